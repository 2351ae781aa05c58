"""Places: one URI in three dialects, and secrets that are read when they are needed."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar

import pytest
from deltalake import DeltaTable
from pyarrow import fs

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.stored.places import Place, parse_place
from ledgerlake.stored.secrets import said_in_short
from ledgerlake.stored.stores import AZURE as AZURE_STORE
from ledgerlake.stored.stores import GOOGLE, S3, StorageSettings, check_settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


AZURE = "lake@shop.dfs.core.windows.net"
WAITS = {"retry_timeout": "90s", "max_retries": "1000", "backoff_config.max_backoff": "5s"}


@pytest.mark.parametrize(
    ("text", "uri", "root", "hadoop_uri"),
    [
        ("lake/orders", "/srv/lake/orders", "/srv/lake/orders", "/srv/lake/orders"),
        ("/lake/orders", "/lake/orders", "/lake/orders", "/lake/orders"),
        ("lake:orders/", "/srv/lake:orders", "/srv/lake:orders", "/srv/lake:orders"),
        ("file:/lake/a%20b", "/lake/a b", "/lake/a b", "/lake/a b"),
        ("file:///lake/orders", "/lake/orders", "/lake/orders", "/lake/orders"),
        ("s3://lake/orders", "s3://lake/orders", "lake/orders", "s3a://lake/orders"),
        ("s3a://lake/orders/", "s3://lake/orders", "lake/orders", "s3a://lake/orders"),
        ("S3A://lake.eu-1/a/b", "s3://lake.eu-1/a/b", "lake.eu-1/a/b", "s3a://lake.eu-1/a/b"),
        ("gs://lake_1/orders/", "gs://lake_1/orders", "lake_1/orders", "gs://lake_1/orders"),
        (f"abfss://{AZURE}/a/b", f"abfss://{AZURE}/a/b", "lake/a/b", f"abfss://{AZURE}/a/b"),
    ],
)
def test_a_place_has_a_name_in_each_library(
    text: str, uri: str, root: str, hadoop_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/srv")
    place = parse_place(text, "path")
    assert (place.uri, place.root, place.hadoop_uri) == (uri, root, hadoop_uri)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dbfs:/lake/orders", "path cannot be 'dbfs:/lake/orders': dbfs: is not supported"),
        ("ftp://host/orders", "path cannot be 'ftp://host/orders': ftp: is not supported"),
        ("s3://", "write s3://BUCKET/PATH"),
        ("s3:///orders", "write s3://BUCKET/PATH"),
        ("s3://Lake/orders", "write s3://BUCKET/PATH"),
        ("s3://lake", "path cannot be a whole bucket; write s3://lake/PATH"),
        ("s3://lake/", "path cannot be a whole bucket; write s3://lake/PATH"),
        ("file://host/orders", "write file:///PATH"),
        ("gs://lake", "path cannot be a whole bucket; write gs://lake/PATH"),
        ("gs:///orders", "write gs://BUCKET/PATH"),
        ("abfss://lake/orders", "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"),
        ("abfss://lake@shop/orders", "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH"),
        (
            "abfss://lake@shop.dfs.core.chinacloudapi.cn/a",
            "write abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
        ),
        *(
            (f"s3://lake/{path}", "below the bucket write")
            for path in ("my%20orders", "a b", "a?b", "a#b", "a/../b", "a//b")
        ),
        ("hdfs://name/orders", "path cannot be 'hdfs://name/orders': hdfs: is not supported"),
    ],
)
def test_what_is_no_place_is_refused_in_one_sentence(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_place(text, "path")
    assert expected in raised.value.message


@pytest.mark.parametrize(
    "text", ["s3://AKIA:hush@lake/orders", "s3://lake/orders?key=hush", "wasb://a:hush@host/b"]
)
def test_what_may_be_a_secret_is_not_in_the_error(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_place(text, "path")
    assert "hush" not in raised.value.message


def test_a_name_is_put_below_a_place() -> None:
    assert Place("s3://lake/orders") / "_delta_log" == Place("s3://lake/orders/_delta_log")
    assert str(Place("lake/") / "a" / "b") == "lake/a/b"


def test_a_local_place_needs_no_options() -> None:
    place = Place("lake/orders")
    assert isinstance(place.filesystem(), fs.LocalFileSystem)
    assert place.delta_options() is None


def test_settings_stand_above_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://env:1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert Place("s3://lake/a").delta_options() == {
        "aws_endpoint_url": "http://env:1",
        "aws_region": "eu-west-1",
        "aws_force_credential_load": "true",
        "allow_http": "true",
        "aws_conditional_put": "etag",
        **WAITS,
    }
    settings = StorageSettings("https://own:2", "eu-west-2", "env:KEY", "secret", "")
    monkeypatch.setenv("KEY", "id")
    options = Place("s3://lake/a", settings).delta_options()
    assert options is not None
    assert options["aws_endpoint_url"] == "https://own:2"
    assert options["aws_region"] == "eu-west-2"
    assert (options["aws_access_key_id"], options["aws_secret_access_key"]) == ("id", "secret")
    assert "allow_http" not in options


def test_a_store_that_refuses_connections_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = f"http://127.0.0.1:{listening.getsockname()[1]}"
        place = Place("s3://lake/a", StorageSettings(endpoint))
        place.check_answers()
    with pytest.raises(
        SetupError,
        match=rf"^{endpoint} cannot be reached; check the network, and \[storage\] endpoint",
    ):
        place.check_answers()
    for elsewhere in (Place("s3://lake/a"), Place("gs://lake/a"), Place("lake/a")):
        elsewhere.check_answers()
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    place.check_answers()


class _Empty(BaseHTTPRequestHandler):
    """A store that has nothing."""

    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def test_a_store_that_refuses_connections_for_ten_seconds_is_waited_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = Place("s3://lake/a", StorageSettings(f"http://127.0.0.1:{port}", "eu-1", "k", "s"))

    def open_later() -> None:
        time.sleep(10)
        HTTPServer(("127.0.0.1", port), _Empty).serve_forever()

    threading.Thread(target=open_later, daemon=True).start()
    with pytest.raises(OSError, match="404"):
        DeltaTable("s3://lake/a", storage_options=place.delta_options())


def test_an_azure_key_is_the_places_own_or_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")
    assert Place(f"abfss://{AZURE}/a").delta_options() == {
        "azure_storage_account_name": "shop",
        "azure_storage_account_key": "a2V5",
        **WAITS,
    }
    place = Place(
        f"abfss://{AZURE}/a", StorageSettings("http://127.0.0.1:1/", account_key="env:OWN")
    )
    monkeypatch.setenv("OWN", "b3du")
    assert place.delta_options() == {
        "azure_storage_account_name": "shop",
        "azure_storage_account_key": "b3du",
        "azure_endpoint": "http://127.0.0.1:1/shop",
        "allow_http": "true",
        **WAITS,
    }
    assert isinstance(place.filesystem(), fs.AzureFileSystem)


def test_spark_reaches_a_bucket_by_settings_of_that_bucket_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    own = StorageSettings("http://minio:9000", "eu-1", "env:LAKE_KEY", "s")
    monkeypatch.setenv("LAKE_KEY", "k")
    assert Place("s3://lake/c", own).hadoop_settings() == {
        "fs.s3a.bucket.lake.endpoint": "http://minio:9000",
        "fs.s3a.bucket.lake.endpoint.region": "eu-1",
        "fs.s3a.bucket.lake.path.style.access": "true",
        "fs.s3a.bucket.lake.access.key": "k",
        "fs.s3a.bucket.lake.secret.key": "s",
        "fs.s3a.bucket.lake.aws.credentials.provider": "org.apache.hadoop.fs.s3a.SimpleAWSCredentialsProvider",
    }
    assert Place("s3://lake/c").hadoop_settings() == {}
    assert Place("lake/c").hadoop_settings() == {}


def test_google_has_its_own_search_for_credentials() -> None:
    assert Place("gs://lake/a").delta_options() == WAITS
    emulator = Place("gs://lake/a", StorageSettings("http://127.0.0.1:1"))
    assert (
        json.loads((emulator.delta_options() or {})["google_service_account_key"])["disable_oauth"]
        is True
    )
    assert isinstance(emulator.filesystem(), fs.GcsFileSystem)


def test_a_session_token_of_the_environment_is_not_sent_with_other_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "hush")
    settings = StorageSettings("http://h:1", "eu-1", "id", "secret")
    with pytest.raises(SetupError, match="AWS_SESSION_TOKEN does not belong to the keys of"):
        Place("s3://lake/a", settings).delta_options()
    assert Place("s3://lake/a", replace(settings, session_token="own")).delta_options()


def test_the_region_of_a_profile_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "config").write_text("[profile lake]\nregion = eu-north-1\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    # The AWS library of a process reads profiles once.
    program = (
        "from ledgerlake.stored.places import Place; "
        "print(Place('s3://lake/a').delta_options()['aws_region'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "eu-north-1"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (StorageSettings("minio:9000"), "endpoint_url is no address of a store"),
        (
            StorageSettings(access_key_id="id"),
            "needs access_key_id and secret_access_key, or neither",
        ),
        (StorageSettings(account_key="key"), "account_key is for abfss://, and no path"),
    ],
)
def test_a_setting_that_no_store_takes_is_refused(settings: StorageSettings, expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        check_settings(settings, {S3})
    check_settings(StorageSettings("http://h:1", "r", "id", "secret", "token"), {S3})
    check_settings(StorageSettings("http://h:1", account_key="key"), {AZURE_STORE})


def test_one_address_is_not_that_of_two_stores() -> None:
    with pytest.raises(UsageError, match="cannot be the address of two stores"):
        check_settings(StorageSettings("http://h:1"), {S3, GOOGLE})
    check_settings(StorageSettings(), {S3, GOOGLE})


def test_a_secret_that_is_renewed_in_its_file_is_seen(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    place = Place("s3://lake/a", StorageSettings("http://h:1", "", "id", f"file:{file}"))
    for secret in ("first", "second"):
        file.write_text(secret + "\n")
        assert (place.delta_options() or {})["aws_secret_access_key"] == secret
    file.unlink()
    with pytest.raises(SetupError, match="cannot be read"):
        place.filesystem()


def test_no_repr_shows_a_secret() -> None:
    place = Place("s3://lake/a", StorageSettings("http://h:1", "", "hushhush", "hush", "hushed"))
    assert "hush" not in repr(place) + str(place)
    assert pickle.loads(pickle.dumps(place)) == place


class _Echo(BaseHTTPRequestHandler):
    """A store that refuses each request, and repeats the session token in all that it sends."""

    renewed: ClassVar[Path]

    def _refuse(self) -> None:
        token = self.headers["x-amz-security-token"]
        self.renewed.write_text("a-new-one")
        body = f"{token}: <Error><Code>{token}</Code><Message>{token}</Message></Error>".encode()
        self.send_response(400, token)
        self.send_header("x-amz-request-id", token)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_HEAD = do_POST = _refuse

    def log_message(self, *_: object) -> None:
        """Print nothing."""


ASKED: dict[str, Callable[[Place], object]] = {
    "pyarrow": lambda place: place.filesystem().get_file_info(fs.FileSelector(place.root)),
    "pyarrow, writing": Place.check_writable,
    "delta-rs": lambda place: DeltaTable(place.uri, storage_options=place.delta_options()),
    "obstore": lambda place: (place / "file").create_file(b""),
}


@pytest.mark.parametrize("is_renewed", [False, True])
@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_no_error_shows_a_secret_that_a_store_repeats(
    ask: Callable[[Place], object],
    is_renewed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "token").write_text("sword+fish")
    monkeypatch.setattr(
        _Echo, "renewed", tmp_path / ("token" if is_renewed else "other"), raising=False
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), _Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = StorageSettings(
            f"http://127.0.0.1:{server.server_port}",
            "eu-1",
            "the-key",
            "the-secret",
            f"file:{tmp_path}/token",
        )
        place = Place("s3://lake/a", settings)
        with pytest.raises(Exception, match="sword") as caught:
            ask(place)
        server.shutdown()
    assert "sword" not in said_in_short(caught.value) + place.reason(caught.value)
    assert "..." in place.reason(caught.value)


def test_no_error_shows_a_password_in_the_address_of_a_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match="endpoint_url holds no user and no password"):
        check_settings(StorageSettings("http://user:hush@127.0.0.1:1"), {S3})
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hush@127.0.0.1:1")
    place = Place("s3://lake/a")
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:1 cannot be reached") as caught:
        place.check_answers()
    assert "hush" not in str(caught.value) + place.reason(OSError("NoSuchBucket"))


@pytest.mark.parametrize(
    "variable", ["AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCOUNT_KEY", "HTTPS_PROXY", "http_proxy"]
)
def test_no_error_shows_a_secret_of_the_environment(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_proxy = variable.lower().endswith("proxy")
    monkeypatch.setenv(variable, "http://user:swordfish@host:1" if is_proxy else "swordfish")
    assert "swordfish" not in Place("s3://lake/a").reason(OSError("one swordfish two"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "Generic GCS error\n  \x1b[31m\u21b3\x1b[0m Error performing GET\n   "
            "\x1b[31m\u21b3\x1b[0m timed out\n",
            "Generic GCS error: timed out",
        ),
        (
            "Kernel error\n \u21b3 Error performing GET - HTTP error\n \u21b3 error sending "
            "request\n \u21b3 refused",
            "Google Cloud Storage cannot be reached",
        ),
        (
            "Generic S3 error\n \u21b3 Error performing GET\n \u21b3 500 Oops\n \u21b3 "
            "<?xml?>\n<Error>\n</Error>\n\n",
            "Generic S3 error: 500 Oops",
        ),
        (
            "Generic S3 error\n \u21b3 404 Not Found\n \u21b3 <html>\n<head>\n</head></html>\n\n",
            "Google Cloud Storage answers, but not as an object store; check [storage] "
            "endpoint_url",
        ),
        ("one line\nand a trace", "one line"),
        ("Kernel error -> one line", "one line"),
        (
            "Error performing token request: 403 Forbidden",
            "there are no credentials for the bucket lake; set the variable",
        ),
        (
            "google::cloud::Status(PERMISSION_DENIED: no)",
            "Google Cloud Storage refuses the credentials for the bucket lake; check the variable "
            "GOOGLE",
        ),
        ("", "OSError"),
    ],
)
def test_the_reason_is_what_an_error_was_caused_by(text: str, reason: str) -> None:
    assert Place("gs://lake/a").reason(OSError(text)).startswith(reason)
