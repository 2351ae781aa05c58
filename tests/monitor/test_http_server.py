"""Who is answered by the HTTP server of the metrics and the status page, and who is not."""

from __future__ import annotations

import base64
import contextlib
import http.client
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.monitor import http_server
from ledgerlake.monitor.http_server import HttpServer, page
from ledgerlake.options.config import parse_config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_PAGES = {"/": page("text/plain", lambda: b"numbers")}


@pytest.fixture
def open_server() -> Iterator[HttpServer]:
    server = HttpServer(0, "127.0.0.1", "", _PAGES)
    yield server
    server.close()


@pytest.fixture
def closed_server(tmp_path: Path) -> Iterator[HttpServer]:
    (tmp_path / "token").write_text("first\n")
    server = HttpServer(0, "127.0.0.1", f"file:{tmp_path / 'token'}", _PAGES)
    yield server
    server.close()


def answer(
    server: HttpServer, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_a_page_is_answered_and_other_paths_and_methods_are_not(open_server: HttpServer) -> None:
    assert answer(open_server) == (200, "numbers")
    assert answer(open_server, "/health") == (200, "ok\n")
    assert answer(open_server, "/../etc/passwd") == (404, "there are /, /health\n")
    assert answer(open_server, method="POST")[0] == 405


@pytest.mark.parametrize("host", ["localhost:9464", "127.0.0.1", "[::1]:9464"])
def test_without_a_token_a_request_that_names_this_machine_is_answered(
    open_server: HttpServer, host: str
) -> None:
    assert answer(open_server, Host=host)[0] == 200


@pytest.mark.parametrize("host", ["evil.example:9464", "10.0.0.1", "[", "localhost.evil.example"])
def test_without_a_token_a_request_that_names_another_host_is_refused(
    open_server: HttpServer, host: str
) -> None:
    status, sentence = answer(open_server, Host=host)
    assert (status, sentence) == (403, "without a [metrics] token, only localhost is answered\n")


@pytest.mark.parametrize(
    "authorization", ["Bearer first", "bearer first", basic("", "first"), basic("ann", "first")]
)
def test_the_token_is_taken_as_bearer_or_as_the_password_of_any_user(
    closed_server: HttpServer, authorization: str
) -> None:
    assert answer(closed_server, Authorization=authorization, Host="lake.example") == (
        200,
        "numbers",
    )


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "first",
        "Bearer",
        "Bearer second",
        basic("first", "second"),
        "Basic !",
        "Basic /w==",
        "Digest first",
    ],
)
def test_without_the_token_nothing_but_the_health_is_answered(
    closed_server: HttpServer, authorization: str
) -> None:
    for path in ("/", "/metrics", "/nothing"):
        status, sentence = answer(closed_server, path, Authorization=authorization)
        assert (status, sentence) == (401, "the token of [metrics] is missing or wrong\n")
    assert answer(closed_server, "/health", Authorization=authorization) == (200, "ok\n")


def test_a_token_that_is_renewed_in_its_file_counts_at_once(
    closed_server: HttpServer, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("second")
    assert answer(closed_server, Authorization="Bearer first")[0] == 401
    assert answer(closed_server, Authorization="Bearer second")[0] == 200
    (tmp_path / "token").unlink()
    assert answer(closed_server, Authorization="Bearer second")[0] == 401


def test_a_port_that_is_taken_and_a_token_that_is_not_there_are_one_sentence(
    open_server: HttpServer,
) -> None:
    with pytest.raises(
        SetupError, match=f"metrics cannot be served on port {open_server.port} of 127.0.0.1"
    ):
        HttpServer(open_server.port, "127.0.0.1", "", _PAGES)
    with pytest.raises(SetupError, match="metrics cannot be served on port 0 of xxx"):
        HttpServer(0, "x" * 70, "token", _PAGES)
    with pytest.raises(SetupError, match="the variable NO_SUCH_TOKEN"):
        HttpServer(0, "127.0.0.1", "env:NO_SUCH_TOKEN", _PAGES)
    with pytest.raises(SetupError, match=r"the token of \[metrics\] is blank"):
        HttpServer(0, "0.0.0.0", "  ", _PAGES)


def test_an_address_that_other_machines_reach_needs_a_token() -> None:
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
        "stream": {"name": "orders", "checkpoint": "checkpoint"},
        "delta": {"path": "lake"},
    }
    for address in ("0.0.0.0", "::", "10.1.2.3", "lake.example"):
        with pytest.raises(
            UsageError,
            match=r"other machines can reach the \[metrics\] address; set \[metrics\] token",
        ):
            parse_config(data | {"metrics": {"address": address}})
        with pytest.raises(UsageError, match="other machines can reach"):
            HttpServer(0, address, "", _PAGES)
        assert (
            parse_config(data | {"metrics": {"address": address, "token": "x"}}).metrics is not None
        )
    for address in ("127.0.0.1", "::1", "localhost"):
        metrics = parse_config(data | {"metrics": {"address": address}}).metrics
        assert metrics is not None
        assert metrics.address == address


def test_the_token_is_in_no_repr() -> None:
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
        "stream": {"name": "orders", "checkpoint": "checkpoint"},
        "delta": {"path": "lake"},
        "metrics": {"token": "very-secret"},
    }
    assert "very-secret" not in repr(parse_config(data))


HEAD = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


def connect(server: HttpServer, sent: bytes = HEAD) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(sent)
    return connection


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("most", [16, 200])
def test_connections_are_bounded_and_the_next_request_is_answered(
    open_server: HttpServer, most: int
) -> None:
    threads = threading.active_count()
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(open_server)) for _ in range(most)]
        assert answer(open_server) == (200, "numbers")
        assert threading.active_count() <= threads + 16
        assert all(map(is_closed, connections[: most - 16]))


@pytest.mark.parametrize("drop", [b"X: 1\r\n", b"x"], ids=["headers", "bytes"])
def test_a_request_that_trickles_in_is_ended(
    open_server: HttpServer, monkeypatch: pytest.MonkeyPatch, drop: bytes
) -> None:
    monkeypatch.setattr(http_server, "_CONNECTION_MOST_S", 0.2)
    with connect(open_server) as connection:
        until_s = time.monotonic() + 15
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < until_s:
                connection.sendall(drop)
                time.sleep(0.05)
        assert time.monotonic() < until_s


def test_a_client_that_is_silent_or_leaves_prints_nothing(
    open_server: HttpServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_server._Handler, "timeout", 0.2)
    linger = struct.pack("ii", 1, 0)
    with (
        connect(open_server) as silent,
        connect(open_server) as reset,
        connect(open_server, b"\x00\xff") as garbage,
    ):
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        reset.close()
        assert is_closed(silent)
        garbage.shutdown(socket.SHUT_WR)
        is_closed(garbage)
    assert answer(open_server)[0] == 200
    assert capfd.readouterr() == ("", "")


def test_a_page_that_fails_is_one_line_in_the_log(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> bytes:
        raise ValueError("no numbers")

    server = HttpServer(0, "127.0.0.1", "", {"/": page("text/plain", fail)})
    try:
        assert answer(server) == (500, "the page failed; see the pipeline's log\n")
    finally:
        server.close()
    assert caplog.messages == ["the page / was not answered: ValueError: no numbers"]
    assert "Traceback" not in capfd.readouterr().err
