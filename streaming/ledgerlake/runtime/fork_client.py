"""What Spark starts in place of Python on the machine of a local master: it has
``workers.fork_server`` fork the process, and lasts as long as that does.

It imports as little as possible, since Spark waits for it. If no server answers, or something else
than a module is asked for, it becomes Python itself, as if Spark had started that.

    python -IS CLIENT -m MODULE ARGUMENTS

where CLIENT is a copy of this file beside the server's socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys

_STREAMS = (0, 1, 2)


def main() -> None:
    """Ask for a process, and end with its status."""
    client, *arguments = sys.argv
    address = os.path.join(os.path.dirname(client), "socket")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if arguments[:1] != ["-m"] or not _is_forked(server, address, arguments):
        os.execv(sys.executable, [sys.executable, *arguments])
    # The streams are the process's now: Spark is to notice if it closes them.
    os.closerange(min(_STREAMS), max(_STREAMS) + 1)
    os._exit(_status(server))


def _is_forked(server: socket.socket, address: str, arguments: list[str]) -> bool:
    try:
        content = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
        server.connect(address)
        socket.send_fds(server, [len(content).to_bytes(8, "big")], _STREAMS)
        server.sendall(content)
        return bool(server.recv(1))
    except OSError:
        return False


def _status(server: socket.socket) -> int:
    try:
        status = server.recv(1)
    except OSError:
        return 1
    return status[0] if status else 1


if __name__ == "__main__":
    main()
