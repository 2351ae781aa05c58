"""The bytes of an immutable bucket: metadata first, then segment after segment (PIP-195).

What Pulsar's brokers write can be read, and they can read ours: the messages are theirs, with a
version and the waiting entries' own bytes beside.

Rules kept here:
  - A newer version is refused with advice. Bytes without a version are Pulsar's own, and are read.
  - Metadata and segments are checked against each other only by whoever has both; each parses
    alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from pyroaring import BitMap

from ledgerlake.delay.segment import frame_sizes, key_columns, waiting
from ledgerlake.errors import OffsetError, refuse_newer
from ledgerlake.pb import delay_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = 1


@dataclass(frozen=True)
class SegmentMetadata:
    """A segment's metadata: when its messages are due, and their entry ids by ledger."""

    min_ms: int
    max_ms: int
    entries: Mapping[int, BitMap]

    @property
    def count(self) -> int:
        return sum(len(one) for one in self.entries.values())


def describe(segment: pa.RecordBatch) -> SegmentMetadata:
    """The metadata of a segment, which is in order and not empty."""
    time_ms, ledger_id, entry_id = key_columns(segment)
    ledgers = np.unique(ledger_id).tolist()
    entries = {one: BitMap(entry_id[ledger_id == one].astype(np.uint32)) for one in ledgers}
    return SegmentMetadata(int(time_ms[0]), int(time_ms[-1]), entries)


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
        refuse_newer("a snapshot of delayed messages", found.version, VERSION)
        _check_whole(found)
        return [_from_pb(one) for one in found.metadata_list]
    except (DecodeError, ValueError, IndexError) as error:
        raise OffsetError(f"a snapshot of delayed messages is damaged ({error}); restore the checkpoint") from None


def segment_to_bytes(segment: pa.RecordBatch) -> bytes:
    """Return a segment, rows of ``WAITING``, as bytes."""
    written = pb.SnapshotSegment()
    add = written.indexes.add
    for time_ms, ledger_id, entry_id in zip(*(column.tolist() for column in key_columns(segment)), strict=True):
        add(timestamp=time_ms, ledger_id=ledger_id, entry_id=entry_id)
    sizes = frame_sizes(segment)
    if sizes.any():
        written.frame_sizes.extend(sizes.tolist())
        written.frames = b"".join(one for one in segment.column(3).to_pylist() if one is not None)
    return written.SerializeToString()


def segment_from_bytes(data: bytes) -> pa.RecordBatch:
    """Read one segment.

    Raises:
        OffsetError: it is damaged.
    """
    try:
        found = pb.SnapshotSegment.FromString(data)
        _check_whole(found)
        keys = [(one.timestamp, one.ledger_id, one.entry_id) for one in found.indexes]
        if keys != sorted(keys):
            raise ValueError("its messages are not in order")
        return waiting(keys).set_column(3, "frame", _frames(found, len(keys)))
    except (DecodeError, ValueError, OverflowError, pa.ArrowInvalid) as error:
        raise OffsetError(f"a segment of delayed messages is damaged ({error}); restore the checkpoint") from None


def _frames(found: pb.SnapshotSegment, count: int) -> pa.Array:
    if not found.frame_sizes:
        return pa.nulls(count, pa.binary())
    sizes = np.array(found.frame_sizes, dtype=np.int64)
    if len(sizes) != count or sizes.sum() != len(found.frames):
        raise ValueError("the sizes of its entries do not fit")
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    validity = None if sizes.all() else pa.py_buffer(np.packbits(sizes > 0, bitorder="little"))
    return pa.Array.from_buffers(pa.binary(), count, [validity, pa.py_buffer(offsets), pa.py_buffer(found.frames)])


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
