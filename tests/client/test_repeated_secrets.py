"""What a server, a proxy or a variable repeats of a secret is in no error, wherever it stands."""

from __future__ import annotations

import base64
import contextlib
import json
import socket
import ssl
import traceback
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import pytest

from ledgerlake.client.auth import parse_authentication
from ledgerlake.devbroker.security import make_security
from ledgerlake.errors import LedgerlakeError
from tests.client.listening import listening

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

CLIENT_SECRET = "sword+fish/'x%41\\"
PROXY_PASSWORD = "hunter2secret"

HEAD = b"HTTP/1.0 200 OK\r\n"

# What the token endpoint answers to a form.
ANSWERS: dict[str, Callable[[bytes], bytes]] = {
    "in place of the status line": lambda form: form + b"\r\n\r\n",
    "behind a status": lambda form: b"HTTP/1.0 401 " + form + b"\r\n\r\n",
    "in place of a status": lambda form: b"HTTP/1.0 " + form + b"\r\n\r\n",
    "in place of a version": lambda form: b"HTTP/" + form + b" 200 OK\r\n\r\n",
    "in a header": lambda form: b"HTTP/1.0 401 no\r\nWWW-Authenticate: " + form + b"\r\n\r\n",
    "in the header of a pause": lambda form: (
        b"HTTP/1.0 503 no\r\nRetry-After: " + form + b"\r\n\r\n"
    ),
    "in a redirect": lambda form: b"HTTP/1.0 302 no\r\nLocation: http://" + form + b"\r\n\r\n",
    "in a header without a colon": lambda form: HEAD + form + b"\r\n\r\n",
    "in a length": lambda form: HEAD + b"Content-Length: " + form + b"\r\n\r\n",
    "in a chunk": lambda form: (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + form + b"\r\n"
    ),
    "in the body of an error": lambda form: b"HTTP/1.0 400 no\r\n\r\n" + form,
    "in a body that is not JSON": lambda form: HEAD + b"\r\n" + form,
    "in the token": lambda form: (
        HEAD + b"\r\n" + json.dumps({"access_token": form.decode() + "\n"}).encode()
    ),
    "in nothing": lambda form: b"",
}


@contextlib.contextmanager
def serving(
    answer: Callable[[bytes], bytes], context: ssl.SSLContext | None = None
) -> Iterator[int]:
    """Answer each request, which may have a form; yield the port."""

    def serve(accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            with context.wrap_socket(accepted, server_side=True) if context else accepted as stream:
                got = stream.recv(65536)
                while got.startswith(b"POST") and b"client_secret" not in got:
                    got += stream.recv(65536)
                stream.sendall(answer(got))

    with listening(serve) as port:
        yield port


@contextlib.contextmanager
def issuer(endpoint: str, answer: Callable[[bytes], bytes] = lambda form: b"") -> Iterator[str]:
    """Serve an issuer that names a token endpoint; PORT there is its own port."""

    def respond(got: bytes) -> bytes:
        if got.startswith(b"POST"):
            return answer(got.partition(b"\r\n\r\n")[2])
        named = endpoint.replace("PORT", str(port))
        return HEAD + b"\r\n" + json.dumps({"token_endpoint": named}).encode()

    with serving(respond) as port:
        yield f"http://127.0.0.1:{port}"


def refusal(issuer_url: str, secret: str = CLIENT_SECRET) -> str:
    """Return all that an error shows, also with its traceback."""
    parameters = {"issuerUrl": issuer_url, "client_id": "me", "client_secret": secret}
    with pytest.raises(LedgerlakeError) as caught:
        parse_authentication("oauth2", json.dumps(parameters), "here").data()
    return "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
@pytest.mark.parametrize("decodes", [False, True])
def test_a_client_secret_that_the_token_endpoint_repeats_is_in_no_error(
    answer: Callable[[bytes], bytes], decodes: bool
) -> None:
    def respond(form: bytes) -> bytes:
        secret = parse_qs(form.decode())["client_secret"][0].encode()
        return answer(secret if decodes else form)

    with issuer("http://127.0.0.1:PORT/token", respond) as url:
        said = refusal(url)
    assert f"the OAuth2 issuer {url}" in said
    assert "sword" not in said


@pytest.mark.parametrize(
    "endpoint",
    [
        "SECRET",
        "http://SECRET/token",
        "https://SECRET.invalid/token",
        "https://SECRET:swordfish/token",
        "http://127.0.0.1:swordfish/token",
        "http://127.0.0.1:PORT/a token of SECRET",
        "https://127.0.0.1:PORT/SECRET",
        f"https://{'swordfish' * 10}/",
    ],
)
def test_a_client_secret_in_the_address_of_the_token_endpoint_is_in_no_error(endpoint: str) -> None:
    with issuer(endpoint.replace("SECRET", "swordfish")) as url:
        assert "swordfish" not in refusal(url, "swordfish")


def test_a_client_secret_that_is_the_host_of_a_certificate_is_in_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = make_security(tmp_path / "security")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "security/broker.pem", tmp_path / "security/broker.key.pem")
    monkeypatch.setenv("SSL_CERT_FILE", security.ca_file)
    found = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda _, port, *others: found("127.0.0.1", port, *others)
    )
    with (
        serving(lambda _: b"", context) as port,
        issuer(f"https://swordfish.example:{port}/token") as url,
    ):
        said = refusal(url, "swordfish")
    assert "its certificate is not accepted: Hostname mismatch" in said
    assert "swordfish" not in said


@pytest.mark.parametrize(
    "variable",
    [
        *(f"http://user:{PROXY_PASSWORD}{end}" for end in ("", "/", "@", "@:1", "@127.0.0.1:x")),
        f"user:{PROXY_PASSWORD}@127.0.0.1:1",
        f"http://us er:{PROXY_PASSWORD}@127.0.0.1:1",
        f"http://user:x[{PROXY_PASSWORD}@127.0.0.1:1",
        f"http://user:x/{PROXY_PASSWORD}@127.0.0.1:1",
        f"socks5://user:{PROXY_PASSWORD}@127.0.0.1:1",
        f"http://{PROXY_PASSWORD * 10}:1",
        f"http:{PROXY_PASSWORD}",
    ],
)
def test_a_password_in_the_variable_of_a_proxy_is_in_no_error(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_proxy(monkeypatch, variable)
    assert PROXY_PASSWORD not in refusal("https://issuer.invalid")


@pytest.mark.parametrize("answer", [answer for answer in ANSWERS.values()], ids=ANSWERS)
def test_a_password_that_a_proxy_repeats_is_in_no_error(
    answer: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def respond(got: bytes) -> bytes:
        (line,) = (line for line in got.split(b"\r\n") if line.lower().startswith(b"proxy-auth"))
        return answer(line)

    with serving(respond) as port:
        with_proxy(monkeypatch, f"http://user:{PROXY_PASSWORD}@127.0.0.1:{port}")
        said = refusal("https://issuer.invalid")
    assert base64.b64encode(f"user:{PROXY_PASSWORD}".encode()).decode() not in said


def with_proxy(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    for name in ("no_proxy", "NO_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", url)
