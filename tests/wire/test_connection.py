"""The connection in both roles, talking to itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.errors import FrameTooLargeError, MalformedFrameError, ProtocolError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands, limits
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
    assert (event.consumer_id, event.ledger_id, event.entry_id, bytes(event.entry)) == (
        3,
        7,
        8,
        b"the entry",
    )


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


def topics_frame(size: int) -> bytes:
    """A list of topics whose frame announces so many bytes."""

    def command(name_bytes: int) -> pb.BaseCommand:
        body = pb.CommandGetTopicsOfNamespaceResponse(request_id=1, topics=["x" * name_bytes])
        kind = pb.BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE
        return pb.BaseCommand(type=kind, get_topics_of_namespace_response=body)

    overhead = 4 + command(size - 50).ByteSize() - (size - 50)
    return commands.encode(command(size - overhead))


def client_of(max_message_bytes: int) -> Connection:
    client = Connection(Role.CLIENT)
    client.send(commands.connect("test"))
    client.receive_data(commands.connected("test server", max_message_bytes))
    assert isinstance(client.next_event(), pb.CommandConnected)
    return client


@pytest.mark.parametrize("max_message_bytes", [1000, limits.DEFAULT_MAX_MESSAGE_BYTES])
def test_a_list_of_topics_may_be_larger_than_a_message(max_message_bytes: int) -> None:
    client = client_of(max_message_bytes)
    client.receive_data(topics_frame(limits.MAX_COMMAND_BYTES))
    event = client.next_event()
    assert isinstance(event, pb.CommandGetTopicsOfNamespaceResponse)
    client.receive_data(topics_frame(limits.MAX_COMMAND_BYTES + 1)[:8])
    with pytest.raises(
        FrameTooLargeError, match="a frame of 33554433 bytes, over the limit of 33554432"
    ) as raised:
        client.next_event()
    assert raised.value.is_command


def test_a_command_may_be_as_large_as_the_frames_of_a_broker_with_large_messages() -> None:
    max_message_bytes = 2 * limits.MAX_COMMAND_BYTES
    client = client_of(max_message_bytes)
    client.receive_data(topics_frame(max_message_bytes + limits.FRAME_PADDING_BYTES))
    assert isinstance(client.next_event(), pb.CommandGetTopicsOfNamespaceResponse)


@pytest.mark.parametrize("size", [limits.MAX_COMMAND_BYTES, limits.frame_limit_bytes(None) + 1])
def test_before_the_handshake_a_command_is_no_larger_than_a_frame_by_default(size: int) -> None:
    client = Connection(Role.CLIENT)
    client.send(commands.connect("test"))
    client.receive_data(topics_frame(size)[:8])
    with pytest.raises(FrameTooLargeError, match=f"over the limit of {5 * 2**20 + 10 * 1024}"):
        client.next_event()


def test_a_frame_with_a_payload_is_never_larger_than_the_announced_size() -> None:
    client = client_of(1000)
    client.receive_data(encode_frame(b"x" * 20_000, b"payload"))
    with pytest.raises(FrameTooLargeError) as raised:
        client.next_event()
    assert not raised.value.is_command


def test_a_command_without_its_body_is_malformed() -> None:
    client, _ = connected_pair()
    client.receive_data(
        encode_frame(pb.BaseCommand(type=pb.BaseCommand.SUCCESS).SerializePartialToString())
    )
    with pytest.raises(MalformedFrameError, match="lacks its success"):
        client.next_event()


def test_a_message_without_a_usable_id_is_malformed() -> None:
    client, _ = connected_pair()
    client.receive_data(
        encode_frame(
            pb.BaseCommand(type=pb.BaseCommand.MESSAGE).SerializePartialToString(), b"entry"
        )
    )
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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(
            pb.BaseCommand(type=pb.BaseCommand.ERROR, error={"request_id": 1, "message": "why"}),
            id="a field",
        ),
        pytest.param(
            pb.BaseCommand(
                type=pb.BaseCommand.GET_TOPICS_OF_NAMESPACE_RESPONSE,
                get_topics_of_namespace_response={"request_id": 1, "topics": ["why"]},
            ),
            id="one of several",
        ),
        pytest.param(
            pb.BaseCommand(
                type=pb.BaseCommand.GET_SCHEMA_RESPONSE,
                get_schema_response={
                    "request_id": 1,
                    "schema": {"name": "why", "schema_data": b"", "type": 0},
                },
            ),
            id="one inside another message",
        ),
    ],
)
def test_an_answer_whose_text_is_not_utf_8_breaks_the_protocol(command: pb.BaseCommand) -> None:
    text = command.SerializePartialToString().replace(b"why", b"\xff\xfe\xfd")
    client, _ = connected_pair()
    client.receive_data(encode_frame(text))
    with pytest.raises(MalformedFrameError, match="UTF-8"):
        client.next_event()
