"""Credentials: where they come from, what brokers are told, and that nobody else sees them."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import parse_qs

import pytest
from cryptography.hazmat.primitives import serialization

from ledgerlake.client import auth
from ledgerlake.client.auth import (
    NO_AUTHENTICATION,
    Authentication,
    hint,
    parse_authentication,
)
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.producer import EntryProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import TopicSelection
from ledgerlake.client.transport import TlsSettings
from ledgerlake.devbroker.security import make_security
from ledgerlake.errors import (
    BrokerError,
    LedgerlakeError,
    ProtocolError,
    SetupError,
    TopicNotFoundError,
    TransportError,
    UsageError,
)
from ledgerlake.options.config import parse_config
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.entries import single
from tests.peer import TOPIC, Peer, _encode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

JAVA = "org.apache.pulsar.client.impl.auth."


def parsed(plugin: str, parameters: str) -> Authentication:
    return parse_authentication(plugin, parameters, "here")


def test_a_secret_is_read_where_it_is_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "from-env\n")
    (tmp_path / "token").write_text("from-file\n")
    for plugin in ("token", f"{JAVA}AuthenticationToken"):
        assert parsed(plugin, "token:abc").data() == b"abc"
        assert parsed(plugin, "secret:abc").data() == b"abc"
        assert parsed(plugin, "env:MY_TOKEN").data() == b"from-env"
        assert parsed(plugin, f"file:{tmp_path}/token").data() == b"from-file"
        assert parsed(plugin, f"file://{tmp_path}/token").data() == b"from-file"
    authentication = parsed("token", f"file:{tmp_path}/token")
    (tmp_path / "token").write_text("newer")
    assert authentication.data() == b"newer"
    assert parsed("basic", '{"userId": "u", "password": "p"}').data() == b"u:p"
    assert parsed("basic", "secret:u:p").method == "basic"
    assert parsed("basic", f"secret:u:file:{tmp_path}/token").data() == b"u:newer"
    assert parsed("basic", "secret:u:env:MY_TOKEN").data() == b"u:from-env"
    (tmp_path / "basic").write_text("u:file:p\n")
    assert parsed("basic", f"file:{tmp_path}/basic").data() == b"u:file:p"
    with pytest.raises(SetupError, match="the variable NOT_SET"):
        parsed("basic", "secret:u:env:NOT_SET").data()
    assert parsed(f"{JAVA}AuthenticationTls", "tlsCertFile:/c,tlsKeyFile:/k") == Authentication(
        "tls", "tlsCertFile:/c,tlsKeyFile:/k"
    )


@pytest.mark.parametrize(
    ("plugin", "parameters", "message"),
    [
        ("kerberos", "", "the plugin is not known; it is token, oauth2, basic or tls"),
        ("token:eyJhbGciOiJI", "", "the plugin is not known"),
        ("token", "", "the token is missing"),
        ("token", "token:  ", "the token is missing"),
        ("token", "secret: ", "the token is missing"),
        (
            "token",
            "eyJhbGciOiJI",
            "Spark would show this secret in its plans; write secret: before it",
        ),
        ("basic", "u:p", "Spark would show"),
        ("basic", "profile:hunter2", "Spark would show"),
        ("basic", "u:hunter2file:x", "Spark would show"),
        (
            "oauth2",
            '{"issuerUrl": "https://i", "privateKey": "data:,{}", "audience": "urn:profile:read"}',
            "Spark would show",
        ),
        ("basic", "secret:u", "write user:password"),
        ("basic", "secret:u: ", "write user:password"),
        ("basic", '{"userId": "u", "password": ""}', "write user:password"),
        ("oauth2", "x", "no JSON object"),
        ("oauth2", "{}", "needs issuerUrl"),
        ("oauth2", '{"issuerUrl": "https://i", "client_id": "me"}', "needs issuerUrl"),
        (
            "oauth2",
            '{"issuerUrl": "https://u:p@i", "privateKey": "file:x"}',
            "issuerUrl holds no user and no password",
        ),
        (
            "oauth2",
            '{"issuerUrl": "https://i", "privateKey": "data:application/json;base64,e30="}',
            "Spark would show",
        ),
    ],
)
def test_what_cannot_be_is_refused_without_repeating_it(
    plugin: str, parameters: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        parsed(plugin, parameters)
    assert not parameters or plugin == "oauth2" or parameters not in str(raised.value)


def test_secrets_that_are_not_there_are_named() -> None:
    with pytest.raises(SetupError, match="the variable NO_SUCH_TOKEN"):
        parsed("token", "env:NO_SUCH_TOKEN").data()
    with pytest.raises(SetupError, match="the file /no/such"):
        parsed("token", "file:/no/such").data()


def test_no_repr_shows_a_secret() -> None:
    options = {
        "service.url": "pulsar://h",
        "topic": "t",
        "pulsar.client.authPluginClassName": "token",
    }
    parsed_options = parse_options({**options, "pulsar.client.authParams": "token:hidden"})
    data = {
        "source": {"service_url": "pulsar://h", "topics": ["t"]},
        "stream": {"name": "n"},
        "delta": {"path": "p"},
    }
    config = parse_config({**data, "auth": {"method": "token", "token": "hidden"}})
    assert "hidden" not in repr(parsed_options) + repr(config)
    assert config.source.client.authentication.data() == b"hidden"


def token(claims: dict[str, Any]) -> Authentication:
    middle = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip("=")
    return parsed("token", f"token:x.{middle}.y")


def refusal_hint(authentication: Authentication, now_s: float) -> str:
    return hint(authentication, (authentication.data() or b"").decode(), now_s)


def test_a_refused_token_is_looked_at_for_when_it_expired() -> None:
    assert (
        refusal_hint(token({"exp": 1_700_000_000}), 1_800_000_000)
        == "; the token expired at 2023-11-14T22:13:20Z; get a new one"
    )
    for authentication in (
        token({"exp": 1_900_000_000}),
        token({"sub": "x"}),
        parsed("token", "token:garbage"),
    ):
        assert refusal_hint(authentication, 1_800_000_000).startswith("; check the token")
    assert refusal_hint(NO_AUTHENTICATION, 0).startswith(
        "; no authentication is configured; set one"
    )


class Issuer(BaseHTTPRequestHandler):
    """An OAuth2 issuer that knows one client; ``failures`` are what it answers first, with the
    headers beside.
    """

    forms: ClassVar[list[dict[str, list[str]]]] = []
    failures: ClassVar[list[tuple[int, dict[str, str]]]] = []
    expires_in: Any = 3600
    access_token: ClassVar[object] = None
    token_endpoint: ClassVar[object] = None
    discovery: ClassVar[bytes] = b""

    def do_GET(self) -> None:
        own = f"http://127.0.0.1:{cast('HTTPServer', self.server).server_port}/token"
        if self.discovery:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.discovery)
            return
        self._answer({"token_endpoint": self.token_endpoint or own})

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        self.forms.append(form)
        if self.failures:
            status, headers = self.failures.pop(0)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            return
        if form["client_secret"] != ["hush"]:
            self.send_error(401)
            return
        access_token = self.access_token or f"access-{len(self.forms)}"
        self._answer({"access_token": access_token, "expires_in": self.expires_in})

    def _answer(self, data: dict[str, Any]) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(data).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def issuer() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Issuer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Issuer.forms.clear()
    Issuer.failures.clear()
    auth._cached_token.cache_clear()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def oauth2(issuer: str, folder: Path, secret: str = "hush") -> Authentication:
    (folder / "key.json").write_text(json.dumps({"client_id": "me", "client_secret": secret}))
    parameters = {
        "issuerUrl": issuer,
        "privateKey": f"file://{folder}/key.json",
        "audience": "urn:pulsar",
    }
    return parsed(f"{JAVA}oauth2.AuthenticationOAuth2", json.dumps(parameters))


def test_oauth2_fetches_a_token_and_keeps_it_until_it_is_about_to_expire(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authentication = oauth2(issuer, tmp_path)
    assert (authentication.method, authentication.data(), authentication.data()) == (
        "token",
        b"access-1",
        b"access-1",
    )
    assert Issuer.forms == [
        {
            "grant_type": ["client_credentials"],
            "client_id": ["me"],
            "client_secret": ["hush"],
            "audience": ["urn:pulsar"],
        }
    ]
    monkeypatch.setattr(auth, "_SPARE_S", 4000)
    auth._cached_token.cache_clear()
    assert (authentication.data(), authentication.data()) == (b"access-2", b"access-3")


def test_a_token_that_was_kept_and_is_refused_is_fetched_again_and_a_fresh_one_is_wrong(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authentication = oauth2(issuer, tmp_path)
    assert authentication.data() == b"access-1"
    assert not authentication.forget()
    monkeypatch.setattr(auth, "_FRESH_S", -1.0)
    assert authentication.forget()
    assert authentication.data() == b"access-2"
    assert not parsed("token", "token:x").forget()


@pytest.mark.parametrize("key_form", ["as it is", "env", "file", "path", "data"])
def test_an_oauth2_key_is_given_in_any_way_that_a_secret_is(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_form: str
) -> None:
    key = json.dumps({"client_id": "me", "client_secret": "hush"})
    (tmp_path / "key.json").write_text(key)
    monkeypatch.setenv("OAUTH2_KEY", key)
    encoded = base64.b64encode(key.encode()).decode()
    ways = {
        "env": "env:OAUTH2_KEY",
        "file": f"file:{tmp_path}/key.json",
        "path": f"{tmp_path}/key.json",
    }
    private_key = {"as it is": key, "data": f"data:application/json;base64,{encoded}", **ways}[
        key_form
    ]
    parameters = json.dumps(
        {"issuerUrl": issuer, "privateKey": private_key, "audience": "urn:pulsar"}
    )
    authentication = parsed(f"{JAVA}oauth2.AuthenticationOAuth2", f"secret:{parameters}")
    assert authentication.data() == b"access-1"


@pytest.mark.parametrize(
    "private_key",
    [
        '{"client_id": "me", "client_secret": "hush"',
        "hush/hush",
        "data:text/plain;base64,hush!",
        "hush",
    ],
)
def test_an_oauth2_key_that_is_wrongly_written_is_not_repeated(
    issuer: str, private_key: str
) -> None:
    parameters = json.dumps({"issuerUrl": issuer, "privateKey": private_key})
    with pytest.raises(LedgerlakeError, match="the OAuth2 privateKey") as raised:
        parsed(f"{JAVA}oauth2.AuthenticationOAuth2", f"secret:{parameters}").data()
    assert "hush" not in str(raised.value)


def test_an_issuer_that_refuses_or_is_not_there_is_named(issuer: str, tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=f"the OAuth2 issuer {issuer} refused us with status 401"
    ) as raised:
        oauth2(issuer, tmp_path, "wrong-one").data()
    assert "wrong-one" not in str(raised.value)
    with pytest.raises(TransportError, match="cannot be reached"):
        oauth2("http://127.0.0.1:1", tmp_path).data()


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_an_issuer_that_refuses_is_not_asked_again(
    issuer: str, tmp_path: Path, status: int
) -> None:
    Issuer.failures.append((status, {}))
    with Peer() as peer:
        cluster = Cluster(
            ClientSettings(peer.url, authentication=oauth2(issuer, tmp_path), give_up_after_s=30)
        )
        with pytest.raises(SetupError, match=f"refused us with status {status}; check client id"):
            cluster.all_partitions(TopicSelection((TOPIC,)))
    assert len(Issuer.forms) == 1


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_issuer_that_is_busy_is_asked_again(issuer: str, tmp_path: Path, status: int) -> None:
    Issuer.failures += 2 * [(status, {})]
    authentication = oauth2(issuer, tmp_path)
    with pytest.raises(
        TransportError, match=f"the OAuth2 issuer {issuer} is not available now, status {status}"
    ):
        authentication.data()
    with Peer() as peer:
        cluster = Cluster(
            ClientSettings(peer.url, authentication=authentication, give_up_after_s=30)
        )
        assert cluster.all_partitions(TopicSelection((TOPIC,))) == [TOPIC]
        cluster.close()
    assert len(Issuer.forms) == 3


class Clock:
    """A clock that moves when told to, in place of the module ``time``."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return 1_700_000_000 + self.now_s


