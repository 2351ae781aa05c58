"""A command in a terminal of tmux, and what it shows: as lines, and as a picture."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Terminal:
    """A terminal with one process, whose id is ``pid``."""

    def __init__(self, socket: Path, command: Sequence[str], columns: int, lines: int) -> None:
        self._socket = socket
        size = ("-x", str(columns), "-y", str(lines))
        self._tmux("-f", "/dev/null", "new-session", "-d", *size, f"exec {shlex.join(command)}")
        self.pid = int(self._tmux("list-panes", "-F", "#{pane_pid}"))

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the terminal."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def lines(self, *, joined: bool = False) -> list[str]:
        """Return the lines on the screen; with ``joined``, a line that was broken is one."""
        return self._tmux("capture-pane", "-p", *(["-J"] if joined else [])).splitlines()

    def svg(self, title: str, columns: int) -> str:
        """Return the screen as a picture."""
        console = Console(record=True, width=columns, file=io.StringIO(), force_terminal=True)
        console.print(Text.from_ansi(self._tmux("capture-pane", "-p", "-e").rstrip()))
        picture = console.export_svg(title=title, unique_id="live-screen")
        # Without the fonts of another host.
        return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)

    def _tmux(self, *words: str) -> str:
        command = ["tmux", "-S", str(self._socket), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def terminal(socket: Path, command: Sequence[str], columns: int, lines: int) -> Iterator[Terminal]:
    """Run a command in a terminal; at the end, stop it and wait for it."""
    started = Terminal(socket, command, columns, lines)
    process = psutil.Process(started.pid)
    try:
        yield started
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            process.wait(60)
