"""The process that Spark's Python processes are forked from, on the machine of a local master.

A start of a query has six Python processes: four planners, one that describes the stateful
operator, and the daemon of the workers. Spark starts them one after another, and each would import
PySpark, pandas, Arrow and Ledgerlake. This process imports them once, while the JVM starts, and the
six share its memory.

Spark finds ``fork_client`` in place of Python (``PYSPARK_PYTHON``). A client connects to a Unix
socket in a folder that no other user may enter, and sends what Spark gave it: three standard
streams, then the length of a JSON document (8 bytes, big endian) and the document, with the
arguments, the environment and the working folder. The answer is a byte once the process is forked,
and one more with its status when it has ended. A client that gets no first byte becomes Python
itself.

    client ends, since Spark ended it    its process gets SIGTERM
    process ends                         its client gets the status, and ends with it
    standard input ends                  this process takes no more clients, and ends after the last

The kernels are compiled in a fork of their own, which takes a minute on the first start of a
machine and a third of a second later. After it this process loads them too, and with it all later
forks.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import resource
import selectors
import shutil
import signal
import socket
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numba
import pyspark.sql.streaming.python_streaming_source_runner
import pyspark.sql.streaming.transform_with_state_driver_worker
import pyspark.sql.worker.create_data_source
import pyspark.sql.worker.lookup_data_sources
import pyspark.sql.worker.plan_data_source_read

import ledgerlake.source.stream_reader
from ledgerlake.runtime.workers import run_quietly
from ledgerlake.workers import worker_daemon

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ledgerlake", "numba", "pyspark"]

_LENGTH_BYTES = 8
_STREAMS = 3
_STDIN = 0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# A client sends all at once. One that was stopped meanwhile does not hold up the others.
_REQUEST_TIMEOUT_S = 5.0

# Of the name of a process, as Linux shows it.
_NAME_BYTES = 15


@dataclass(frozen=True)
class Request:
    """What Spark asked of a Python process."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]


