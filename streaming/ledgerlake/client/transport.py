"""A TCP stream with deadlines, with or without TLS. Every error of the operating system becomes a
TransportError that names the address.
"""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from dataclasses import dataclass
from typing import NoReturn

from ledgerlake.errors import DeadlineError, SetupError, TransportError, UsageError

RECEIVE_BYTES = 256 * 1024
_PORTS = {"pulsar": 6650, "pulsar+ssl": 6651}
_HOST = r"(?:[^/:,@\s]+|\[[0-9a-fA-F:]+\])(?::\d{1,5})?"
_URL = re.compile(rf"(pulsar(?:\+ssl)?)://({_HOST}(?:,{_HOST})*)/?")


@dataclass(frozen=True)
class Address:
    """The address of a broker, as in a service url."""

    host: str
    port: int
    is_tls: bool

    @property
    def url(self) -> str:
        scheme = "pulsar+ssl" if self.is_tls else "pulsar"
        return f"{scheme}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


@dataclass(frozen=True)
class TlsSettings:
    """The trusted certificates and the client's own, as paths of PEM files; without ``ca_file``,
    the system's trusted certificates.

    ``proxy_url``: an SNI proxy to connect to instead; it passes TLS on to the broker named in the
    handshake.
    """

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    checks_hostname: bool = True
    allows_insecure: bool = False
    proxy_url: str | None = None


DEFAULT_TLS = TlsSettings()


def parse_service_url(url: str) -> list[Address]:
    """Return the addresses of ``pulsar://host[:6650][,host...]``, or of ``pulsar+ssl://`` with port
    6651. A host name is in lower case, so that equal addresses are one.

    Raises:
        UsageError: the url has another form.
    """
    matched = _URL.fullmatch(url)
    if matched is None:
        # The part before the sign may contain a password, so the error does not show it.
        if "@" in url:
            raise UsageError(
                "a service url holds no user and no password; give them as the authentication's "
                "parameters"
            )
        raise UsageError(
            f"'{url}' is not a service url; write pulsar://host:6650 or pulsar+ssl://host:6651"
        )
    scheme = matched.group(1)
    addresses = []
    for host_and_port in matched.group(2).split(","):
        host, port = re.fullmatch(r"(.+?)(?::(\d+))?", host_and_port).groups()  # type: ignore[union-attr]
        addresses.append(
            Address(host.strip("[]").lower(), int(port or _PORTS[scheme]), scheme == "pulsar+ssl")
        )
    if any(address.port > 65535 for address in addresses):
        raise UsageError(f"'{url}' has a port above 65535")
    return addresses


class Transport:
    """A connected socket. Callers of ``send`` and ``receive`` must have the session's lock."""

    def __init__(self, url: str, connect_timeout_s: float, tls: TlsSettings = DEFAULT_TLS) -> None:
        self.url = url
        (address,) = parse_service_url(url)
        (target,) = parse_service_url(tls.proxy_url if address.is_tls and tls.proxy_url else url)
        host, port = target.host, target.port
        try:
            self._socket = socket.create_connection((host, port), timeout=connect_timeout_s)
        except socket.gaierror as error:
            raise TransportError(
                f"the broker's host name in {url} does not resolve ({error.strerror}); check the "
                "service url"
            ) from None
        except TimeoutError:
            raise TransportError(
                f"no broker answered at {url} in {connect_timeout_s:g} s; check the address and "
                "the firewall"
            ) from None
        except UnicodeError:
            raise TransportError(
                f"the address {url} has a host name that there cannot be; correct it"
            ) from None
        except OSError as error:
            raise TransportError(
                f"no broker listens at {url} ({error.strerror or error}); start it or correct the "
                "service url"
            ) from None
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.is_tls:
            self._socket = _in_tls(self._socket, address, tls)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._sending = threading.Lock()

    def send(self, data: bytes, timeout_s: float) -> None:
        try:
            with self._sending:
                self._socket.settimeout(timeout_s)
                self._socket.sendall(data)
        except TimeoutError:
            raise DeadlineError(
                f"the broker at {self.url} accepted no bytes for {timeout_s:g} s"
            ) from None
        except OSError as error:
            raise TransportError(
                f"the connection to {self.url} broke while sending ({error.strerror or error})"
            ) from None

    def receive(self, timeout_s: float, into: memoryview | None = None) -> memoryview | None:
        """Return received bytes, valid until the next call, or in ``into``; None if none came in
        time.
        """
        buffer = self._buffer if into is None else into
        try:
            # The smallest timeout above zero lasts a millisecond.
            self._socket.settimeout(max(timeout_s, 0.0))
            count = self._socket.recv_into(buffer)
        except TimeoutError:
            return None
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
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
        self._buffer = memoryview(b"")


def _in_tls(connected: socket.socket, address: Address, tls: TlsSettings) -> ssl.SSLSocket:
    try:
        return _context(tls).wrap_socket(connected, server_hostname=address.host)
    except SetupError:
        connected.close()
        raise
    except ssl.SSLCertVerificationError as error:
        connected.close()
        is_of_clock = "expired" in error.verify_message or "not yet valid" in error.verify_message
        raise SetupError(
            f"the certificate of {address.url} is not accepted: {error.verify_message}; check "
            "tlsTrustCertsFilePath ([tls] ca_file) and the host "
            f"name{', and the clock of this machine' if is_of_clock else ''}"
        ) from None
    except OSError as error:
        connected.close()
        raise TransportError(
            f"no TLS connection to {address.url} ({error.strerror or error}); check that the port "
            "is the one for TLS"
        ) from None


def _refuse_pass_phrase(file: str | None) -> NoReturn:
    raise SetupError(
        f"the TLS key {file} is encrypted, and nobody is there to give its pass phrase; write it "
        "without one, to a file that only this user can read: openssl pkey -in KEY -out NEWKEY"
    )


def _context(tls: TlsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            # Without a function, OpenSSL asks the terminal for the pass phrase, without a deadline.
            context.load_cert_chain(
                tls.cert_file,
                tls.key_file,
                lambda: _refuse_pass_phrase(tls.key_file or tls.cert_file),
            )
    except (OSError, ssl.SSLError) as error:
        files = ", ".join(file for file in (tls.ca_file, tls.cert_file, tls.key_file) if file)
        raise SetupError(
            f"the TLS files {files} cannot be used ({error}); check their paths and contents"
        ) from None
    context.check_hostname = tls.checks_hostname and not tls.allows_insecure
    if tls.allows_insecure:
        context.verify_mode = ssl.CERT_NONE
    return context
