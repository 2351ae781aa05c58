"""Targets of ``ledgerlake.wire``: frames, connections, entries, chunks, ids."""

from __future__ import annotations

import zlib
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message

from ledgerlake.client.topics import split_partition
from ledgerlake.client.transport import parse_service_url
from ledgerlake.decode.scan import scan
from ledgerlake.errors import (
    BrokerError,
    CorruptEntryError,
    FrameTooLargeError,
    LedgerlakeError,
    MalformedFrameError,
    ProtocolError,
    UsageError,
)
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits, lookup, value_schema
from ledgerlake.wire import entry as wire_entry
from ledgerlake.wire import message_id as ids
from ledgerlake.wire.chunks import parse_marker
from ledgerlake.wire.connection import (
    Connection,
    EntriesReceived,
    EntryReceived,
    LastMessageIdReceived,
    Role,
)
from ledgerlake.wire.framing import FrameBuffer, encode_frame
from ledgerlake.wire.last_message import LastEntry, last_message_id
from ledgerlake.wire.message_id import AFTER_ALL
from tests.fuzz import mutate, seeds
from tests.fuzz.engine import MIB, Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.fuzz.mutate import Rng

# A frame that has begun gets room for all of it, within the limit that the peers agreed on.
_LARGE_FRAME = 2 * limits.frame_limit_bytes(None)


def pieces_of(data: bytes) -> list[bytes]:
    """The same bytes in pieces of any size, which depend on nothing else."""
    places = [zlib.crc32(data, number) % (len(data) + 1) for number in range(6)]
    return [data[start:end] for start, end in pairwise([0, *sorted(places), len(data)])]


# Frames.

# Those that ``commands`` has no function for, since only a broker sends them.
_ANSWERS = [
    "type: LOOKUP_RESPONSE lookup_topic_response { request_id: 1 response: Connect "
    'broker_service_url: "pulsar://b:6650" message: "m" }',
    "type: PARTITIONED_METADATA_RESPONSE partition_metadata_response { request_id: 1 partitions: 3 "
    "response: Success }",
    "type: GET_TOPICS_OF_NAMESPACE_RESPONSE get_topics_of_namespace_response { request_id: 1 "
    'topics: "persistent://a/b/c-partition-1" topics: "d" }',
    'type: GET_SCHEMA_RESPONSE get_schema_response { request_id: 1 schema { name: "n" schema_data: '
    '"{}" type: Json properties { key: "a" value: "b" } } schema_version: "12345678" }',
    'type: AUTH_CHALLENGE auth_challenge { server_version: "b" challenge { auth_method_name: '
    '"token" auth_data: "x" } }',
    'type: PRODUCER_SUCCESS producer_success { request_id: 1 producer_name: "p" last_sequence_id: '
    "-1 }",
    "type: SEND_RECEIPT send_receipt { producer_id: 1 sequence_id: 2 message_id { ledger_id: 7 "
    "entry_id: 3 } }",
    "type: SEND_ERROR send_error { producer_id: 1 sequence_id: 2 error: MetadataError message: "
    '"no" }',
    'type: WATCH_TOPIC_UPDATE watch_topic_update { watcher_id: 1 new_topics: "a" deleted_topics: '
    '"b" topics_hash: "h" }',
]


@cache
def commands_of_a_broker() -> list[bytes]:
    entries = seeds.all_entries()
    position = ids.to_wire(ids.Position(7, 3))
    frames = [commands.encode(text_format.Parse(answer, pb.BaseCommand())) for answer in _ANSWERS]
    last = pb.CommandGetLastMessageIdResponse(last_message_id=position, request_id=1)
    command = pb.BaseCommand(
        type=pb.BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE, get_last_message_id_response=last
    )
    frames.append(commands.encode(command, entries[0]))
    frames += [
        commands.ping(),
        commands.pong(),
        commands.success(4),
        commands.error(1, pb.MetadataError, "why\nmore"),
    ]
    frames += [
        commands.close_consumer(1, 2),
        commands.connected("b", 5 * MIB),
        commands.connected("b", 2**31 - 1),
    ]
    frames += [commands.message(1, 7, number, entry) for number, entry in enumerate(entries[:12])]
    return frames


