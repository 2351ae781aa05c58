"""Delayed messages whose bytes are not in a segment of a bucket, as the state variable ``separate``
stores them: JSON with a version.

Such a message is a large message, or a batch that a range cut in two. The segment has its position
alone; its bytes are in the state variable ``parts``, or only the topic has them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from ledgerlake.assembly.assembler import KeptEntries, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange
from ledgerlake.decode.split import entries_of
from ledgerlake.operators.outcome_types import RejectedPositions
from ledgerlake.operators.stage_rows import positions_to_json
from ledgerlake.stored.fields import exactly, fields_of, parse_stored, stored
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from pyspark.sql.streaming.stateful_processor import MapState

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.reasons import Reason

VERSION = 1


@dataclass(frozen=True)
class SeparatelyStored:
    """A large message, whose chunks are at ``positions``, or one entry.

    ``bytes_kept`` says whether ``parts`` has the bytes; if not, they are read from the topic.
    ``batch_range`` says which messages of the entry wait; it is None for a large message.
    ``stands_at``, ``key``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    bytes_kept: bool
    stands_at: Position
    batch_range: BatchRange | None = None
    key: ChunkedMessageKey | None = None

    def is_continued_by(self, rest: BatchRange) -> bool:
        """Return whether a part of an entry begins where this one ends: a topic that was created
        again may have another entry at the position.
        """
        return (
            self.batch_range is not None
            and self.batch_range.until is not None
            and rest.after == self.batch_range.until
        )

    def joined_with(self, rest: BatchRange) -> SeparatelyStored:
        after = None if self.batch_range is None else self.batch_range.after
        return replace(self, batch_range=replace(rest, after=after))


class StoredEntries(KeptEntries, Protocol):
    """Entries in state, by position."""

    def put(self, position: Position, entry: bytes) -> bool:
        """Keep an entry; return False if it is refused."""

    def get(self, position: Position) -> bytes | None:
        """Return an entry, which stays kept; None if it is not."""


class SeparateMessages:
    """The messages of one topic partition that are stored so, by the positions in their segments.

    Args:
        state: the state variable ``separate``.
        kept_entries: the state variable ``parts``.
    """

    def __init__(self, state: MapState, kept_entries: StoredEntries) -> None:
        self._state = state
        self._kept_entries = kept_entries

    def load(self, position: Position) -> SeparatelyStored | None:
        """Return the message that waits at a position; None if none does that is stored so."""
        row = self._state.getValue((position.ledger_id, position.entry_id))
        return None if row is None else separately_stored_from_json(row[0])

    def store(self, position: Position, message: SeparatelyStored) -> None:
        """Store the record of a position."""
        self._state.updateValue(
            (position.ledger_id, position.entry_id), (separately_stored_to_json(message),)
        )

    def remove(self, position: Position) -> None:
        """Remove the record of a position; the bytes stay."""
        self._state.removeKey((position.ledger_id, position.entry_id))

    def take_frame(self, position: Position) -> Entry | None:
        """Take the bytes of an entry when a part of it leaves."""
        self.remove(position)
        return self._kept_entries.take(position)

    def take_reject(self, reason: Reason, position: Position) -> Outcome:
        """Take a due message that is not to be delivered and whose bytes are not in its segment;
        return its reject.
        """
        message = self.load(position)
        if message is None:
            return Rejected(reason, [(position, None)])
        if message.batch_range is not None:
            kept_frame = self.take_frame(position)
            return Rejected(
                reason,
                [(position, None)] if kept_frame is None else [*entries_of(kept_frame).items()],
            )
        self.remove(position)
        if not message.bytes_kept:
            return RejectedPositions(reason, message.positions)
        return Rejected(
            reason, [(chunk, self._kept_entries.take(chunk)) for chunk in message.positions]
        )

    def first_to_reread(self) -> Position | None:
        """Return the first position of the messages whose bytes only the topic has."""
        if not self._state.exists():
            return None
        messages = [separately_stored_from_json(value[0]) for _, value in self._state.iterator()]
        return min(
            (message.positions[0] for message in messages if not message.bytes_kept), default=None
        )


def separately_stored_to_json(message: SeparatelyStored) -> str:
    return json.dumps(
        {
            "version": VERSION,
            "positions": positions_to_json(message.positions),
            "bytes_kept": message.bytes_kept,
            "stands_at": message.stands_at,
            "batch_range": None if message.batch_range is None else asdict(message.batch_range),
            "key": None if message.key is None else asdict(message.key),
        },
        default=fields_of,
    )


def separately_stored_from_json(text: str) -> SeparatelyStored:
    """Read a value of the state variable ``separate``.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "delayed large messages", _from_fields, VERSION)


def _from_fields(fields: dict[str, Any]) -> SeparatelyStored:
    ids, bytes_kept, stands_at, batch_range, key = exactly(
        fields, "positions", "bytes_kept", "stands_at", "batch_range", "key"
    )
    positions = tuple(map(_position, stored(list[list[int]], ids)))
    if not positions:
        raise ValueError("a message without chunks")
    return SeparatelyStored(
        positions,
        stored(bool, bytes_kept),
        stored(Position, stands_at),
        stored(BatchRange | None, batch_range),
        stored(ChunkedMessageKey | None, key),
    )


def _position(ids: list[int]) -> Position:
    ledger_id, entry_id = ids
    return Position(ledger_id, entry_id)
