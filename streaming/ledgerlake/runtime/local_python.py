"""The Python that Spark starts on the machine of a local master: a script that runs ``fork_client``,
with a server of this process behind it (``pipeline.fork_server``).

The server is told by its standard input, a pipe, when this process ends, however it ends. The script
and the server's socket are in a folder that no other user may enter.
"""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_SERVER = "ledgerlake.pipeline.fork_server"

# Spark gives its workers the first, unless the user has it; with the second, NumPy has no threads
# that a fork would lose.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "YES"}

# Of the server, so that it lives as long as this process does.
_running: list[subprocess.Popen[bytes]] = []


@cache
def local_python() -> str:
    """Return the path of what Spark is to start as Python; its server is started once.

    It is the path of this Python if the user has a home of Spark, whose PySpark may be another than the
    one that a server would import, or if the folder for temporary files forbids programs.
    """
    if "SPARK_HOME" in os.environ:
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="ledgerlake-python-"))
    script = folder / "python"
    address = folder / "socket"
    client = Path(__file__).with_name("fork_client.py")
    command = shlex.join((sys.executable, "-IS", str(client), str(address)))
    script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    script.chmod(0o700)
    if not os.access(script, os.X_OK):
        return sys.executable
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(address))
        listener.listen()
        _running.append(_start(folder, listener))
    return str(script)


def _start(folder: Path, listener: socket.socket) -> subprocess.Popen[bytes]:
    number = listener.fileno()
    return subprocess.Popen(
        [sys.executable, "-m", _SERVER, str(folder), str(number)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[number],
        start_new_session=True,
        env=_ENVIRONMENT | os.environ,
    )
