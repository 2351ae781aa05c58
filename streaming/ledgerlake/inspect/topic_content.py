"""What a range of a topic partition holds, as ``verify`` compares it: read and decoded as the
pipeline does it.

Whether a large message is complete is found by the rules of ``assembly.rules`` over all chunks of
the range, without any limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.assembly.chunk_entries import read_alone
from ledgerlake.assembly.rules import Chunk, Limits
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.rejects import read_reject
from ledgerlake.decode.split import PieceKind, only_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.inspect.table_rows import Keys, entries_of, keys_of
from ledgerlake.operators.in_task import LocalAssembly
from ledgerlake.source.loss import DATA_LOSS
from ledgerlake.source.pieces import read_pieces
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange

_NO_LIMITS = Limits(max_pending=2**31, max_pending_bytes=2**62, max_message_bytes=2**31)


@dataclass(frozen=True)
class TopicContent:
    """The messages in a range of a topic partition.

    ``messages`` are keys, ``bad_entries`` entries that cannot be messages; ``large`` are the chunks
    of each whole large message, and chunks that belong to none alone; ``waiting`` and
    ``large_waiting`` are the same of what is not due; ``first`` is the first entry.
    """

    messages: Keys
    bad_entries: Keys
    waiting: Keys
    large: list[tuple[Position, ...]]
    large_waiting: list[tuple[Position, ...]]
    open_chunks: int
    first: Position | None


def read_topic(options: SourceOptions, span: EntryRange, reached_ms: int | None) -> TopicContent:
    """Read a range.

    Args:
        reached_ms: a message that is delivered later than this waits; None if no message does.

    Raises:
        BrokerError, TransportError: the topic cannot be read.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    keys: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    bad: list[Keys] = [np.empty((0, 2), dtype=np.int64)]
    waiting: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    chunks = LocalAssembly(_NO_LIMITS, delays_messages=reached_ms is not None)
    large: list[tuple[Position, ...]] = []
    large_waiting: list[tuple[Position, ...]] = []
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
                for positions, deliver_ms in _take_alone(chunks, piece.kind, entry, position):
                    (large_waiting if deliver_ms > (reached_ms or 0) else large).append(positions)
            except CorruptEntryError:
                bad.append(np.array([[position.ledger_id, position.entry_id]], dtype=np.int64))
            continue
        for decoded in decode_bundle(piece.frames, source, first_entry=piece.first_entry, **options.decoding):
            waits = np.zeros(decoded.messages.num_rows, dtype=bool)
            if piece.kind == PieceKind.DELAYED and reached_ms is not None:
                waits = decoded.messages["deliver_at"].cast(pa.int64()).to_numpy() > reached_ms * 1000
            found = keys_of(decoded.messages)
            keys.append(found[~waits])
            waiting.append(found[waits])
            bad.append(entries_of(decoded.rejects))
            first = first or _first_of(found, bad[-1])
    large += [(event.position,) for event in chunks.events if isinstance(event, Chunk)]
    open_chunks = len(list(chunks.drain_pending()))
    return TopicContent(
        np.concatenate(keys), np.concatenate(bad), np.concatenate(waiting), large, large_waiting, open_chunks, first
    )


def _take_alone(
    chunks: LocalAssembly, kind: PieceKind, entry: memoryview, position: Position
) -> list[tuple[tuple[Position, ...], int]]:
    """Chunks that ended with this one: a whole message's together, those that belong to none alone;
    and when they are due.
    """
    event = read_alone(kind, entry, position)
    outcomes = chunks.arrive(event, b"") if isinstance(event, Chunk) else chunks.apply_marker(event)
    found: list[tuple[tuple[Position, ...], int]] = []
    for outcome in outcomes or ():
        if isinstance(outcome, Assembled):
            found.append((outcome.positions, outcome.deliver_ms or 0))
        elif isinstance(outcome, Rejected):
            found += [((one,), 0) for one, _ in outcome.entries]
    return found


def _first_of(keys: Keys, bad: Keys) -> Position | None:
    found = [Position(*one[:2]) for one in (*keys[:1].tolist(), *bad[:1].tolist())]
    return min(found, default=None)
