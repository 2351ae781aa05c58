"""Spark's Python workers, without tracebacks and progress lines of theirs on the terminal.

Spark's daemon prints a traceback for every worker that finds its pipe closed, which over Unix
domain sockets is what an idle worker finds when the session stops. Tasks run under a daemon of ours
(``workers.worker_daemon``); planners run under Spark's own, whatever is configured, so those are
made quiet from inside once they load the source. The process that Spark asks for the variables of a
stateful operator prints each of its steps; it is made quiet once it loads the operator, after its
first line. A fork of ``workers.fork_server`` has loaded both, so it is quiet from its start.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import traceback
from types import SimpleNamespace
from typing import Any

_DAEMON = "pyspark.daemon"
_DESCRIBER = "pyspark.sql.streaming.transform_with_state_driver_worker"


def quieten(daemon: Any) -> None:
    """Have a daemon module say nothing of pipes that the other side has closed."""
    daemon.traceback = SimpleNamespace(print_exc=_print_exc, format_exc=traceback.format_exc)


def run_quietly(module: str) -> None:
    """Run a module as the main module. Spark's daemon and the process that describes a stateful
    operator are quiet from their start.
    """
    if module == _DAEMON:
        daemon = importlib.import_module(module)
        quieten(daemon)
        daemon.manager()
    else:
        names = {"print": _print_nothing} if module == _DESCRIBER else None
        runpy.run_module(module, names, run_name="__main__", alter_sys=True)


def quieten_this_process() -> None:
    """Have this process print less if Spark started it as a planner, or to describe a stateful
    operator.
    """
    main: Any = sys.modules["__main__"]
    name = getattr(getattr(main, "__spec__", None), "name", None)
    if name == _DAEMON:
        quieten(main)
    elif name == _DESCRIBER:
        main.print = _print_nothing


def _print_nothing(*_: object, **__: object) -> None:
    pass


def _print_exc() -> None:
    """As ``traceback.print_exc``, but for a pipe that the other side has closed."""
    if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
        traceback.print_exc()
