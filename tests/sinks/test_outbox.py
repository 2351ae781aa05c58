"""The outbox: numbers that a micro-batch run again gives again, and nothing sent before its batch has committed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ledgerlake.errors import OffsetError
from ledgerlake.sinks.ordered import DataFile
from ledgerlake.sinks.outbox import Outbox
from ledgerlake.sinks.republish import java_hash

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, name: str, rows: int) -> DataFile:
    (folder / name).write_bytes(b"rows")
    return DataFile(name, 4, rows, "{}")


def numbers(outbox: Outbox) -> list[tuple[str, int]]:
    return [(one.name, one.first_sequence) for one in outbox.ready()]


def test_messages_are_numbered_one_after_another_by_topic_partition(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path))
    found = [written(tmp_path, name, rows) for name, rows in (("a.parquet", 3), ("b.parquet", 2), ("c.parquet", 7))]
    outbox.add(4, {"t-0": found[:2], "t-1": found[2:]})
    outbox.commit(4)
    outbox.add(6, {"t-0": [written(tmp_path, "d.parquet", 1)], "t-1": []})
    outbox.commit(6)
    assert numbers(outbox) == [("a.parquet", 0), ("b.parquet", 3), ("c.parquet", 0), ("d.parquet", 5)]


def test_a_batch_that_is_run_again_gives_the_same_numbers_also_when_it_was_sent_meanwhile(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path))
    outbox.add(1, {"t": [written(tmp_path, "a.parquet", 3)]})
    outbox.commit(1)
    outbox.add(2, {"t": [written(tmp_path, "b.parquet", 2)]})
    assert numbers(outbox) == [("a.parquet", 0)], "batch 2 is not in the table"
    outbox.sent(outbox.ready()[0])
    again = Outbox(str(tmp_path))
    assert again.name == outbox.name
    again.add(2, {"t": [written(tmp_path, "b2.parquet", 2)]})
    again.commit(2)
    assert numbers(again) == [("b2.parquet", 3)]
    assert not (tmp_path / "b.parquet").exists()
    again.sent(again.ready()[0])
    third = Outbox(str(tmp_path))
    third.add(2, {"t": [written(tmp_path, "b3.parquet", 2)]})
    third.commit(2)
    third.add(3, {"t": [written(tmp_path, "c.parquet", 1)]})
    third.commit(3)
    assert numbers(third) == [("b3.parquet", 3), ("c.parquet", 5)]


def test_files_of_batches_that_never_ended_are_removed(tmp_path: Path) -> None:
    outbox = Outbox(str(tmp_path))
    outbox.add(1, {"t": [written(tmp_path, "a.parquet", 3)]})
    written(tmp_path, "orphan.parquet", 9)
    Outbox(str(tmp_path))
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.parquet", "outbox.json"]


def test_a_newer_outbox_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "outbox.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(OffsetError, match=r"newer Ledgerlake \(version 2.*upgrade"):
        Outbox(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "hashed"), [("", 0), ("hello", 99162322), ("polygenelubricants", 0), ("é€", 31 * 233 + 8364)]
)
def test_keys_are_hashed_as_by_java(text: str, hashed: int) -> None:
    assert java_hash(text) == hashed
