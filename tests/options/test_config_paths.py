"""The relative paths of a configuration begin in the folder of its file."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.config import (
    SECTION_CLASSES,
    folder_of,
    load_config,
    load_config_to_forget,
    parse_config,
    read_config,
)
from ledgerlake.options.declared import declared
from ledgerlake.stored.secrets import resolve_secret

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.options.config import Config

_FILE = """
source = { service_url = "pulsar://h", topics = ["orders"] }
stream = { name = "orders" }
delta = { path = "../lake/orders" }
auth = { method = "token", token = "file:token" }
"""

_OPTIONS = {
    f"{option.section}.{option.key}": option
    for kind in SECTION_CLASSES
    for _, option in declared(kind)
    if option.section
}
_PATHS = sorted(name for name, option in _OPTIONS.items() if option.kind.resolve is not None)

_S3 = {"delta": {"path": "s3://lake/orders"}}

# What else a configuration needs that has an option.
_BESIDE: dict[str, dict[str, Any]] = {
    "auth.token": {"auth": {"method": "token"}},
    "auth.password": {"auth": {"method": "basic", "user": "u"}},
    "auth.private_key": {"auth": {"method": "oauth2", "issuer_url": "https://i"}},
    "tls.cert_file": {"tls": {"key_file": "/k.pem"}},
    "tls.key_file": {"tls": {"cert_file": "/c.pem"}},
    "delta.rejects_path": {"delta": {"path": "/lake/orders"}},
    "storage.access_key_id": _S3 | {"storage": {"secret_access_key": "s"}},
    "storage.secret_access_key": _S3 | {"storage": {"access_key_id": "k"}},
    "storage.session_token": _S3 | {"storage": {"access_key_id": "k", "secret_access_key": "s"}},
    "storage.account_key": {"delta": {"path": "abfss://lake@shop.dfs.core.windows.net/orders"}},
    "metrics.token": {"metrics": {"port": 9464}},
}

# What an option of another kind says of a path, a file or a secret.
_WORDS = re.compile(
    r"paths?\b|file\b|folder|archive|uri\b|token\b|secret\b|password\b", re.IGNORECASE
)
_WITHOUT_PATH = {
    "source.crypto_key_reader": "a function",
    "auth.method": "a word",
    "delta.table": "a name in the catalog",
    "metrics.address": "an address",
    "spark.settings": "Spark's own settings",
}


def _config(folder: str, name: str, value: Any) -> Config:
    section, _, key = name.partition(".")
    data: dict[str, Any] = {
        "source": {"service_url": "pulsar+ssl://h", "topics": ["orders"]},
        "stream": {"name": "orders", "checkpoint": "/checkpoint"},
        "delta": {"path": "/lake/orders"},
    }
    if section == "tables":
        return parse_config(data | {"tables": [{key: value}]}, folder)
    for beside, keys in _BESIDE.get(name, {}).items():
        data[beside] = data.get(beside, {}) | keys
    data[section] = data.get(section, {}) | {key: value}
    return parse_config(data, folder)


@pytest.mark.parametrize("name", _PATHS)
def test_each_option_that_is_a_path_begins_in_the_folder_of_the_file(name: str) -> None:
    takes = _OPTIONS[name].kind.takes
    prefix = "file:" if "file:PATH" in takes else ""

    def value(path: str) -> Any:
        if name == "iceberg.settings":
            return {"type": "sql", "uri": f"sqlite:///{path}", "warehouse": path}
        return f"{prefix}{path}"

    relative = _config("/etc/lake", name, value("below/x"))
    assert relative == _config("/", name, value("/etc/lake/below/x"))
    assert relative != _config("/etc", name, value("below/x"))
    assert _config("/etc", name, value("/x")) == _config("/", name, value("/x"))


@pytest.mark.parametrize("settings", [{"type": "SQL"}, {}, {"type": "in-memory"}])
def test_a_catalog_in_a_database_has_its_files_by_paths(settings: dict[str, str]) -> None:
    settings |= {"uri": "sqlite:///c.db", "warehouse": "lake"}
    assert {*_config("/etc", "iceberg.settings", settings).iceberg.settings} >= {
        ("uri", "sqlite:////etc/c.db"),
        ("warehouse", "/etc/lake"),
    }


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("file:lake/orders", "file:///PATH"),
        ("s3:lake/orders", "s3://BUCKET/PATH"),
        ("S3A:lake/orders", "s3://BUCKET/PATH"),
        ("gs:lake", "gs://BUCKET/PATH"),
    ],
)
def test_a_scheme_without_a_slash_is_refused(text: str, shape: str) -> None:
    with pytest.raises(UsageError) as refused:
        _config("/etc", "delta.path", text)
    assert refused.value.message == (
        f"[delta] path cannot be '{text}'; write a path alone, or {shape}"
    )


def test_absolute_paths_need_no_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "removed").mkdir()
    monkeypatch.chdir(tmp_path / "removed")
    (tmp_path / "removed").rmdir()
    for folder in (".", "/etc"):
        config = _config(folder, "delta.path", "/lake/orders")
        assert config.checkpoint_place.root == "/checkpoint"
        assert config.messages_place.root == "/lake/orders"


@pytest.mark.parametrize("name", ["delta.path", "tables.path"])
def test_placeholders_are_in_no_folder_of_a_configuration(name: str) -> None:
    with pytest.raises(
        UsageError,
        match=r"'lake/orders' is /srv/\{topic\}/x/lake/orders, and a path with \{topic\}",
    ):
        _config("/srv/{topic}/x", name, "lake/orders")
    path = "/lake/{topic}" if name == "tables.path" else "/lake/orders"
    for absolute in (path, f"../..{path}"):
        assert _config("/srv/{topic}", name, absolute) == _config("/srv", name, path)


def test_a_configuration_from_a_pipe_begins_in_no_folder_with_a_placeholder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "{topic}").mkdir()
    monkeypatch.chdir(tmp_path / "{topic}")
    with pytest.raises(UsageError, match=r"a path with \{topic\} is that of the tables of single"):
        _config(folder_of("/dev/stdin"), "tables.path", "lake/orders")


@pytest.mark.parametrize("name", sorted(_OPTIONS.keys() - {*_PATHS}))
def test_an_option_that_tells_of_a_path_is_declared_as_one(name: str) -> None:
    option = _OPTIONS[name]
    assert (_WORDS.search(f"{option.key} {option.meaning}") is None) != (name in _WITHOUT_PATH)


def test_a_file_is_the_same_stream_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("project/conf", "away"):
        (tmp_path / name).mkdir(parents=True)
    file = tmp_path / "project" / "conf" / "orders.toml"
    file.write_text(_FILE)
    monkeypatch.chdir(tmp_path / "away")
    config = load_config(file)
    assert config == load_config("../project/conf/orders.toml")
    assert config.checkpoint_place.root == f"{tmp_path}/project/conf/checkpoints/orders"
    assert config.messages_place.root == f"{tmp_path}/project/lake/orders"
    assert config.rejects_place.root == f"{tmp_path}/project/lake/orders_rejects"
    (tmp_path / "mounted.toml").symlink_to(file)
    assert load_config(tmp_path / "mounted.toml").checkpoint_place.root == (
        f"{tmp_path}/checkpoints/orders"
    )


@pytest.mark.parametrize(
    "folder", ["/devops", "/dev-data/a", "/dev/shm/job", "/process", "/proc/a"]
)
def test_a_folder_may_have_any_name(folder: str) -> None:
    assert folder_of(f"{folder}/orders.toml") == folder


@pytest.mark.parametrize("by", ["the file", "a link", "a link as of a ConfigMap", "a pipe"])
@pytest.mark.parametrize("checkpoint", ["checkpoints/orders", "/checkpoints/orders"])
def test_no_stream_is_forgotten_whose_checkpoint_may_be_in_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str, checkpoint: str
) -> None:
    content = _FILE.replace('"orders" }', f'"orders", checkpoint = "{checkpoint}" }}').encode()
    folder, path = tmp_path / "..2026_05_01", tmp_path / "..2026_05_01" / "orders.toml"
    folder.mkdir()
    path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    if by == "a link":
        (tmp_path / "orders.toml").symlink_to(path)
    (tmp_path / "..data").symlink_to(folder.name)
    if by == "a link as of a ConfigMap":
        (tmp_path / "orders.toml").symlink_to("..data/orders.toml")
    name = {"the file": str(path), "a pipe": f"/dev/fd/{reading}"}.get(by, "orders.toml")
    try:
        if by == "the file" or checkpoint.startswith("/"):
            assert load_config_to_forget(name).stream.name == "orders"
            return
        with pytest.raises(UsageError, match=rf"is {tmp_path}/checkpoints/orders now.* absolute"):
            load_config_to_forget(name)
    finally:
        os.close(reading)


@pytest.mark.parametrize("through", ["a pipe", "parse_config"])
def test_paths_of_a_configuration_without_a_file_begin_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if through == "a pipe":
        reading, writing = os.pipe()
        os.write(writing, _FILE.encode())
        os.close(writing)
        config = load_config(f"/dev/fd/{reading}")
        os.close(reading)
    else:
        config = _config(".", "stream.checkpoint", "checkpoints/orders")
    monkeypatch.chdir("/")
    assert config.checkpoint_place.root == f"{tmp_path}/checkpoints/orders"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta.path", "s3://lake/orders"),
        ("delta.path", "file:///lake/orders"),
        ("delay.storage", "state"),
        ("auth.token", "env:TOKEN"),
        ("auth.token", "a/b"),
        ("auth.private_key", '{"client_id": "c", "client_secret": "s"}'),
        ("auth.private_key", "data:application/json;base64,e30="),
        ("iceberg.settings", {"type": "rest", "uri": "https://h", "warehouse": "lake"}),
        ("iceberg.settings", {"type": "sql", "uri": "sqlite:///:memory:"}),
        ("iceberg.settings", {"type": "sql", "uri": "postgresql://h/c"}),
    ],
)
def test_what_is_no_relative_path_stays_as_it_is(name: str, value: Any) -> None:
    assert _config("/etc", name, value) == _config("/", name, value)


@pytest.mark.parametrize("prefix", ["file:", "file://"])
def test_a_secret_is_read_from_a_folder_whose_name_needs_escapes(
    tmp_path: Path, prefix: str
) -> None:
    folder = tmp_path / "a%41 b"
    (folder / "c d").mkdir(parents=True)
    (folder / "c d" / "token").write_text("hushed")
    config = _config(str(folder), "metrics.token", f"{prefix}c%20d/token")
    assert config.metrics is not None
    assert resolve_secret(config.metrics.token) == "hushed"


@pytest.mark.parametrize("prefix", ["file:", "file://", "file:///"])
def test_an_absolute_reference_to_a_secret_stays_as_it_is(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "token").write_text("hushed")
    config = _config("/etc", "metrics.token", f"{prefix}{tmp_path}/token")
    assert config.metrics is not None
    assert config.metrics.token == f"{prefix}{tmp_path}/token"
    assert resolve_secret(config.metrics.token) == "hushed"


def test_a_path_that_begins_with_a_variable_is_refused() -> None:
    content = _FILE.replace("../lake/orders", "$HOME/lake").encode()
    with pytest.raises(UsageError, match=r"\[delta\] path cannot be '\$HOME/lake'; variables are"):
        read_config(content, "orders.toml")