class ForkServer:
    """Forks a process for each client."""

    def __init__(self, listener: socket.socket, prepare: Callable[[], bool]) -> None:
        self._listener = listener
        self._prepare = prepare
        self._preparing: int | None = None
        self._selector = selectors.DefaultSelector()
        self._clients_by_pid: dict[int, socket.socket] = {}
        self._is_open = True
        self._ended_reader, self._ended_writer = socket.socketpair()

    def serve(self) -> Request | None:
        """Return in each forked process with its request, and in this one with nothing, after the
        last has ended.
        """
        # Signals to all processes of a service or a terminal are for the process that started this
        # one.
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._ended_writer.setblocking(False)
        signal.set_wakeup_fd(self._ended_writer.fileno(), warn_on_full_buffer=False)
        self._selector.register(_STDIN, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended_reader, selectors.EVENT_READ)
        self._start_preparing()
        while self._is_open or self._clients_by_pid:
            # One at a time: the handling of one event may make another event stale.
            for key, _ in self._selector.select()[:1]:
                request = self._handle(key.fileobj)
                if request is not None:
                    return request
        return None

    def _start_preparing(self) -> None:
        with contextlib.suppress(OSError):
            self._preparing = os.fork()
        if self._preparing == 0:
            self._leave_all()
            os._exit(0 if self._prepare() else 1)

    def _handle(self, ready: object) -> Request | None:
        if ready == _STDIN:
            self._close()
        elif ready is self._listener:
            return self._accept()
        elif ready is self._ended_reader:
            self._ended_reader.recv(4096)
            self._reap()
        elif isinstance(ready, socket.socket):
            self._leave(ready)
        return None

    def _close(self) -> None:
        if os.read(_STDIN, 4096):
            return
        self._is_open = False
        self._selector.unregister(_STDIN)
        self._selector.unregister(self._listener)
        self._listener.close()
        if self._preparing is not None:
            os.kill(self._preparing, signal.SIGKILL)

    def _accept(self) -> Request | None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return None
        client.settimeout(_REQUEST_TIMEOUT_S)
        request = receive(client)
        if request is None:
            client.close()
            return None
        try:
            pid = os.fork()
        except OSError:
            # The client tries by itself, and Spark has its error.
            client.close()
            pid = None
        if pid == 0:
            client.close()
            self._leave_all()
            return request
        for stream in request.streams:
            os.close(stream)
        if pid is not None:
            self._clients_by_pid[pid] = client
            self._selector.register(client, selectors.EVENT_READ)
            _answer(client, 0)
        return None

    def _leave(self, client: socket.socket) -> None:
        """End the process whose client has ended."""
        self._selector.unregister(client)
        for pid, other in self._clients_by_pid.items():
            if other is client:
                os.kill(pid, signal.SIGTERM)

    def _reap(self) -> None:
        while self._preparing is not None or self._clients_by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == self._preparing:
                self._preparing = None
                if status == 0:
                    self._prepare()
                    gc.freeze()
                continue
            client = self._clients_by_pid.pop(pid)
            with contextlib.suppress(KeyError):
                self._selector.unregister(client)
            _answer(client, os.waitstatus_to_exitcode(status) % 256)
            client.close()

    def _leave_all(self) -> None:
        """Give up, in a forked process, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        for server_socket in (
            self._listener,
            self._ended_reader,
            self._ended_writer,
            *self._clients_by_pid.values(),
        ):
            server_socket.close()


def receive(client: socket.socket) -> Request | None:
    """Read a request; nothing if the client left before its end."""
    streams: list[int] = []
    try:
        start, streams, _, _ = socket.recv_fds(client, _LENGTH_BYTES, _STREAMS)
        if len(start) == _LENGTH_BYTES and len(streams) == _STREAMS:
            with client.makefile("rb") as reader:
                content = reader.read(int.from_bytes(start, "big"))
            arguments, environment, folder = json.loads(content)
            return Request(arguments, environment, folder, streams)
    except (OSError, ValueError):
        pass
    for stream in streams:
        os.close(stream)
    return None


def _answer(client: socket.socket, status: int) -> None:
    with contextlib.suppress(OSError):
        client.sendall(bytes([status]))


def run(request: Request) -> None:
    """Be the process that was asked for: ``python -m MODULE ARGUMENTS``."""
    for number, stream in enumerate(request.streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    _, module, *arguments = request.arguments
    added = [
        path
        for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if path and path not in sys.path
    ]
    # As with ``python -m``, unless Python is told to search no working folder.
    sys.path[:0] = added if os.environ.get("PYTHONSAFEPATH") else [request.folder, *added]
    sys.argv = ["-m", *arguments]
    _name_process((arguments or [module])[-1])
    # Spark's modules are imported here and there before one of them is the main one.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")
    run_quietly(module)


def _name_process(module: str) -> None:
    """Tell the processes apart for ``top`` and ``ps``, if the system can."""
    with contextlib.suppress(OSError):
        name = module.rpartition(".")[2].removeprefix("python_")
        Path("/proc/self/comm").write_text(f"python {name}"[:_NAME_BYTES])


def _raise_limit_of_files() -> None:
    """Let forks open as many files as what a JVM starts."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Listen at a socket that was bound by the process that started this one.

    ``python -m ledgerlake.workers.fork_server FOLDER LISTENER``, which are the folder that is
    removed at the end and the number of an open file.
    """
    folder, listener = sys.argv[1:]
    # It is where this process has started, and has no modules.
    sys.path[:] = [path for path in sys.path if path != folder]
    # What cleans up folders for temporary files passes over one that is locked.
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)
    _raise_limit_of_files()
    # No thread has a lock while this process forks: NumPy's and Arrow's start at their first use.
    warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*fork")
    gc.freeze()
    request = ForkServer(socket.socket(fileno=int(listener)), worker_daemon.prepare).serve()
    if request is not None:
        run(request)
    else:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
