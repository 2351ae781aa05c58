"""The messages of a topic and the rows of a table with the latest messages, for ``verify``; see
``latest_rule``.

The same code as in a task says which messages count, by the configuration of today: which table
takes a message, and what row it becomes (see ``operators.table_writer.TopicTables``). A large
message is not joined here, and a message of an entry in ``rejects`` may have been rejected for this
table or for another one. So those are uncertain, and so is a message that counted by a schema that
is not known any more (see ``CountingTables``).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import QueryBuilder

from ledgerlake.client.topics import join_partition
from ledgerlake.decode.codes import codes_of
from ledgerlake.operators.table_writer import has_key
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
    from ledgerlake.values.typed import SchemaOfVersion
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
        has_key = f"({inside}key is not null or {inside}key_bytes is not null)"
        query = (
            f"select {', '.join(f'{inside}{name} as {name}' for name in _COLUMNS)} from t "
            f"where {are_own} and {has_key}"
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

    def take(
        self,
        rows: pa.RecordBatch,
        *,
        were_delayed: bool,
        repeat: bool = False,
        may_not_count: bool = False,
    ) -> None:
        """Take messages with a key that are due; see ``CountingTables.take``.

        Args:
            may_not_count: nothing tells whether the table took them.
        """
        counting = _packed(rows, np.full(rows.num_rows, were_delayed))
        counting["partition"] = self.number
        counting["is_deletion"] = rows["is_null"].to_numpy(zero_copy_only=False)
        counting["is_uncertain"] = repeat | may_not_count | self.were_rejected(rows)
        if repeat:
            counting["time_us"] = REPEATS_US
        self._add(counting)

    def were_rejected(self, messages: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the messages whose entries have messages in ``rejects``."""
        return self._rejected.contains(entries_of(messages))

    def _add(self, messages: Messages) -> None:
        self.latest.add(messages)
        if self._spill is not None and len(self.latest) >= _MOST_KEPT:
            self._spill(self.latest.last_of_each())
            self.latest = LatestMessages()


class CountingTables:
    """Takes the messages of a topic partition for its tables with the latest messages.

    The schemas of today may not decide which table took a message. A message that names no version
    was read by the newest one of its time, and a version may have left the registry since. So a
    message that does not fit a table today, and is not in ``rejects``, did fit. A table that takes
    all messages has taken it; another table may have.

    Args:
        tables: decide which table takes a message.
        counting: by table.
        of_version: the schemas of the topic that the registry has.
        had_schemas: the topic has, or had, a schema.
        others_take_all: one of its other tables takes all messages.
    """

    def __init__(
        self,
        tables: TopicTables,
        counting: Mapping[str, CountingMessages],
        of_version: SchemaOfVersion,
        *,
        had_schemas: bool,
        others_take_all: bool,
    ) -> None:
        self._tables, self._counting, self._of_version = tables, counting, of_version
        self._had_schemas, self._others_take_all = had_schemas, others_take_all
        options = [maker.table for maker in tables.makers]
        # They may have taken a message whose schema of its time is not known, or not.
        unsure = [
            table
            for table in options
            if table.schema or (table.has_record_shape and (table.where or table.computes_rows))
        ]
        self._is_choice_unsure = any(table.schema or table.where for table in unsure)
        self._unsure = {
            table.name
            for table in options
            if table in unsure or (table.is_default and self._is_choice_unsure)
        }

    def take(
        self, messages: pa.RecordBatch, *, were_delayed: bool, repeat: bool = False
    ) -> NDArray[np.bool_]:
        """Take messages that are due; return a mask of those that other tables, or ``rejects``,
        have to have.

        Args:
            were_delayed: they were held back until they were due.
            repeat: they are due again and again.

        Raises:
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        lacks_schema = self._lack_schema(messages)
        in_latest, in_others = np.zeros((2, messages.num_rows), dtype=bool)
        for made in self._tables.of(messages):
            if made.maker is None or not made.maker.table.keeps_latest:
                in_others[made.taken.rows] = True
                continue
            in_latest[made.taken.rows] = True
            table = made.maker.table
            counting = self._counting[table.name]
            is_unsure = lacks_schema & (table.name in self._unsure)
            counting.take(
                made.rows.filter(pa.array(~is_unsure[made.numbers])),
                were_delayed=were_delayed,
                repeat=repeat,
            )
            misfits = np.zeros_like(lacks_schema)
            misfits[[misfit.row for misfit in made.taken.misfits]] = True
            counting.take(
                _with_key(messages, misfits & ~is_unsure & ~counting.were_rejected(messages)),
                were_delayed=were_delayed,
                repeat=repeat,
                may_not_count=table.takes_some,
            )
        for name in self._unsure & self._counting.keys():
            self._counting[name].take(
                _with_key(messages, lacks_schema),
                were_delayed=were_delayed,
                repeat=repeat,
                may_not_count=True,
            )
        if self._others_take_all:
            return np.ones(messages.num_rows, dtype=bool)
        decided: NDArray[np.bool_] = (in_others | ~in_latest) & ~(
            lacks_schema & self._is_choice_unsure
        )
        return decided

    def take_large(self, message: pa.RecordBatch, *, was_delayed: bool) -> bool:
        """Take a large message that is due, by what its last chunk says of it; return whether other
        tables, or ``rejects``, have to have it. Without its value nothing tells which tables do.
        """
        for counting in self._counting.values():
            counting.take(
                _with_key(message, np.ones(1, dtype=bool)),
                were_delayed=was_delayed,
                may_not_count=True,
            )
        return self._others_take_all

    def _lack_schema(self, messages: pa.RecordBatch) -> NDArray[np.bool_]:
        """Return a mask of the messages whose schema of their time is not known. One without a
        version and a value needs none.
        """
        if not self._unsure:
            return np.zeros(messages.num_rows, dtype=bool)
        numbers, firsts = codes_of(messages["schema_version"])
        versions = messages["schema_version"].take(pa.array(firsts)).to_pylist()
        is_unknown = [bool(name) and self._of_version(name) is None for name in versions]
        names_none = [not name and self._had_schemas for name in versions]
        has_value = ~messages["is_null"].to_numpy(zero_copy_only=False)
        mask: NDArray[np.bool_] = np.array(is_unknown, dtype=bool)[numbers] | (
            np.array(names_none, dtype=bool)[numbers] & has_value
        )
        return mask


def _with_key(messages: pa.RecordBatch, mask: NDArray[np.bool_]) -> pa.RecordBatch:
    """Return the messages of a mask that have a key."""
    return messages.filter(pa.array(mask & has_key(messages)))


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
