"""Shows the progress of a running pipeline: on a terminal a live screen, elsewhere lines."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, TextIO

from ledgerlake.delay.due_times import delayed_counts, first_due_ms
from ledgerlake.monitor.progress import (
    Details,
    Progress,
    Totals,
    counted,
    lags_now,
    lags_of,
    offset_of,
    progress_line,
)
from ledgerlake.runtime.guarded_output import printable, unguarded

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.monitor.progress import Reading
    from ledgerlake.monitor.shared_terminal import SharedTerminal
    from ledgerlake.pipeline.commit import BatchResult

# How often the live screen changes, and a line is written.
_LIVE_S, _LINES_S = 1.0, 10.0
# The rate is that of so long, since a micro-batch may take longer than the live screen stays.
_RATE_S = 10.0
# As many as a wide terminal has columns for.
_SHOWN_RATES = 120


class ProgressScreen:
    """Shows the progress each second on a terminal (see ``live_screen``), and writes a line every
    ten seconds elsewhere.

    Args:
        name: of the stream.
        as_json: the lines are JSON, also on a terminal.
        terminal: in which other processes write too.
    """

    def __init__(
        self,
        out: TextIO | None = None,
        *,
        name: str = "",
        as_json: bool = False,
        terminal: SharedTerminal | None = None,
    ) -> None:
        self.totals = Totals()
        self._details = Details()
        self._name = name
        self._reading: Callable[[], Reading | None] = lambda: None
        self._is_owner: Callable[[], bool] = lambda: True
        self._lost_ms: int | None = None
        self._terminal = terminal
        self._out = terminal.out if terminal is not None else out or sys.stderr
        self._as_json = as_json
        self._is_live = self._out.isatty() and not as_json
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._counts = deque([(time.monotonic(), 0)])
        self._rates: deque[float] = deque(maxlen=_SHOWN_RATES)

    def add(self, result: BatchResult) -> None:
        """Count a committed micro-batch."""
        self.totals.add(result)
        self._details.add(result, int(time.time() * 1000))

    def add_delayed(self, due_spans: dict[str, list[DueSpan]]) -> None:
        """Take the delayed messages of topic partitions that wait since an earlier run."""
        # A micro-batch may have been added already.
        self.totals.delayed_counts = delayed_counts(due_spans) | self.totals.delayed_counts
        self._details.next_due_ms = first_due_ms(due_spans) | self._details.next_due_ms

    def start(
        self,
        query: StreamingQuery,
        reading: Callable[[], Reading | None] = lambda: None,
        is_owner: Callable[[], bool] = lambda: True,
    ) -> None:
        """Show the progress of a query until ``stop``.

        Args:
            reading: returns the micro-batch that runs.
            is_owner: returns whether this process is connected to the broker, and owns the stream.
        """
        self._reading, self._is_owner = reading, is_owner
        show = self._show_live if self._is_live else self._write_lines
        self._thread = threading.Thread(target=show, args=(query,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        if not self._as_json:
            totals = self.totals
            messages = counted(totals.messages, "message", "messages")
            rejects = counted(totals.rejects, "reject", "rejects")
            line = f"{messages} and {rejects} in {counted(totals.batches, 'batch', 'batches')}"
            self._out.write(line + "\n")
        self._out.flush()

    def progress(self, query: StreamingQuery) -> Progress:
        """Return the progress now."""
        last = query.lastProgress
        source = last.sources[0] if last is not None and last.sources else None
        self._rates.append(self._rate())
        reading, is_owner, now_ms = self._reading(), self._is_owner(), int(time.time() * 1000)
        self._lost_ms = None if is_owner else self._lost_ms or now_ms
        return Progress(
            self._name,
            self.totals,
            self._details,
            list(self._rates),
            offset_of(source, "endOffset"),
            lags_now({} if last is None else lags_of(last), reading, is_owner=is_owner),
            now_ms,
            "" if reading is None else reading.text(time.monotonic()),
            self._lost_ms,
        )

    def _write_lines(self, query: StreamingQuery) -> None:
        while not self._end.wait(_LINES_S):
            progress = self.progress(query)
            line = progress.as_json() if self._as_json else progress_line(progress)
            self._out.write(line + "\n")
            self._out.flush()

    def _show_live(self, query: StreamingQuery) -> None:
        from rich.console import Console, ConsoleDimensions
        from rich.live import Live
        from rich.text import Text

        from ledgerlake.monitor.live_screen import live_screen

        console, terminal = Console(file=unguarded(self._out)), self._terminal
        # Log lines appear above the screen.
        with Live(
            console=console, auto_refresh=False, transient=True, redirect_stderr=terminal is None
        ) as live:
            if terminal is not None:
                terminal.show_lines(lambda line: console.print(Text(printable(line.expandtabs()))))
            size = console.size
            while not self._end.wait(_LIVE_S):
                if terminal is not None:
                    console.size = ConsoleDimensions(*terminal.size)
                if console.size != size:
                    # The terminal has broken the lines of the last screen anew, so that their
                    # number is unknown.
                    size = console.size
                    console.clear()
                ascii_only = console.options.ascii_only
                live.update(
                    live_screen(self.progress(query), *size, ascii_only=ascii_only), refresh=True
                )
        if terminal is not None:
            terminal.show_lines(None)

    def _rate(self) -> float:
        now_s, count = time.monotonic(), self.totals.messages
        self._counts.append((now_s, count))
        while len(self._counts) > 2 and now_s - self._counts[1][0] >= _RATE_S:
            self._counts.popleft()
        before_s, before_count = self._counts[0]
        return (count - before_count) / max(now_s - before_s, 0.001)
