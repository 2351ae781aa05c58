"""The live screen of a running pipeline on a terminal: rate, lag by topic partition, delayed
messages, rejects, and the last commits. Pure: it takes the numbers and returns objects that rich
prints.

Rules kept here:
  - The screen is no wider and no higher than the terminal. A name that is too long loses its
    beginning, because its end tells topic partitions apart.
  - Lines and columns keep their places while numbers change. If all topic partitions fit, they keep
    their order too; else those with the most lag are shown, and the number of the others.
  - Times of day are UTC.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ledgerlake.client.topics import split_partition
from ledgerlake.monitor.progress import broker_time, clock_text, counted
from ledgerlake.operators.stage_rows import sum_of
from ledgerlake.runtime.guarded_output import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ledgerlake.monitor.progress import Commit, Progress

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_MOST_REASONS = 5
# The lines of everything but the topic partitions.
_OTHER_LINES = 17
_FEWEST_ROWS = 3
# Widths in columns of the terminal: a number, the longest name, the longest bar, and a gap.
_NUMBER, _NAME, _BAR, _GAP = 11, 60, 60, 2
_LABEL = 12


def live_screen(
    progress: Progress, width: int, height: int, *, ascii_only: bool = False
) -> RenderableType:
    """Return the screen for a terminal of so many columns and lines."""
    blocks = _ASCII if ascii_only else _BLOCKS
    parts: list[RenderableType] = [
        _line("Ledgerlake", progress.name, "bold"),
        _line("messages", _messages(progress)),
        _rate(progress, width, blocks),
        _line("lag", _lag(progress), "red" if progress.lost else ""),
        _line("delayed", _delayed(progress)),
        _line("rejects", _rejects(progress), "red" if progress.totals.rejects else ""),
        _line("large", _large(progress)),
        "",
        _partitions(progress, max(height - _OTHER_LINES, _FEWEST_ROWS), width, blocks),
    ]
    if progress.details.commits:
        parts += ["", _commits(progress.details.commits)]
    return Group(*parts)


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """Return a bar of one character for each value, relative to the greatest."""
    most = max(values, default=0.0) or 1.0
    return "".join(blocks[round(value / most * (len(blocks) - 1))] for value in values)


def _line(label: str, text: str, style: str = "") -> Text:
    line = Text(no_wrap=True, overflow="ellipsis")
    return line.append(label.ljust(_LABEL), "dim").append(text, style)


def _messages(progress: Progress) -> str:
    reached = broker_time(progress.taken)
    until = "" if reached == "-" else f", up to {reached} UTC by the broker's clock"
    reading = f", {progress.reading}" if progress.reading else ""
    return f"{progress.totals.messages:,}{until}{reading}"


def _rate(progress: Progress, width: int, blocks: str) -> Text:
    line = _line("rate", f"{progress.rate:,.0f} messages/s".ljust(20), "bold")
    shown = progress.rates[-max(width - len(line), 0) :]
    return line.append(sparkline(shown, blocks), "cyan")


def _lag(progress: Progress) -> str:
    if progress.lost:
        return f"not known, {progress.lost}"
    lags = progress.lags
    messages = [lag.messages for lag in lags.values() if lag.messages is not None]
    times_ms = [lag.time_ms for lag in lags.values() if lag.time_ms is not None]
    if not messages:
        return "not known"
    return counted(sum(messages), "message", "messages") + (
        f", at most {_span(max(times_ms))}" if times_ms else ""
    )


def _delayed(progress: Progress) -> str:
    due_ms = min(
        (time_ms for time_ms in progress.details.next_due_ms.values() if time_ms is not None),
        default=None,
    )
    count = counted(sum(progress.totals.delayed_counts.values()), "message", "messages")
    if due_ms is None:
        return count
    left_ms = due_ms - progress.now_ms
    # The index has a message that was cancelled or replaced until then.
    is_due = f"is due in {_span(left_ms)}, unless cancelled or replaced"
    return f"{count}, the next " + (is_due if left_ms > 0 else f"was due {_span(-left_ms)} ago")


def _rejects(progress: Progress) -> str:
    common = progress.details.reasons.most_common(_MOST_REASONS)
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in common)
    return f"{progress.totals.rejects:,}" + (f": {reasons}" if reasons else "")


def _large(progress: Progress) -> str:
    incomplete = sum_of(progress.details.incomplete.values())
    return (
        f"{counted(incomplete.count, 'incomplete message', 'incomplete messages')}, "
        f"{incomplete.kept_bytes / 1e6:,.1f} MB kept"
    )


def _partitions(progress: Progress, most_rows: int, width: int, blocks: str) -> Table:
    lags = progress.lags
    left = max(width - 3 * (_NUMBER + _GAP) - _GAP, 0)
    names = sorted(lags, key=split_partition)
    if len(names) > most_rows:
        names.sort(key=lambda name: (-(lags[name].messages or 0), -(lags[name].time_ms or 0)))
    rows = [(_short(printable(name)), name) for name in names[:most_rows]]
    name_width = min(max([cell_len(short) for short, _ in rows] + [16]), _NAME, left)
    bar_width = max(min(left - name_width - _GAP, _BAR), 0)
    greatest = max((lag.messages or 0 for lag in lags.values()), default=0) or 1
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("topic partition", no_wrap=True, width=name_width)
    for title in ("lag", "lag in time", "delayed"):
        table.add_column(title, justify="right", no_wrap=True, width=_NUMBER)
    table.add_column("", no_wrap=True, width=bar_width)
    for short, name in rows:
        lag = lags[name]
        # Lower than the line, so that bars of two lines do not touch.
        bar = blocks[-2] * round(bar_width * (lag.messages or 0) / greatest)
        table.add_row(
            Text(_end_of(short, name_width, ".." if blocks is _ASCII else "…")),
            "?" if lag.messages is None else f"{lag.messages:,}",
            "?" if lag.time_ms is None else _span(lag.time_ms),
            f"{progress.totals.delayed_counts.get(name, 0):,}",
            Text(bar, "yellow"),
        )
    if len(lags) > most_rows:
        table.add_row(Text(f"{len(lags) - most_rows:,} more", "dim"))
    return table


def _commits(commits: list[Commit]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.add_column("last commits", no_wrap=True, width=20)
    for title in ("messages", "rejects", "took"):
        table.add_column(title, justify="right", no_wrap=True, width=_NUMBER)
    for commit in reversed(commits):
        table.add_row(
            f"{clock_text(commit.time_ms)} UTC  #{commit.batch_id}",
            f"{commit.messages:,}",
            f"{commit.rejects:,}",
            _span(commit.taken_ms),
        )
    return table


def _end_of(text: str, width: int, mark: str) -> str:
    """Return the end of a text, with a mark if the beginning is cut."""
    if cell_len(text) <= width:
        return text
    kept = set_cell_size(text[::-1], max(width - len(mark), 0))[::-1]
    return mark + kept


def _short(name: str) -> str:
    """Return a topic partition without the domain that nearly all have."""
    topic, partition = split_partition(name.removeprefix("persistent://"))
    return f"{topic} {partition}" if partition >= 0 else topic


def _span(span_ms: int) -> str:
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if abs(span_ms) >= size_ms:
            return f"{span_ms / size_ms:,.1f} {unit}"
    return f"{span_ms} ms"
