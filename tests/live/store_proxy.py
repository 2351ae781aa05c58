"""A proxy before an object store, which counts requests and can refuse them all."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

_REQUEST = re.compile(rb"(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\r\n")
_REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class StoreProxy:
    """Hands bytes on to a port of the same address.

    ``counts`` are by method and path. While ``refuses`` is set, each request gets the status 503.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.refuses = False
        self._upstream = (host, port)
        self._listening = socket.create_server((host, 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listening.accept()
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            server = socket.create_connection(self._upstream)
        except OSError:
            client.close()
            return
        threading.Thread(
            target=_hand_on, args=(server, client, lambda _data: True), daemon=True
        ).start()
        _hand_on(client, server, lambda data: self._admit(data, client))

    def _admit(self, data: bytes, client: socket.socket) -> bool:
        """Return whether what a client sent may go on."""
        if self.refuses:
            client.sendall(_REFUSAL)
            return False
        request = _REQUEST.match(data)
        if request is not None:
            self.counts[request[1].decode(), request[2].decode()] += 1
        return True


def _hand_on(source: socket.socket, target: socket.socket, admit: Callable[[bytes], bool]) -> None:
    try:
        while data := source.recv(2**16):
            if not admit(data):
                return
            target.sendall(data)
    except OSError:
        pass
    finally:
        for end in (source, target):
            with contextlib.suppress(OSError):
                # Closing alone would not wake up the thread that reads from it.
                end.shutdown(socket.SHUT_RDWR)
            end.close()
