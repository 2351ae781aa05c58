"""One connection without its socket: received bytes in, events and bytes to send out.

The interface is three calls: ``receive_data(bytes)``, ``next_event()``, ``data_to_send()``. The
same class has both roles; the tests' broker uses it in the server role.

    client  IDLE --connect sent--> CONNECTING --CONNECTED--> READY --error or close--> CLOSED
    server  IDLE --CONNECT-------> CONNECTING --connected sent--> READY

Rules kept here:
  - Before READY only commands of the handshake are legal (with the server's ERROR and challenge),
    in frames of the protocol's default size. After that, the limit is the message size that the
    broker announced, and for commands without payload at least ``limits.MAX_COMMAND_BYTES``.
  - PING is answered at once and is not an event. Commands of an unknown type are skipped.
  - After a ProtocolError the connection is closed, and no further bytes are interpreted.
  - If a ``scan`` is set, MESSAGEs that it recognises are returned as runs (``EntriesReceived``).
    All other frames are handled one by one, so that only one place judges unusual input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError, Message

from ledgerlake.errors import MalformedFrameError, ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
from ledgerlake.wire.entry import message_count
from ledgerlake.wire.framing import Frame, FrameBuffer
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_T = pb.BaseCommand

# A transaction that is committed leaves so many entries that never come between two others.
HOLE_ENTRIES = 1


class Role(Enum):
    """The end of the connection that this object is."""

    CLIENT = "client"
    SERVER = "server"


class State(Enum):
    """The state of the handshake."""

    IDLE = "idle"
    CONNECTING = "connecting"
    READY = "ready"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EntryReceived:
    """A MESSAGE with its entry. ``frames`` is its one complete frame, as received; the entry is
    ``frames[entry_start:]``.
    """

    consumer_id: int
    ledger_id: int
    entry_id: int
    frames: bytes | bytearray
    entry_start: int

    @property
    def position(self) -> Position:
        return Position(self.ledger_id, self.entry_id)

    @property
    def entry(self) -> memoryview:
        return memoryview(self.frames)[self.entry_start :]

    @property
    def message_count(self) -> int:
        """Return how many permits the entry uses."""
        return message_count(self.entry)

    @property
    def last(self) -> Position:
        return self.position

    def after(self, position: Position) -> EntryReceived | None:
        """Return the entries after a position."""
        return self if self.position > position else None

    def until(self, position: Position) -> EntryReceived | None:
        """Return the entries up to and including a position."""
        return self if self.position <= position else None

    def follows(self, position: Position) -> bool:
        """Return whether no entry is missing after a position, nor between the entries."""
        return self.position == position.next

    def runs(self, moved_to: Position) -> Iterator[EntryReceived]:
        yield self

    def each(self) -> Iterator[EntryReceived]:
        yield self

    @property
    def first_entry(self) -> EntryReceived:
        return self

    @property
    def last_entry(self) -> EntryReceived:
        return self


@dataclass(frozen=True, slots=True)
class EntriesReceived:
    """A run of MESSAGEs with plain entries of one ledger, in order of their entry ids. ``frames``
    holds the complete frames, one after another.

    ``entry_ids``, ``frame_ends`` and ``message_counts`` (the permits of each) have one number for
    each entry.
    """

    consumer_id: int
    ledger_id: int
    entry_ids: NDArray[np.int64]
    frame_ends: NDArray[np.int64]
    message_counts: NDArray[np.int64]
    frames: bytes | memoryview

    @property
    def position(self) -> Position:
        """The position of the first entry."""
        return Position(self.ledger_id, int(self.entry_ids[0]))

    @property
    def last(self) -> Position:
        return Position(self.ledger_id, int(self.entry_ids[-1]))

    @property
    def message_count(self) -> int:
        return int(self.message_counts.sum())

    def after(self, position: Position) -> EntriesReceived | None:
        """Return the entries after a position."""
        if position.ledger_id != self.ledger_id:
            return self if position.ledger_id < self.ledger_id else None
        return self._part(
            int(self.entry_ids.searchsorted(position.entry_id, "right")), len(self.entry_ids)
        )

    def until(self, position: Position) -> EntriesReceived | None:
        """Return the entries up to and including a position."""
        if position.ledger_id != self.ledger_id:
            return self if position.ledger_id > self.ledger_id else None
        return self._part(0, int(self.entry_ids.searchsorted(position.entry_id, "right")))

    def follows(self, position: Position) -> bool:
        """Return whether no entry is missing after a position, nor between the entries."""
        return self.position == position.next and self.last.entry_id - position.entry_id == len(
            self.entry_ids
        )

    def runs(self, moved_to: Position) -> Iterator[EntriesReceived]:
        """Yield the entries in runs between which more than ``HOLE_ENTRIES`` are missing, or an
        entry before ``moved_to``.
        """
        steps = self.entry_ids[1:] - self.entry_ids[:-1]
        is_break = steps > HOLE_ENTRIES + 1
        if moved_to > self.position:
            last_id = (
                moved_to.entry_id if moved_to.ledger_id == self.ledger_id else self.last.entry_id
            )
            is_break |= (steps > 1) & (self.entry_ids[:-1] < last_id)
        breaks = is_break.nonzero()[0] + 1
        first = 0
        for stop in [*breaks.tolist(), len(self.entry_ids)]:
            part = self._part(first, stop)
            assert part is not None
            yield part
            first = stop

    def each(self) -> Iterator[EntryReceived]:
        """Yield the entries one by one."""
        return map(self._one, range(len(self.entry_ids)))

    @property
    def first_entry(self) -> EntryReceived:
        return self._one(0)

    @property
    def last_entry(self) -> EntryReceived:
        return self._one(len(self.entry_ids) - 1)

    def _one(self, row: int) -> EntryReceived:
        frame = bytes(self.frames[self._start(row) : int(self.frame_ends[row])])
        entry_start = 8 + int.from_bytes(frame[4:8], "big")
        return EntryReceived(
            self.consumer_id, self.ledger_id, int(self.entry_ids[row]), frame, entry_start
        )

    def _start(self, row: int) -> int:
        return int(self.frame_ends[row - 1]) if row else 0

    def _part(self, first: int, stop: int) -> EntriesReceived | None:
        if first >= stop:
            return None
        if stop - first == len(self.entry_ids):
            return self
        start = self._start(first)
        return EntriesReceived(
            self.consumer_id,
            self.ledger_id,
            self.entry_ids[first:stop],
            self.frame_ends[first:stop] - start,
            self.message_counts[first:stop],
            memoryview(self.frames)[start : int(self.frame_ends[stop - 1])],
        )


# Received entries of a consumer: one, or several at once.
Received = EntryReceived | EntriesReceived


# Finds a run at the front of bytes that begin with a frame. Frames above a size limit are not part
# of it.
Scan = Callable[[memoryview, int], EntriesReceived | None]


@dataclass(frozen=True, slots=True)
class LastMessageIdReceived:
    """The answer to GET_LAST_MESSAGE_ID. ``entry`` is the stored entry behind it (PIP-429); no
    released broker sends one.
    """

    answer: pb.CommandGetLastMessageIdResponse
    entry: bytes

    @property
    def request_id(self) -> int:
        return int(self.answer.request_id)


Event = EntryReceived | EntriesReceived | LastMessageIdReceived | Message

# The commands that may arrive, by our role and state. Any other known command is an error of the
# peer.
_ACCEPTED: dict[tuple[Role, State], frozenset[int]] = {
    (Role.CLIENT, State.CONNECTING): frozenset(
        {_T.CONNECTED, _T.ERROR, _T.AUTH_CHALLENGE, _T.PING, _T.PONG}
    ),
    (Role.CLIENT, State.READY): frozenset(
        {
            _T.MESSAGE,
            _T.SEND_RECEIPT,
            _T.SEND_ERROR,
            _T.PRODUCER_SUCCESS,
            _T.CLOSE_PRODUCER,
            _T.SUCCESS,
            _T.ERROR,
            _T.CLOSE_CONSUMER,
            _T.PING,
            _T.PONG,
            _T.PARTITIONED_METADATA_RESPONSE,
            _T.LOOKUP_RESPONSE,
            _T.REACHED_END_OF_TOPIC,
            _T.CONSUMER_STATS_RESPONSE,
            _T.GET_LAST_MESSAGE_ID_RESPONSE,
            _T.GET_TOPICS_OF_NAMESPACE_RESPONSE,
            _T.GET_SCHEMA_RESPONSE,
            _T.WATCH_TOPIC_LIST_SUCCESS,
            _T.WATCH_TOPIC_UPDATE,
            _T.AUTH_CHALLENGE,
            _T.ACK_RESPONSE,
        }
    ),
    (Role.SERVER, State.IDLE): frozenset({_T.CONNECT}),
    (Role.SERVER, State.READY): frozenset(
        {
            _T.SUBSCRIBE,
            _T.PRODUCER,
            _T.SEND,
            _T.CLOSE_PRODUCER,
            _T.ACK,
            _T.FLOW,
            _T.UNSUBSCRIBE,
            _T.CLOSE_CONSUMER,
            _T.PING,
            _T.PONG,
            _T.PARTITIONED_METADATA,
            _T.LOOKUP,
            _T.CONSUMER_STATS,
            _T.GET_LAST_MESSAGE_ID,
            _T.GET_TOPICS_OF_NAMESPACE,
            _T.GET_SCHEMA,
            _T.WATCH_TOPIC_LIST,
            _T.AUTH_RESPONSE,
        }
    ),
}


class Connection:
    """The protocol's state for one byte stream."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.state = State.IDLE
        self.scan: Scan | None = None
        self._frames = FrameBuffer()
        self._outgoing = bytearray()

    def send(self, frame: bytes) -> None:
        """Queue one encoded command (see ``commands``) for ``data_to_send``."""
        if self.state is State.IDLE and self.role is Role.CLIENT:
            self.state = State.CONNECTING
        elif self.state is State.CONNECTING and self.role is Role.SERVER:
            self.state = State.READY
        self._outgoing += frame

    @property
    def unsent_bytes(self) -> int:
        """Return how many bytes ``data_to_send`` would return."""
        return len(self._outgoing)

    def data_to_send(self) -> bytes:
        """Return the bytes to write to the peer; the caller owns them afterwards."""
        data = bytes(self._outgoing)
        self._outgoing.clear()
        return data

    def receive_data(self, data: bytes | memoryview) -> None:
        self._frames.feed(data)

    def wanted(self) -> memoryview | None:
        """Return the buffer for the rest of a large frame; None if there is no large frame.

        The caller may write into it instead of calling ``receive_data``, and passes the number of
        written bytes to ``filled``.
        """
        return self._frames.wanted()

    def filled(self, count: int) -> None:
        self._frames.filled(count)

    def next_event(self) -> Event | None:
        """Return the next event, or None if more bytes are needed.

        Raises:
            ProtocolError: the peer broke the protocol; the connection is CLOSED.
        """
        try:
            run = self._next_run()
            if run is not None:
                return run
            while (frame := self._frames.next()) is not None:
                event = self._interpret(frame)
                if event is not None:
                    return event
            return None
        except ProtocolError:
            self.state = State.CLOSED
            raise

    def _next_run(self) -> EntriesReceived | None:
        if self.scan is None or self.state is not State.READY or self.role is not Role.CLIENT:
            return None
        with self._frames.unread() as unread:
            run = self.scan(unread, self._frames.limit_bytes)
        if run is not None:
            self._frames.drop(len(run.frames))
        return run

    def _interpret(self, frame: Frame) -> Event | None:
        try:
            command = pb.BaseCommand.FromString(frame.command)
        except DecodeError as error:
            raise MalformedFrameError(f"a command does not parse: {error}") from None
        kind = command.type
        if kind == _T.MESSAGE and self.state is State.READY and self.role is Role.CLIENT:
            return _entry_event(command, frame)
        if not command.HasField("type"):
            return None
        self._check_accepted(kind)
        body = self._advance(command)
        if isinstance(body, pb.CommandGetLastMessageIdResponse):
            return LastMessageIdReceived(body, bytes(frame.payload))
        return body

    def _check_accepted(self, kind: int) -> None:
        if kind not in _ACCEPTED.get((self.role, self.state), frozenset()):
            name = pb.BaseCommand.Type.Name(kind)
            raise MalformedFrameError(
                f"the peer sent {name} to a {self.role.value} that is {self.state.value}"
            )

    def _advance(self, command: pb.BaseCommand) -> Message | None:
        field = _FIELD_OF_TYPE[command.type]
        if not command.HasField(field):
            raise MalformedFrameError(f"a command of type {command.type} lacks its {field}")
        if command.type == _T.PING:
            self._outgoing += commands.pong()
            return None
        if command.type == _T.CONNECTED:
            self._frames.limit_bytes = limits.frame_limit_bytes(command.connected.max_message_size)
            self._frames.command_limit_bytes = max(
                self._frames.limit_bytes, limits.MAX_COMMAND_BYTES
            )
            self.state = State.READY
        elif command.type == _T.CONNECT:
            self.state = State.CONNECTING
        body: Message = getattr(command, field)
        if not _is_text(body):
            raise MalformedFrameError(
                f"a command of type {command.type} holds text that is not UTF-8"
            )
        return body


def _entry_event(command: pb.BaseCommand, frame: Frame) -> EntryReceived:
    message = command.message
    position = message.message_id
    if not command.HasField("message") or position.ledger_id >= 2**63 or position.entry_id >= 2**63:
        raise MalformedFrameError("a MESSAGE lacks a usable message id")
    return EntryReceived(
        message.consumer_id, position.ledger_id, position.entry_id, frame.raw, frame.command_end
    )


def _is_text(message: Message) -> bool:
    """Return whether every text field is text. If a field is not UTF-8, protobuf's C parser returns
    its bytes.
    """
    for field, value in message.ListFields():
        values = value if field.is_repeated else (value,)
        if field.type == field.TYPE_STRING and not all(isinstance(text, str) for text in values):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_is_text, values)):
            return False
    return True


def _field_of_type() -> dict[int, str]:
    """Return the name of the field with the body by command type; the protocol gives that field
    the number of the type.
    """
    fields = {field.number: field.name for field in pb.BaseCommand.DESCRIPTOR.fields}
    return {value: fields[value] for value in pb.BaseCommand.Type.values()}


_FIELD_OF_TYPE = _field_of_type()