@pytest.mark.parametrize(
    ("retry_after", "pause_s"),
    [
        pytest.param("7", 7, id="seconds"),
        pytest.param("Tue, 14 Nov 2023 22:30:10 GMT", 10, id="a date"),
        pytest.param("86400", 60, id="no longer than a minute"),
        pytest.param("-5", 0, id="no time at all"),
        pytest.param("Tue, 14 Nov 2023 99:99:99 GMT", 0, id="nonsense"),
    ],
)
def test_an_issuer_is_left_alone_for_as_long_as_it_asks(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, retry_after: str, pause_s: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(auth, "time", clock)
    Issuer.failures.append((503, {"Retry-After": retry_after}))
    authentication = oauth2(issuer, tmp_path)
    with pytest.raises(TransportError):
        authentication.data()
    clock.now_s += pause_s - 0.5
    if pause_s:
        with pytest.raises(TransportError, match="is not available now"):
            authentication.data()
        assert len(Issuer.forms) == 1
    clock.now_s += 0.5
    assert authentication.data() == b"access-2"


@pytest.mark.parametrize(
    "endpoint", ["http://issuer/token", "file:///etc/hostname", "ftp://issuer/token", 7, "token"]
)
def test_a_secret_is_sent_to_no_token_endpoint_without_tls(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: object
) -> None:
    monkeypatch.setattr(Issuer, "token_endpoint", endpoint)
    with pytest.raises(
        SetupError,
        match=r"to which no secret is sent, .* begins with https://; correct token_endpoint",
    ):
        oauth2(issuer, tmp_path).data()


@pytest.mark.parametrize("url", ["http://issuer", "file:///etc", "issuer"])
def test_an_issuer_without_tls_is_refused(url: str) -> None:
    parameters = json.dumps({"issuerUrl": url, "client_id": "me", "client_secret": "hush"})
    with pytest.raises(UsageError, match=r"issuerUrl does not begin with https://") as raised:
        parsed("oauth2", f"secret:{parameters}")
    assert "hush" not in str(raised.value)


@pytest.mark.parametrize(
    "discovery", [b"[" * 500_000, b"<html>", b"\xff"], ids=["deep", "html", "no text"]
)
def test_an_answer_that_is_not_json_is_one_error(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, discovery: bytes
) -> None:
    monkeypatch.setattr(Issuer, "discovery", discovery)
    with pytest.raises(TransportError, match="did not answer with JSON"):
        oauth2(issuer, tmp_path).data()


@pytest.mark.parametrize("access_token", ["tok\x1b[31m", "a\nb", ["a"], {"a": 1}, "a" * 65537])
def test_an_access_token_is_visible_text(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access_token: object
) -> None:
    monkeypatch.setattr(Issuer, "access_token", access_token)
    with pytest.raises(SetupError, match="gave no access token"):
        oauth2(issuer, tmp_path).data()


@pytest.mark.parametrize("expires_in", [10**9, "1e300"])
def test_a_token_is_fetched_again_after_a_day_at_most(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires_in: object
) -> None:
    clock = Clock()
    monkeypatch.setattr(auth, "time", clock)
    monkeypatch.setattr(Issuer, "expires_in", expires_in)
    authentication = oauth2(issuer, tmp_path)
    assert (authentication.data(), authentication.data()) == (b"access-1", b"access-1")
    clock.now_s += 24 * 60 * 60
    assert authentication.data() == b"access-2"


@pytest.mark.parametrize("expires_in", ["soon", None, [], "-1", "NaN", "1e999", float("inf")])
def test_a_token_without_a_usable_lifetime_is_used_once(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expires_in: object
) -> None:
    monkeypatch.setattr(Issuer, "expires_in", expires_in)
    authentication = oauth2(issuer, tmp_path)
    assert (authentication.data(), authentication.data()) == (b"access-1", b"access-2")


def test_a_broker_is_told_who_we_are_and_again_when_it_asks(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    with Peer(challenges=1) as peer:
        peer.add(single(b"v"))
        settings = ClientSettings(
            peer.url, authentication=parsed("token", f"file:{tmp_path}/token"), give_up_after_s=2
        )
        cluster = Cluster(settings)
        assert cluster.topic_partitions(TOPIC) == [TOPIC]
        assert peer.credentials == [("token", b"first"), ("token", b"first")]
        (tmp_path / "token").write_text("second")
        peer.challenges = 1
        assert cluster.topic_partitions(TOPIC) == [TOPIC]
        deadline = time.monotonic() + 60
        while len(peer.credentials) < 3 and time.monotonic() < deadline:
            cluster.topic_partitions(TOPIC)
        assert peer.credentials[2] == ("token", b"second")
        cluster.close()


def test_a_broker_that_asks_one_who_has_no_credentials_is_refused() -> None:
    with (
        Peer(challenges=1) as peer,
        pytest.raises(BrokerError, match="no authentication is configured"),
    ):
        Cluster(ClientSettings(peer.url, give_up_after_s=1)).topic_partitions(TOPIC)


def test_a_certificate_must_be_trusted_and_be_for_the_host(tmp_path: Path) -> None:
    security = make_security(tmp_path / "security")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(
        tmp_path / "security" / "broker.pem", tmp_path / "security" / "broker.key.pem"
    )

    def partitions(peer: Peer, tls: TlsSettings) -> list[str]:
        cluster = Cluster(ClientSettings(peer.url, tls=tls, give_up_after_s=1))
        try:
            return cluster.topic_partitions(TOPIC)
        finally:
            cluster.close()

    with Peer(tls=context) as peer:
        assert partitions(peer, TlsSettings(security.ca_file)) == [TOPIC]
        assert partitions(peer, TlsSettings(allows_insecure=True)) == [TOPIC]
        with pytest.raises(SetupError, match=r"is not accepted: .*; check tlsTrustCertsFilePath"):
            partitions(peer, TlsSettings())
        with pytest.raises(SetupError, match="cannot be used"):
            partitions(peer, TlsSettings("/no/such"))
    with Peer(tls=context, host="127.0.0.2") as peer:
        assert partitions(peer, TlsSettings(security.ca_file, checks_hostname=False)) == [TOPIC]
        with pytest.raises(SetupError, match=r"is not accepted: .*127\.0\.0\.2"):
            partitions(peer, TlsSettings(security.ca_file))


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_pass_phrase(
    tmp_path: Path,
) -> None:
    make_security(tmp_path / "security")
    own = tmp_path / "security" / "client.pem"
    key = serialization.load_pem_private_key(
        (tmp_path / "security" / "client.key.pem").read_bytes(), None
    )
    encrypted = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"hush"),
    )
    (tmp_path / "key.pem").write_bytes(encrypted)
    (tmp_path / "both.pem").write_bytes(own.read_bytes() + encrypted)
    with Peer() as peer:
        url = peer.url.replace("pulsar://", "pulsar+ssl://")
        for tls in (
            TlsSettings(cert_file=str(own), key_file=str(tmp_path / "key.pem")),
            TlsSettings(cert_file=str(tmp_path / "both.pem")),
        ):
            cluster = Cluster(ClientSettings(url, tls=tls, give_up_after_s=1))
            with pytest.raises(
                SetupError, match=rf"{tls.key_file or tls.cert_file} is encrypted, .*openssl pkey"
            ):
                cluster.topic_partitions(TOPIC)
            cluster.close()


