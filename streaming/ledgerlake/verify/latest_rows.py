"""The messages of a topic and the rows of a table with the latest messages, for ``verify``; see
``latest_rule``.

The same code as in a task says which messages count, by the configuration of today: which table
takes a message, and what row it becomes (see ``operators.table_writer.TopicTables``). A large
message is not joined here, and a message of an entry in ``rejects`` may have been rejected for this
table or for another one. So those are uncertain.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import QueryBuilder

from ledgerlake.client.topics import join_partition
from ledgerlake.table.latest_index import key_hashes
from ledgerlake.table.open_table import not_readable
from ledgerlake.values.record_columns import PULSAR_COLUMN
from ledgerlake.verify.entry_set import EntrySet
from ledgerlake.verify.hashed_parts import HashedParts
from ledgerlake.verify.latest_rule import (
    MESSAGE,
    NO_MESSAGES,
    REPEATS_US,
    Finding,
    LatestMessages,
    Span,
    judge,
)
from ledgerlake.verify.table_rows import entries_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from deltalake import DeltaTable
    from numpy.typing import NDArray

    from ledgerlake.operators.table_writer import TopicTables
    from ledgerlake.pipeline.tables import MessagesTable
    from ledgerlake.verify.hashed_parts import Records
    from ledgerlake.verify.latest_rule import Messages
    from ledgerlake.verify.table_rows import Keys

_POSITION = ("ledger_id", "entry_id", "batch_index")
_COLUMNS = (
    "topic",
    "partition",
    "key",
    "key_bytes",
    *_POSITION,
    "broker_timestamp",
    "publish_time",
    "deliver_at",
    "delivered_at",
)


# Either the last messages of keys, or rows of the table.
_RECORD = np.dtype([("is_row", bool), ("message", MESSAGE)])

# So many messages of a topic partition that may be the latest of their keys are in memory.
_MOST_KEPT = 500_000


class LatestComparison:
    """A table with the latest messages, and the messages of its topics that count for it. To be
    used as a context.

    Args:
        table: as it is.
        snapshot: the version of the table that is compared.
        topic_partitions: all that are read.
    """

    def __init__(
        self, table: MessagesTable, snapshot: DeltaTable, topic_partitions: Collection[str]
    ) -> None:
        self._options, self._snapshot = table.options, snapshot
        self._has_unread = bool(table.table.written_topic_partitions() - set(topic_partitions))
        self._numbers: dict[str, int] = {}
        self._spans: dict[int, Span] = {}
        self._records = HashedParts(_RECORD, _key_hashes)

    def __enter__(self) -> LatestComparison:
        return self

    def __exit__(self, *_: object) -> None:
        self._records.close()

    def begin(self, topic_partition: str, reject_entries: Keys) -> CountingMessages:
        """Begin to read a topic partition."""
        number = self._number(topic_partition)
        return CountingMessages(number, reject_entries, self._add_messages)

    def end(self, counting: CountingMessages, span: Span) -> None:
        """Take the messages of a topic partition that was read."""
        self._add_messages(counting.latest.last_of_each())
        self._spans[counting.number] = span

    def _add_messages(self, messages: Messages) -> None:
        self._records.add(_as_records(messages, is_row=False), len(messages))

    def judge(self) -> tuple[int, int, Counter[Finding]]:
        """Return the number of rows, the number of those beyond the first of each key, and how many
        keys have which finding.

        Raises:
            TableError: the table cannot be read.
            SetupError: as ``HashedParts``.
        """
        for rows in self._rows():
            self._records.add(_as_records(rows, is_row=True), len(rows))
        count, duplicate, findings = 0, 0, Counter[Finding]()
        for part in self._records.parts():
            rows, messages = part["message"][part["is_row"]], part["message"][~part["is_row"]]
            keys, first = np.unique(rows["key"], return_index=True)
            count, duplicate = count + len(rows), duplicate + len(rows) - len(keys)
            findings.update(
                judge(
                    _last_of_each(messages), rows[first], self._spans, has_unread=self._has_unread
                )
            )
        return count, duplicate, findings

    def _rows(self) -> Iterator[Messages]:
        inside = f"{PULSAR_COLUMN}." if self._options.has_record_shape else ""
        # Rows that somebody else has added are of no message.
        are_own = " and ".join(
            f"{inside}{name} is not null" for name in ("topic", "partition", *_POSITION)
        )
        query = (
            f"select {', '.join(f'{inside}{name} as {name}' for name in _COLUMNS)} from t "
            f"where {are_own}"
        )
        try:
            for part in QueryBuilder().register("t", self._snapshot).execute(query):
                rows = pa.record_batch(part)
                messages = _packed(
                    rows, pc.is_valid(rows["delivered_at"]).to_numpy(zero_copy_only=False)
                )
                messages["partition"] = [
                    self._number(join_partition(*source))
                    for source in zip(
                        rows["topic"].to_pylist(), rows["partition"].to_pylist(), strict=True
                    )
                ]
                yield messages
        # Errors while the answer comes have no type of their own.
        except Exception as error:
            raise not_readable(self._options.place, error) from None

    def _number(self, topic_partition: str) -> int:
        return self._numbers.setdefault(topic_partition, len(self._numbers))


class CountingMessages:
    """The messages of a topic partition that count for a table.

    Args:
        reject_entries: those that have messages in ``rejects``.
        spill: takes those in ``latest`` when they are many; None if all stay there.
    """

    def __init__(
        self,
        number: int,
        reject_entries: Keys,
        spill: Callable[[Messages], None] | None = None,
    ) -> None:
        self.number = number
        self.latest = LatestMessages()
        self._rejected = EntrySet(reject_entries)
        self._spill = spill

    def take(self, rows: pa.RecordBatch, *, were_delayed: bool, repeat: bool = False) -> None:
        """Take rows of the table that are due; see ``CountingTables.take``."""
        counting = _packed(rows, np.full(rows.num_rows, were_delayed))
        counting["partition"] = self.number
        counting["is_deletion"] = rows["is_null"].to_numpy(zero_copy_only=False)
        counting["is_uncertain"] = repeat | self._rejected.contains(entries_of(rows))
        if repeat:
            counting["time_us"] = REPEATS_US
        self._add(counting)

    def take_large(self, message: pa.RecordBatch, *, was_delayed: bool) -> None:
        """Take a large message that is due, by what its last chunk says of it."""
        if message["key"].null_count and message["key_bytes"].null_count:
            return
        counting = _packed(message, np.full(1, was_delayed))
        counting["partition"], counting["is_uncertain"] = self.number, True
        self._add(counting)

    def _add(self, messages: Messages) -> None:
        self.latest.add(messages)
        if self._spill is not None and len(self.latest) >= _MOST_KEPT:
            self._spill(self.latest.last_of_each())
            self.latest = LatestMessages()


class CountingTables:
    """Takes the messages of a topic partition for its tables with the latest messages.

    Args:
        tables: decide which table takes a message.
        counting: by table.
    """

    def __init__(self, tables: TopicTables, counting: Mapping[str, CountingMessages]) -> None:
        self._tables, self._counting = tables, counting

    def take(self, messages: pa.RecordBatch, *, were_delayed: bool, repeat: bool = False) -> None:
        """Take messages that are due.

        Args:
            were_delayed: they were held back until they were due.
            repeat: they are due again and again.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        for made in self._tables.of(messages):
            counting = None if made.maker is None else self._counting.get(made.maker.table.name)
            if counting is not None:
                counting.take(made.rows, were_delayed=were_delayed, repeat=repeat)

    def take_large(self, message: pa.RecordBatch, *, was_delayed: bool) -> None:
        """Take a large message that is due, by what its last chunk says of it."""
        for counting in self._counting.values():
            counting.take_large(message, was_delayed=was_delayed)


