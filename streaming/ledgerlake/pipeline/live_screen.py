"""The live screen of a running pipeline on a terminal: rate, lag by topic partition, what waits and what
was rejected, and the last commits. Pure: the numbers in, what rich prints out.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ledgerlake.client.topics import split_partition
from ledgerlake.pipeline.progress import behind, broker_time, printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ledgerlake.pipeline.progress import Behind, Commit, Progress

_BLOCKS, _ASCII = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_BAR = 24
_MOST_REASONS = 5
# The lines of everything but the topic partitions.
_OTHER_LINES = 16
_FEWEST_ROWS = 3


def live_screen(progress: Progress, height: int, *, ascii_only: bool = False) -> RenderableType:
    """Return the screen for a terminal of so many lines."""
    blocks = _ASCII if ascii_only else _BLOCKS
    parts: list[RenderableType] = [
        _head(progress, blocks),
        _lags(progress, max(height - _OTHER_LINES, _FEWEST_ROWS), blocks),
    ]
    parts.append(_state(progress))
    if progress.details.reasons:
        parts.append(_reasons(progress))
    if progress.details.commits:
        parts.append(_commits(progress.details.commits))
    return Group(*parts)


def sparkline(values: Sequence[float], blocks: str = _BLOCKS) -> str:
    """Return a bar of one character for each value, relative to the greatest."""
    most = max(values, default=0.0) or 1.0
    return "".join(blocks[round(value / most * (len(blocks) - 1))] for value in values)


def _head(progress: Progress, blocks: str) -> Text:
    totals = progress.totals
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{progress.name}  ", "bold")
    text.append(f"{totals.messages:,} messages  ")
    text.append(f"{progress.rate:,.0f}/s ", "bold")
    text.append(sparkline(progress.rates, blocks), "cyan")
    text.append(f"  broker time {broker_time(progress.taken)}  ")
    text.append(f"rejects {totals.rejects:,}", "bold red" if totals.rejects else "")
    return text


def _lags(progress: Progress, most_rows: int, blocks: str) -> Table:
    lags = {name: behind(progress.taken.get(name), latest) for name, latest in progress.latest.items()}
    greatest = max((lag.messages or 0 for lag in lags.values()), default=0) or 1
    names = sorted(lags, key=lambda name: (-(lags[name].messages or 0), name))
    table = Table(box=None, pad_edge=False, title_justify="left", expand=False)
    table.add_column("topic partition", overflow="ellipsis", no_wrap=True, max_width=48)
    for title in ("lag", "in time", "delayed"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for name in names[:most_rows]:
        table.add_row(*_lag_row(name, lags[name], greatest, progress, blocks))
    if len(names) > most_rows:
        table.add_row(f"{len(names) - most_rows:,} more", "", "", "", "")
    return table


def _lag_row(name: str, lag: Behind, greatest: int, progress: Progress, blocks: str) -> list[RenderableType]:
    bar = blocks[-1] * round(_BAR * (lag.messages or 0) / greatest)
    delayed = progress.totals.delayed_counts.get(name, 0)
    return [
        Text(printable(_short(name))),
        "?" if lag.messages is None else f"{lag.messages:,}",
        "?" if lag.time_ms is None else _span(lag.time_ms),
        f"{delayed:,}",
        Text(bar, "yellow"),
    ]


def _state(progress: Progress) -> Text:
    details = progress.details
    due_ms = min((time_ms for time_ms in details.next_due_ms.values() if time_ms is not None), default=None)
    next_due = "" if due_ms is None else f", next due in {_span(due_ms - progress.now_ms)}"
    return Text(
        f"delayed {sum(progress.totals.delayed_counts.values()):,}{next_due}   "
        f"incomplete large messages {details.incomplete_count:,} ({details.kept_bytes / 1e6:,.1f} MB kept)",
        no_wrap=True,
        overflow="ellipsis",
    )


def _reasons(progress: Progress) -> Text:
    common = progress.details.reasons.most_common(_MOST_REASONS)
    text = "   ".join(f"{reason} {count:,}" for reason, count in common)
    return Text(f"rejects by reason: {text}", "red", no_wrap=True, overflow="ellipsis")


def _commits(commits: list[Commit]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("last commits", "messages", "rejects", "took"):
        table.add_column(title, justify="right", no_wrap=True)
    for commit in reversed(commits):
        at = time.strftime("%H:%M:%S", time.localtime(commit.time_ms / 1000))
        table.add_row(
            f"{at}  #{commit.batch_id}", f"{commit.messages:,}", f"{commit.rejects:,}", _span(commit.taken_ms)
        )
    return table


def _short(name: str) -> str:
    """Return a topic partition without the domain that nearly all have."""
    topic, partition = split_partition(name.removeprefix("persistent://"))
    return f"{topic} {partition}" if partition >= 0 else topic


def _span(span_ms: int) -> str:
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if abs(span_ms) >= size_ms:
            return f"{span_ms / size_ms:,.1f} {unit}"
    return f"{span_ms} ms"
