"""Frames: three outcomes, and no length believed unchecked."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.errors import FrameTooLargeError, MalformedFrameError, ProtocolError
from ledgerlake.wire.framing import FrameBuffer, encode_frame
from tests.parsing import frames_three_ways


def test_frames_are_found_however_the_bytes_arrive() -> None:
    frames = [encode_frame(b"command"), encode_frame(b"c", b"payload"), encode_frame(b"")]
    frames_three_ways(b"".join(frames), frames)


def test_a_frame_knows_its_command_and_its_payload() -> None:
    buffer = FrameBuffer()
    buffer.feed(encode_frame(b"command", b"payload"))
    frame = buffer.next()
    assert frame is not None
    assert (frame.command, bytes(frame.payload)) == (b"command", b"payload")


def test_a_length_over_the_limit_is_refused_before_its_bytes_arrive() -> None:
    buffer = FrameBuffer(limit_bytes=100)
    buffer.feed(struct.pack(">I", 101))
    with pytest.raises(FrameTooLargeError, match="101 bytes, over the limit of 100"):
        buffer.next()


def test_a_frame_at_the_limit_passes() -> None:
    buffer = FrameBuffer(limit_bytes=100)
    buffer.feed(encode_frame(b"c", b"x" * 95))
    assert buffer.next() is not None


def test_a_command_that_passes_its_frame_is_refused() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack(">II", 10, 7))
    with pytest.raises(MalformedFrameError, match="does not fit"):
        buffer.next()


def test_a_frame_too_small_for_a_command_is_refused() -> None:
    buffer = FrameBuffer()
    buffer.feed(struct.pack(">I", 3))
    with pytest.raises(MalformedFrameError, match="too small"):
        buffer.next()


def test_after_an_error_framing_stays_lost() -> None:
    buffer = FrameBuffer(limit_bytes=100)
    buffer.feed(struct.pack(">I", 101))
    with pytest.raises(FrameTooLargeError):
        buffer.next()
    buffer.feed(encode_frame(b"fine"))
    with pytest.raises(FrameTooLargeError):
        buffer.next()


def test_many_frames_do_not_grow_the_buffer() -> None:
    buffer = FrameBuffer()
    frame = encode_frame(b"c", b"x" * 1000)
    for _ in range(5000):
        buffer.feed(frame)
        assert buffer.next() is not None
    assert len(buffer) == 0


@given(st.binary(max_size=200))
def test_any_bytes_give_frames_or_a_protocol_error_and_nothing_else(data: bytes) -> None:
    buffer = FrameBuffer(limit_bytes=64)
    buffer.feed(data)
    try:
        while buffer.next() is not None:
            pass
    except ProtocolError:
        pass


LARGE = encode_frame(b"command", b"x" * 300_000)


def test_a_large_frame_that_arrives_in_parts_is_received_in_place() -> None:
    buffer = FrameBuffer()
    assert buffer.wanted() is None
    buffer.feed(LARGE[:1000])
    assert buffer.wanted() is None
    frames = [buffer.next()]
    for start in range(1000, len(LARGE), 50_000):
        target = buffer.wanted()
        assert target is not None
        count = min(50_000, len(target))
        target[:count] = LARGE[start : start + count]
        buffer.filled(count)
        frames.append(buffer.next())
    assert [frame is not None for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1] is not None
    assert frames[-1].raw == LARGE
    assert buffer.wanted() is None


@pytest.mark.parametrize("step", [1, 4, 7, 8, 1000, 299_999, 300_050, 700_000])
def test_large_and_small_frames_are_found_however_they_arrive(step: int) -> None:
    frames = [
        encode_frame(b"a"),
        LARGE,
        encode_frame(b"b", b"payload"),
        LARGE,
        LARGE,
        encode_frame(b"c"),
    ]
    data = b"".join(frames)
    buffer, read_frames = FrameBuffer(), []
    edge = 20 if step < 100 else len(data)
    cuts = [*range(0, edge, step), *range(edge, len(data), 100_000), len(data)]
    for start, stop in itertools.pairwise(cuts):
        buffer.feed(data[start:stop])
        while (frame := buffer.next()) is not None:
            read_frames.append((bytes(frame.raw), frame.command, len(frame.payload)))
    assert [raw for raw, _, _ in read_frames] == frames
    assert [command for _, command, _ in read_frames] == [
        b"a",
        b"command",
        b"b",
        b"command",
        b"command",
        b"c",
    ]
    assert len(buffer) == 0
