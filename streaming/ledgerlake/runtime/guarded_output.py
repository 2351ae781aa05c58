"""Standard output and standard error, to which texts from outside go as plain text.

Producers choose keys, topics and values, and brokers choose error texts. Escape sequences in them
can change a terminal's title, its clipboard and the text on its screen. So a command writes through
``guarded_output``, whatever it prints, logs or raises. Each write is one line at most: a newline
within it is escaped too, so that no text can look like a line of its own.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from collections.abc import Iterator


def printable(text: str) -> str:
    """Return a text that came from outside as one line, without control characters."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_line(line: str) -> str:
    """Return a line as ``printable`` does, with its tabs, as lines of stack traces begin
    with one.
    """
    return "\t".join(map(printable, line.split("\t")))


def _escaped(char: str) -> str:
    # JSON's encoder leaves this character as it is, and has no other form for it.
    return "\\u007f" if char == "\x7f" else char.encode("unicode_escape").decode()


class GuardedStream:
    """A stream of text that escapes what a terminal would obey."""

    def __init__(self, raw: TextIO) -> None:
        self.raw = raw

    def write(self, text: str) -> int:
        """Write at most one line."""
        line = text.removesuffix("\n")
        self.raw.write(printable_line(line) + text[len(line) :])
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        """Write several lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Guard standard output and standard error of this process while the block runs."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast("TextIO", GuardedStream(unguarded(stream))) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream behind a guarded one, for a screen whose texts are already printable."""
    return stream.raw if isinstance(stream, GuardedStream) else stream
