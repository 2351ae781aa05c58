"""The state of schedules by id (see ``schedules.schedules``): a hash table of the messages that
wait.

    schedule_blocks  block -> the messages of the ids of one hash, some thirty (``ScheduleBlock`` of
                     ``pb/delay.proto``); -1 -> the size of the table, and the rate of the messages
                     that repeat (``ScheduleTable``)
    schedules        id -> those messages that repeat, with what waits of them, JSON with a version

A call into the state store costs far more than a message in it, so messages share a value. The
table grows by linear hashing: of N blocks, an id is in the one that the last bits of its hash name,
one bit less if there is no such block yet. So a larger table splits some blocks and leaves the
others as they are. Producers choose ids, so the hash has a key that they do not know: the query's
id, which belongs to the checkpoint. A micro-batch that is run again has the same one.

A message that repeats is in its block too, but what changes when it is delivered is in a value of
its own: a block has the messages of other ids, and would be written again for each occurrence.

A message that is released stays in its block until the block is changed again, and the whole table
is removed when nothing waits under an id. So a release costs no call. The marks of positions, which
say what waits, are stored with the cancels (``schedules.cancels``).
"""

from __future__ import annotations

from collections import defaultdict
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError

from ledgerlake.decode.split import MAX_DELAYED_ENTRY_ID
from ledgerlake.errors import OffsetError, refuse_newer
from ledgerlake.operators.bucket_folders import find_query_id
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.schedules.repetition import RepetitionRate
from ledgerlake.schedules.schedules import (
    Repeating,
    ScheduledMessage,
    waiting_from_json,
    waiting_to_json,
)
from ledgerlake.stored.fields import ADVICE
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ledgerlake.operators.state_variables import StateVariables
    from ledgerlake.schedules.schedules import MarkedPositions

VERSION = 1

# A small block costs as much as one message; a large one takes time to parse for each message.
BLOCK_MESSAGES = 32

_TABLE_KEY = (-1,)

# Without a limit, producers may claim any rate.
_MOST_STORED = 2**63 - 1

_MOST_KEY_BYTES = blake2b.MAX_KEY_SIZE

_Stored = TypeVar("_Stored", pb.ScheduleBlock, pb.ScheduleTable)
_Value = TypeVar("_Value")

# Messages by id.
Block = dict[str, list[ScheduledMessage]]


class ScheduleState:
    """The state variables."""

    def __init__(self, variables: StateVariables) -> None:
        self.blocks = variables.getMapState("schedule_blocks", "block bigint", "messages binary")
        self.schedules = variables.getMapState("schedules", "schedule_id string", "messages string")

    def clear(self) -> None:
        """Remove everything: nothing waits under an id."""
        for variable in (self.blocks, self.schedules):
            variable.clear()


