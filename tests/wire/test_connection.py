"""The connection in both roles, talking to itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.errors import FrameTooLargeError, MalformedFrameError, ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.connection import Connection, EntryReceived, Role, State
from ledgerlake.wire.framing import encode_frame


def connected_pair() -> tuple[Connection, Connection]:
    client, server = Connection(Role.CLIENT), Connection(Role.SERVER)
    client.send(commands.connect("test"))
    server.receive_data(client.data_to_send())
    assert isinstance(server.next_event(), pb.CommandConnect)
    server.send(commands.connected("test server", 1000))
    client.receive_data(server.data_to_send())
    assert isinstance(client.next_event(), pb.CommandConnected)
    return client, server


def test_connect_is_what_the_java_client_would_accept() -> None:
    command = pb.BaseCommand.FromString(commands.connect("py")[8:])
    assert command.connect.feature_flags.supports_broker_entry_metadata
    assert command.connect.protocol_version >= 18


def test_flow_is_byte_for_byte_the_java_clients() -> None:
    assert commands.flow(1, 1000).hex() == "0000000d00000009080b5a05080110e807"


def test_both_ends_are_ready_after_the_handshake() -> None:
    client, server = connected_pair()
    assert (client.state, server.state) == (State.READY, State.READY)


def test_an_entry_arrives_with_its_position_and_untouched_bytes() -> None:
    client, server = connected_pair()
    server.send(commands.message(3, 7, 8, b"the entry"))
    client.receive_data(server.data_to_send())
    event = client.next_event()
    assert isinstance(event, EntryReceived)
    assert (event.consumer_id, event.ledger_id, event.entry_id, bytes(event.entry)) == (3, 7, 8, b"the entry")


def test_ping_is_answered_and_is_no_event() -> None:
    client, server = connected_pair()
    client.receive_data(commands.ping())
    assert client.next_event() is None
    server.receive_data(client.data_to_send())
    assert isinstance(server.next_event(), pb.CommandPong)


def test_a_command_of_an_unknown_type_is_skipped() -> None:
    client, _ = connected_pair()
    client.receive_data(encode_frame(b"\x08\x63") + commands.success(5))
    event = client.next_event()
    assert isinstance(event, pb.CommandSuccess)


def test_a_command_that_the_peer_may_not_send_ends_the_connection() -> None:
    client, _ = connected_pair()
    client.receive_data(commands.flow(1, 1))
    with pytest.raises(MalformedFrameError, match="the peer sent FLOW to a client that is ready"):
        client.next_event()
    assert client.state is State.CLOSED


def test_nothing_but_the_handshake_is_legal_before_it_is_done() -> None:
    client = Connection(Role.CLIENT)
    client.send(commands.connect("test"))
    client.receive_data(commands.success(1))
    with pytest.raises(MalformedFrameError):
        client.next_event()


def test_the_announced_message_size_bounds_later_frames() -> None:
    client, _ = connected_pair()
    client.receive_data(commands.message(1, 1, 1, b"x" * 20_000))
    with pytest.raises(FrameTooLargeError):
        client.next_event()


def test_a_command_without_its_body_is_malformed() -> None:
    client, _ = connected_pair()
    client.receive_data(encode_frame(pb.BaseCommand(type=pb.BaseCommand.SUCCESS).SerializePartialToString()))
    with pytest.raises(MalformedFrameError, match="lacks its success"):
        client.next_event()


def test_a_message_without_a_usable_id_is_malformed() -> None:
    client, _ = connected_pair()
    client.receive_data(encode_frame(pb.BaseCommand(type=pb.BaseCommand.MESSAGE).SerializePartialToString(), b"entry"))
    with pytest.raises(MalformedFrameError, match="message id"):
        client.next_event()


@given(st.lists(st.binary(max_size=40), max_size=8), st.sampled_from(list(Role)))
def test_no_bytes_raise_anything_but_a_protocol_error(pieces: list[bytes], role: Role) -> None:
    connection = Connection(role)
    connection.state = State.READY
    for piece in pieces:
        connection.receive_data(encode_frame(piece) + piece)
        try:
            while connection.next_event() is not None:
                pass
        except ProtocolError:
            return
