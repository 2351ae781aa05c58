"""Runs of entries straight from the receive buffer are what single frames would have been, on
whatever arrives.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import Message

from ledgerlake.decode.scan import scan
from ledgerlake.errors import ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import Connection, EntriesReceived, EntryReceived, Event, Role
from ledgerlake.wire.entry import message_count
from ledgerlake.wire.framing import encode_frame
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import batch, bundle, single

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

LIMIT = 1_000_000


def connected_client(with_scan: bool) -> Connection:
    client = Connection(Role.CLIENT)
    client.send(commands.connect("test"))
    client.receive_data(commands.connected("test server", LIMIT))
    assert isinstance(client.next_event(), pb.CommandConnected)
    client.data_to_send()
    client.scan = scan if with_scan else None
    return client


def events(client: Connection, pieces: Iterable[bytes]) -> Iterator[Event]:
    for piece in pieces:
        client.receive_data(piece)
        while (event := client.next_event()) is not None:
            yield event


def outcome(pieces: list[bytes], with_scan: bool) -> tuple[list[Any], list[int], bytes]:
    """Return the entries of some bytes with the error that ended them, the permits, and the
    answers.
    """
    client = connected_client(with_scan)
    entries_and_error: list[Any] = []
    counts: list[int] = []
    try:
        for event in events(client, pieces):
            if isinstance(event, EntriesReceived):
                entries_and_error += event.each()
                counts += event.message_counts.tolist()
            elif isinstance(event, EntryReceived):
                entries_and_error.append(event)
                counts.append(message_count(event.entry))
            else:
                entries_and_error.append(
                    event.SerializePartialToString() if isinstance(event, Message) else event
                )
    except ProtocolError as error:
        entries_and_error.append((type(error), error.message))
    return entries_and_error, counts, client.data_to_send()


def run(*entries: bytes, **more: Any) -> EntriesReceived:
    received = scan(memoryview(bundle(entries, **more)), LIMIT)
    assert received is not None
    return received


def test_plain_entries_come_as_one_run_with_their_frames_untouched() -> None:
    entries = [single(b"a"), batch([b"b", b"c"]), single(b"d", partition_key="k")]
    received = run(*entries)
    assert [bytes(entry.entry) for entry in received.each()] == entries
    assert received.frames == bundle(entries)
    assert (received.position, received.last, received.message_count) == (
        Position(7, 0),
        Position(7, 2),
        4,
    )


@pytest.mark.parametrize(
    "next_frame",
    [
        pytest.param(commands.ping(), id="a command"),
        pytest.param(commands.message(2, 7, 2, single(b"x")), id="another consumer's entry"),
        pytest.param(commands.message(1, 8, 2, single(b"x")), id="another ledger's entry"),
        pytest.param(commands.message(1, 7, 1, single(b"x")), id="an entry again"),
        pytest.param(
            commands.message(1, 7, 2, chunk_entries(b"large message", 2)[0]), id="a chunk"
        ),
        pytest.param(commands.message(1, 7, 2, b"no entry"), id="what is no entry"),
        pytest.param(commands.message(1, 7, 2, single(b"x"))[:-1], id="half a frame"),
        pytest.param(b"\xff\xff\xff\xff\x00\x00\x00\x01", id="a frame over the limit"),
        pytest.param(
            b"\x00\x00\x00\x08\xff\xff\xff\xff", id="a command that passes its frame's end"
        ),
    ],
)
def test_a_run_ends_before(next_frame: bytes) -> None:
    plain = bundle([single(b"a"), single(b"b")])
    received = scan(memoryview(plain + next_frame), LIMIT)
    assert received is not None
    assert received.frames == plain


def test_there_is_no_run_where_the_first_frame_is_not_whole_or_no_entry() -> None:
    assert scan(memoryview(b""), LIMIT) is None
    assert scan(memoryview(bundle([single(b"a")])[:-1]), LIMIT) is None
    assert scan(memoryview(commands.ping() * 10), LIMIT) is None


def test_a_run_is_cut_at_positions() -> None:
    received = run(*(single(str(number).encode()) for number in range(5)))
    behind, before = received.after(Position(7, 1)), received.until(Position(7, 1))
    assert behind is not None
    assert before is not None
    assert [entry.entry_id for entry in behind.each()] == [2, 3, 4]
    assert [entry.entry_id for entry in before.each()] == [0, 1]
    assert bytes(before.frames) + bytes(behind.frames) == received.frames
    assert received.after(Position(6, 9)) is received
    assert received.until(Position(8, 0)) is received
    assert received.after(Position(7, 4)) is None
    assert received.after(Position(8, -1)) is None
    assert received.until(Position(6, 9)) is None


def odd_command(rng: random.Random) -> bytes:
    """A MESSAGE in a form that no broker uses today."""
    command = pb.BaseCommand(type=pb.BaseCommand.MESSAGE)
    command.message.consumer_id = 1
    command.message.message_id.ledger_id = rng.choice([7, 2**63, 2**63 - 1])
    command.message.message_id.entry_id = rng.randrange(100)
    command.message.message_id.partition = -1
    if rng.random() < 0.5:
        command.message.ack_set.extend([1, -1])
    if rng.random() < 0.5:
        command.message.redelivery_count = 3
    text = command.SerializeToString()
    if rng.random() < 0.5:
        text += b"\xf8\x7f\x01"  # a field that nobody knows
    return encode_frame(text, single(b"odd"))


def stream(rng: random.Random) -> bytes:
    """Frames as a broker might send them, now and then damaged."""
    frames = []
    entry_id = 0
    for _ in range(rng.randrange(1, 40)):
        entry_id += rng.choice([1, 1, 1, 1, 2, 0, -1])
        entry = rng.choice(
            [
                single(rng.randbytes(rng.randrange(200))),
                single(b"v", partition_key="k", properties=[pb.KeyValue(key="a", value="b")]),
                batch([b"x"] * rng.randrange(1, 5), codec=pb.LZ4),
                *chunk_entries(b"large message", 2),
                single(b"e", encryption_keys=[pb.EncryptionKeys(key="k", value=b"v")]),
                rng.randbytes(rng.randrange(60)),
                b"",
            ]
        )
        kind = rng.random()
        if kind < 0.85:
            ledger_id, consumer_id = (
                (7, 1) if rng.random() < 0.9 else (rng.randrange(6, 9), rng.randrange(1, 3))
            )
            frames.append(commands.message(consumer_id, ledger_id, max(entry_id, 0), entry))
        elif kind < 0.9:
            frames.append(odd_command(rng))
        elif kind < 0.95:
            frames.append(
                rng.choice([commands.ping(), commands.success(3), commands.close_consumer(9, 9)])
            )
        else:
            frames.append(commands.message(1, 7, max(entry_id, 0), single(rng.randbytes(300_000))))
    data = bytearray(b"".join(frames))
    if rng.random() < 0.4:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


@pytest.mark.parametrize("part", range(4))
def test_runs_and_single_frames_bring_the_same_from_random_streams(part: int) -> None:
    for seed in range(part * 300, part * 300 + 300):
        rng = random.Random(seed)
        data = stream(rng)
        cuts = sorted(rng.randrange(len(data)) for _ in range(rng.randrange(12)))
        pieces = [
            data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
        ]
        assert outcome(pieces, with_scan=True) == outcome(pieces, with_scan=False), f"seed {seed}"
