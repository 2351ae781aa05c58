"""Rows of ``rejects`` for single entries that other modules reject, such as chunks of incomplete
messages.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.decode.split import only_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import Reason
from ledgerlake.wire import commands
from ledgerlake.wire.entry import peek_metadata, split_broker_metadata

if TYPE_CHECKING:
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.wire.message_id import Position


_U32 = struct.Struct(">I")


@dataclass(frozen=True)
class RejectedEntry:
    """A rejected entry and the reason; ``entry`` is None if its bytes are lost. With a
    ``batch_index``, one message of the entry is rejected, and ``entry`` has that message alone.
    """

    position: Position
    entry: bytes | memoryview | None
    reason: Reason
    detail: str = ""
    batch_index: int = -1


def reject_rows(rejected: list[RejectedEntry], source: TopicPartition) -> pa.Table:
    """Return rows of ``schema.REJECTS``."""
    rows = [
        {"topic": source.topic, "partition": source.partition, **_row(reject)}
        for reject in rejected
    ]
    return pa.Table.from_pylist(rows, schema=schema.REJECTS)


def rejected_row(rejected: RejectedEntry, source: TopicPartition) -> pa.RecordBatch:
    """Return the row of ``schema.ENTRIES`` for a reject, which may be a loss without an entry."""
    row = {
        "topic": source.topic,
        "partition": source.partition,
        "ledger_id": rejected.position.ledger_id,
        "entry_id": rejected.position.entry_id,
        "reject_reason": rejected.reason,
        "entry": bytes(rejected.entry or rejected.detail.encode()),
    }
    return pa.RecordBatch.from_pylist([row], schema=schema.ENTRIES)


def reject_frame(rejected: RejectedEntry) -> memoryview:
    """Return the frame of a reject in a bundle: ``[u32 size] [reason \\0 detail]``
    before the entry's bytes.
    """
    header = f"{rejected.reason}\0{rejected.detail}".encode()
    content = _U32.pack(len(header)) + header + bytes(rejected.entry or b"")
    return memoryview(
        commands.message(0, rejected.position.ledger_id, rejected.position.entry_id, content)
    )


def read_reject(frames: memoryview) -> RejectedEntry:
    """Return the entry that ``reject_frame`` wrote."""
    position, content = only_entry(frames)
    header_end = 4 + int(_U32.unpack_from(content)[0])
    reason, _, detail = bytes(content[4:header_end]).decode().partition("\0")
    return RejectedEntry(position, bytes(content[header_end:]), Reason(reason), detail)


def _row(reject: RejectedEntry) -> dict[str, Any]:
    row: dict[str, Any] = {
        "message_id": f"{reject.position}:{reject.batch_index}"
        if reject.batch_index >= 0
        else str(reject.position),
        "ledger_id": reject.position.ledger_id,
        "entry_id": reject.position.entry_id,
        "reason": reject.reason,
    }
    if reject.entry is None:
        return row | {"detail": reject.detail or "the topic no longer has this entry"}
    raw = memoryview(reject.entry)
    return (
        row
        | _broker_columns(raw)
        | {"detail": reject.detail or _describe(raw), "entry": bytes(raw)}
    )


def _broker_columns(raw: memoryview) -> dict[str, Any]:
    try:
        broker, _ = split_broker_metadata(raw)
    except CorruptEntryError:
        return {}
    if broker is None:
        return {}
    return {
        "broker_timestamp": broker.broker_timestamp * 1000
        if broker.HasField("broker_timestamp")
        else None,
        "broker_index": broker.index if broker.HasField("index") else None,
    }


def _describe(raw: memoryview) -> str:
    try:
        metadata = peek_metadata(raw)
    except CorruptEntryError:
        return ""
    if not metadata.num_chunks_from_msg:
        return ""
    return f"chunk {metadata.chunk_id} of {metadata.num_chunks_from_msg} of {metadata.uuid!s}"
