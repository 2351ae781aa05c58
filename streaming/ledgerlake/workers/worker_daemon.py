"""Spark's daemon of Python workers, started by Spark as ``python -m
ledgerlake.workers.worker_daemon``; its log output is reduced (see ``runtime.workers``).

A worker is a fork of the daemon. So the daemon imports the modules that every worker needs and
compiles the kernels, which would take each of a batch's workers a second or more. Spark's own
daemon imports nothing, because threads do not survive a fork. Here that is safe: Arrow and NumPy
create their threads at first use, and again after a fork.

A worker runs the code that it gets through the daemon's Unix socket, which asks for no secret. So
no other user may connect to it, whatever the umask is.

A worker collects garbage after each task. The imported modules are frozen, so that the collector
does not walk them, which took a tenth of a second per task.
"""

from __future__ import annotations

import gc
import logging
import os
from typing import Any

import pandas as pd
import pyspark.worker
from pyspark import daemon

import ledgerlake.operators.ingest
import ledgerlake.operators.outcome_files
import ledgerlake.operators.stateful
from ledgerlake.decode import kernels
from ledgerlake.decode.warm_up import warm_up
from ledgerlake.runtime.private_files import is_private
from ledgerlake.runtime.workers import quieten

__all__ = ["ledgerlake", "pd", "pyspark"]

_log = logging.getLogger(__name__)

# What Spark's JVM says of the daemon's socket.
_IS_UNIX_SOCKET = "PYTHON_UNIX_DOMAIN_ENABLED"
_SOCKET_FOLDER = "PYTHON_WORKER_FACTORY_SOCK_DIR"


def prepare() -> bool:
    """Load the kernels, and compile them before if they are not; return whether machine code is
    kept. If not, nothing is done.
    """
    is_kept = kernels.is_kept()
    if is_kept:
        warm_up()
    return is_kept


def main() -> None:
    """Serve Spark until it closes the pipe."""
    quieten(daemon)
    if not prepare():
        _log.warning(
            "there is no folder for compiled code that nobody else can write to, so every worker "
            "compiles for itself at its start; set NUMBA_CACHE_DIR to a folder of your own"
        )
        warm_up()
    gc.freeze()
    _make_socket_private()
    daemon.manager()


def _make_socket_private() -> None:
    """Let no other user connect to the socket that the daemon is about to make. In a private folder
    nobody can; elsewhere its rights decide, and the umask is the user's again when Spark is told.
    """
    if os.environ.get(_IS_UNIX_SOCKET) != "true" or is_private(os.environ[_SOCKET_FOLDER]):
        return
    tell = daemon.write_with_length
    umask = os.umask(0o077)

    def restore_and_tell(path: bytes, stream: Any) -> None:
        os.umask(umask)
        tell(path, stream)

    daemon.write_with_length = restore_and_tell


if __name__ == "__main__":
    main()