def test_a_proxy_learns_the_brokers_name_and_the_broker_is_checked_by_it(tmp_path: Path) -> None:
    security = make_security(tmp_path / "security")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(
        tmp_path / "security" / "broker.pem", tmp_path / "security" / "broker.key.pem"
    )
    asked_for: list[str] = []
    context.sni_callback = lambda _socket, name, _context: asked_for.append(name)

    def partitions(peer: Peer, broker: str) -> list[str]:
        tls = TlsSettings(security.ca_file, proxy_url=peer.url)
        cluster = Cluster(ClientSettings(f"pulsar+ssl://{broker}:1", tls=tls, give_up_after_s=1))
        try:
            return cluster.topic_partitions(TOPIC)
        finally:
            cluster.close()

    with Peer(tls=context) as peer:
        assert partitions(peer, "localhost") == [TOPIC]
        with pytest.raises(
            SetupError, match=r"the certificate of pulsar\+ssl://broker.example:1 is not accepted"
        ):
            partitions(peer, "broker.example")
    assert asked_for == ["localhost", "broker.example"]


@pytest.mark.parametrize(
    "response", [pb.CommandLookupTopicResponse.Connect, pb.CommandLookupTopicResponse.Redirect]
)
def test_credentials_for_a_tls_url_are_sent_to_no_address_without_tls(
    tmp_path: Path, response: int
) -> None:
    security = make_security(tmp_path / "security")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(
        tmp_path / "security" / "broker.pem", tmp_path / "security" / "broker.key.pem"
    )
    token = Authentication("token", "token:the-token")
    with Peer(tls=context) as broker, Peer() as plain:
        broker.lookup = {"response": response, "broker_service_url_tls": plain.url}
        settings = ClientSettings(
            broker.url, tls=TlsSettings(security.ca_file), authentication=token
        )
        cluster = Cluster(settings)
        with pytest.raises(ProtocolError, match=r"the service url begins with pulsar\+ssl://"):
            cluster.session_for(TOPIC)
        assert cluster.sessions_for([TOPIC]) == {}
        cluster.close()
        assert plain.requests == []