@cache
def commands_of_a_client() -> list[bytes]:
    return [
        commands.connect("c", "token", b"secret"),
        commands.partition_metadata("t", 1),
        commands.topics_of_namespace("a/b", 2),
        commands.watch_topics(1, "a/b", "persistent://a/b/.*", 3),
        commands.get_schema("t", b"\0" * 8, 4),
        commands.lookup("t", 5),
        commands.subscribe_reader("t", "s", 1, 6, ids.to_wire(ids.Position(7, 1)), False),
        commands.subscribe_durable("t", "s", 1, 7, True),
        commands.flow(1, 1000),
        commands.acknowledge_cumulative(1, 8, ids.to_wire(ids.Position(7, 1))),
        commands.unsubscribe(1, 9),
        commands.close_consumer(1, 10),
        commands.get_last_message_id(1, 11),
        commands.producer("t", 1, 12, "p"),
        commands.send(1, 3, 1, seeds.all_entries()[0]),
        commands.ping(),
    ]


def _stream(rng: Rng, seed_frames: Sequence[bytes]) -> bytes:
    frames = [_frame(rng, rng.choice(seed_frames)) for _ in range(rng.choice([1, 2, 3, 6]))]
    data = b"".join(frames)
    return mutate.some_bytes(rng, data, seed_frames) if rng.random() < 0.25 else data


def _frame(rng: Rng, frame: bytes) -> bytes:
    """A frame whose command or payload was changed; the lengths fit again."""
    end = 8 + int.from_bytes(frame[4:8], "big")
    command, payload = frame[8:end], frame[end:]
    kind = rng.random()
    if kind < 0.5:
        command = mutate.message(rng, command)
    elif kind < 0.6:
        payload = mutate.some_bytes(rng, payload)
    elif kind < 0.65:
        return (mutate.edge(rng) % 2**32).to_bytes(4, "big") + frame[4:]
    return encode_frame(command, payload)


def _judge_frames(data: bytes) -> int:
    def outcome(pieces: Sequence[bytes]) -> tuple[list[tuple[bytes, int]], LedgerlakeError | None]:
        buffer = FrameBuffer()
        read_frames: list[tuple[bytes, int]] = []
        try:
            for piece in pieces:
                buffer.feed(piece)
                while (frame := buffer.next()) is not None:
                    assert len(frame.command) + len(frame.payload) + 8 == len(frame.raw)
                    read_frames.append((bytes(frame.raw), frame.command_end))
        except ProtocolError as error:
            return read_frames, error
        return read_frames, None

    frames, error = outcome([data])
    for pieces in (
        [data[at : at + 1] for at in range(len(data[:2000]))] + [data[2000:]],
        pieces_of(data),
    ):
        other, other_error = outcome(pieces)
        assert (other, str(other_error)) == (frames, str(error))
    if error is not None:
        raise error
    return len(frames)


# Connections.


def _client(is_connected: bool = True, with_scan: bool = False) -> Connection:
    client = Connection(Role.CLIENT)
    client.send(commands.connect("fuzz"))
    if is_connected:
        client.receive_data(commands.connected("broker", 5 * MIB))
        client.next_event()
    client.data_to_send()
    client.scan = scan if with_scan else None
    return client


def _server() -> Connection:
    return Connection(Role.SERVER)


def _events(connection: Connection, pieces: Sequence[bytes]) -> Iterator[Any]:
    for piece in pieces:
        connection.receive_data(piece)
        while (event := connection.next_event()) is not None:
            if isinstance(event, pb.CommandConnect):
                connection.send(commands.connected("fuzz", 5 * MIB))
            yield event


def _heard(
    connection: Connection, pieces: Sequence[bytes]
) -> tuple[list[Any], list[int], bytes, LedgerlakeError | None]:
    """Return the events as values, the permits of entries, the answers, and the error that ended
    them.
    """
    event_values: list[Any] = []
    counts: list[int] = []
    try:
        for event in _events(connection, pieces):
            if isinstance(event, EntriesReceived):
                event_values += [_entry_value(received) for received in event.each()]
                counts += event.message_counts.tolist()
            elif isinstance(event, EntryReceived):
                event_values.append(_entry_value(event))
                counts.append(event.message_count)
            elif isinstance(event, LastMessageIdReceived):
                event_values.append(
                    (event.request_id, event.answer.SerializePartialToString(), event.entry)
                )
            else:
                event_values.append(event.SerializePartialToString())
                _use(event)
    except ProtocolError as error:
        return event_values, counts, connection.data_to_send(), error
    return event_values, counts, connection.data_to_send(), None


