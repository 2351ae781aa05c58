"""Shows a few stored entries of a topic with both kinds of metadata."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.topics import TopicSelection, full_name, split_partition
from ledgerlake.decode.entries import entry_rows
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.inspect.entry_values import entry_values
from ledgerlake.inspect.recent_entries import before_last
from ledgerlake.options.bounds import parse_start
from ledgerlake.runtime.guarded_output import printable
from ledgerlake.source.bounds import end_position, matching_partitions, resolve_start
from ledgerlake.source.read_until import next_until
from ledgerlake.stored.offsets import moment_text
from ledgerlake.wire.entry import index_count

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.wire.message_id import Position

_LAST = "last"

# A value is shown by so many bytes, if it has no more than this uncompressed.
_SHOWN_BYTES = 80
_MOST_BYTES = 8 * 1024 * 1024


def peek(settings: ClientSettings, topic: str, start: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield up to ``count`` entries of each topic partition as rows of ``schema.ENTRIES``, with the
    number of bytes in place of the bytes, and the beginning of the first value as text.
    ``index_count`` is by how much an entry raised the broker's index.

    Args:
        start: ``earliest``, a message id, or ``last`` for the last entries of the last ledger.

    Raises:
        UsageError, BrokerError, TransportError, ProtocolError.
    """
    bound = None if start == _LAST else parse_start(start, "--from")
    cluster = Cluster(replace(settings, waits_for_topics=False))
    try:
        names = find_topic_partitions(cluster, TopicSelection((full_name(topic),)))
        for name in names if bound is None else matching_partitions(names, bound):
            end = end_position(cluster, name)
            after = before_last(end, count)
            if bound is not None:
                after = resolve_start(cluster, name, bound, is_bounded=True).position
            yield from described_entries(cluster, name, after, end, count)
    finally:
        cluster.close()


def described_entries(
    cluster: Cluster, name: str, after: Position, end: Position, count: int, first_message: int = 0
) -> Iterator[dict[str, Any]]:
    """Yield up to ``count`` entries of a topic partition after ``after`` and up to ``end``, as
    ``peek`` does.

    Args:
        first_message: the index in its batch of the message whose value the first entry shows.
    """
    reader = EntryReader(cluster, name, after, window=count)
    source = TopicPartition(*split_partition(name))
    try:
        for number in range(count):
            entry = next_until(reader, end)
            if entry is None:
                return
            shown = 0 if number else first_message
            yield _described(entry_rows(entry.frames, source), shown)
    finally:
        reader.close()


def _described(rows: pa.RecordBatch, message: int) -> dict[str, Any]:
    """Return the single row of an entry, with its size in place of its bytes, ``index_count`` and
    ``value``.
    """
    row: dict[str, Any] = rows.to_pylist()[0]
    entry = row.pop("entry")
    return row | {
        "entry_bytes": len(entry),
        "index_count": index_count(memoryview(entry)),
        "value": _value(entry, message),
    }


def _value(entry: bytes, message: int) -> str | None:
    """Return the beginning of the value of one message of an entry; None if it has none that can be
    read here.
    """
    value = next(islice(entry_values(entry, _MOST_BYTES), message, None), None)
    if value is None:
        return None
    return value[:_SHOWN_BYTES].decode(errors="replace") + (
        "..." if len(value) > _SHOWN_BYTES else ""
    )


def entry_line(row: dict[str, Any]) -> str:
    """Return an entry as one line of text."""
    partition = f" p{row['partition']}" if row["partition"] >= 0 else ""
    last, count = row["broker_index"], row["index_count"]
    # The broker gives a batch the number of its last message.
    index = f"{last - count + 1} to {last}" if last is not None and count > 1 else last
    broker = (
        f"broker {moment_text(row['broker_timestamp'])} index {index}"
        if row["broker_timestamp"]
        else "no broker metadata"
    )
    if row["reject_reason"]:
        return (
            f"{row['ledger_id']}:{row['entry_id']}{partition}  {broker}  {row['entry_bytes']} "
            f"bytes  {row['reject_reason']}"
        )
    content = (
        f"batch of {row['num_messages_in_batch']}"
        if row["num_messages_in_batch"] is not None
        else "single"
    )
    if row["chunk_count"] is not None:
        content = f"chunk {row['chunk_id']} of {row['chunk_count']}"
    due = f" due {moment_text(row['deliver_at'])}" if row["deliver_at"] is not None else ""
    published = "-" if row["publish_time"] is None else moment_text(row["publish_time"])
    key = f" key {printable(row['key'])}" if row["key"] is not None else ""
    value = f"  {printable(row['value'])}" if row["value"] else ""
    return (
        f"{row['ledger_id']}:{row['entry_id']}{partition}  {broker}  published "
        f"{published} by "
        f"{printable(str(row['producer_name']))} #{row['sequence_id']}  {content}{due} "
        f"{row['compression']} {row['entry_bytes']} bytes{key}{value}"
    )
