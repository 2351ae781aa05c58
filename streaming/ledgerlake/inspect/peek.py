"""Shows a few stored entries of a topic with both kinds of metadata."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.options.bounds import parse_start
from ledgerlake.source.bounds import end_position, matching_partitions, resolve_start
from ledgerlake.source.positions import next_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.wire.message_id import Position


def peek(settings: ClientSettings, topic: str, start: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield up to ``count`` entries of each topic partition as rows of ``schema.ENTRIES``, with the
    number of bytes in place of the bytes.

    Raises:
        UsageError, BrokerError, TransportError, ProtocolError.
    """
    bound = parse_start(start, "--from")
    cluster = Cluster(settings)
    try:
        for name in matching_partitions(cluster.topic_partitions(topic), bound):
            yield from _peek_partition(cluster, name, bound, count)
    finally:
        cluster.close()


def _peek_partition(cluster: Cluster, name: str, bound: Any, count: int) -> Iterator[dict[str, Any]]:
    end = end_position(cluster, name)
    return described_entries(cluster, name, resolve_start(cluster, name, bound).position, end, count)


def described_entries(
    cluster: Cluster, name: str, after: Position, end: Position, count: int
) -> Iterator[dict[str, Any]]:
    """Yield up to ``count`` entries of a topic partition after ``after`` and up to ``end``, as
    ``peek`` does.
    """
    reader = EntryReader(cluster, name, after, window=count)
    source = TopicPartition(*split_partition(name))
    try:
        for _ in range(count):
            entry = next_until(reader, end)
            if entry is None:
                return
            yield _described(entry_rows(entry.frames, source))
    finally:
        reader.close()


def _described(rows: pa.RecordBatch) -> dict[str, Any]:
    """Return the single row of an entry, with its size in place of its bytes."""
    row: dict[str, Any] = rows.to_pylist()[0]
    row["entry_bytes"] = len(row.pop("entry"))
    return row


def entry_line(row: dict[str, Any]) -> str:
    """Return an entry as one line of text."""
    partition = f" p{row['partition']}" if row["partition"] >= 0 else ""
    broker = (
        f"broker {_clock(row['broker_timestamp'])} index {row['broker_index']}"
        if row["broker_timestamp"]
        else "no broker metadata"
    )
    if row["reject_reason"]:
        return f"{row['ledger_id']}:{row['entry_id']}{partition}  {broker}  {row['entry_bytes']} bytes  {row['reject_reason']}"
    batch = f"batch of {row['num_messages_in_batch']}" if row["num_messages_in_batch"] is not None else "single"
    key = f" key {row['key']}" if row["key"] is not None else ""
    return (
        f"{row['ledger_id']}:{row['entry_id']}{partition}  {broker}  published {_clock(row['publish_time'])} by "
        f"{row['producer_name']} #{row['sequence_id']}  {batch} {row['compression']} {row['entry_bytes']} bytes{key}"
    )


def _clock(moment: Any) -> str:
    return "-" if moment is None else str(moment.strftime("%H:%M:%S.%f")[:-3])