def test_a_plain_broker_behind_a_tls_url_is_told_apart() -> None:
    with (
        Peer() as peer,
        pytest.raises(TransportError, match="check that the port is the one for TLS"),
    ):
        Cluster(
            ClientSettings(peer.url.replace("pulsar:", "pulsar+ssl:"), give_up_after_s=1)
        ).topic_partitions(TOPIC)


def test_of_several_addresses_one_that_answers_is_enough() -> None:
    with Peer() as peer:
        port = peer.url.rpartition(":")[2]
        cluster = Cluster(
            ClientSettings(f"pulsar://127.0.0.1:1,127.0.0.1:{port}", give_up_after_s=1)
        )
        assert cluster.topic_partitions(TOPIC) == [TOPIC]
        cluster.close()


_NOT_READY: dict[str, Any] = {"error": pb.ServiceNotReady, "message": "no metadata store"}


@pytest.mark.parametrize(
    "sick",
    [
        pytest.param(
            Peer(greeting=commands.error(2**64 - 1, pb.ServiceNotReady, "no metadata store")),
            id="not ready",
        ),
        pytest.param(
            Peer(greeting=commands.error(2**64 - 1, pb.AuthenticationError, "who?")),
            id="does not know us",
        ),
        pytest.param(Peer(greeting=b"HTTP/1.1 400 Bad Request\r\n\r\n"), id="another program"),
        pytest.param(
            Peer(lookup={"response": pb.CommandLookupTopicResponse.Failed, **_NOT_READY}),
            id="a failing lookup",
        ),
    ],
)
def test_of_several_addresses_one_that_is_well_is_enough(sick: Peer) -> None:
    with sick, Peer() as well:
        well.add(single(b"v"))
        url = f"{sick.url},{well.url.removeprefix('pulsar://')}"
        cluster = Cluster(ClientSettings(url, give_up_after_s=0, request_timeout_s=5))
        assert cluster.topic_partitions(TOPIC) == [TOPIC]
        assert EntryReader(cluster, TOPIC, BEFORE_ALL).next(5.0) is not None
        asked = len(sick.requests)
        cluster.session_for(TOPIC)
        assert len(sick.requests) == asked
        cluster.close()