class StoredSchedules:
    """The schedules of one topic partition in one micro-batch; ``begin`` comes first.

    One block is in memory, so ask for the ids in the order of ``block_of``. The messages of an id
    are put together once while its block is open, however many events change them.
    """

    def __init__(self, state: ScheduleState, marked: MarkedPositions) -> None:
        self._state = state
        self._marked = marked
        self._stored_size = b""
        self._blocks = self._messages = 0
        self._hash_key = b""
        self.rate = RepetitionRate()
        self._number: int | None = None
        self._block: Block = {}
        self._loaded: set[str] = set()
        self._stored = b""
        self._repeating: dict[str, list[ScheduledMessage]] = {}
        self._stored_repeating: dict[str, str | None] = {}

    def begin(self, added: int) -> None:
        """Open the table, and make it large enough for so many more ids."""
        row = self._state.blocks.getValue(_TABLE_KEY)
        if row is not None:
            self._stored_size = bytes(row[0])
            table = table_from_bytes(self._stored_size)
            self._blocks, self._messages, self._hash_key = (
                table.blocks,
                table.messages,
                table.hash_key,
            )
            self.rate = RepetitionRate(table.occurrences_per_day, table.bytes_per_day)
        else:
            self._hash_key = find_query_id().encode()[:_MOST_KEY_BYTES]
        self._grow(added)

    def block_of(self, schedule_id: str) -> int:
        """Return the block that an id is in."""
        return block_of(schedule_id, self._blocks, self._hash_key)

    def load(self, schedule_id: str) -> list[ScheduledMessage]:
        self._open(self.block_of(schedule_id))
        if schedule_id not in self._loaded:
            self._loaded.add(schedule_id)
            messages = [
                message for message in self._block.get(schedule_id, []) if self._is_waiting(message)
            ]
            if any(message.repeating for message in messages):
                repeating = {
                    message.position: message for message in self.load_repeating(schedule_id)
                }
                current = [
                    repeating.get(message.position) if message.repeating else message
                    for message in messages
                ]
                messages = [message for message in current if message is not None]
            self._block[schedule_id] = messages
        return self._block[schedule_id]

    def store(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        self._open(self.block_of(schedule_id))
        self._loaded.add(schedule_id)
        self._block[schedule_id] = messages

    def load_repeating(self, schedule_id: str) -> list[ScheduledMessage]:
        if schedule_id not in self._repeating:
            row = self._state.schedules.getValue((schedule_id,))
            self._stored_repeating[schedule_id] = None if row is None else row[0]
            self._repeating[schedule_id] = [] if row is None else waiting_from_json(row[0])
        return self._repeating[schedule_id]

    def store_repeating(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        self._repeating[schedule_id] = messages

    def save_repeating(self) -> None:
        """Store the messages that repeat and have changed, and their rate."""
        self._save_size()
        for schedule_id, messages in self._repeating.items():
            before = self._stored_repeating.get(schedule_id)
            text = waiting_to_json(messages) if messages else None
            if text is None and before is not None:
                self._state.schedules.removeKey((schedule_id,))
            elif text is not None and text != before:
                self._state.schedules.updateValue((schedule_id,), (text,))

    def save(self) -> None:
        """Store the blocks that have changed, if ``begin`` was called."""
        self._close()
        if self._blocks:
            self._save_size()

    def _save_size(self) -> None:
        table = pb.ScheduleTable(
            blocks=self._blocks,
            messages=self._messages,
            occurrences_per_day=min(self.rate.occurrences, _MOST_STORED),
            bytes_per_day=min(self.rate.size_bytes, _MOST_STORED),
            hash_key=self._hash_key,
            version=VERSION,
        )
        size = table.SerializeToString()
        if size != self._stored_size:
            self._state.blocks.updateValue(_TABLE_KEY, (size,))
            self._stored_size = size

    def _grow(self, added: int) -> None:
        """Make the table large enough for so many more messages."""
        before = self._blocks
        self._blocks = max(before, -(-(self._messages + added) // BLOCK_MESSAGES))
        for number in sorted(
            {_masked(block, before) for block in range(before, self._blocks)} if before else ()
        ):
            self._split(number)

    def _split(self, number: int) -> None:
        self._open(number)
        blocks: dict[int, Block] = defaultdict(dict)
        for schedule_id, messages in self._block.items():
            blocks[self.block_of(schedule_id)][schedule_id] = messages
        self._block = blocks.pop(number, {})
        for other, block in blocks.items():
            self._close()
            self._number, self._block, self._stored = other, block, b""
        self._close()

    def _open(self, number: int) -> None:
        if number == self._number:
            return
        self._close()
        row = self._state.blocks.getValue((number,))
        self._stored = b"" if row is None else bytes(row[0])
        self._number, self._block = number, block_from_bytes(self._stored)
        # The number decides how large the table is, and nothing else.
        self._messages = max(0, self._messages - sum(map(len, self._block.values())))

    def _close(self) -> None:
        """Store the block that is in memory, without the messages that have left."""
        if self._number is None:
            return
        for schedule_id in self._loaded:
            repeating = [message for message in self._block[schedule_id] if message.repeating]
            if repeating or self._repeating.get(schedule_id):
                self.store_repeating(schedule_id, repeating)
        self._loaded = set()
        waiting = [
            (schedule_id, message)
            for schedule_id, messages in self._block.items()
            for message in messages
            if self._is_waiting(message)
        ]
        self._messages += len(waiting)
        data = block_to_bytes(waiting)
        if data != self._stored:
            if waiting:
                self._state.blocks.updateValue((self._number,), (data,))
            else:
                self._state.blocks.removeKey((self._number,))
        self._number, self._block = None, {}

    def _is_waiting(self, message: ScheduledMessage) -> bool:
        return self._marked.is_waiting(message.position)


def block_of(schedule_id: str, blocks: int, hash_key: bytes = b"") -> int:
    """Return the block of an id in a table of so many blocks."""
    digest = blake2b(schedule_id.encode(), digest_size=8, key=hash_key).digest()
    return _masked(int.from_bytes(digest, "little"), blocks)


def _masked(number: int, blocks: int) -> int:
    bits = max(blocks - 1, 0).bit_length()
    block = number & ((1 << bits) - 1)
    return block if block < blocks else block & ((1 << bits >> 1) - 1)


def block_to_bytes(messages: Iterable[tuple[str, ScheduledMessage]]) -> bytes:
    """Return messages, each with its id, as bytes; nothing if there are none."""
    block = pb.ScheduleBlock()
    for schedule_id, message in messages:
        position = message.position
        block.messages.add(
            schedule_id=schedule_id,
            ledger_id=position.ledger_id,
            entry_id=position.entry_id,
            time_ms=message.time_ms,
            deliver_ms=message.deliver_ms
            if message.repeating is None
            else message.repeating.start_ms,
            repeats=True if message.repeating else None,
        )
    if not block.messages:
        return b""
    block.version = VERSION
    return block.SerializeToString()


def block_from_bytes(data: bytes) -> Block:
    """Read a block.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return _read(pb.ScheduleBlock, data, _messages)


def _messages(block: pb.ScheduleBlock) -> Block:
    messages: Block = {}
    for message in block.messages:
        position = Position(message.ledger_id, message.entry_id)
        # Protobuf's C parser gives the bytes of a text that is not UTF-8.
        if not isinstance(message.schedule_id, str) or message.entry_id > MAX_DELAYED_ENTRY_ID:
            raise ValueError(f"the message {position}")
        repeating = Repeating(message.deliver_ms) if message.repeats else None
        waiting = ScheduledMessage(position, message.time_ms, message.deliver_ms, repeating)
        messages.setdefault(message.schedule_id, []).append(waiting)
    return messages


def table_from_bytes(data: bytes) -> pb.ScheduleTable:
    """Read the record of the table: its size, the rate of the messages that repeat, and its key.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return _read(pb.ScheduleTable, data, _checked)


def _checked(table: pb.ScheduleTable) -> pb.ScheduleTable:
    if len(table.hash_key) > _MOST_KEY_BYTES:
        raise ValueError(f"a key of {len(table.hash_key)} bytes")
    return table


def _read(kind: type[_Stored], data: bytes, read: Callable[[_Stored], _Value]) -> _Value:
    try:
        value = kind.FromString(data)
        refuse_newer("the checkpoint", value.version, VERSION, "schedules of version")
        # Protobuf's C parser does not check for required fields.
        if not value.IsInitialized():
            raise ValueError("a required field is missing")
        return read(value)
    except (DecodeError, ValueError) as error:
        raise OffsetError(f"the checkpoint holds damaged schedules ({error}); {ADVICE}") from None
