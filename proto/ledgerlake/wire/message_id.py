"""Message ids: ledger, entry, and the index inside a batch.

The text form is ``ledger:entry`` or ``ledger:entry:batch``, and ``first;last`` for a chunked
message (PIP-107). The byte form is MessageIdData, as every Pulsar client serialises it, given as
hex, base64, or the list of signed or unsigned bytes that Spark's JVM connector writes. Without
``first_chunk_message_id`` (field 7) it is a plain id, as older clients wrote it. The partition in a
serialised id is kept (``partition_of``). Positions are ordered by (ledger, entry); ledger ids only
grow, but are not consecutive. A batch index of -1 means the entry itself.

The position of a chunked message is that of its last chunk: order, equality and hash of a
``ChunkMessageId`` use ``last`` alone, also beside plain ids. A read from it begins at ``first``.

A producer chooses the ids in markers and in cancels. Python's hash of numbers has no secret, so
many numbers with one hash are easily found. So ids have the hash of their text.

EARLIEST and LATEST are the protocol's: all bits one (-1 as u64) and the largest signed long.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from ledgerlake.errors import UsageError
from ledgerlake.pb import pulsar_pb2 as pb

_TEXT = re.compile(r"(\d{1,19}):(-1|\d{1,19})(?::(\d{1,9}))?")
_EARLIEST_WIRE = 2**64 - 1
_LATEST_WIRE = 2**63 - 1


@dataclass(frozen=True, order=True, slots=True)
class Position:
    """The position of an entry in a topic partition. ``Position(-1, -1)`` is before all entries;
    entry -1 is before the first entry of its ledger.
    """

    ledger_id: int
    entry_id: int

    @property
    def before(self) -> Position:
        """Return the position before this one in the same ledger; a range after that one begins
        with this one.
        """
        return Position(self.ledger_id, self.entry_id - 1)

    @property
    def next(self) -> Position:
        """Return the position after this one in the same ledger."""
        return Position(self.ledger_id, self.entry_id + 1)

    @property
    def is_storable(self) -> bool:
        """Return whether an entry can have this position: both ids fit a signed 64-bit number, and
        none is negative.
        """
        return 0 <= self.ledger_id < 2**63 and 0 <= self.entry_id < 2**63

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    def __hash__(self) -> int:
        return hash(f"{self.ledger_id}:{self.entry_id}")


BEFORE_ALL = Position(-1, -1)
AFTER_ALL = Position(_LATEST_WIRE, _LATEST_WIRE)


@dataclass(frozen=True, order=True, slots=True)
class MessageId:
    """The id of a message; ``batch_index`` -1 names the whole entry.

    ``partition`` is the topic partition's number in a serialised id, -1 if it has none. Ledger ids
    are unique in a cluster, so order and equality ignore it.
    """

    ledger_id: int
    entry_id: int
    batch_index: int = -1
    partition: int = field(default=-1, compare=False)

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    def __str__(self) -> str:
        plain = f"{self.ledger_id}:{self.entry_id}"
        return plain if self.batch_index < 0 else f"{plain}:{self.batch_index}"

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkMessageId:
    """The id of a chunked message: its first and its last chunk."""

    first: MessageId
    last: MessageId

    def __str__(self) -> str:
        return f"{self.first};{self.last}"

    def __hash__(self) -> int:
        return hash(self.last)

    def __eq__(self, other: object) -> bool:
        return self.last == _standing(other) if isinstance(other, AnyMessageId) else NotImplemented

    def __lt__(self, other: AnyMessageId) -> bool:
        return self.last < _standing(other)

    def __le__(self, other: AnyMessageId) -> bool:
        return self.last <= _standing(other)

    def __gt__(self, other: AnyMessageId) -> bool:
        return self.last > _standing(other)

    def __ge__(self, other: AnyMessageId) -> bool:
        return self.last >= _standing(other)


AnyMessageId = MessageId | ChunkMessageId


def _standing(message_id: AnyMessageId) -> MessageId:
    return message_id.last if isinstance(message_id, ChunkMessageId) else message_id


def partition_of(message_id: AnyMessageId) -> int:
    """Return the partition in an id; -1 if it has none."""
    return _standing(message_id).partition


def parse_message_id(text: str) -> AnyMessageId:
    """Read ``ledger:entry[:batch]``, ``first;last`` of a chunked message, or a serialised id.

    A serialised id is hex, base64 (also with the URL alphabet), or a list of its bytes, such as
    ``[8, -41, 2, 16, 0]``.

    Raises:
        UsageError: it is none of these.
    """
    ends = [_parse_text(part) for part in text.split(";")]
    if len(ends) == 1 and ends[0] is not None:
        return ends[0]
    if len(ends) == 2 and ends[0] is not None and ends[1] is not None:
        return ChunkMessageId(ends[0], ends[1])
    for read in (bytes.fromhex, _from_base64, _from_list):
        try:
            return from_bytes(read(text.strip()))
        except (ValueError, DecodeError, RecursionError):
            continue
    raise UsageError(
        f"'{text}' is not a message id; write ledger:entry, ledger:entry:batch, or a serialised id "
        "as hex or base64"
    )


def _from_base64(text: str) -> bytes:
    standard = text.replace("-", "+").replace("_", "/").rstrip("=")
    return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)


def _from_list(text: str) -> bytes:
    """Return the bytes of a JSON list of numbers, signed (as in Java) or unsigned."""
    numbers = json.loads(text)
    if not isinstance(numbers, list) or not all(
        isinstance(number, int) and -128 <= number < 256 for number in numbers
    ):
        raise ValueError("no list of bytes")
    return bytes(number % 256 for number in numbers)


def _parse_text(text: str) -> MessageId | None:
    matched = _TEXT.fullmatch(text.strip())
    if matched is None:
        return None
    ledger_id, entry_id, batch_index = matched.groups(default="-1")
    return MessageId(int(ledger_id), int(entry_id), int(batch_index))


def from_bytes(serialised: bytes) -> AnyMessageId:
    """Read MessageIdData as any Pulsar client writes it.

    If there is a batch index, a first chunk is ignored, as in the Java client. A negative batch
    index means none: the Go client writes -1.

    Raises:
        DecodeError: the bytes are not MessageIdData.
    """
    data = pb.MessageIdData.FromString(serialised)
    if not data.IsInitialized():
        raise DecodeError("ledger or entry is missing")
    if data.HasField("first_chunk_message_id") and data.batch_index < 0:
        return ChunkMessageId(from_wire(data.first_chunk_message_id), from_wire(data))
    return from_wire(data)


def to_bytes(message_id: AnyMessageId, partition: int | None = None) -> bytes:
    """Return the bytes that a Java client writes for the same id, including batch size 0.

    Args:
        partition: the topic partition's number, -1 for a topic without partitions; None: the
            partition in the id.
    """
    partition = partition_of(message_id) if partition is None else partition
    data = _id_data(_standing(message_id), partition)
    if isinstance(message_id, ChunkMessageId):
        data.first_chunk_message_id.CopyFrom(_id_data(message_id.first, partition))
    return data.SerializeToString()


def _id_data(message_id: MessageId, partition: int) -> pb.MessageIdData:
    data = to_wire(message_id.position)
    if partition >= 0:
        data.partition = partition
    if message_id.batch_index >= 0:
        data.batch_index = message_id.batch_index
    data.batch_size = 0
    return data


def from_wire(data: pb.MessageIdData) -> MessageId:
    """Return the id in MessageIdData, without its first chunk."""
    batch_index, partition = max(data.batch_index, -1), max(data.partition, -1)
    return MessageId(_signed(data.ledger_id), _signed(data.entry_id), batch_index, partition)


def to_wire(position: Position) -> pb.MessageIdData:
    """Return a position as MessageIdData; ``BEFORE_ALL`` becomes EARLIEST, ``AFTER_ALL`` becomes
    LATEST.
    """
    return pb.MessageIdData(
        ledger_id=position.ledger_id % 2**64, entry_id=position.entry_id % 2**64
    )


def start_after(position: Position) -> pb.MessageIdData:
    """Return the start id with which a broker delivers from the entry after ``position``.

    A broker goes back one entry from the start id of a reader and delivers what follows that entry
    (``PersistentTopic.getNonDurableSubscription``). So the next entry id skips nothing, even if
    that entry does not exist.
    """
    if position in (BEFORE_ALL, AFTER_ALL):
        return to_wire(position)
    return to_wire(position.next)


def _signed(value: int) -> int:
    return value - 2**64 if value > _LATEST_WIRE else value