def test_an_address_with_a_wrong_certificate_leads_to_the_next_one(tmp_path: Path) -> None:
    peers, ca_files = [], []
    for name in ("other", "trusted"):
        ca_files.append(make_security(tmp_path / name).ca_file)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tmp_path / name / "broker.pem", tmp_path / name / "broker.key.pem")
        peers.append(Peer(tls=context))
    with peers[0] as other, peers[1] as trusted:
        url = f"{other.url},{trusted.url.removeprefix('pulsar+ssl://')}"
        cluster = Cluster(ClientSettings(url, tls=TlsSettings(ca_files[1]), give_up_after_s=0))
        assert cluster.topic_partitions(TOPIC) == [TOPIC]
        cluster.close()


def test_if_no_address_lets_us_in_the_last_one_says_why() -> None:
    with Peer(greeting=commands.error(2**64 - 1, pb.AuthenticationError, "who?")) as peer:
        cluster = Cluster(
            ClientSettings(f"pulsar://127.0.0.1:1,{peer.url.removeprefix('pulsar://')}")
        )
        with pytest.raises(BrokerError, match="AuthenticationError: who"):
            cluster.topic_partitions(TOPIC)


def test_a_final_answer_of_one_address_is_that_of_all() -> None:
    with Peer(missing_topics={TOPIC}) as first, Peer() as second:
        cluster = Cluster(ClientSettings(f"{first.url},{second.url.removeprefix('pulsar://')}"))
        with pytest.raises(TopicNotFoundError):
            cluster.topic_partitions(TOPIC)
        assert second.requests == []
        cluster.close()


