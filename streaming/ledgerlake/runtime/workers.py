"""Spark's Python workers, without a traceback on the terminal when their session ends before they
could answer.

Spark's daemon prints one for every worker that finds its pipe closed, which over Unix domain
sockets is what an idle worker finds when the session stops. Tasks run under a daemon of ours
(``pipeline.worker_daemon``); planners run under Spark's own, whatever is configured, so those are
made quiet from inside once they load the source.
"""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace
from typing import Any


def quieten(daemon: Any) -> None:
    """Have a daemon module say nothing of pipes that the other side has closed."""
    daemon.traceback = SimpleNamespace(print_exc=_print_exc, format_exc=traceback.format_exc)


def quieten_planner() -> None:
    """The same if this process is a worker of Spark's own daemon; else nothing."""
    main = sys.modules["__main__"]
    if getattr(getattr(main, "__spec__", None), "name", None) == "pyspark.daemon":
        quieten(main)


def _print_exc() -> None:
    """As ``traceback.print_exc``, but for a pipe that the other side has closed."""
    if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
        traceback.print_exc()
