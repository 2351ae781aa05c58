"""Segments and snapshots of delayed messages: how they are cut, and that their bytes are
Pulsar's.
"""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
from pyroaring import BitMap

from ledgerlake.delay.segment import SEGMENT_BYTES, Key, cut_segments, index_rows, key_at, sort_rows
from ledgerlake.delay.snapshot import (
    describe_segment,
    metadata_from_bytes,
    metadata_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)
from ledgerlake.errors import OffsetError
from ledgerlake.pb import delay_pb2 as pb


def keys_of(batch: pa.RecordBatch) -> list[Key]:
    return [key_at(batch, row) for row in range(batch.num_rows)]


def keys_at(*times_ms: int) -> list[Key]:
    return [(time_ms, 1, number) for number, time_ms in enumerate(times_ms)]


@pytest.mark.parametrize(
    ("times_ms", "step_ms", "most", "sizes"),
    [
        pytest.param([], 10, 5, [], id="nothing"),
        pytest.param([0, 9], 10, 5, [2], id="within a step"),
        pytest.param([0, 10], 10, 5, [1, 1], id="a whole step later"),
        pytest.param(
            [0, 5, 10, 14, 15, 20], 10, 5, [2, 3, 1], id="steps begin at each segment's first"
        ),
        pytest.param([0] * 11, 10, 5, [5, 5, 1], id="full segments"),
    ],
)
def test_segments_end_by_time_and_by_count(
    times_ms: list[int], step_ms: int, most: int, sizes: list[int]
) -> None:
    keys = keys_at(*times_ms)
    for pieces in ([keys], [keys[:3], keys[3:4], keys[4:]]):
        segments = list(cut_segments((index_rows(piece) for piece in pieces), step_ms, most, 1))
        assert [segment.num_rows for segment in segments] == sizes
        assert [key for segment in segments for key in keys_of(segment)] == keys


@pytest.mark.parametrize(
    ("least", "sizes"),
    [pytest.param(2, [2, 2, 2], id="least"), pytest.param(5, [4, 2], id="most is less")],
)
def test_a_segment_does_not_end_by_time_before_it_has_the_least_messages(
    least: int, sizes: list[int]
) -> None:
    keys = keys_at(0, 100, 200, 300, 400, 500)
    for pieces in ([keys], [[key] for key in keys]):
        segments = list(cut_segments((index_rows(piece) for piece in pieces), 10, 4, least))
        assert [segment.num_rows for segment in segments] == sizes


