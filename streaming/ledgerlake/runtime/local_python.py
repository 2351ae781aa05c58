"""The Python that Spark starts on the machine of a local master: a copy of ``fork_client``, with a
server of this process behind it (``workers.fork_server``).

The server imports nothing from the working folder, which other users may be able to write to.

The server is told by its standard input, a pipe, when this process ends, however it ends. The
script and the server's socket are in a folder that no other user may enter.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_CLIENT = Path(__file__).with_name("fork_client.py")
_SERVER = "ledgerlake.workers.fork_server"

# With the first, NumPy has no threads that a fork would lose.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "YES"}

_HASH_SEED = "PYTHONHASHSEED"


@cache
def hash_seed() -> dict[str, str]:
    """Return the variable with the secret of the hashes of texts, for all processes that Spark
    starts. The user's variable stands. Without one Spark sets 0, and a producer who knows that can
    choose texts for which a ``dict`` takes quadratic time.
    """
    return {_HASH_SEED: os.environ.get(_HASH_SEED, str(secrets.randbelow(2**32 - 1) + 1))}


@cache
def local_python() -> str:
    """Return the path of what Spark is to start as Python; its server is started once.

    It is the path of this Python if forks of a server would not be the same: the user has a home of
    Spark, whose PySpark may be another, or a home of Python; or if the system has no place for a
    server's socket or forbids programs there.
    """
    if {"SPARK_HOME", "PYTHONHOME"} & set(os.environ) or not re.fullmatch(
        r"\S{1,100}", sys.executable
    ):
        return sys.executable
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="ledgerlake-python-"))
        script = folder / "python"
        script.write_text(f"#!{sys.executable} -IS\n{_CLIENT.read_text()}")
        script.chmod(0o700)
        if os.access(script, os.X_OK):
            _start(folder)
            return str(script)
    except OSError:
        pass
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    return sys.executable


def _start(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen()
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, "-m", _SERVER, str(folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[number],
            start_new_session=True,
            # Python looks for modules in the folder where it starts.
            cwd=folder,
            env=_ENVIRONMENT | hash_seed() | os.environ | _absolute_python_path(),
        )
    # It also keeps the pipe open until this process ends.
    atexit.register(_remove_after, server, folder)


def _absolute_python_path() -> dict[str, str]:
    """Return the paths that the user has set, for a process with another working folder."""
    given = os.environ.get("PYTHONPATH")
    if not given:
        return {}
    return {
        "PYTHONPATH": os.pathsep.join(
            os.path.abspath(path) for path in given.split(os.pathsep) if path
        )
    }


def _remove_after(server: subprocess.Popen[bytes], folder: Path) -> None:
    """Remove what a server left that was killed."""
    if server.poll() is not None:
        shutil.rmtree(folder, ignore_errors=True)
