"""Counts of rejects, and what the command prints of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import ledgerlake as ledgerlake_package
from ledgerlake.decode import schema
from ledgerlake.inspect.reject_counts import count_rejects
from ledgerlake.options.config import Config, parse_config
from ledgerlake.reasons import REASONS
from tests.live.pipelines import config_file, ledgerlake, sentence


def data_of(folder: Path) -> dict[str, Any]:
    return {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages")},
    }


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse_config(data_of(tmp_path))


def reject(
    number: int, reason: str, topic: str = "t", time_ms: int | None = 0, detail: str = ""
) -> dict[str, Any]:
    return {
        "topic": topic,
        "partition": -1,
        "message_id": f"1:{number}",
        "ledger_id": 1,
        "entry_id": number,
        "broker_timestamp": None if time_ms is None else time_ms * 1000,
        "reason": reason,
        "detail": detail,
        "entry": b"x",
    }


def write(config: Config, *rejects: dict[str, Any]) -> None:
    write_deltalake(
        config.delta.rejects_path, pa.Table.from_pylist(list(rejects), schema=schema.REJECTS)
    )


def test_rejects_are_counted_by_reason_and_topic_with_the_last_of_each(config: Config) -> None:
    write(
        config,
        reject(1, "encrypted", time_ms=3000, detail="no key"),
        reject(2, "encrypted", time_ms=5000, detail="no such key"),
        reject(3, "encrypted", topic="u", time_ms=4000),
        reject(4, "bad_checksum", time_ms=None),
    )
    largest, *others = count_rejects(config)
    assert (largest.reason, largest.topic, largest.rejects) == ("encrypted", "t", 2)
    assert (largest.message_id, largest.detail) == ("1:2", "no such key")
    assert largest.sentence() == (
        "2 encrypted of t, the last one stored by the broker at 1970-01-01T00:00:05.000Z "
        "(1:2: no such key)"
    )
    assert [(count.reason, count.topic, count.last is None) for count in others] == [
        ("bad_checksum", "t", True),
        ("encrypted", "u", False),
    ]


def test_the_command_prints_a_line_for_each(tmp_path: Path, config: Config) -> None:
    write(config, reject(4, "bad_checksum", time_ms=None))
    result = ledgerlake("rejects", config_file(tmp_path, data_of(tmp_path)))
    assert result.stdout == "1 bad_checksum of t (1:4)\n"
    result = ledgerlake("rejects", config_file(tmp_path, data_of(tmp_path)), "--json")
    assert json.loads(result.stdout)["rejects"] == 1


def test_times_are_iso_in_utc_in_json_too(tmp_path: Path, config: Config) -> None:
    write(config, reject(4, "bad_checksum", time_ms=5000))
    result = ledgerlake("rejects", config_file(tmp_path, data_of(tmp_path)), "--json")
    assert json.loads(result.stdout)["last"] == "1970-01-01T00:00:05.000Z"


def test_one_reason_is_asked_for(tmp_path: Path, config: Config) -> None:
    write(config, reject(1, "encrypted"), reject(2, "too_large"), reject(3, "no_key"))
    file = config_file(tmp_path, data_of(tmp_path))
    result = ledgerlake("rejects", file, "--reason", "encrypted", "--reason", "no_key", "--json")
    assert sorted(json.loads(line)["reason"] for line in result.stdout.splitlines()) == [
        "encrypted",
        "no_key",
    ]
    assert (
        ledgerlake("rejects", file, "--reason", "chunk_gap").stdout
        == "there are no rejects of chunk_gap\n"
    )


@pytest.mark.parametrize("replay", [[], ["--replay"]])
def test_a_misspelt_reason(tmp_path: Path, replay: list[str]) -> None:
    result = ledgerlake(
        "rejects", config_file(tmp_path, data_of(tmp_path)), "--reason", "encrpyted", *replay
    )
    assert (
        sentence(result, 2)
        == "ledgerlake: there is no reason 'encrpyted'; did you mean 'encrypted'?"
    )


def test_every_reason_in_the_code_is_known() -> None:
    roots = [Path(str(root)) for root in ledgerlake_package.__path__]
    code = "".join(file.read_text() for root in roots for file in root.rglob("*.py"))
    assert set(re.findall(r'reason="([a-z_]+)"', code)) <= set(REASONS)


def test_a_table_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    result = ledgerlake("rejects", config_file(tmp_path, data_of(tmp_path)))
    assert (
        sentence(result, 2)
        == f"ledgerlake: there is no table at {tmp_path}/messages_rejects; if it was removed, "
        "restore it; else run the pipeline first"
    )
