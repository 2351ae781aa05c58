"""The HTTP server of the metrics and of the status page, in threads of the driver.

Rules kept here:
  - A request changes nothing, and nothing in it names a file: a page is found by its whole path.
  - If there is a token, every request needs it, as ``Authorization: Bearer TOKEN`` or as the
    password of any user, for which a browser asks. ``/health`` needs none, so that probes have
    none; it says only that the process answers.
  - If there is no token, the address is of this machine alone, and so is the host that a request
    names. Else a page of another site could read the answers, by a name that leads to this machine.
  - A connection lasts ten seconds at most, and there are sixteen at most: of more, the oldest is
    closed. So clients that are slow or silent take neither threads nor files from the pipeline.
  - No request prints a traceback: a client that leaves is not an error of the pipeline.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import errno
import hmac
import io
import logging
import socket
import threading
import time
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from ledgerlake.errors import SetupError
from ledgerlake.options.config import check_reachable_by, is_of_this_machine
from ledgerlake.stored.secrets import resolve_secret, said_in_short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)

_CONNECTION_MOST_S = 10.0
_MOST_CONNECTIONS = 16

# How long a new connection waits for the end of the oldest one.
_CLOSES_WITHIN_S = 1.0

_TEXT = "text/plain; charset=utf-8"


class HttpServer:
    """Serves pages until it is closed.

    Args:
        port: 0 for a free one; ``port`` says which.
        token: as the configuration has it; empty for none. A file is read at each request.
        pages: by path.

    Raises:
        UsageError: other machines reach the address, and there is no token.
        SetupError: the port is taken, the address is not of this machine, or the token cannot be
            read.
    """

    def __init__(
        self, port: int, address: str, token: str, pages: Mapping[str, WSGIApplication]
    ) -> None:
        check_reachable_by(address, token)
        if token:
            resolve_secret(token, "the token of [metrics]")
        kind = _ServerOfVersion6 if ":" in address else _Server
        try:
            self._server = make_server(address, port, _Gate(token, pages), kind, _Handler)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "no name of a host"
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            hint = "if this stream runs already, leave it or end it; else " if is_taken else ""
            # Another process of the stream may end soon.
            later = {"exit_code": 3} if is_taken else {}
            raise SetupError(
                f"metrics cannot be served on port {port} of {address} ({reason}); {hint}set "
                "another [metrics] port",
                **later,
            ) from None
        self.port: int = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="ledgerlake-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the server; a request in work is finished by its own thread."""
        self._server.shutdown()
        self._server.server_close()


def page(
    content_type: str, content: Callable[[], bytes], headers: Mapping[str, str] | None = None
) -> WSGIApplication:
    """Return a page whose content is made anew for each request."""

    def answer(_environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        always = {
            "Content-Type": content_type,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }
        made = content()
        start_response("200 OK", list((always | dict(headers or {})).items()))
        return [made]

    return answer


def check_port(port: int, address: str, token: str) -> None:
    """Check that pages can be served.

    Raises:
        As ``HttpServer``.
    """
    HttpServer(port, address, token, {}).close()


class _Gate:
    """Finds the page of a request that may be answered."""

    def __init__(self, token: str, pages: Mapping[str, WSGIApplication]) -> None:
        self._token = token
        self._pages = {"/health": page(_TEXT, lambda: b"ok\n"), **pages}

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "") or "/"
        if (
            self._token
            and path != "/health"
            and not self._has_token(environ.get("HTTP_AUTHORIZATION", ""))
        ):
            challenges = [
                ("WWW-Authenticate", kind + ' realm="ledgerlake", charset="UTF-8"')
                for kind in ("Basic", "Bearer")
            ]
            return _refuse(
                start_response,
                "401 Unauthorized",
                "the token of [metrics] is missing or wrong",
                challenges,
            )
        if not self._token and not _names_this_machine(environ.get("HTTP_HOST", "")):
            return _refuse(
                start_response,
                "403 Forbidden",
                "without a [metrics] token, only localhost is answered",
            )
        if environ["REQUEST_METHOD"] != "GET":
            return _refuse(
                start_response, "405 Method Not Allowed", "only GET is answered", [("Allow", "GET")]
            )
        if path not in self._pages:
            return _refuse(
                start_response, "404 Not Found", f"there are {', '.join(sorted(self._pages))}"
            )
        try:
            return self._pages[path](environ, start_response)
        except Exception as error:
            _log.warning("the page %s was not answered: %s", path, said_in_short(error))
            return _refuse(
                start_response,
                "500 Internal Server Error",
                "the page failed; see the pipeline's log",
            )

    def _has_token(self, authorization: str) -> bool:
        kind, _, given = authorization.partition(" ")
        if kind.lower() == "basic":
            try:
                given = base64.b64decode(given, validate=True).decode().partition(":")[2]
            except (binascii.Error, UnicodeDecodeError):
                return False
        elif kind.lower() != "bearer":
            return False
        try:
            token = resolve_secret(self._token)
        except SetupError:
            return False
        return hmac.compare_digest(given.strip().encode(errors="replace"), token.strip().encode())


def _names_this_machine(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname
    except ValueError:
        return False
    return not host or (name is not None and is_of_this_machine(name))


def _refuse(
    start_response: StartResponse,
    status: str,
    sentence: str,
    headers: list[tuple[str, str]] | None = None,
) -> Iterable[bytes]:
    start_response(status, [("Content-Type", _TEXT), *(headers or [])])
    return [sentence.encode() + b"\n"]


class _Handler(WSGIRequestHandler):
    """Logs no request."""

    timeout = _CONNECTION_MOST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def get_stderr(self) -> Any:
        """Return where wsgiref prints the traceback of a client that leaves: nowhere."""
        return io.StringIO()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and a bounded number of them."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, *args: Any) -> None:
        # When each connection was accepted, the oldest first, by the monotonic clock.
        self._accepted: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin a connection, after the oldest one has ended if there are too many."""
        if not self._free.acquire(blocking=False):
            with self._lock:
                _shut_down(list(self._accepted)[:1])
            if not self._free.acquire(timeout=_CLOSES_WITHIN_S):
                super().shutdown_request(request)
                return
        with self._lock:
            self._accepted[request] = time.monotonic()
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """End connections that have lasted too long; ``serve_forever`` calls it twice a second."""
        super().service_actions()
        accepted_before = time.monotonic() - _CONNECTION_MOST_S
        with self._lock:
            _shut_down(
                [request for request, since in self._accepted.items() if since < accepted_before]
            )

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        with self._lock:
            is_known = self._accepted.pop(request, None) is not None
        super().shutdown_request(request)
        if is_known:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: the client was too slow, or has left."""


def _shut_down(connections: list[socket.socket]) -> None:
    """Let the threads of connections end, which close them."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class _ServerOfVersion6(_Server):
    address_family = socket.AF_INET6
