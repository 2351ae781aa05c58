"""Records are divided by their hashes, in memory or in a temporary file."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ledgerlake.errors import SetupError
from ledgerlake.verify import hashed_parts
from ledgerlake.verify.hashed_parts import HashedParts

if TYPE_CHECKING:
    from numpy.typing import NDArray

RECORD = np.dtype([("hash", np.uint64), ("number", np.int32)])


def hashes(records: NDArray[np.void]) -> NDArray[np.uint64]:
    return records["hash"]


def random_records(count: int, distinct: int = 0) -> NDArray[np.void]:
    rng = np.random.default_rng(7)
    records = np.zeros(count, dtype=RECORD)
    records["hash"] = rng.integers(0, 2**64, distinct or count, dtype=np.uint64)[
        np.arange(count) % (distinct or count)
    ]
    records["number"] = np.arange(count)
    return records


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashed_parts, "_BUFFER_RECORDS", 50)
    monkeypatch.setattr(hashed_parts, "_PART_SIZE", 100)


def parts_of(records: NDArray[np.void], batch: int) -> list[NDArray[np.void]]:
    with HashedParts(RECORD, hashes) as hashed:
        for begin in range(0, len(records), batch):
            hashed.add(records[begin : begin + batch], len(records[begin : begin + batch]))
        return list(hashed.parts())


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_all_records_of_a_hash_are_in_one_part_in_the_order_in_which_they_came(batch: int) -> None:
    records = random_records(3000, distinct=40)
    parts = parts_of(records, batch)
    assert len(parts) > 5
    assert sorted(number for part in parts for number in part["number"].tolist()) == list(
        range(3000)
    )
    assert sum(len(set(part["hash"].tolist())) for part in parts) == 40
    for part in parts:
        for value in set(part["hash"].tolist()):
            numbers = part["number"][part["hash"] == value].tolist()
            assert numbers == sorted(numbers)


@pytest.mark.parametrize("count", [60, 99, 100, 101, 1000, 5000])
def test_the_number_of_parts_follows_from_the_number_of_records(count: int) -> None:
    parts = parts_of(random_records(count), 10)
    assert count / 200 < len(parts) <= 1 + 2 * count / 100
    assert max(map(len, parts)) < 2 * 100


def test_a_record_can_count_for_many() -> None:
    records = random_records(49)
    with HashedParts(RECORD, hashes) as hashed:
        hashed.add(records, 4900)
        parts = list(hashed.parts())
    assert len(parts) > 20
    assert sorted(number for part in parts for number in part["number"].tolist()) == list(range(49))


def test_few_records_are_one_part_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: pytest.fail("a file was opened"))
    records = random_records(49)
    (part,) = parts_of(records, 10)
    assert sorted(part.tolist()) == sorted(records.tolist())
    assert parts_of(records[:0], 10) == []


def test_nothing_is_left_in_the_temporary_folder_even_while_the_file_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with HashedParts(RECORD, hashes) as parts:
        parts.add(random_records(100), 100)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(**_: Any) -> Any:
        return open("/dev/full", "w+b", buffering=0)

    monkeypatch.setattr(tempfile, "TemporaryFile", full_disk)
    with pytest.raises(
        SetupError,
        match=r"cannot be used \(No space left on device\); make room there, or .* TMPDIR$",
    ):
        with HashedParts(RECORD, hashes) as parts:
            parts.add(random_records(100), 100)


def test_a_missing_temporary_folder_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(SetupError, match="missing cannot be used"):
        parts_of(random_records(100), 10)