def _entry_value(event: EntryReceived) -> tuple[Any, ...]:
    assert bytes(event.entry) == bytes(event.frames)[event.entry_start :]
    return event.consumer_id, event.position, bytes(event.frames)


def _use(event: Message) -> None:
    """What the client's room does with the text of an answer."""
    try:
        if isinstance(event, pb.CommandLookupTopicResponse):
            step = lookup.step("t", event, 0)
            parse_service_url(step.broker_url)
        elif isinstance(event, pb.CommandGetSchemaResponse):
            hash(value_schema.from_wire(event.schema))
        elif isinstance(event, pb.CommandGetTopicsOfNamespaceResponse):
            assert all(isinstance(split_partition(topic)[1], int) for topic in event.topics)
        elif isinstance(event, pb.CommandError):
            str(lookup.refused("do it", event.error, event.message))
    except (BrokerError, ProtocolError, UsageError):
        pass


def _judge_client(data: bytes) -> int:
    fed_at_once = _heard(_client(), [data])
    _same(fed_at_once, _heard(_client(), pieces_of(data)))
    if fed_at_once[3] is not None:
        raise fed_at_once[3]
    _heard(_client(is_connected=False), [data])
    return len(fed_at_once[0])


def _judge_server(data: bytes) -> int:
    fed_at_once = _heard(_server(), [data])
    _same(fed_at_once, _heard(_server(), pieces_of(data)))
    if fed_at_once[3] is not None:
        raise fed_at_once[3]
    return len(fed_at_once[0])


def _judge_scan(data: bytes) -> int:
    with_scan = _heard(_client(with_scan=True), [data])
    _same(with_scan, _heard(_client(), [data]))
    _same(with_scan, _heard(_client(with_scan=True), pieces_of(data)))
    if with_scan[3] is not None:
        raise with_scan[3]
    return len(with_scan[0])


