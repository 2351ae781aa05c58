"""The content of a range of a topic partition, for ``verify``: read and decoded as by the pipeline.

Whether a large message is complete is found by the rules of ``assembly.rules`` over all chunks of
the range, without limits.
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


def read_topic(options: SourceOptions, span: EntryRange, reached_ms: int | None) -> TopicContent:
    """Read a range.

    Args:
        reached_ms: a message that is delivered later than this is delayed; None if no message is.

    Raises:
        BrokerError, TransportError: the topic cannot be read.
    """
    source = TopicPartition(*split_partition(span.topic_partition))
    keys: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    bad: list[Keys] = [np.empty((0, 2), dtype=np.int64)]
    delayed: list[Keys] = [np.empty((0, 4), dtype=np.int64)]
    chunks = LocalAssembly(_NO_LIMITS, delays_messages=reached_ms is not None)
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
                for positions, deliver_ms in _take_alone(chunks, piece.kind, entry, position):
                    (large_delayed if deliver_ms > (reached_ms or 0) else large).append(positions)
            except CorruptEntryError:
                bad.append(np.array([[position.ledger_id, position.entry_id]], dtype=np.int64))
            continue
        for decoded in decode_bundle(piece.frames, source, first_entry=piece.first_entry, **options.decoding):
            is_delayed = np.zeros(decoded.messages.num_rows, dtype=bool)
            if piece.kind == PieceKind.DELAYED and reached_ms is not None:
                is_delayed = decoded.messages["deliver_at"].cast(pa.int64()).to_numpy() > reached_ms * 1000
            message_keys = keys_of(decoded.messages)
            keys.append(message_keys[~is_delayed])
            delayed.append(message_keys[is_delayed])
            bad.append(entries_of(decoded.rejects))
            first = first or _first_of(message_keys, bad[-1])
    large += [(event.position,) for event in chunks.events if isinstance(event, Chunk)]
    open_chunks = len(list(chunks.drain_pending()))
    return TopicContent(
        np.concatenate(keys), np.concatenate(bad), np.concatenate(delayed), large, large_delayed, open_chunks, first
    )


def _take_alone(
    chunks: LocalAssembly, kind: PieceKind, entry: memoryview, position: Position
) -> list[tuple[tuple[Position, ...], int]]:
    """Add a chunk or marker; return the chunks that it completes or rejects, and when they are due.
    The chunks of a complete message come together, rejected ones one by one.
    """
    event = read_alone(kind, entry, position)
    outcomes = chunks.arrive(event, b"") if isinstance(event, Chunk) else chunks.apply_marker(event)
    ended: list[tuple[tuple[Position, ...], int]] = []
    for outcome in outcomes or ():
        if isinstance(outcome, Assembled):
            ended.append((outcome.positions, outcome.deliver_ms or 0))
        elif isinstance(outcome, Rejected):
            ended += [((rejected,), 0) for rejected, _ in outcome.entries]
    return ended


def _first_of(keys: Keys, bad: Keys) -> Position | None:
    firsts = [Position(*key[:2]) for key in (*keys[:1].tolist(), *bad[:1].tolist())]
    return min(firsts, default=None)