def test_parameters_that_are_nested_without_end_are_refused() -> None:
    with pytest.raises(UsageError, match="no JSON object"):
        parse_authentication("oauth2", "secret:" + "[" * 100_000, "here")


class _Repeating(Peer):
    """A broker that repeats credentials in a refusal: of a connection, or of a topic that
    is named.
    """

    def _answer(self, connection: Any, consumers: Any, event: Any) -> None:
        if isinstance(event, pb.CommandConnect):
            refusal = f"no role for {event.auth_data.decode()}"
            if TOPIC not in self.refuse_topics:
                connection.send(
                    _encode("ERROR", request_id=0, error=pb.AuthenticationError, message=refusal)
                )
                return
            self.refuse_topics[TOPIC] = (pb.AuthorizationError, refusal)
        super()._answer(connection, consumers, event)


@pytest.mark.parametrize("refused_topics", [{}, {TOPIC: (pb.AuthorizationError, "")}])
@pytest.mark.parametrize(
    "credentials", [Authentication("token", "token:SECRET"), Authentication("basic", "joe:SECRET")]
)
def test_credentials_that_a_broker_repeats_are_in_no_error(
    credentials: Authentication, refused_topics: dict[str, Any]
) -> None:
    with _Repeating(refuse_topics=refused_topics) as peer:
        cluster = Cluster(ClientSettings(peer.url, authentication=credentials))
        with pytest.raises(BrokerError, match="no role for") as caught:
            EntryReader(cluster, TOPIC, BEFORE_ALL).next(1.0)
        cluster.close()
    assert "SECRET" not in str(caught.value)


