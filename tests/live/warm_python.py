"""A Python for the processes that Spark starts with each query, which has their modules imported.

With each query Spark starts a Python for the planner and one that describes the stateful operator,
and planners of batch reads fork from a daemon that has imported nothing. Each imports for half a
second of CPU, which the tests would pay some hundred times.

``warm_python`` starts a server that has imported everything, and gives the path of a program to use
as Spark's Python. The program sends its arguments, environment and standard streams to the server.
The server forks; the fork runs the module as its main module, as ``python -m`` does. If the program
is killed, its fork ends too.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Everything else, among it the daemon of tasks, is run by an ordinary Python.
_MODULES = {
    "pyspark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
}
_IMPORTED = (
    "pandas",
    "pyarrow.compute",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "ledgerlake.operators.ingest_source",
    "ledgerlake.operators.stateful",
    "ledgerlake.publish.datasource",
)
_PROGRAM = """#!{python} -IS
import json, os, socket, sys
if sys.argv[1] != "-m" or sys.argv[2] not in {modules}:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({path!r})
request = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
server.sendall(request)
code = server.recv(1)
os._exit(code[0] if code else 1)
"""


@contextlib.contextmanager
def warm_python() -> Iterator[str]:
    """Give the path of the program while the server runs."""
    with tempfile.TemporaryDirectory(prefix="ledgerlake-python-") as folder:
        path, program = f"{folder}/socket", Path(folder, "python")
        program.write_text(_PROGRAM.format(python=sys.executable, path=path, modules=_MODULES))
        program.chmod(0o700)
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.live.warm_python", path]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        assert server.stdout is not None
        try:
            assert server.stdout.readline() == b"ready\n"
            yield str(program)
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()


def main(path: str) -> None:
    """Serve until this process is ended."""
    for name in (*_MODULES, *_IMPORTED):
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(64)
    os.write(1, b"ready\n")
    while True:
        program, _ = listening.accept()
        size, streams, _, _ = socket.recv_fds(program, 4, 3)
        request = b""
        while len(request) < int.from_bytes(size, "big"):
            request += program.recv(2**16)
        if os.fork() == 0:
            listening.close()
            _run(program, streams, *json.loads(request))
        for stream in streams:
            os.close(stream)
        program.close()


def _run(
    program: socket.socket, streams: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _end_with(program)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = arguments
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(":") if path not in sys.path]
    sys.modules.pop(arguments[0], None)
    code = 0
    try:
        # The one that describes an operator prints each of its steps.
        runpy.run_module(arguments[0], {"print": _print_nothing}, "__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else bool(ended.code)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        with contextlib.suppress(OSError):
            program.send(bytes([code]))
        os._exit(code)


def _print_nothing(*_: object, **__: object) -> None:
    pass


def _end_with(program: socket.socket) -> None:
    """Have the kernel end this process if the program ends: that is what SIGIO does by default."""
    fcntl.fcntl(program, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(program, fcntl.F_SETFL, fcntl.fcntl(program, fcntl.F_GETFL) | os.O_ASYNC)


if __name__ == "__main__":
    main(sys.argv[1])
