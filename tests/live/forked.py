"""Finds Spark's Python processes among the processes of a pipeline: forks of
``workers.fork_server``, named after their modules, and forks of these forks.
"""

from __future__ import annotations

import contextlib

import psutil

_SERVER = "ledgerlake.workers.fork_server"


def is_worker(process: psutil.Process) -> bool:
    """Whether a daemon forked this process, for tasks or for planners."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return (
            len([above for above in (process, *process.parents()) if _SERVER in above.cmdline()])
            > 2
        )
    return False


def is_task_worker(process: psutil.Process) -> bool:
    """Whether this process runs tasks."""
    return is_worker(process) and _name(process) == "python worker"


def is_stream_planner(process: psutil.Process) -> bool:
    """Whether this process plans a stream's micro-batches."""
    return _name(process) == "python streamin"


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return str(process.name())
    return ""