def _same(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert first[:3] == second[:3]
    assert str(first[3]) == str(second[3])


def _messages(rng: Rng) -> bytes:
    """What a broker sends a reader: most often one plain MESSAGE after another."""
    entries = seeds.plain_entries()
    frames = []
    for number in range(rng.choice([1, 2, 5, 12])):
        frame = commands.message(
            1, 7, number, rng.choice(entries) if rng.random() < 0.7 else seeds.an_entry(rng)
        )
        frames.append(_frame(rng, frame) if rng.random() < 0.15 else frame)
    data = b"".join(frames)
    return mutate.some_bytes(rng, data) if rng.random() < 0.3 else data


# Entries.


def _judge_entry(data: bytes) -> int:
    view = memoryview(data)
    counts = wire_entry.message_count(view), wire_entry.index_count(view)
    assert min(counts) >= 1
    entry = wire_entry.parse_entry(view)
    wire_entry.read_stamp(view)
    assert wire_entry.peek_metadata(view) == entry.metadata
    wire_entry.delivery_time_ms(entry)
    for field in ("producer_name", "uuid", "partition_key"):
        wire_entry.text_of(entry.metadata, field)
    payload, taken_count = entry.payload, 0
    count = 0 if entry.metadata.compression else entry.metadata.num_messages_in_batch
    for index in range(max(count, 0)):
        _, _, payload = wire_entry.take_message(payload, index, count)
        taken_count += 1
    return taken_count


def _judge_marker(data: bytes) -> int:
    return len(parse_marker(data, AFTER_ALL).positions)


def _a_marker(rng: Rng) -> bytes:
    parts = seeds.take_apart(seeds.large_entries()[-1])
    assert parts is not None
    if rng.random() < 0.3:
        parts = seeds.Parts(
            parts.broker, parts.has_checksum, mutate.message(rng, parts.metadata), parts.payload
        )
    if rng.random() < 0.8:
        listed_chunks = mutate.json_text(rng, parts.payload.decode()).encode(
            "utf-8", "surrogatepass"
        )
        parts = seeds.Parts(parts.broker, parts.has_checksum, parts.metadata, listed_chunks)
    return parts.put_together()


# The last entry of a compacted topic.


def _a_last_entry(rng: Rng) -> bytes:
    parts = seeds.take_apart(seeds.an_entry(rng, seeds.plain_entries()))
    if parts is None:
        return mutate.packed(rng.randbytes(8), rng.randbytes(20))
    has_payload = rng.random() < 0.8
    return mutate.packed(parts.metadata, *([parts.payload] if has_payload else []))


def _judge_last_entry(data: bytes) -> int:
    parts = mutate.unpacked(data)
    metadata, payload = parts[0] if parts else b"", parts[1] if len(parts) > 1 else None
    last_id = last_message_id(LastEntry(7, 3, -1, metadata, payload))
    assert last_id.position == ids.Position(7, 3)
    return 1


# Message ids.

_ID_TEXTS = [
    "7:3", "7:3:2", "0:-1", "7:3;7:9", "7:3:1;7:9:2", "080710031800", "08ffffffffffffffffff0110ffffffffffffffffff01",
    "CAcQAxgA", "CAcQAxgA==", "[8, -41, 2, 16, 0]", "[8, 215, 2, 16, 0]", "9223372036854775807:9223372036854775807",
]  # fmt: skip


def _an_id_text(rng: Rng) -> bytes:
    if rng.random() < 0.4:
        data = mutate.message(rng, _id_bytes(rng))
        word = rng.choice(
            [
                data.hex(),
                str(list(data)),
                str([byte - 256 if byte > 127 else byte for byte in data]),
            ]
        )
    else:
        word = mutate.text(rng, rng.choice(_ID_TEXTS), _ID_TEXTS)
    return word.encode("utf-8", "surrogatepass")


def _id_bytes(rng: Rng) -> bytes:
    data = pb.MessageIdData(
        ledger_id=7, entry_id=3, partition=2, batch_index=rng.choice([-1, 0, 5]), batch_size=9
    )
    if rng.random() < 0.5:
        data.first_chunk_message_id.ledger_id, data.first_chunk_message_id.entry_id = 7, 1
        data.ClearField("batch_index")
    return data.SerializeToString()


def _judge_id_text(data: bytes) -> int:
    message_id = ids.parse_message_id(data.decode("utf-8", "surrogatepass"))
    parsed_again = ids.parse_message_id(str(message_id))
    assert str(parsed_again) == str(message_id)
    return 1


def _judge_id_bytes(data: bytes) -> int:
    try:
        message_id = ids.from_bytes(data)
    except DecodeError as error:
        # Documented of this one function; text is read by another, which says it in ours.
        raise UsageError(str(error)) from None
    assert ids.from_bytes(ids.to_bytes(message_id)) == message_id
    return 1


TARGETS = [
    Target(
        "frames", "wire.framing", lambda rng: _stream(rng, commands_of_a_broker()), _judge_frames,
        (FrameTooLargeError, MalformedFrameError), memory_bytes=_LARGE_FRAME + 8 * MIB,
    ),
    Target(
        "client", "wire.connection as a client, and what is made of answers",
        lambda rng: _stream(rng, commands_of_a_broker()), _judge_client,
        (FrameTooLargeError, MalformedFrameError), memory_bytes=2 * limits.frame_limit_bytes(2**31) + 8 * MIB,
    ),
    Target(
        "server", "wire.connection as a server", lambda rng: commands.connect("c") * (rng.random() < 0.8) + _stream(rng, commands_of_a_client()),
        _judge_server, (FrameTooLargeError, MalformedFrameError), memory_bytes=_LARGE_FRAME + 8 * MIB,
    ),
    Target(
        "scan", "decode.scan against wire.connection, frame by frame", _messages, _judge_scan,
        (FrameTooLargeError, MalformedFrameError), memory_bytes=_LARGE_FRAME + 16 * MIB,
    ),
    Target("entry", "wire.entry", seeds.an_entry, _judge_entry, (CorruptEntryError,)),
    Target("marker", "wire.chunks: the list of a large message's chunks", _a_marker, _judge_marker, (CorruptEntryError,)),
    Target("last-entry", "wire.last_message (PIP-429)", _a_last_entry, _judge_last_entry, (CorruptEntryError,)),
    Target("id-text", "wire.message_id: ids as text", _an_id_text, _judge_id_text, (UsageError,)),
    Target("id-bytes", "wire.message_id: serialised ids", lambda rng: mutate.message(rng, _id_bytes(rng)), _judge_id_bytes, (UsageError,)),
]  # fmt: skip