def _refusal(cluster: Cluster) -> str:
    """Return what a reader says of a broker that refuses it."""
    with pytest.raises(LedgerlakeError, match="no role for") as caught:
        EntryReader(cluster, TOPIC, BEFORE_ALL).next(1.0)
    cluster.close()
    return str(caught.value)


@pytest.mark.parametrize("refused_topics", [{}, {TOPIC: (pb.AuthorizationError, "")}])
def test_a_credential_that_was_renewed_after_it_was_sent_is_in_no_error(
    refused_topics: dict[str, Any], tmp_path: Path
) -> None:
    class Renewing(_Repeating):
        def _answer(self, connection: Any, consumers: Any, event: Any) -> None:
            (tmp_path / "token").write_text("a-new-one")
            super()._answer(connection, consumers, event)

    (tmp_path / "token").write_text("SECRET")
    credentials = Authentication("token", f"file:{tmp_path}/token")
    with Renewing(refuse_topics=refused_topics) as peer:
        assert "SECRET" not in _refusal(
            Cluster(ClientSettings(peer.url, authentication=credentials))
        )


@pytest.mark.parametrize("refused_topics", [{}, {TOPIC: (pb.AuthorizationError, "")}])
def test_no_other_token_is_fetched_for_an_error(
    issuer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused_topics: dict[str, Any]
) -> None:
    monkeypatch.setattr(Issuer, "expires_in", None)
    with _Repeating(refuse_topics=refused_topics) as peer:
        cluster = Cluster(
            ClientSettings(peer.url, authentication=oauth2(issuer, tmp_path), give_up_after_s=0)
        )
        assert "access-1" not in _refusal(cluster)
    assert len(Issuer.forms) == 1


