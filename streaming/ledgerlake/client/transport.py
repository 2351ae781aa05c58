"""A TCP stream with deadlines; every operating system error becomes a TransportError that names the address."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

from ledgerlake.errors import DeadlineError, TransportError, UsageError

RECEIVE_BYTES = 256 * 1024
_URL = re.compile(r"pulsar://([^/:,\s]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?/?")


def parse_service_url(url: str) -> tuple[str, int]:
    """Host and port of ``pulsar://host[:6650]``.

    Raises:
        UsageError: another form.
    """
    matched = _URL.fullmatch(url)
    if matched is None or int(matched.group(2) or 6650) > 65535:
        raise UsageError(f"'{url}' is not a service url; write pulsar://host:6650")
    return matched.group(1).strip("[]"), int(matched.group(2) or 6650)


class Transport:
    """One connected socket. Sending is safe from any thread, receiving belongs to one."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        self.url = url
        host, port = parse_service_url(url)
        try:
            self._socket = socket.create_connection((host, port), timeout=connect_timeout_s)
        except socket.gaierror as error:
            raise TransportError(
                f"the broker's host name in {url} does not resolve ({error.strerror}); check the service url"
            ) from None
        except TimeoutError:
            raise TransportError(
                f"no broker answered at {url} in {connect_timeout_s:g} s; check the address and the firewall"
            ) from None
        except OSError as error:
            raise TransportError(
                f"no broker listens at {url} ({error.strerror or error}); start it or correct the service url"
            ) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._sending = threading.Lock()

    def send(self, data: bytes, timeout_s: float) -> None:
        try:
            with self._sending:
                self._socket.settimeout(timeout_s)
                self._socket.sendall(data)
        except TimeoutError:
            raise DeadlineError(f"the broker at {self.url} took no bytes for {timeout_s:g} s") from None
        except OSError as error:
            raise TransportError(
                f"the connection to {self.url} broke while sending ({error.strerror or error})"
            ) from None

    def receive(self, timeout_s: float, into: memoryview | None = None) -> memoryview | None:
        """Bytes that arrived, valid until the next call or in ``into``; None when nothing came in time."""
        buffer = self._buffer if into is None else into
        try:
            self._socket.settimeout(max(timeout_s, 0.000001))
            count = self._socket.recv_into(buffer)
        except TimeoutError:
            return None
        except BlockingIOError:
            return None
        except OSError as error:
            raise TransportError(
                f"the connection to {self.url} broke while receiving ({error.strerror or error})"
            ) from None
        if count == 0:
            raise TransportError(f"the broker at {self.url} closed the connection")
        return buffer[:count]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
