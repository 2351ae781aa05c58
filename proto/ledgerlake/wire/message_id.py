"""Where a message stands: ledger, entry, and the index inside a batch.

Text form: ``ledger:entry`` or ``ledger:entry:batch``. Byte form: MessageIdData, as every Pulsar client serialises it.
Positions order by (ledger, entry); ids of ledgers only grow, but are not dense. A batch index of -1 means "the entry itself".

EARLIEST and LATEST are the protocol's: all ones (-1 as u64) and the largest signed long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ledgerlake.errors import UsageError
from ledgerlake.pb import pulsar_pb2 as pb

_TEXT = re.compile(r"(\d{1,19}):(-1|\d{1,19})(?::(\d{1,9}))?")
_EARLIEST_WIRE = 2**64 - 1
_LATEST_WIRE = 2**63 - 1


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """One entry of one topic partition. ``Position(-1, -1)`` is before everything; entry -1 is before the ledger's first."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"


BEFORE_ALL = Position(-1, -1)


@dataclass(frozen=True, order=True, slots=True)
class MessageId:
    """One message; ``batch_index`` -1 names the whole entry."""

    ledger_id: int
    entry_id: int
    batch_index: int = -1

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    def __str__(self) -> str:
        plain = f"{self.ledger_id}:{self.entry_id}"
        return plain if self.batch_index < 0 else f"{plain}:{self.batch_index}"


def parse_message_id(text: str) -> MessageId:
    """Read ``ledger:entry[:batch]`` or the hex of a serialised id.

    Raises:
        UsageError: it is neither.
    """
    matched = _TEXT.fullmatch(text.strip())
    if matched:
        ledger_id, entry_id, batch_index = matched.groups(default="-1")
        return MessageId(int(ledger_id), int(entry_id), int(batch_index))
    try:
        return from_bytes(bytes.fromhex(text))
    except (ValueError, DecodeError):
        raise UsageError(
            f"'{text}' is not a message id; write ledger:entry, ledger:entry:batch, or the hex of a serialised id"
        ) from None


def from_bytes(serialised: bytes) -> MessageId:
    """Read MessageIdData as any Pulsar client writes it.

    Raises:
        DecodeError: the bytes are not MessageIdData.
    """
    data = pb.MessageIdData.FromString(serialised)
    if not data.IsInitialized():
        raise DecodeError("ledger or entry is missing")
    return from_wire(data)


def from_wire(data: pb.MessageIdData) -> MessageId:
    return MessageId(_signed(data.ledger_id), _signed(data.entry_id), data.batch_index)


def to_wire(position: Position) -> pb.MessageIdData:
    """A position as the protocol writes it; ``BEFORE_ALL`` becomes the protocol's EARLIEST."""
    return pb.MessageIdData(ledger_id=position.ledger_id % 2**64, entry_id=position.entry_id % 2**64)


def start_after(position: Position) -> pb.MessageIdData:
    """The start id that makes a broker deliver from the entry after ``position``.

    A broker steps back one entry from the id that a reader asks for and goes on after that one
    (``PersistentTopic.getNonDurableSubscription``), so asking for the next entry id skips nothing, also where
    that id does not exist.
    """
    if position == BEFORE_ALL:
        return to_wire(position)
    return to_wire(Position(position.ledger_id, position.entry_id + 1))


def latest_wire() -> pb.MessageIdData:
    return pb.MessageIdData(ledger_id=_LATEST_WIRE, entry_id=_LATEST_WIRE)


def _signed(value: int) -> int:
    return value - 2**64 if value > _LATEST_WIRE else value
