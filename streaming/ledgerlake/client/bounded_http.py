"""HTTP requests that carry secrets: bounded in time and bytes, and encrypted.

Rules kept here:
  - A URL begins with https://, or with http:// and names this machine. This holds for redirects.
  - A request to this machine stays here: no proxy gets it. A proxy of the environment gets the
    others, which are encrypted through it.
  - A form is sent to the URL that was given; a redirect is not followed.
  - The deadline is of the whole request: connections, headers and body. At the deadline the
    connections are shut down.
  - An error has only words of Ledgerlake, the operating system and OpenSSL. A server or a proxy may
    repeat a secret in each text that it sends, and urllib the password in a proxy's variable.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from http.client import HTTPConnection, HTTPException, HTTPSConnection, InvalidURL
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from http.client import HTTPResponse


_REFUSED_BY_PROXY = re.compile(r"Tunnel connection failed: (\d{3})\b")


class UnsafeUrlError(ValueError):
    """A URL to which no secret is sent."""

    def __init__(self) -> None:
        super().__init__("it is no URL that begins with https://")


class StatusError(OSError):
    """The status of an answer is an error, or the redirect of a form."""

    def __init__(self, status: int, retry_after: str) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.retry_after = retry_after


class NoAnswerError(OSError):
    """There was no answer of HTTP."""


def check_url(url: str) -> None:
    """Check that secrets may be sent to a URL.

    Raises:
        UnsafeUrlError: it is not encrypted, or not a URL.
    """
    try:
        parts = urlsplit(url)
        # A port that is no number is found when it is asked for.
        is_safe = (
            bool(parts.hostname)
            and (
                parts.scheme == "https"
                or (parts.scheme == "http" and _is_of_this_machine(parts.hostname or ""))
            )
            and parts.port != 0
        )
    except ValueError:
        is_safe = False
    if not is_safe or not (url.isascii() and url.isprintable()) or " " in url:
        raise UnsafeUrlError


def fetch(url: str, form: bytes | None, timeout_s: float, most_bytes: int) -> bytes:
    """Return the body of the answer, up to ``most_bytes``.

    Args:
        form: the body of a POST; None for a GET.

    Raises:
        UnsafeUrlError: as ``check_url``, also of a redirect.
        StatusError: the status is an error, or the redirect of a form.
        TimeoutError: there was no answer before the deadline.
        NoAnswerError: there was none for another reason.
    """
    check_url(url)
    exchange = _Exchange(time.monotonic() + timeout_s)
    timer = threading.Timer(timeout_s, exchange.end)
    timer.daemon = True
    timer.start()
    try:
        request = urllib.request.Request(url, data=form)
        with exchange.opener().open(request, timeout=timeout_s) as response:
            body: bytes = response.read(most_bytes)
    except UnsafeUrlError:
        raise
    except (OSError, HTTPException, ValueError) as error:
        # A socket may time out just before the timer ends it.
        if exchange.is_over or isinstance(getattr(error, "reason", error), TimeoutError):
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            raise StatusError(error.code, error.headers.get("Retry-After", "")) from None
        raise NoAnswerError(_reason(error)) from None
    finally:
        timer.cancel()
    if exchange.is_over:
        raise TimeoutError(f"no answer in {timeout_s:g} s")
    return body


def _reason(error: Exception) -> str:
    """Return why there was no answer, in words that nobody else has chosen."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, ssl.SSLCertVerificationError):
        # A host's name stands behind the comma, and the server may have named the host.
        return f"its certificate is not accepted: {cause.verify_message.partition(',')[0]}"
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    if isinstance(cause, ConnectionError):
        return "the connection was closed without an answer"
    refused = _REFUSED_BY_PROXY.match(str(cause))
    if refused is not None:
        return f"the proxy of the variable https_proxy refused with status {refused[1]}"
    if isinstance(cause, UnicodeError):
        return "there can be no host of its name"
    if isinstance(cause, str | InvalidURL | ValueError):
        return "the variable https_proxy is not http://HOST:PORT"
    return "the answer is not HTTP, or not whole"


def _is_of_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Exchange:
    """One request with its redirects, and the connections that it has opened."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._connections: list[_Connection | _SecureConnection] = []
        self.is_over = False

    def opener(self) -> urllib.request.OpenerDirector:
        return urllib.request.build_opener(_Http(self), _Https(self), _Redirects, _Proxies)

    def end(self) -> None:
        """Shut the connections down."""
        self.is_over = True
        for connection in self._connections:
            for opened in (connection.opened, connection.sock):
                if opened is not None:
                    with contextlib.suppress(OSError):
                        opened.shutdown(socket.SHUT_RDWR)

    def note(self, connection: _Connection | _SecureConnection) -> None:
        """Note a connection before it is opened, and give it the time that is left."""
        self._connections.append(connection)
        connection.timeout = max(self._deadline - time.monotonic(), 0.001)


class _Connection(HTTPConnection):
    """``opened`` stays after urllib has handed the socket to the response."""

    opened: socket.socket | None = None

    def connect(self) -> None:
        super().connect()
        self.opened = self.sock


class _SecureConnection(HTTPSConnection):
    """As ``_Connection``."""

    opened: socket.socket | None = None

    def connect(self) -> None:
        super().connect()
        self.opened = self.sock


class _Http(urllib.request.HTTPHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._connection, req)

    def _connection(self, host: str, **options: Any) -> _Connection:
        connection = _Connection(host, **options)
        self._exchange.note(connection)
        return connection


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, exchange: _Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(self._connection, req)

    def _connection(self, host: str, **options: Any) -> _SecureConnection:
        connection = _SecureConnection(host, **options)
        self._exchange.note(connection)
        return connection


class _Proxies(urllib.request.ProxyHandler):
    """The proxies of the environment, without the one for http: such a URL names this machine. That
    for https gets a CONNECT.
    """

    def __init__(self) -> None:
        super().__init__(
            {
                scheme: url
                for scheme, url in urllib.request.getproxies().items()
                if scheme == "https"
            }
        )

    def proxy_open(self, req: urllib.request.Request, proxy: str, type: str) -> Any:
        if _is_of_this_machine(urlsplit(req.full_url).hostname or ""):
            return None
        return super().proxy_open(req, proxy, type)


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.data is not None:
            return None
        check_url(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
