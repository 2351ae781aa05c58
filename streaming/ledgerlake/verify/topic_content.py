"""The content of a range of a topic partition, for ``verify``: read and decoded as by the pipeline,
and left as records of its messages (see ``key_comparison``).

Whether a large message is complete is found by the rules of ``assembly.rules`` over all chunks of
the range, without limits.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.large import large_message
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.rejects import read_reject
from ledgerlake.decode.split import PieceKind, only_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.local_assembly import EventBudget, LocalAssembly
from ledgerlake.operators.scheduled import refusal_of_large
from ledgerlake.reasons import DATA_LOSS
from ledgerlake.schedules.cancel_messages import rows_with_property
from ledgerlake.source.pieces import read_pieces
from ledgerlake.verify.key_comparison import Kind, entry_records, message_records
from ledgerlake.verify.table_rows import entries_of, keys_of
from ledgerlake.wire.entry import delivery_time_ms, parse_entry
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import CRON_PROPERTY, EVERY_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.verify.entry_set import EntrySet
    from ledgerlake.verify.hashed_parts import HashedParts
    from ledgerlake.verify.latest_rows import CountingTables
    from ledgerlake.verify.table_rows import Keys

_NO_LIMITS = Limits(
    max_pending=2**31,
    max_pending_bytes=2**62,
    max_spilled=2**31,
    max_incomplete_chunks=2**31,
    max_message_bytes=2**31,
)


@dataclass
class TopicContent:
    """The content of a range of a topic partition beside its messages: chunks of incomplete large
    messages, last chunks of messages that may have begun before the first entry of the topic, and
    that entry.
    """

    incomplete_chunks: int = 0
    not_checked: int = 0
    first: Position | None = None


class ExpectedMessages:
    """Takes the messages of a topic partition, and writes records of those that are not in rejects.

    Args:
        partition: the number of the topic partition.
        rejects: the entries in rejects.
        messages: messages of batches that are in rejects by themselves, with their batch index.
        chunks: all entries that were ever in rejects; by default, ``rejects``. A replay may join
            chunks to a message that a read without interruptions does not find, or leave some
            over.
    """

    def __init__(
        self,
        partition: int,
        rejects: EntrySet,
        records: HashedParts,
        messages: EntrySet | None = None,
        chunks: EntrySet | None = None,
    ) -> None:
        self._partition, self._rejects, self._records = partition, rejects, records
        self._messages = messages
        self._chunks = rejects if chunks is None else chunks

    def add(self, keys: Keys, is_not_due: NDArray[np.bool_]) -> None:
        """Add messages that are not large.

        Args:
            is_not_due: a mask of those that are not due.
        """
        is_wanted = ~self._rejects.contains(keys[:, :2])
        if self._messages is not None:
            is_wanted &= ~self._messages.contains(keys[:, :3])
        for waits in (False, True):
            wanted = keys[is_wanted & (is_not_due == waits)]
            self._records.add(
                message_records(self._partition, wanted, is_not_due=waits), len(wanted)
            )

    def add_large(self, positions: Sequence[Position], *, is_not_due: bool) -> None:
        """Add a large message by its chunks, or a chunk that belongs to none. A message that does
        not fit a table is in rejects with the position of its last chunk.
        """
        entries = _entries(positions)
        is_message = len(positions) > 1
        is_absent = (
            not self._rejects.contains(entries)[-1]
            if is_message
            else self.lacks_chunk(positions[-1])
        )
        if is_absent:
            self._add_entries(Kind.ENTRY if is_message else Kind.CHUNK, entries[-1:], is_not_due)

    def lacks_chunk(self, position: Position) -> bool:
        """Return whether a chunk that belongs to no whole message was never in rejects."""
        return not self._chunks.contains(_entries([position])).item()

    def add_unreadable(self, entries: Keys, *, is_not_due: bool = False) -> None:
        """Add entries that cannot be decoded. Those that are not in rejects may have been decoded
        with another key or limit.
        """
        self._add_entries(Kind.ENTRY, entries[~self._rejects.contains(entries)], is_not_due)

    def _add_entries(self, kind: Kind, entries: Keys, is_not_due: bool) -> None:
        records = entry_records(kind, self._partition, entries, is_not_due=is_not_due)
        self._records.add(records, len(records))


def read_topic(
    options: SourceOptions,
    span: EntryRange,
    reached_ms: int | None,
    expected: ExpectedMessages,
    counting: CountingTables | None = None,
) -> TopicContent:
    """Read a range.

    Args:
        reached_ms: a message that is delivered later than this is delayed; None if no message is.
        expected: takes the messages.
        counting: takes the messages that are due.

    Raises:
        BrokerError, TransportError: the topic cannot be read.
        SetupError: as ``HashedParts``.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    chunks = _Chunks(
        source, delays_messages=reached_ms is not None, makes_rows=counting is not None
    )
    content = TopicContent()
    for piece in read_pieces(replace(options, fail_on_data_loss=False), span):
        if piece.kind == PieceKind.REJECT:
            rejected = read_reject(piece.frames)
            if rejected.reason != DATA_LOSS:
                expected.add_unreadable(_entries([rejected.position]))
            continue
        if piece.kind not in (PieceKind.ENTRIES, PieceKind.DELAYED):
            position, entry = only_entry(piece.frames)
            content.first = content.first or position
            try:
                for ended in chunks.take(piece.kind, entry, position):
                    if len(ended.positions) == 1 and content.first != _next(span.after):
                        content.not_checked += ended.is_last and expected.lacks_chunk(position)
                        continue
                    is_due = ended.deliver_ms <= (reached_ms or 0)
                    is_expected = True
                    if is_due and ended.message is not None and counting is not None:
                        is_expected = counting.take_large(
                            ended.message, was_delayed=ended.deliver_ms > 0
                        )
                    if is_expected:
                        expected.add_large(ended.positions, is_not_due=not is_due)
            except CorruptEntryError:
                expected.add_unreadable(_entries([position]))
            continue
        for decoded in decode_bundle(
            piece.frames, source, first_entry=piece.first_entry, **options.decoding
        ):
            is_delayed = np.zeros(decoded.messages.num_rows, dtype=bool)
            were_delayed = piece.kind == PieceKind.DELAYED and reached_ms is not None
            if reached_ms is not None and were_delayed:
                is_delayed = (
                    decoded.messages["deliver_at"].cast(pa.int64()).to_numpy() > reached_ms * 1000
                )
            repeats = np.zeros(decoded.messages.num_rows, dtype=bool)
            if were_delayed:
                repeats[
                    rows_with_property(
                        decoded.messages["properties"], [CRON_PROPERTY, EVERY_PROPERTY]
                    )
                ] = True
            # When messages that repeat are due is known to their rule alone.
            is_not_due = is_delayed | repeats
            are_expected = is_not_due.copy()
            for repeat, are_due in ((False, ~is_not_due), (True, repeats & ~is_delayed)):
                due = decoded.messages.filter(pa.array(are_due))
                if counting is None:
                    are_expected |= are_due
                elif due.num_rows:
                    are_expected[are_due] |= counting.take(
                        due, were_delayed=were_delayed, repeat=repeat
                    )
            message_keys, bad = keys_of(decoded.messages), entries_of(decoded.rejects)
            waits = _wait(decoded.rejects["entry"], reached_ms if were_delayed else None)
            expected.add(message_keys[are_expected], is_not_due[are_expected])
            expected.add_unreadable(bad[~waits])
            expected.add_unreadable(bad[waits], is_not_due=True)
            content.first = content.first or _first_of(message_keys, bad)
    content.incomplete_chunks = sum(map(expected.lacks_chunk, chunks.incomplete()))
    return content