def test_segments_end_by_bytes_and_a_large_entry_has_its_own() -> None:
    sizes = [SEGMENT_BYTES // 2, SEGMENT_BYTES // 2, 1, 2 * SEGMENT_BYTES, 1, 1]
    segments = list(
        cut_segments([index_rows(keys_at(*range(len(sizes))), [bytes(size) for size in sizes])])
    )
    assert [segment.num_rows for segment in segments] == [2, 1, 1, 2]


def test_rows_come_in_order_and_once() -> None:
    rows = index_rows([(5, 1, 1), (3, 2, 9), (3, 1, 9), (5, 1, 1)], [b"a", b"b", None, b"a"])
    merged = sort_rows([rows, index_rows([(3, 2, 9), (4, 1, 0)], [b"b", b"c"])])
    assert keys_of(merged) == [(3, 1, 9), (3, 2, 9), (4, 1, 0), (5, 1, 1)]
    assert merged["frame"].to_pylist() == [None, b"b", b"c", b"a"]


def test_metadata_knows_what_is_in_its_segment() -> None:
    segment_metadata = describe_segment(index_rows([(5, 1, 7), (5, 2, 7), (9, 1, 3)]))
    assert (segment_metadata.min_ms, segment_metadata.max_ms, segment_metadata.count) == (5, 9, 3)
    assert {
        ledger_id: list(entries) for ledger_id, entries in segment_metadata.entries.items()
    } == {1: [3, 7], 2: [7]}


@pytest.mark.parametrize("frames_kept", ["all", "some", "none"])
def test_bytes_read_back_are_what_was_written(frames_kept: str) -> None:
    rng = random.Random(1)
    keys = sorted(
        {(rng.randrange(10**6), rng.randrange(5), rng.randrange(2**32)) for _ in range(3000)}
    )
    frames = [rng.randbytes(rng.randrange(1, 300)) if frames_kept == "all" or (frames_kept == "some" and rng.random() < 0.5) else None for _ in keys]  # fmt: skip
    segments = list(cut_segments([index_rows(keys, frames)], 50_000, 100, 1))
    metadata = [describe_segment(segment) for segment in segments]
    assert metadata_from_bytes(metadata_to_bytes(metadata)) == metadata
    assert [segment_from_bytes(segment_to_bytes(segment)) for segment in segments] == segments


@pytest.mark.parametrize(
    ("entries", "golden"),
    [
        (
            [0, 1, 3, 5, 10, 16, 18, 999],
            "3a30000001000000000007001000000000000100030005000a0010001200e703",
        ),
        (range(100), "3b3000000100006300010000006300"),
    ],
)
def test_bitmaps_are_the_bytes_that_pulsars_java_writes(entries: list[int], golden: str) -> None:
    segment = index_rows([(1, 4, entry_id) for entry_id in entries])
    written = pb.SnapshotMetadata.FromString(metadata_to_bytes([describe_segment(segment)]))
    assert written.metadata_list[0].delayed_index_bit_map[4].hex() == golden
    assert describe_segment(segment).entries[4] == BitMap.deserialize(bytes.fromhex(golden))


def test_what_a_broker_wrote_has_no_version_and_is_read() -> None:
    theirs = pb.SnapshotMetadata()
    theirs.metadata_list.add(max_schedule_timestamp=9, min_schedule_timestamp=5)
    (segment_metadata,) = metadata_from_bytes(theirs.SerializeToString())
    assert (segment_metadata.min_ms, segment_metadata.max_ms, segment_metadata.count) == (5, 9, 0)


def test_a_newer_version_is_refused_with_advice() -> None:
    with pytest.raises(OffsetError, match=r"newer Ledgerlake \(version 2.*upgrade"):
        metadata_from_bytes(pb.SnapshotMetadata(version=2).SerializeToString())


@pytest.mark.parametrize(
    "data", [b"\xff", b"\x0a\x02\x10\x05", b"\x0a\x0a\x0a\x04\x08\x01\x12\x00\x10\x01\x18\x01"]
)
def test_damaged_bytes_are_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(OffsetError, match="damaged"):
        metadata_from_bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x0a\x02\x08\x05", id="a required field is missing"),
        pytest.param(
            b"\x0a\x0f\x08" + b"\xff" * 9 + b"\x01\x10\x01\x18\x01", id="a time beyond all"
        ),
        pytest.param(
            pb.SnapshotSegment(frames=b"abc", frame_sizes=[3]).SerializeToString(),
            id="a size for nobody",
        ),
    ],
)
def test_a_damaged_segment_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(OffsetError, match="damaged"):
        segment_from_bytes(data)


def test_a_segment_that_a_broker_wrote_has_no_entries() -> None:
    theirs = pb.SnapshotSegment()
    theirs.indexes.add(timestamp=5, ledger_id=1, entry_id=2)
    assert segment_from_bytes(theirs.SerializeToString()) == index_rows([(5, 1, 2)])


def test_a_segment_that_is_not_in_order_is_damaged() -> None:
    unordered = pb.SnapshotSegment()
    for time_ms in (5, 4):
        unordered.indexes.add(timestamp=time_ms, ledger_id=1, entry_id=1)
    with pytest.raises(OffsetError, match="not in order"):
        segment_from_bytes(unordered.SerializeToString())
