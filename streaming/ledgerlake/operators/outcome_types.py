"""The outcomes of the stateful stage for one topic partition. Two kinds, assembled large messages
and rejected chunks, are in ``assembly.assembler``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ledgerlake.assembly.assembler import Assembled, Entry, Rejected
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange
from ledgerlake.reasons import Reason
from ledgerlake.wire.message_id import Position


@dataclass(frozen=True)
class RejectedPositions:
    """Chunks of a rejected message whose bytes only the topic has: those that are ``known`` (see
    ``Assembled``).
    """

    reason: Reason
    positions: tuple[Position, ...]


@dataclass(frozen=True)
class Delivery:
    """One delivery of a message that repeats: when it was due, and the properties that the message
    gets beside its own.
    """

    due_ms: int
    properties: Mapping[str, str]


@dataclass(frozen=True)
class DueEntries:
    """Delayed entries, in the order in which they are due: complete MESSAGE frames.

    ``outputs`` are the outputs beside the table, with their mark-delete positions: an output does
    not get messages up to its position. ``first_entry`` says which messages of the first entry are
    due. ``clock_ms`` is the time of the micro-batch, None if it has none. If messages that repeat
    are among them, ``deliveries`` has an item for each entry, None for the others, and several
    entries may be of one message; else it is empty.
    """

    frames: Entry
    delivered_ms: int
    outputs: Mapping[str, Position]
    first_entry: BatchRange = WHOLE_BATCH
    clock_ms: int | None = None
    deliveries: Sequence[Delivery | None] = ()


@dataclass(frozen=True)
class DuePositions:
    """Delayed entries whose bytes only the topic has, in the order in which they are due, with the
    times of the index at which they are. If messages that repeat are among them, ``deliveries`` has
    an item for each position, None for the others, and ``frames`` has the entries that are known,
    which are found by their positions.
    """

    positions: list[Position]
    due_ms: list[int]
    delivered_ms: int
    outputs: Mapping[str, Position]
    clock_ms: int | None = None
    frames: Entry = b""
    deliveries: Sequence[Delivery | None] = ()


Outcome = Assembled | Rejected | RejectedPositions | DueEntries | DuePositions
