"""The content of a range of a topic partition, for ``verify``: read and decoded as by the pipeline.

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
from ledgerlake.delay.cancel_messages import rows_with_property
from ledgerlake.errors import CorruptEntryError
from ledgerlake.inspect.table_rows import Keys, entries_of, keys_of
from ledgerlake.operators.in_task import LocalAssembly
from ledgerlake.source.loss import DATA_LOSS
from ledgerlake.source.pieces import read_pieces
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.schedules import CRON_PROPERTY, EVERY_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ledgerlake.inspect.latest_rows import CountingMessages
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange

_NO_LIMITS = Limits(max_pending=2**31, max_pending_bytes=2**62, max_message_bytes=2**31)


@dataclass(frozen=True)
class TopicContent:
    """The messages in a range of a topic partition.

    ``messages`` are keys, ``bad_entries`` entries that cannot be messages. ``large`` are the chunks
    of each complete large message, and single chunks that belong to none. ``delayed`` and
    ``large_delayed`` are the same for messages that are not due. ``first`` is the first entry.
    """

    messages: Keys
    bad_entries: Keys
    delayed: Keys
    large: list[tuple[Position, ...]]
    large_delayed: list[tuple[Position, ...]]
    open_chunks: int
    first: Position | None


def read_topic(
    options: SourceOptions, span: EntryRange, reached_ms: int | None, counting: Sequence[CountingMessages] = ()
) -> TopicContent:
    """Read a range.

    Args:
        reached_ms: a message that is delivered later than this is delayed; None if no message is.
        counting: they take the messages that are due.

    Raises:
        BrokerError, TransportError: the topic cannot be read.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    keys: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    bad: list[Keys] = [np.empty((0, 2), dtype=np.int64)]
    delayed: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    chunks = _Chunks(source, delays_messages=reached_ms is not None)
    large: list[tuple[Position, ...]] = []
    large_delayed: list[tuple[Position, ...]] = []
    first: Position | None = None
    for piece in read_pieces(replace(options, fail_on_data_loss=False), span):
        if piece.kind == PieceKind.REJECT:
            rejected = read_reject(piece.frames)
            if rejected.reason != DATA_LOSS:
                bad.append(np.array([[rejected.position.ledger_id, rejected.position.entry_id]], dtype=np.int64))
            continue
        if piece.kind not in (PieceKind.ENTRIES, PieceKind.DELAYED):
            position, entry = only_entry(piece.frames)
            first = first or position
            try:
                for ended in chunks.take(piece.kind, entry, position):
                    is_due = ended.deliver_ms <= (reached_ms or 0)
                    (large if is_due else large_delayed).append(ended.positions)
                    if is_due and ended.message is not None:
                        for table in counting:
                            table.take_large(ended.message, was_delayed=ended.deliver_ms > 0)
            except CorruptEntryError:
                bad.append(np.array([[position.ledger_id, position.entry_id]], dtype=np.int64))
            continue
        for decoded in decode_bundle(piece.frames, source, first_entry=piece.first_entry, **options.decoding):
            is_delayed = np.zeros(decoded.messages.num_rows, dtype=bool)
            were_delayed = piece.kind == PieceKind.DELAYED and reached_ms is not None
            if reached_ms is not None and were_delayed:
                is_delayed = decoded.messages["deliver_at"].cast(pa.int64()).to_numpy() > reached_ms * 1000
            repeats = np.zeros(decoded.messages.num_rows, dtype=bool)
            if were_delayed:
                repeats[rows_with_property(decoded.messages["properties"], [CRON_PROPERTY, EVERY_PROPERTY])] = True
            for table in counting:
                table.take(decoded.messages.filter(pa.array(~is_delayed & ~repeats)), were_delayed=were_delayed)
                if repeats.any():
                    is_due = pa.array(~is_delayed & repeats)
                    table.take(decoded.messages.filter(is_due), were_delayed=True, repeat=True)
            # When they are due is known to their rule alone.
            is_delayed |= repeats
            message_keys = keys_of(decoded.messages)
            keys.append(message_keys[~is_delayed])
            delayed.append(message_keys[is_delayed])
            bad.append(entries_of(decoded.rejects))
            first = first or _first_of(message_keys, bad[-1])
    large += [(event.position,) for event in chunks.assembly.events if isinstance(event, Chunk)]
    open_chunks = len(list(chunks.assembly.drain_pending()))
    return TopicContent(
        np.concatenate(keys), np.concatenate(bad), np.concatenate(delayed), large, large_delayed, open_chunks, first
    )


@dataclass(frozen=True)
class _Ended:
    """The chunks of a complete large message, or one rejected chunk, and when they are due.
    ``message`` is the row of the message without its value.
    """

    positions: tuple[Position, ...]
    deliver_ms: int = 0
    message: pa.RecordBatch | None = None


class _Chunks:
    """The chunks of a range, without their bytes."""

    def __init__(self, source: TopicPartition, *, delays_messages: bool) -> None:
        self.assembly = LocalAssembly(_NO_LIMITS, delays_messages=delays_messages)
        self._source = source
        # The rows of messages whose last chunk has come, by its position.
        self._rows: dict[Position, pa.RecordBatch] = {}

    def take(self, kind: PieceKind, entry: memoryview, position: Position) -> list[_Ended]:
        """Add a chunk or marker; return the chunks that it completes or rejects. The chunks of a
        complete message come together, rejected ones one by one.

        Raises:
            CorruptEntryError: it is none.
        """
        event = read_alone(kind, entry, position)
        if isinstance(event, Chunk):
            if event.chunk_id == event.chunk_count - 1:
                # A message whose metadata makes no row becomes rejects.
                with suppress(CorruptEntryError):
                    self._rows[position] = large_message(entry, position, self._source)
            outcomes = self.assembly.arrive(event, b"")
        else:
            outcomes = self.assembly.apply_marker(event)
        ended: list[_Ended] = []
        for outcome in outcomes or ():
            if isinstance(outcome, Assembled):
                message = self._rows.pop(outcome.positions[-1], None)
                ended.append(_Ended(outcome.positions, outcome.deliver_ms or 0, message))
            elif isinstance(outcome, Rejected):
                ended += [_Ended((rejected,)) for rejected, _ in outcome.entries]
        return ended


def _first_of(keys: Keys, bad: Keys) -> Position | None:
    firsts = [Position(*key[:2]) for key in (*keys[:1].tolist(), *bad[:1].tolist())]
    return min(firsts, default=None)
