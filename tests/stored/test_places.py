"""Places: one URI in three dialects, and secrets that are read when they are needed."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

import pytest
from pyarrow import fs

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.stored.places import Place, StorageSettings, parse_place

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "uri", "root", "hadoop_uri"),
    [
        ("lake/orders", "lake/orders", "lake/orders", "lake/orders"),
        ("/lake/orders", "/lake/orders", "/lake/orders", "/lake/orders"),
        ("lake:orders", "lake:orders", "lake:orders", "lake:orders"),
        ("file:/lake/a%20b", "/lake/a b", "/lake/a b", "/lake/a b"),
        ("file:///lake/orders", "/lake/orders", "/lake/orders", "/lake/orders"),
        ("s3://lake/orders", "s3://lake/orders", "lake/orders", "s3a://lake/orders"),
        ("s3a://lake/orders/", "s3://lake/orders", "lake/orders", "s3a://lake/orders"),
        ("S3A://lake.eu-1/a/b", "s3://lake.eu-1/a/b", "lake.eu-1/a/b", "s3a://lake.eu-1/a/b"),
    ],
)
def test_a_place_has_a_name_in_each_library(text: str, uri: str, root: str, hadoop_uri: str) -> None:
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
    ],
)
def test_what_is_no_place_is_refused_in_one_sentence(text: str, expected: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_place(text, "path")
    assert expected in raised.value.message


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
        "allow_http": "true",
        "aws_conditional_put": "etag",
        "retry_timeout": "90s",
    }
    settings = StorageSettings("https://own:2", "eu-west-2", "env:KEY", "secret", "")
    monkeypatch.setenv("KEY", "id")
    options = Place("s3://lake/a", settings).delta_options()
    assert options is not None
    assert options["aws_endpoint_url"] == "https://own:2"
    assert options["aws_region"] == "eu-west-2"
    assert (options["aws_access_key_id"], options["aws_secret_access_key"]) == ("id", "secret")
    assert "allow_http" not in options


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