def _packed(rows: pa.RecordBatch, were_delayed: NDArray[np.bool_]) -> Messages:
    """Return messages by key, position and time."""
    packed_rows = np.zeros(rows.num_rows, dtype=MESSAGE)
    packed_rows["key"] = key_hashes(rows)
    for name in _POSITION:
        packed_rows[name] = rows[name].to_numpy()
    stored, published, due = (
        pc.fill_null(rows[name].cast(pa.int64()), 0).to_numpy()
        for name in ("broker_timestamp", "publish_time", "deliver_at")
    )
    delivery = np.maximum(np.where(stored > 0, stored, published), due)
    packed_rows["time_us"] = np.where(were_delayed, delivery, stored)
    packed_rows["was_delayed"] = were_delayed
    return packed_rows


def _as_records(messages: Messages, *, is_row: bool) -> Records:
    records = np.empty(len(messages), dtype=_RECORD)
    records["is_row"], records["message"] = is_row, messages
    return records


def _key_hashes(records: Records) -> NDArray[np.uint64]:
    """Return the first bytes of each key's hash."""
    hashes: NDArray[np.uint64] = (
        np.ascontiguousarray(records["message"]["key"]).view(np.uint64).reshape(-1, 2)[:, 0]
    )
    return hashes


def _last_of_each(messages: Messages) -> Messages:
    """Return the last messages of each topic partition: several parts of one were added."""
    kept = [NO_MESSAGES]
    for partition in np.unique(messages["partition"]).tolist():
        latest = LatestMessages()
        latest.add(messages[messages["partition"] == partition])
        kept.append(latest.last_of_each())
    return np.concatenate(kept)
