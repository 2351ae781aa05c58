"""Makes outcomes of the delayed messages that left the index, in the order in which they are due.

Messages with bytes in their segments are joined to rows of ``ROW_BYTES``. The others are read: from
state if they are stored separately (``separately_stored``), else from the topic.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.decode.split import entries_of
from ledgerlake.delay.segment import frame_sizes, index_rows, key_at, key_columns
from ledgerlake.operators.outcome_types import DueEntries, DuePositions
from ledgerlake.operators.repeating import Repeated
from ledgerlake.reasons import REPETITION_REFUSED, Reason
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.decode.messages import BatchRange
    from ledgerlake.delay.segment import Key
    from ledgerlake.operators.outcome_types import Delivery, Outcome
    from ledgerlake.operators.separately_stored import SeparateMessages, StoredEntries
    from ledgerlake.schedules.schedules import Schedules

# The most bytes, or positions, of one row of due messages.
_ROW_BYTES = 1024 * 1024
_ROW_POSITIONS = 1000


@dataclass(frozen=True)
class Release:
    """What the messages have in common that a micro-batch releases (see ``DueEntries``)."""

    delivered_ms: int
    outputs: dict[str, Position]
    clock_ms: int | None


class _DueRow(NamedTuple):
    """A message that left the index. ``frame`` is None if only the topic has it, or if it is stored
    separately. ``delivery`` is None if the message does not repeat.
    """

    key: Key
    frame: bytes | None
    delivery: Delivery | None


class _Together:
    """What left the index one after another: messages, occurrences of those that repeat, and
    rejects of these.
    """

    def __init__(self) -> None:
        self.parts: list[pa.RecordBatch | Repeated] = []
        self.rejected: dict[Reason, list[tuple[Position, Entry | None]]] = {}
        self.size_bytes = 0
        self.has_repeated = False

    def add(self, part: pa.RecordBatch | Repeated, size_bytes: int) -> None:
        self.parts.append(part)
        self.size_bytes += size_bytes
        self.has_repeated |= isinstance(part, Repeated)

    def reject(self, rejected: Rejected) -> None:
        self.rejected.setdefault(rejected.reason, []).extend(rejected.entries)
        self.size_bytes += sum(len(entry or b"") for _, entry in rejected.entries)

    def rows(self) -> Iterator[_DueRow]:
        """Yield messages and occurrences one by one, in order."""
        for part in self.parts:
            if isinstance(part, Repeated):
                key = (part.delivery.due_ms, part.position.ledger_id, part.position.entry_id)
                yield _DueRow(key, part.frame, part.delivery)
            else:
                for time_ms, ledger_id, entry_id, frame in zip(
                    *(column.to_pylist() for column in part.columns), strict=True
                ):
                    yield _DueRow((time_ms, ledger_id, entry_id), frame, None)


@dataclass(frozen=True)
class _KeptChunks:
    """The chunks of a message that is due. They stay kept until it is delivered: if they cannot be
    joined, they become rejects.
    """

    kept_entries: StoredEntries
    positions: tuple[Position, ...]

    def __iter__(self) -> Iterator[bytes | None]:
        return map(self.kept_entries.get, self.positions)

    def __reversed__(self) -> Iterator[bytes | None]:
        return map(self.kept_entries.get, reversed(self.positions))


class DueOutcomes:
    """The outcomes of what one micro-batch releases of a topic partition."""

    def __init__(
        self,
        separate: SeparateMessages,
        kept_entries: StoredEntries,
        schedules: Schedules,
        release: Release,
    ) -> None:
        self._separate = separate
        self._kept_entries = kept_entries
        self._schedules = schedules
        self._release = release

    def in_order(self, due: Iterable[pa.RecordBatch | Repeated | Rejected]) -> Iterator[Outcome]:
        """Yield the outcomes of what left the index: messages, occurrences of those that repeat,
        and rejects of these.
        """
        together = _Together()
        for part in due:
            if together.size_bytes >= _ROW_BYTES:
                yield from self._outcomes_of(together)
                together = _Together()
            if isinstance(part, Repeated):
                together.add(part, len(part.frame))
            elif isinstance(part, Rejected):
                together.reject(part)
            else:
                messages, withheld = _without_withheld(part, self._schedules)
                yield from self._withheld_rejects(part, withheld)
                together.add(messages, messages.nbytes)
        yield from self._outcomes_of(together)

    def _partial(self, position: Position, batch_range: BatchRange) -> Iterator[Outcome]:
        """Yield a part of an entry."""
        frame = self._separate.take_frame(position)
        release = self._release
        if frame is not None:
            yield DueEntries(
                frame, release.delivered_ms, release.outputs, batch_range, release.clock_ms
            )

    def _withheld_rejects(
        self, batch: pa.RecordBatch, withheld: dict[int, Reason]
    ) -> Iterator[Outcome]:
        """Yield the rejects of due messages that are not to be delivered. A large one is read when
        the one before it was taken.

        Args:
            withheld: the reasons by row.
        """
        frames: dict[Reason, list[bytes]] = {}
        for row, reason in withheld.items():
            frame = batch.column(3)[row].as_py()
            if reason == REPETITION_REFUSED:
                # It was rejected when it arrived.
                continue
            if frame is None:
                _, ledger_id, entry_id = key_at(batch, row)
                yield self._separate.take_reject(reason, Position(ledger_id, entry_id))
            else:
                frames.setdefault(reason, []).append(frame)
        for reason, group in frames.items():
            yield Rejected(reason, list(entries_of(b"".join(group)).items()))

    def _outcomes_of(self, together: _Together) -> Iterator[Outcome]:
        """Yield what left the index together. If messages that repeat are among the others, as many
        as possible make one outcome: a sender can put an occurrence between any two of them.
        """
        yield from (Rejected(reason, entries) for reason, entries in together.rejected.items())
        if not together.has_repeated:
            for batch in together.parts:
                yield from self._outcomes(batch)
            return
        rows: list[_DueRow] = []
        for row in together.rows():
            is_separate = (
                row.frame is None and self._separate.load(Position(*row.key[1:])) is not None
            )
            if is_separate or (
                len(rows) >= _ROW_POSITIONS and any(each.frame is None for each in rows)
            ):
                yield from _due_outcome(rows, self._release)
                rows = []
            if is_separate:
                yield from self._take_separate(index_rows([row.key]))
            else:
                rows.append(row)
        yield from _due_outcome(rows, self._release)

    def _outcomes(self, batch: pa.RecordBatch) -> Iterator[Outcome]:
        release = self._release
        has_frame = batch.column(3).is_valid().to_pylist()
        for is_packed, group in groupby(range(batch.num_rows), has_frame.__getitem__):
            rows = list(group)
            messages = batch.slice(rows[0], len(rows))
            if is_packed:
                yield from (
                    DueEntries(
                        frames, release.delivered_ms, release.outputs, clock_ms=release.clock_ms
                    )
                    for frames in _join_frames(messages)
                )
            else:
                yield from self._take_separate(messages)

    def _take_separate(self, batch: pa.RecordBatch) -> Iterator[Outcome]:
        """Yield messages whose bytes are not in their segment: large ones, partial entries, and
        those that must be read from the topic.
        """
        release = self._release
        to_reread: list[Key] = []
        for due_ms, ledger_id, entry_id in zip(
            *(column.to_pylist() for column in batch.columns[:3]), strict=True
        ):
            position = Position(ledger_id, entry_id)
            message = self._separate.load(position)
            if to_reread and (message is not None or len(to_reread) == _ROW_POSITIONS):
                yield _due_positions(to_reread, release)
                to_reread = []
            if message is None:
                to_reread.append((due_ms, ledger_id, entry_id))
                continue
            positions = message.positions
            if message.batch_range is not None:
                yield from self._partial(positions[0], message.batch_range)
                continue
            entries = _KeptChunks(self._kept_entries, positions) if message.bytes_kept else None
            known = () if message.bytes_kept else positions
            yield Assembled(
                positions,
                entries,
                message.stands_at,
                delivered_ms=release.delivered_ms,
                due_ms=due_ms,
                outputs=release.outputs,
                key=message.key,
                known=known,
                clock_ms=release.clock_ms,
            )
            self._separate.remove(position)
            for chunk in positions if message.bytes_kept else ():
                self._kept_entries.drop(chunk)
        if to_reread:
            yield _due_positions(to_reread, release)


def _without_withheld(
    batch: pa.RecordBatch, schedules: Schedules
) -> tuple[pa.RecordBatch, dict[int, Reason]]:
    """Return due messages without those that are not to be delivered, and the reasons of these by
    row.
    """
    _, ledger_ids, entry_ids = key_columns(batch)
    withheld = schedules.release(ledger_ids, entry_ids)
    if not withheld:
        return batch, withheld
    is_kept = np.ones(batch.num_rows, dtype=bool)
    is_kept[list(withheld)] = False
    return batch.filter(pa.array(is_kept)), withheld


def _due_outcome(rows: list[_DueRow], release: Release) -> Iterator[DueEntries | DuePositions]:
    """Yield rows as one outcome, if there are any."""
    frames = b"".join(row.frame for row in rows if row.frame is not None)
    deliveries = [row.delivery for row in rows]
    if any(row.frame is None for row in rows):
        yield _due_positions([row.key for row in rows], release, frames, deliveries)
    elif rows:
        yield DueEntries(
            frames,
            release.delivered_ms,
            release.outputs,
            clock_ms=release.clock_ms,
            deliveries=deliveries,
        )


def _due_positions(
    keys: list[Key],
    release: Release,
    frames: bytes = b"",
    deliveries: Sequence[Delivery | None] = (),
) -> DuePositions:
    positions = [Position(*key[1:]) for key in keys]
    due_ms = [key[0] for key in keys]
    return DuePositions(
        positions,
        due_ms,
        release.delivered_ms,
        release.outputs,
        release.clock_ms,
        frames,
        deliveries,
    )


def combined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in fewer batches: a batch costs much more than a message in it."""
    buffer: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        buffer.append(batch)
        size += batch.nbytes
        if size >= _ROW_BYTES:
            yield _concat(buffer)
            buffer, size = [], 0
    if buffer:
        yield _concat(buffer)


def _concat(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return pa.Table.from_batches(batches).combine_chunks().to_batches()[0]


def _join_frames(batch: pa.RecordBatch) -> Iterator[bytes]:
    """Yield the frames of rows that all have one, joined up to the size of one row."""
    ends = frame_sizes(batch).cumsum()
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        end = max(start + 1, int(np.searchsorted(ends, before + _ROW_BYTES, "right")))
        yield b"".join(batch.column(3).slice(start, end - start).to_pylist())
        start = end
