"""Frames: commands and entries in one byte stream.

    [total u32] [command size u32] [command] [payload ...]

All integers are big-endian; ``total`` is the number of bytes after it. A frame without payload has
``total == 4 + command size``. The bytes after the command are the payload, for MESSAGE a raw entry.

Rules kept here:
  - ``FrameBuffer.next`` has three outcomes: a frame, None (more bytes are needed), or a
    ProtocolError.
  - A length is checked against the limit before that many bytes are awaited or allocated. A frame
    without payload has its own limit, since a list of topics may be larger than any message.
  - After a ProtocolError the buffer returns no more frames.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ledgerlake.errors import FrameTooLargeError, MalformedFrameError, ProtocolError
from ledgerlake.wire import limits

_U32 = struct.Struct(">I")
_SIZES = struct.Struct(">II")

# Taken bytes stay at the front of the buffer until there are this many, so that one memmove serves
# many frames.
_COMPACT_AFTER_BYTES = 1 << 20

# From this size on an incomplete frame gets its own buffer.
_LARGE_FRAME_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """A complete frame. ``raw`` is all of it, including the leading total; the command is
    ``raw[8:command_end]``.
    """

    raw: bytes | bytearray
    command_end: int

    @property
    def command(self) -> bytes:
        return bytes(memoryview(self.raw)[8 : self.command_end])

    @property
    def payload(self) -> memoryview:
        return memoryview(self.raw)[self.command_end :]


@dataclass
class _LargeFrame:
    """A frame that is still arriving: a buffer for all of it, and the number of bytes received."""

    raw: bytearray
    command_end: int
    filled: int = 0


class FrameBuffer:
    """Received bytes that are not frames yet.

    An incomplete large frame within the limit gets its own buffer. The receiver may write directly
    into it (``wanted``, ``filled``), so that its bytes are not copied again; ``feed`` works too.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = (
            limit_bytes if limit_bytes is not None else limits.frame_limit_bytes(None)
        )
        self.command_limit_bytes = self.limit_bytes
        self._bytes = bytearray()
        self._start = 0
        self._large: _LargeFrame | None = None
        self._broken: ProtocolError | None = None

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        wanted = self.wanted()
        if wanted is None:
            self._bytes += data
            return
        count = min(len(wanted), len(data))
        wanted[:count] = data[:count]
        self.filled(count)
        self._bytes += data[count:]

    def wanted(self) -> memoryview | None:
        """Return the buffer for the rest of a large frame; None if no large frame is incomplete."""
        if self._large is None or self._large.filled == len(self._large.raw):
            return None
        return memoryview(self._large.raw)[self._large.filled :]

    def filled(self, count: int) -> None:
        """Note that so many bytes were written to ``wanted``."""
        assert self._large is not None
        self._large.filled += count

    def __len__(self) -> int:
        return (
            len(self._bytes) - self._start + (self._large.filled if self._large is not None else 0)
        )

    def next(self) -> Frame | None:
        """Return the next frame, or None if it is incomplete.

        Raises:
            FrameTooLargeError: the announced length is above the limit.
            MalformedFrameError: the command does not fit into its frame.
        """
        if self._broken is not None:
            raise self._broken
        if self._large is not None:
            return self._take_large()
        available = len(self)
        if available < 4:
            return None
        (total,) = _U32.unpack_from(self._bytes, self._start)
        if total > max(self.limit_bytes, self.command_limit_bytes):
            raise self._too_large(total, None if available < 8 else self._command_size())
        if total < 4:
            raise self._break(
                MalformedFrameError(
                    f"the peer announced a frame of {total} bytes, too small for a command"
                )
            )
        if available < 8:
            return None
        command_size = self._command_size()
        if command_size > total - 4:
            raise self._break(
                MalformedFrameError(
                    f"a command of {command_size} bytes does not fit into its frame of {total} "
                    "bytes"
                )
            )
        if total > self.limit_bytes and command_size < total - 4:
            raise self._too_large(total, command_size)
        if available >= 4 + total:
            return self._take(4 + total, 8 + command_size)
        if total >= _LARGE_FRAME_BYTES:
            self._begin_large(4 + total, 8 + command_size)
        return None

    def unread(self) -> memoryview:
        """Return a view of the received bytes that are not taken yet, to find several frames at
        once. Release the view before the next call.

        It is empty while a large frame is incomplete.
        """
        nothing = self._large is not None or self._broken is not None
        return memoryview(self._bytes)[len(self._bytes) if nothing else self._start :]

    def drop(self, size: int) -> None:
        """Remove so many bytes, which are complete frames, from the front."""
        self._start += size
        if self._start == len(self._bytes):
            self._bytes.clear()
            self._start = 0
        elif self._start > _COMPACT_AFTER_BYTES:
            del self._bytes[: self._start]
            self._start = 0

    def _command_size(self) -> int:
        size: int = _U32.unpack_from(self._bytes, self._start + 4)[0]
        return size

    def _too_large(self, total: int, command_size: int | None) -> ProtocolError:
        is_command = command_size == total - 4
        limit_bytes = (
            max(self.limit_bytes, self.command_limit_bytes) if is_command else self.limit_bytes
        )
        message = f"the peer announced a frame of {total} bytes, over the limit of {limit_bytes}"
        return self._break(FrameTooLargeError(message, is_command=is_command))

    def _begin_large(self, size: int, command_end: int) -> None:
        """Allocate a buffer for the incomplete frame, whose size was checked."""
        self._large = _LargeFrame(bytearray(size), command_end)
        arrived = self._bytes[self._start :]
        self._bytes.clear()
        self._start = 0
        self.feed(arrived)

    def _take_large(self) -> Frame | None:
        assert self._large is not None
        if self._large.filled < len(self._large.raw):
            return None
        frame = Frame(self._large.raw, self._large.command_end)
        self._large = None
        return frame

    def _take(self, size: int, command_end: int) -> Frame:
        with memoryview(self._bytes) as view:
            raw = bytes(view[self._start : self._start + size])
        self.drop(size)
        return Frame(raw, command_end)

    def _break(self, error: ProtocolError) -> ProtocolError:
        self._broken = error
        return error


def encode_frame(command: bytes, payload: bytes = b"") -> bytes:
    """Return a frame around an encoded command and an optional payload."""
    return _SIZES.pack(4 + len(command) + len(payload), len(command)) + command + payload