def test_credentials_are_in_no_error_of_an_entry_that_is_refused() -> None:
    class Refusing(Peer):
        def _answer(self, connection: Any, consumers: Any, event: Any) -> None:
            if not isinstance(event, pb.CommandSend):
                super()._answer(connection, consumers, event)
                return
            number: dict[str, Any] = {
                "producer_id": event.producer_id,
                "sequence_id": event.sequence_id,
            }
            refusal = f"{self.credentials[0][1].decode()} may not produce"
            connection.send(
                _encode("SEND_ERROR", error=pb.NotAllowedError, message=refusal, **number)
            )

    with Refusing() as peer:
        cluster = Cluster(
            ClientSettings(peer.url, authentication=Authentication("basic", "joe:SECRET"))
        )
        producer = EntryProducer(cluster, TOPIC)
        with pytest.raises(BrokerError, match="may not produce") as caught:
            producer.send_and_wait([single(b"v")])
        cluster.close()
    assert "SECRET" not in str(caught.value)


@pytest.mark.parametrize("password", ["SECRET", "SECR'ET", "SECRET" * 100])
def test_credentials_are_in_no_error_of_an_address_that_is_refused(password: str) -> None:
    with Peer(lookup={"broker_service_url": f"pulsar://joe:{password}@broker:1"}) as peer:
        cluster = Cluster(
            ClientSettings(peer.url, authentication=Authentication("basic", f"joe:{password}"))
        )
        with pytest.raises(ProtocolError, match=r"named the address 'pulsar://\.\.\.@broker:1'"):
            cluster.session_for(TOPIC)
        cluster.close()


@pytest.mark.parametrize("expiry", ["-1e20", "1" * 400, '{"a":' * 5000, "1e999"])
def test_a_token_with_an_odd_expiry_is_refused_in_a_sentence(expiry: str) -> None:
    claims = base64.urlsafe_b64encode(f'{{"exp":{expiry}}}'.encode()).decode()
    assert "check the token" in refusal_hint(Authentication("token", f"token:a.{claims}.b"), 0.0)
