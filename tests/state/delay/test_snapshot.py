"""Segments and snapshots of delayed messages: how they are cut, and that their bytes are Pulsar's."""

from __future__ import annotations

import random

import pytest
from pyroaring import BitMap

from ledgerlake.errors import OffsetError
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.state.delay.segment import DelayedIndex, cut
from ledgerlake.state.delay.snapshot import (
    describe,
    metadata_from_bytes,
    metadata_to_bytes,
    segment_from_bytes,
    segment_to_bytes,
)


def indexes(*times_ms: int) -> list[DelayedIndex]:
    return [DelayedIndex(time_ms, 1, number) for number, time_ms in enumerate(times_ms)]


@pytest.mark.parametrize(
    ("times_ms", "step_ms", "most", "sizes"),
    [
        pytest.param([], 10, 5, [], id="nothing"),
        pytest.param([0, 9], 10, 5, [2], id="within a step"),
        pytest.param([0, 10], 10, 5, [1, 1], id="a whole step later"),
        pytest.param([0, 5, 10, 14, 15, 20], 10, 5, [2, 3, 1], id="steps begin at each segment's first"),
        pytest.param([0] * 11, 10, 5, [5, 5, 1], id="full segments"),
    ],
)
def test_segments_end_by_time_and_by_count(times_ms: list[int], step_ms: int, most: int, sizes: list[int]) -> None:
    found = list(cut(indexes(*times_ms), step_ms, most))
    assert [len(one) for one in found] == sizes
    assert [one for segment in found for one in segment] == indexes(*times_ms)


def test_metadata_knows_what_is_in_its_segment() -> None:
    found = describe([DelayedIndex(5, 1, 7), DelayedIndex(5, 2, 7), DelayedIndex(9, 1, 3)])
    assert (found.min_ms, found.max_ms, found.count) == (5, 9, 3)
    assert [found.contains(*one) for one in [(1, 7), (1, 3), (2, 7), (2, 3), (3, 7)]] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_bytes_read_back_are_what_was_written() -> None:
    rng = random.Random(1)
    waiting = sorted(DelayedIndex(rng.randrange(10**6), rng.randrange(5), rng.randrange(2**32)) for _ in range(3000))
    segments = list(cut(waiting, 50_000, 100))
    metadata = [describe(one) for one in segments]
    assert metadata_from_bytes(metadata_to_bytes(metadata)) == metadata
    assert [segment_from_bytes(segment_to_bytes(one)) for one in segments] == segments


@pytest.mark.parametrize(
    ("entries", "golden"),
    [
        ([0, 1, 3, 5, 10, 16, 18, 999], "3a30000001000000000007001000000000000100030005000a0010001200e703"),
        (range(100), "3b3000000100006300010000006300"),
    ],
)
def test_bitmaps_are_the_bytes_that_pulsars_java_writes(entries: list[int], golden: str) -> None:
    segment = [DelayedIndex(1, 4, entry_id) for entry_id in entries]
    written = pb.SnapshotMetadata.FromString(metadata_to_bytes([describe(segment)]))
    assert written.metadata_list[0].delayed_index_bit_map[4].hex() == golden
    assert describe(segment).entries[4] == BitMap.deserialize(bytes.fromhex(golden))


def test_what_a_broker_wrote_has_no_version_and_is_read() -> None:
    theirs = pb.SnapshotMetadata()
    theirs.metadata_list.add(max_schedule_timestamp=9, min_schedule_timestamp=5)
    (found,) = metadata_from_bytes(theirs.SerializeToString())
    assert (found.min_ms, found.max_ms, found.count) == (5, 9, 0)


def test_a_newer_version_is_refused_with_advice() -> None:
    with pytest.raises(OffsetError, match=r"newer Ledgerlake \(version 2.*upgrade"):
        metadata_from_bytes(pb.SnapshotMetadata(version=2).SerializeToString())


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x02\x10\x05", b"\x0a\x0a\x0a\x04\x08\x01\x12\x00\x10\x01\x18\x01"])
def test_damaged_bytes_are_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(OffsetError, match="damaged"):
        metadata_from_bytes(data)
    with pytest.raises(OffsetError, match="damaged"):
        segment_from_bytes(b"\x0a\x02\x08\x05")
