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
from ledgerlake.client.consumers import grant
from ledgerlake.client.session import Session
from ledgerlake.errors import DeadlineError, ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
from ledgerlake.wire.connection import EntryReceived, LastMessageIdReceived
from ledgerlake.wire.framing import FrameBuffer
from tests.entries import batch, single

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
        session = Session(url, connect_timeout_s=5, request_timeout_s=20, authentication=Authentication("basic", "a:b"))
        session.close()
    kinds = []
    while (frame := received.next()) is not None:
        kinds.append(pb.BaseCommand.FromString(frame.command).type)
    assert kinds[0] == pb.BaseCommand.CONNECT
    # As many as the network cut the bytes into.
    assert 1 <= kinds.count(pb.BaseCommand.AUTH_RESPONSE) < 10


def test_entries_beyond_the_permits_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_EXCESS_BYTES", 4 * MIB)
    sent_bytes = 0

    def serve(accepted: socket.socket) -> None:
        nonlocal sent_bytes
        accepted.sendall(commands.connected("x", 5 * MIB))
        accepted.recv(65536)
        entry = single(bytes(64 * 1024))
        for number in range(2000):
            frame = commands.message(7, 1, number, entry)
            accepted.sendall(frame)
            sent_bytes += len(frame)
        accepted.sendall(last_message(1))

    with broker(serve) as url:
        session = Session(url, connect_timeout_s=5, request_timeout_s=60)
        consumer = session.channels.consumers[7] = Consumer(7)
        with pytest.raises(ProtocolError, match=f"without permits, over the limit of {4 * MIB}"):
            session.request(
                LastMessageIdReceived, "tell the last message", partial(commands.get_last_message_id, 7), consumer
            )
    # What the network holds comes in addition.
    assert sent_bytes < 64 * MIB


def last_message(request_id: int) -> bytes:
    body = pb.CommandGetLastMessageIdResponse(request_id=request_id)
    body.last_message_id.ledger_id = body.last_message_id.entry_id = 1
    command = pb.BaseCommand(type=pb.BaseCommand.GET_LAST_MESSAGE_ID_RESPONSE, get_last_message_id_response=body)
    return commands.encode(command)


def received(number: int, entry: bytes) -> EntryReceived:
    return EntryReceived(7, 1, number, entry, 0)


@pytest.mark.parametrize("reads", [False, True])
def test_only_unread_entries_count(monkeypatch: pytest.MonkeyPatch, reads: bool) -> None:
    entry = batch([b"x"] * 100)
    monkeypatch.setattr(limits, "MAX_EXCESS_BYTES", 10 * len(entry))
    channels = Channels()
    consumer = channels.consumers[7] = Consumer(7)
    # The broker reads ten entries at once, and the permits are used up by the first of them.
    consumer.permits = 100
    taken = 0
    with contextlib.suppress(ProtocolError):
        for number in range(100):
            channels.take(received(number, entry))
            taken += 1
            if reads:
                consumer.entries.clear()
    assert taken == (100 if reads else 11)


def test_permits_that_are_granted_are_not_excess() -> None:
    def serve(accepted: socket.socket) -> None:
        accepted.sendall(commands.connected("x", 5 * MIB))
        drain(accepted)

    with broker(serve) as url:
        session = Session(url, connect_timeout_s=5, request_timeout_s=5)
        consumer = Consumer(7)
        grant(session, consumer, 3)
        for number in range(3):
            consumer.add(received(number, single(b"x")))
        assert consumer.excess_bytes == 0
        consumer.add(received(3, single(b"x")))
        assert consumer.excess_bytes > 0
        session.close()
