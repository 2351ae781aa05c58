"""The terminal of this process and of those that it starts, for a screen that is drawn again and
again.

A screen goes back over its own lines before it is drawn anew. What another process writes in
between, as the JVM and Spark's Python workers do, would move it, and be erased. So file descriptor
2 becomes a pipe before they start. They inherit it, and a thread of this process writes each line
above the screen.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from typing import TYPE_CHECKING, TextIO

from ledgerlake.runtime.guarded_output import printable_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_STDERR = 2
_DRAIN_S = 1.0


class SharedTerminal:
    """Has the terminal as ``out``. Each line that this process or one below it writes to standard
    error goes to the terminal, or to the function that ``show_lines`` was given.
    """

    def __init__(self) -> None:
        self.out: TextIO = os.fdopen(os.dup(_STDERR), "w")
        self._show: Callable[[str], None] = self._write
        self._reader, writer = os.pipe()
        os.dup2(writer, _STDERR)
        os.close(writer)
        threading.Thread(target=self._copy, name="ledgerlake-stderr", daemon=True).start()

    @property
    def size(self) -> tuple[int, int]:
        """Return the columns and lines of the terminal; some terminals do not say them."""
        size = os.get_terminal_size(self.out.fileno())
        return size.columns or 80, size.lines or 24

    def show_lines(self, show: Callable[[str], None] | None) -> None:
        """Have a function show the lines, each without its end; None: nothing else uses the
        terminal.
        """
        self._show = show or self._write

    def close(self) -> None:
        """Give standard error back. What the other processes write later still comes through the
        pipe.
        """
        self._show = self._write
        os.dup2(self.out.fileno(), _STDERR)
        give_up_s = time.monotonic() + _DRAIN_S
        while select.select([self._reader], [], [], 0)[0] and time.monotonic() < give_up_s:
            time.sleep(0.01)

    def _copy(self) -> None:
        # A line ends with a newline alone: what follows a carriage return is a part of it.
        with os.fdopen(os.dup(self._reader), errors="replace", newline="\n") as lines:
            for line in lines:
                self._show(line.rstrip("\r\n"))

    def _write(self, line: str) -> None:
        self.out.write(printable_line(line) + "\n")
        self.out.flush()


@contextlib.contextmanager
def shared_terminal() -> Iterator[SharedTerminal | None]:
    """Share the terminal while the block runs; None if standard error is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    terminal = SharedTerminal()
    try:
        yield terminal
    finally:
        terminal.close()
