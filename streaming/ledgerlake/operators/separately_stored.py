"""Delayed messages whose bytes are not in a segment of a bucket, as the state variable ``separate``
stores them: JSON with a version.

Such a message is a large message, or a batch that a range cut in two. The segment has its position
alone; its bytes are in the state variable ``parts``, or only the topic has them.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange
from ledgerlake.operators.stage_rows import positions_to_json
from ledgerlake.stored.fields import exactly, parse_stored, stored
from ledgerlake.wire.message_id import Position

VERSION = 1


@dataclass(frozen=True)
class SeparatelyStored:
    """A large message, whose chunks are at ``positions``, or one entry.

    ``bytes_kept`` says whether ``parts`` has the bytes; if not, they are read from the topic.
    ``batch_range`` says which messages of the entry have arrived; it is None for a large message. A
    record with ``is_delivered`` stays after those have left, because a later range may bring the
    entry's other messages; nothing waits at its position. ``key``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    bytes_kept: bool
    batch_range: BatchRange | None = None
    is_delivered: bool = False
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


def separately_stored_to_json(message: SeparatelyStored) -> str:
    return json.dumps(
        {
            "version": VERSION,
            "positions": positions_to_json(message.positions),
            "bytes_kept": message.bytes_kept,
            "batch_range": None if message.batch_range is None else asdict(message.batch_range),
            "is_delivered": message.is_delivered,
            "key": None if message.key is None else asdict(message.key),
        }
    )


def separately_stored_from_json(text: str) -> SeparatelyStored:
    """Read a value of the state variable ``separate``.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "delayed large messages", _from_fields, VERSION)


def _from_fields(fields: dict[str, Any]) -> SeparatelyStored:
    ids, bytes_kept, is_delivered, batch_range, key = exactly(
        fields, "positions", "bytes_kept", "is_delivered", "batch_range", "key"
    )
    positions = tuple(map(_position, stored(list[list[int]], ids)))
    if not positions:
        raise ValueError("a message without chunks")
    return SeparatelyStored(
        positions,
        stored(bool, bytes_kept),
        stored(BatchRange | None, batch_range),
        stored(bool, is_delivered),
        stored(ChunkedMessageKey | None, key),
    )


def _position(ids: list[int]) -> Position:
    ledger_id, entry_id = ids
    return Position(ledger_id, entry_id)
