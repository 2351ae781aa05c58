"""Requests that carry secrets end in time and go to nobody who could read them on the way."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.client.bounded_http import StatusError, UnsafeUrlError, check_url, fetch
from tests.client.listening import listening

if TYPE_CHECKING:
    from collections.abc import Iterator

# A server ends by itself in the end, so that a test of a client without a deadline fails.
SLOW_S = 20.0

HEAD = b"HTTP/1.0 200 OK\r\n"


@contextlib.contextmanager
def trickling(start: bytes, drop: bytes) -> Iterator[int]:
    """Serve connections that get ``start`` at once, and then ``drop`` ten times a second; yield the
    port.
    """

    def serve(accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            accepted.sendall(start)
            for _ in range(int(SLOW_S * 10)):
                accepted.sendall(drop)
                time.sleep(0.1)

    with listening(serve) as port:
        yield port


@pytest.mark.parametrize(
    ("scheme", "start", "drop"),
    [
        pytest.param("http", b"", b"", id="silence"),
        pytest.param("http", b"HTTP/1.0 200 ", b"O", id="status"),
        pytest.param("http", HEAD, b"X: 1\r\n", id="headers"),
        pytest.param("http", HEAD + b"\r\n", b" ", id="body"),
        pytest.param("http", HEAD + b"Content-Length: 1000\r\n\r\n", b" ", id="body of a length"),
        pytest.param("https", b"\x16\x03\x03\x40\x00", b"\x00", id="TLS"),
    ],
)
def test_the_deadline_is_of_the_whole_request(scheme: str, start: bytes, drop: bytes) -> None:
    with trickling(start, drop) as port, pytest.raises(TimeoutError, match=r"no answer in 0\.5 s"):
        fetch(f"{scheme}://127.0.0.1:{port}/", None, 0.5, 1000)


@given(
    scheme=st.sampled_from(["https", "http", "file", "ftp", "data", "HTTP", "", "jar"]),
    host=st.sampled_from(
        ["issuer", "localhost.evil", "evil@127.0.0.1", "127.0.0.1@evil", "127.0.0.1", "[::1]", ""]
    ),
    path=st.text(st.sampled_from([*"/a?#:@%", "\x1b", "\n", "é"]), max_size=4),
)
def test_a_secret_goes_over_tls_or_stays_on_this_machine(scheme: str, host: str, path: str) -> None:
    try:
        check_url(f"{scheme}://{host}/{path}")
    except UnsafeUrlError as error:
        assert str(error).isprintable()  # noqa: PT017
        return
    stays_here = host in {"127.0.0.1", "[::1]", "evil@127.0.0.1"}
    assert host
    assert scheme == "https" or (scheme.lower() == "http" and stays_here)


class Redirecting(BaseHTTPRequestHandler):
    """Redirects each request to ``location``."""

    location: ClassVar[str] = ""
    seen: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.seen.append(f"{self.command} {self.path}")
        if self.path == "/end":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")
            return
        self.send_response(302)
        self.send_header("Location", self.location)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Redirecting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Redirecting.seen.clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_redirect_is_followed_to_a_safe_url_alone(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Redirecting, "location", f"{server}/end")
    assert fetch(f"{server}/start", None, 10, 1000) == b"{}"
    assert Redirecting.seen == ["GET /start", "GET /end"]
    monkeypatch.setattr(Redirecting, "location", "http://issuer.invalid/end")
    with pytest.raises(UnsafeUrlError, match="no URL that begins with https://"):
        fetch(f"{server}/start", None, 10, 1000)


def test_a_form_is_sent_to_no_other_url(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Redirecting, "location", f"{server}/end")
    with pytest.raises(StatusError, match="status 302"):
        fetch(f"{server}/token", b"client_secret=hush", 10, 1000)
    assert Redirecting.seen == ["POST /token"]


def test_a_proxy_gets_no_request_to_this_machine(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with trickling(b"HTTP/1.0 200 OK\r\n\r\nproxy", b"") as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "https_proxy", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert fetch(f"{server}/end", b"client_secret=hush", 10, 1000) == b"{}"
    assert Redirecting.seen == ["POST /end"]


def test_a_proxy_learns_of_a_request_over_tls_only_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: list[bytes] = []

    def serve() -> None:
        with listener.accept()[0] as accepted:
            got.append(accepted.recv(65536))

    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(OSError):
            fetch("https://issuer.invalid/token", b"client_secret=hush", 10, 1000)
        serving.join()
    assert got[0].startswith(b"CONNECT issuer.invalid:443 ")
    assert b"hush" not in got[0]
    assert b"token" not in got[0]


def test_no_more_than_the_limit_is_read() -> None:
    with trickling(HEAD + b"\r\n" + bytes(5000), b"") as port:
        assert len(fetch(f"http://127.0.0.1:{port}/", None, 10, 1000)) == 1000
