"""The three ways in which every parser is tested: whole, byte by byte, and with bytes behind that
must stay.
"""

from __future__ import annotations

from ledgerlake.wire.framing import Frame, FrameBuffer


def frames_three_ways(data: bytes, expected: list[bytes]) -> None:
    """``data`` gives frames with these raw bytes however it arrives."""
    assert _fed_whole(data) == expected
    assert _fed_byte_by_byte(data) == expected
    trailing = FrameBuffer()
    trailing.feed(data + b"\x00\x00")
    assert [frame.raw for frame in _drain(trailing)] == expected
    assert len(trailing) == 2


def _fed_whole(data: bytes) -> list[bytes]:
    buffer = FrameBuffer()
    buffer.feed(data)
    return [bytes(frame.raw) for frame in _drain(buffer)]


def _fed_byte_by_byte(data: bytes) -> list[bytes]:
    buffer = FrameBuffer()
    frames: list[bytes] = []
    for index in range(len(data)):
        buffer.feed(data[index : index + 1])
        frames += [bytes(frame.raw) for frame in _drain(buffer)]
    return frames


def _drain(buffer: FrameBuffer) -> list[Frame]:
    frames = []
    while (frame := buffer.next()) is not None:
        frames.append(frame)
    return frames
