"""``check`` tells what a start would refuse, and what would go wrong later; here without a
broker.
"""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from deltalake import write_deltalake

from ledgerlake.inspect.checks import Finding, check_config, clock, disk
from ledgerlake.inspect.recent_entries import LastEntries
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import RawEntry
from ledgerlake.wire.message_id import Position
from tests.live.pipelines import config_file, ledgerlake

if TYPE_CHECKING:
    from pathlib import Path


def data_of(folder: Path, **sections: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "source": {"service_url": "pulsar://127.0.0.1:1", "topics": ["orders"]},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages")},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return data


def found(folder: Path, **sections: Any) -> dict[str, Finding]:
    return {
        finding.check: finding
        for finding in check_config(parse_config(data_of(folder, **sections)))
    }


def problem(finding: Finding) -> str:
    assert finding.state == "problem"
    return finding.text


def test_what_needs_the_broker_is_skipped_without_one_and_all_else_is_checked(
    tmp_path: Path,
) -> None:
    findings = found(tmp_path)
    assert "start it or correct the service url" in problem(findings["broker"])
    skipped = {name for name, finding in findings.items() if finding.state == "skipped"}
    assert skipped == {
        "topics",
        "reading",
        "broker metadata",
        "clock",
        "decryption",
        "checkpoint",
        "schema",
    }
    assert findings["tables"] == Finding(
        "tables", "ok", f"to be made: {tmp_path}/messages, {tmp_path}/messages_rejects"
    )


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    found(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_table_of_another_schema(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "messages"), pa.table({"id": [1]}))
    text = problem(found(tmp_path)["tables"])
    assert (
        "has another schema (it lacks topic; it lacks partition; it lacks message_id; and 21 more; "
        "it has id)" in text
    )
    assert text.endswith("use another path")


def test_a_table_of_records_is_compared_and_not_changed(tmp_path: Path) -> None:
    write_deltalake(str(tmp_path / "messages"), pa.table({"id": [1]}))
    before = sorted(tmp_path.rglob("*"))
    assert "no table of records" in problem(found(tmp_path, delta={"shape": "record"})["tables"])
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("key", ["path", "rejects_path"])
def test_a_table_folder_that_cannot_be_written(tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text("")
    text = problem(found(tmp_path, delta={key: f"{tmp_path}/file/table"})["tables"])
    assert f"{tmp_path}/file/table" in text
    assert "choose another path" in text


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    text = problem(
        found(tmp_path, stream={"checkpoint": f"{tmp_path}/file/checkpoint"})["checkpoint"]
    )
    assert text.startswith(f"the checkpoint folder {tmp_path}/file/checkpoint cannot be")
    assert "choose another path" in text


def test_a_checkpoint_of_another_stream(tmp_path: Path) -> None:
    Checkpoint(Place(str(tmp_path / "checkpoint"))).save_stream("visits", 1)
    assert "belongs to the stream visits" in problem(found(tmp_path)["checkpoint"])


def test_a_metrics_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "set another [metrics] port" in problem(
            found(tmp_path, metrics={"port": port})["metrics"]
        )
    assert found(tmp_path, metrics={"port": port})["metrics"].state == "ok"


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert "apt-get install" in problem(found(tmp_path)["java"])


def test_a_bundle_that_is_not_there(tmp_path: Path) -> None:
    spark = {"master": "spark://host:7077", "bundle": f"{tmp_path}/none.tar.gz"}
    assert "make it with: ledgerlake bundle" in problem(found(tmp_path, spark=spark)["spark"])


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    text = problem(found(tmp_path, source={"crypto_key_reader": "no_such_module:key"})["functions"])
    assert "no_such_module:key cannot be imported" in text


def test_keys_that_cannot_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "keys"

    def said() -> str:
        return problem(found(tmp_path, source={"crypto_key_folder": str(folder)})["decryption"])

    def write(key: Any) -> None:
        formats = (
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        (folder / "shop.pem").write_bytes(key.private_bytes(*formats))

    assert f"{folder} cannot be read (No such file or directory)" in said()
    folder.mkdir()
    assert "has no file NAME.pem" in said()
    (folder / "shop.pem").write_text("no key")
    assert "shop.pem is no private key" in said()
    write(ec.generate_private_key(ec.SECP256R1()))
    assert "shop.pem is no RSA key" in said()
    write(rsa.generate_private_key(public_exponent=65537, key_size=2048))
    assert (
        found(tmp_path, source={"crypto_key_folder": str(folder)})["decryption"].state == "skipped"
    )


def stored_at(*times_ms: int) -> list[LastEntries]:
    def entry(time_ms: int) -> RawEntry:
        return RawEntry(
            pb.BrokerEntryMetadata(broker_timestamp=time_ms), pb.MessageMetadata(), memoryview(b"")
        )

    return [LastEntries("t", Position(1, 1), [entry(time_ms)]) for time_ms in times_ms]


def test_a_clock_that_is_behind_the_brokers() -> None:
    ahead = clock(stored_at(1000, 60_000), now_ms=30_000)
    assert isinstance(ahead, Finding)
    assert ahead.state == "warning"
    assert "stored an entry at 1970-01-01T00:01:00+00:00, 30 s from now" in ahead.text
    assert isinstance(clock(stored_at(30_900), now_ms=30_000), str)
    nothing_known = clock([LastEntries("t", Position(1, 1), [])], now_ms=30_000)
    assert isinstance(nothing_known, Finding)
    assert nothing_known.state == "skipped"


@pytest.mark.parametrize(
    ("free_bytes", "state"), [(10**6, "problem"), (5 * 10**8, "warning"), (10**12, "ok")]
)
def test_a_disk_that_is_full(free_bytes: int, state: str) -> None:
    finding = disk("/lake", "tables", free_bytes)
    assert (finding.state, "make room" in finding.text) == (state, state == "problem")


def test_the_command_prints_a_line_for_each_and_ends_with_1_if_there_is_a_problem(
    tmp_path: Path,
) -> None:
    result = ledgerlake("check", config_file(tmp_path, data_of(tmp_path)))
    assert result.returncode == 1
    assert any(line.startswith("problem  broker ") for line in result.stdout.splitlines())
    result = ledgerlake("check", config_file(tmp_path, data_of(tmp_path)), "--json")
    assert {json.loads(line)["state"] for line in result.stdout.splitlines()} >= {
        "ok",
        "problem",
        "skipped",
    }


@pytest.mark.parametrize(
    ("section", "key", "value", "said"),
    [
        ("source", "topicz", ["orders"], "[source] has no key 'topicz'; did you mean 'topics'?"),
        ("source", "topics", "orders", "[source] topics must be a list of texts"),
        ("metrics", "port", "9464", "[metrics] port must be a whole number above 0"),
        ("stream", "trigger", "1 sec", "'1 sec' is not a duration; write for example '30 seconds'"),
    ],
)
def test_a_mistake_in_the_file_is_the_only_problem(
    tmp_path: Path, section: str, key: str, value: Any, said: str
) -> None:
    result = ledgerlake(
        "check", config_file(tmp_path, data_of(tmp_path, **{section: {key: value}}))
    )
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("problem")]
    assert said in line
    assert result.returncode == 1