@dataclass(frozen=True)
class _Ended:
    """The chunks of a complete large message, or one rejected chunk, and when they are due.
    ``message`` is the row of the message without its value, if rows are made. ``is_last``: the
    rejected chunk is the last one of its message, which has just been read.
    """

    positions: tuple[Position, ...]
    is_last: bool = False
    deliver_ms: int = 0
    message: pa.RecordBatch | None = None


class _Chunks:
    """The chunks of a range, without their bytes.

    Args:
        makes_rows: a complete message comes with its row. The rows of last chunks that complete no
            message stay in memory.
    """

    def __init__(self, source: TopicPartition, *, delays_messages: bool, makes_rows: bool) -> None:
        self._delays_messages = delays_messages
        self._assembly = LocalAssembly(_NO_LIMITS, delays_messages=delays_messages)
        self._source = source
        self._makes_rows = makes_rows
        # The rows of messages whose last chunk has come, by its position.
        self._rows: dict[Position, pa.RecordBatch] = {}

    def take(self, kind: PieceKind, entry: memoryview, position: Position) -> list[_Ended]:
        """Add a chunk or marker; return the chunks that it completes or rejects. The chunks of a
        complete message come together, rejected ones one by one.

        Raises:
            CorruptEntryError: the entry has no chunk and no marker, or its schedule is bad.
        """
        event = read_alone(kind, entry, position)
        refusal = refusal_of_large(entry, delays_messages=self._delays_messages)
        if refusal is not None:
            reason, detail = refusal
            raise CorruptEntryError(detail, reason=reason)
        is_last = False
        if isinstance(event, Chunk):
            is_last = event.chunk_id == event.chunk_count - 1
            if self._makes_rows and is_last:
                # A message whose metadata makes no row becomes rejects.
                with suppress(CorruptEntryError):
                    self._rows[position] = large_message(entry, position, self._source)
            outcomes = self._assembly.arrive(event, b"")
        else:
            outcomes = self._assembly.apply_marker(event)
        ended: list[_Ended] = []
        for outcome in outcomes or ():
            if isinstance(outcome, Assembled):
                message = self._rows.pop(outcome.positions[-1], None)
                due_ms = outcome.deliver_ms or 0
                ended.append(_Ended(outcome.positions, deliver_ms=due_ms, message=message))
            elif isinstance(outcome, Rejected):
                ended += [
                    _Ended((rejected,), is_last and rejected == position)
                    for rejected, _ in outcome.entries
                ]
        # Nothing before the range is known here. So a chunk for the stateful stage belongs to no
        # message.
        ended += [
            _Ended((left.position,), is_last and left.position == position)
            for left in self._assembly.events
            if isinstance(left, Chunk)
        ]
        self._assembly.events.clear()
        self._assembly.budget = EventBudget()
        return ended

    def incomplete(self) -> list[Position]:
        """Return the chunks of messages that are still incomplete."""
        return [position for position, _ in self._assembly.drain_pending()]


def _wait(entries: pa.Array, reached_ms: int | None) -> NDArray[np.bool_]:
    """Return a mask of the entries that are due after a time; none of them if it is None."""
    mask = np.zeros(len(entries), dtype=bool)
    if reached_ms is not None:
        for row, entry in enumerate(entries):
            with suppress(CorruptEntryError):
                mask[row] = (delivery_time_ms(parse_entry(entry.as_py())) or 0) > reached_ms
    return mask


def _next(position: Position) -> Position:
    """Return the position of the next entry, if the ledger has one."""
    return Position(position.ledger_id, position.entry_id + 1)


def _entries(positions: Sequence[Position]) -> Keys:
    entries = [(position.ledger_id, position.entry_id) for position in positions]
    return np.array(entries, dtype=np.int64).reshape(-1, 2)


def _first_of(keys: Keys, bad: Keys) -> Position | None:
    firsts = [Position(*key[:2]) for key in (*keys[:1].tolist(), *bad[:1].tolist())]
    return min(firsts, default=None)
