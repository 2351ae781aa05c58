"""The bytes of an immutable bucket: metadata first, then segment after segment (PIP-195).

What Pulsar's brokers write can be read, and they can read ours: the messages are theirs, with a version of ours beside.

Rules kept here:
  - A newer version is refused with advice. Bytes without a version are Pulsar's own, and are read.
  - Metadata and segments are checked against each other only by whoever has both; each parses alone.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError
from pyroaring import BitMap

from ledgerlake.errors import OffsetError
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.state.delay.segment import DelayedIndex

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

VERSION = 1


@dataclass(frozen=True)
class SegmentMetadata:
    """What is known of a segment without it: when its messages are due, and which they are, by ledger."""

    min_ms: int
    max_ms: int
    entries: Mapping[int, BitMap]

    @property
    def count(self) -> int:
        return sum(len(one) for one in self.entries.values())

    def contains(self, ledger_id: int, entry_id: int) -> bool:
        return ledger_id in self.entries and entry_id in self.entries[ledger_id]


def describe(segment: Sequence[DelayedIndex]) -> SegmentMetadata:
    """The metadata of a segment, which is in order and not empty."""
    by_ledger: dict[int, list[int]] = defaultdict(list)
    for index in segment:
        by_ledger[index.ledger_id].append(index.entry_id)
    entries = {ledger_id: BitMap(entry_ids) for ledger_id, entry_ids in by_ledger.items()}
    return SegmentMetadata(segment[0].time_ms, segment[-1].time_ms, entries)


def metadata_to_bytes(segments: Iterable[SegmentMetadata]) -> bytes:
    """A snapshot's metadata, which says of every segment what is in it."""
    return pb.SnapshotMetadata(metadata_list=[_to_pb(one) for one in segments], version=VERSION).SerializeToString()


def metadata_from_bytes(data: bytes) -> list[SegmentMetadata]:
    """Read a snapshot's metadata.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    try:
        found = pb.SnapshotMetadata.FromString(data)
        if found.version > VERSION:
            raise OffsetError(
                f"a snapshot of delayed messages was written by a newer Ledgerlake (version {found.version}, this one reads "
                f"up to {VERSION}); upgrade Ledgerlake"
            )
        _check_whole(found)
        return [_from_pb(one) for one in found.metadata_list]
    except (DecodeError, ValueError, IndexError) as error:
        raise OffsetError(f"a snapshot of delayed messages is damaged ({error}); restore the checkpoint") from None


def segment_to_bytes(segment: Iterable[DelayedIndex]) -> bytes:
    """One segment."""
    indexes = [
        pb.DelayedIndex(timestamp=one.time_ms, ledger_id=one.ledger_id, entry_id=one.entry_id) for one in segment
    ]
    return pb.SnapshotSegment(indexes=indexes).SerializeToString()


def segment_from_bytes(data: bytes) -> list[DelayedIndex]:
    """Read one segment.

    Raises:
        OffsetError: it is damaged.
    """
    try:
        found = pb.SnapshotSegment.FromString(data)
        _check_whole(found)
    except (DecodeError, ValueError) as error:
        raise OffsetError(f"a segment of delayed messages is damaged ({error}); restore the checkpoint") from None
    return [DelayedIndex(one.timestamp, one.ledger_id, one.entry_id) for one in found.indexes]


def _check_whole(message: pb.SnapshotMetadata | pb.SnapshotSegment) -> None:
    """Protobuf's C parser does not look for required fields."""
    if not message.IsInitialized():
        raise ValueError("a required field is missing")


def _to_pb(one: SegmentMetadata) -> pb.SnapshotSegmentMetadata:
    bitmaps = {ledger_id: _packed(entries) for ledger_id, entries in one.entries.items()}
    return pb.SnapshotSegmentMetadata(
        delayed_index_bit_map=bitmaps, max_schedule_timestamp=one.max_ms, min_schedule_timestamp=one.min_ms
    )


def _from_pb(one: pb.SnapshotSegmentMetadata) -> SegmentMetadata:
    entries = {ledger_id: BitMap.deserialize(data) for ledger_id, data in one.delayed_index_bit_map.items()}
    return SegmentMetadata(one.min_schedule_timestamp, one.max_schedule_timestamp, entries)


def _packed(entries: BitMap) -> bytes:
    copy = entries.copy()
    copy.run_optimize()
    return bytes(copy.serialize())
