"""Spark's daemon of Python workers, started by Spark as ``python -m ledgerlake.query.daemon``.

It differs from Spark's own in one thing: a worker whose session ended before it could answer leaves no traceback on the terminal.
"""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

from pyspark import daemon


def print_exc() -> None:
    """As ``traceback.print_exc``, but for a pipe that the other side has closed."""
    if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
        traceback.print_exc()


if __name__ == "__main__":
    daemon.traceback = SimpleNamespace(print_exc=print_exc, format_exc=traceback.format_exc)
    daemon.manager()
