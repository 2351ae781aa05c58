"""Delayed messages whose bytes are not in a segment of a bucket, as the state variable ``large``
stores them: JSON with a version.

Such a message is a large message, or an entry of which a range begins or ends inside. The segment
has its position alone; its bytes are in the state variable ``parts``, or only the topic has them.

Version 1 had no ``part`` and no ``delivered``, version 2 no ``key``.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from ledgerlake.assembly.rules import ChunkedMessageKey
from ledgerlake.decode.messages import BatchRange
from ledgerlake.operators.rows import places
from ledgerlake.stored.fields import parse_stored, stored
from ledgerlake.wire.message_id import Position

VERSION = 3


@dataclass(frozen=True)
class UnpackedMessage:
    """A large message, whose chunks stand at ``positions``, or one entry.

    ``is_held`` says whether ``parts`` has the bytes; if not, they are read from the topic. ``part``
    says which messages of the entry have come; it is None for a large message. A record with
    ``is_delivered`` stays after those were delivered, since a later range may bring the entry's
    other messages. ``key``: see ``Assembled``.
    """

    positions: tuple[Position, ...]
    is_held: bool
    part: BatchRange | None = None
    is_delivered: bool = False
    key: ChunkedMessageKey | None = None


def unpacked_to_json(message: UnpackedMessage) -> str:
    return json.dumps(
        {
            "version": VERSION,
            "positions": places(message.positions),
            "held": message.is_held,
            "part": None if message.part is None else asdict(message.part),
            "delivered": message.is_delivered,
            "key": None if message.key is None else asdict(message.key),
        }
    )


def unpacked_from_json(text: str) -> UnpackedMessage:
    """Read a value of the state variable ``large``.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "delayed large messages", _from_fields, VERSION)


def _from_fields(fields: dict[str, Any], version: int) -> UnpackedMessage:
    positions = tuple(map(_position, stored(list[list[int]], fields["positions"])))
    if not positions:
        raise ValueError("a message without chunks")
    is_held = stored(bool, fields["held"])
    if version == 1:
        return UnpackedMessage(positions, is_held)
    part, is_delivered = stored(BatchRange | None, fields["part"]), stored(bool, fields["delivered"])
    key = stored(ChunkedMessageKey | None, fields["key"]) if version > 2 else None
    return UnpackedMessage(positions, is_held, part, is_delivered, key)


def _position(place: list[int]) -> Position:
    ledger_id, entry_id = place
    return Position(ledger_id, entry_id)
