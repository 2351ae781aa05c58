"""The bytes of an immutable bucket: metadata first, then segment after segment (PIP-195).

Pulsar's brokers can read these snapshots, and theirs can be read here: the protobuf messages are
Pulsar's, with fields for a version and for the bytes of the delayed entries.

Rules kept here:
  - A newer version is refused with advice. Bytes without a version are Pulsar's own, and are read.
  - Metadata and each segment are parsed alone, and not checked against each other here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from pyroaring import BitMap

from ledgerlake.delay.segment import frame_sizes, index_rows, key_columns
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
        return sum(len(bitmap) for bitmap in self.entries.values())


def describe_segment(segment: pa.RecordBatch) -> SegmentMetadata:
    """Return the metadata of a segment, which must be in order and not empty."""
    time_ms, ledger_id, entry_id = key_columns(segment)
    ledgers = np.unique(ledger_id).tolist()
    entries = {
        ledger: BitMap(entry_id[ledger_id == ledger].astype(np.uint32)) for ledger in ledgers
    }
    return SegmentMetadata(int(time_ms[0]), int(time_ms[-1]), entries)


def metadata_to_bytes(segments: Iterable[SegmentMetadata]) -> bytes:
    """Return the metadata of all segments of a snapshot as bytes."""
    metadata_list = [_to_pb(segment) for segment in segments]
    return pb.SnapshotMetadata(metadata_list=metadata_list, version=VERSION).SerializeToString()


def metadata_from_bytes(data: bytes) -> list[SegmentMetadata]:
    """Read a snapshot's metadata.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    try:
        metadata = pb.SnapshotMetadata.FromString(data)
        refuse_newer("a snapshot of delayed messages", metadata.version, VERSION)
        _check_complete(metadata)
        return [_from_pb(segment) for segment in metadata.metadata_list]
    except (DecodeError, ValueError, IndexError) as error:
        raise OffsetError(
            f"a snapshot of delayed messages is damaged ({error}); restore the checkpoint"
        ) from None


def segment_to_bytes(segment: pa.RecordBatch) -> bytes:
    """Return a segment, rows of ``INDEX_SCHEMA``, as bytes."""
    message = pb.SnapshotSegment()
    add = message.indexes.add
    for time_ms, ledger_id, entry_id in zip(
        *(column.tolist() for column in key_columns(segment)), strict=True
    ):
        add(timestamp=time_ms, ledger_id=ledger_id, entry_id=entry_id)
    sizes = frame_sizes(segment)
    if sizes.any():
        message.frame_sizes.extend(sizes.tolist())
        message.frames = b"".join(
            frame for frame in segment.column(3).to_pylist() if frame is not None
        )
    return message.SerializeToString()


def segment_from_bytes(data: bytes) -> pa.RecordBatch:
    """Read one segment.

    Raises:
        OffsetError: it is damaged.
    """
    try:
        message = pb.SnapshotSegment.FromString(data)
        _check_complete(message)
        keys = [(index.timestamp, index.ledger_id, index.entry_id) for index in message.indexes]
        if keys != sorted(keys):
            raise ValueError("its messages are not in order")
        return index_rows(keys).set_column(3, "frame", _frames(message, len(keys)))
    except (DecodeError, ValueError, OverflowError, pa.ArrowInvalid) as error:
        raise OffsetError(
            f"a segment of delayed messages is damaged ({error}); restore the checkpoint"
        ) from None


def _frames(message: pb.SnapshotSegment, count: int) -> pa.Array:
    if not message.frame_sizes:
        return pa.nulls(count, pa.binary())
    sizes = np.array(message.frame_sizes, dtype=np.int64)
    if len(sizes) != count or sizes.sum() != len(message.frames):
        raise ValueError("the sizes of its entries do not fit")
    offsets = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(sizes, out=offsets[1:])
    validity = None if sizes.all() else pa.py_buffer(np.packbits(sizes > 0, bitorder="little"))
    return pa.Array.from_buffers(
        pa.binary(), count, [validity, pa.py_buffer(offsets), pa.py_buffer(message.frames)]
    )


def _check_complete(message: pb.SnapshotMetadata | pb.SnapshotSegment) -> None:
    """Check for required fields, which protobuf's C parser does not."""
    if not message.IsInitialized():
        raise ValueError("a required field is missing")


def _to_pb(segment: SegmentMetadata) -> pb.SnapshotSegmentMetadata:
    bitmaps = {ledger_id: _packed(entries) for ledger_id, entries in segment.entries.items()}
    return pb.SnapshotSegmentMetadata(
        delayed_index_bit_map=bitmaps,
        max_schedule_timestamp=segment.max_ms,
        min_schedule_timestamp=segment.min_ms,
    )


def _from_pb(segment: pb.SnapshotSegmentMetadata) -> SegmentMetadata:
    entries = {
        ledger_id: BitMap.deserialize(bitmap)
        for ledger_id, bitmap in segment.delayed_index_bit_map.items()
    }
    return SegmentMetadata(segment.min_schedule_timestamp, segment.max_schedule_timestamp, entries)


def _packed(entries: BitMap) -> bytes:
    copy = entries.copy()
    copy.run_optimize()
    return bytes(copy.serialize())
