"""A broker that sends without end: the client's memory and its deadlines hold."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from ledgerlake.client.auth import Authentication
from ledgerlake.client.channels import Channels, Consumer
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.client.session import Session
from ledgerlake.errors import DeadlineError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
from ledgerlake.wire.connection import EntryReceived, LastMessageIdReceived
from ledgerlake.wire.framing import FrameBuffer
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.entries import single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1024 * 1024

# A flood ends by itself in the end, so that a test of a client without a limit fails and does not
# run for ever.
FLOOD_S = 20.0


@contextlib.contextmanager
def broker(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve one connection; yield the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                accepted, _ = listener.accept()
                with accepted:
                    serve(accepted)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"pulsar://127.0.0.1:{listener.getsockname()[1]}"
    thread.join(FLOOD_S)


def challenge() -> bytes:
    data = pb.AuthData(auth_method_name="token", auth_data=b"")
    body = pb.CommandAuthChallenge(server_version="x", challenge=data)
    return commands.encode(pb.BaseCommand(type=pb.BaseCommand.AUTH_CHALLENGE, auth_challenge=body))


def drain(accepted: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while accepted.recv(65536):
            pass


@pytest.mark.parametrize("frame", [challenge(), commands.ping()], ids=["challenges", "pings"])
def test_a_handshake_with_endless_commands_ends_at_its_deadline(frame: bytes) -> None:
    def serve(accepted: socket.socket) -> None:
        threading.Thread(target=drain, args=(accepted,), daemon=True).start()
        until_s = time.monotonic() + FLOOD_S
        while time.monotonic() < until_s:
            accepted.sendall(frame * 500)
        accepted.sendall(commands.connected("x", 5 * MIB))

    token = Authentication("token", "token:x")
    with broker(serve) as url, pytest.raises(DeadlineError, match="did not greet us"):
        Session(url, connect_timeout_s=5, request_timeout_s=0.5, authentication=token)


def test_challenges_that_arrive_together_get_one_answer() -> None:
    received = FrameBuffer()

    def serve(accepted: socket.socket) -> None:
        accepted.sendall(challenge() * 1000 + commands.connected("x", 5 * MIB))
        with contextlib.suppress(OSError):
            while data := accepted.recv(65536):
                received.feed(data)

    with broker(serve) as url:
        session = Session(
            url,
            connect_timeout_s=5,
            request_timeout_s=20,
            authentication=Authentication("basic", "a:b"),
        )
        session.close()
    kinds = []
    while (frame := received.next()) is not None:
        kinds.append(pb.BaseCommand.FromString(frame.command).type)
    assert kinds[0] == pb.BaseCommand.CONNECT
    # As many as the network cut the bytes into.
    assert 1 <= kinds.count(pb.BaseCommand.AUTH_RESPONSE) < 10


def test_what_waits_for_other_readers_is_bounded_in_bytes_and_does_not_hide_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 4 * MIB)
    entry = single(bytes(64 * 1024))
    closed_ids: list[int] = []

    def serve(accepted: socket.socket) -> None:
        accepted.sendall(commands.connected("x", 5 * MIB))
        commands_of_client = FrameBuffer()
        while not closed_ids:
            for number in range(100):
                accepted.sendall(
                    commands.message(7, 1, number, entry) + commands.message(8, 1, number, entry)
                )
            commands_of_client.feed(accepted.recv(65536))
            while (frame := commands_of_client.next()) is not None:
                command = pb.BaseCommand.FromString(frame.command)
                if command.type == pb.BaseCommand.CLOSE_CONSUMER:
                    closed_ids.append(command.close_consumer.consumer_id)
        # Entries that were under way before the broker got the command.
        accepted.sendall(commands.message(7, 1, 1000, entry) * 100 + last_message(1))
        drain(accepted)

    with broker(serve) as url:
        session = Session(url, connect_timeout_s=5, request_timeout_s=20)
        for consumer_id in (7, 8):
            session.channels.consumers[consumer_id] = Consumer(consumer_id)
        held_bytes: list[int] = []
        pump = session._pump

        def counting_pump(timeout_s: float) -> None:
            pump(timeout_s)
            held_bytes.append(session.channels.unread_bytes())

        monkeypatch.setattr(session, "_pump", counting_pump)
        session.request(
            LastMessageIdReceived, "tell the last message", partial(commands.get_last_message_id, 7)
        )
        session.close()
    assert max(held_bytes) < 5 * MIB
    assert set(closed_ids) <= {7, 8}


def test_a_reader_whose_entries_were_dropped_while_another_answer_was_awaited_gets_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", MIB)
    with Peer() as peer:
        peer.add(*[single(bytes(64 * 1024)) for _ in range(100)])
        cluster = Cluster(ClientSettings(peer.url))
        reader = EntryReader(cluster, TOPIC, BEFORE_ALL)
        entry_ids: list[int] = []
        while len(entry_ids) < 100:
            entry = reader.next(10.0)
            assert entry is not None
            entry_ids.append(entry.entry_id)
            if len(entry_ids) % 30 == 1:
                # The answer comes behind all entries for which there are permits.
                cluster.topic_partitions(TOPIC)
                assert reader.session is None or reader.session.channels.unread_bytes() <= MIB
        reader.close()
        cluster.close()
    assert entry_ids == list(range(100))
    assert peer.requests.count("CommandSubscribe") > 1


@pytest.mark.parametrize("entries_each", [1, 2])
def test_a_consumer_keeps_a_single_entry_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, entries_each: int
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", MIB)
    channels = Channels()
    for consumer_id in range(4):
        channels.consumers[consumer_id] = Consumer(consumer_id)
        for number in range(entries_each):
            channels.take(EntryReceived(consumer_id, 1, number, bytes(MIB), 0))
    assert len(channels.drop_excess()) == (0 if entries_each == 1 else 4)


def last_message(request_id: int) -> bytes:
    body = pb.CommandGetLastMessageIdResponse(request_id=request_id)
    body.last_message_id.ledger_id = body.last_message_id.entry_id = 1
    command = pb.BaseCommand(
        type=pb.BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE, get_last_message_id_response=body
    )
    return commands.encode(command)
