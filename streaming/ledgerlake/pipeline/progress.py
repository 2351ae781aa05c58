"""The progress screen of a running pipeline: rate, lag per topic partition, the broker's time
reached, rejects.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import OffsetError
from ledgerlake.stored.offsets import Offset, PartitionOffset, from_json

if TYPE_CHECKING:
    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.pipeline.commit import BatchResult


@dataclass
class Totals:
    """The numbers since the start, from committed batches; ``delayed_counts`` is by topic
    partition.
    """

    messages: int = 0
    rejects: int = 0
    batches: int = 0
    delayed_counts: dict[str, int] = field(default_factory=dict)

    def add(self, result: BatchResult) -> None:
        self.delayed_counts |= result.delayed_counts
        if not result.repeated:
            self.messages += result.messages
            self.rejects += result.rejects
        self.batches += 1


class ProgressScreen:
    """Prints a line every second on a terminal (over the last one), every ten seconds elsewhere."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.totals = Totals()
        self._out = out or sys.stderr
        self._terminal = self._out.isatty()
        self._end = threading.Event()
        self._thread: threading.Thread | None = None
        self._before = (time.monotonic(), 0)

    def start(self, query: StreamingQuery) -> None:
        self._thread = threading.Thread(target=self._loop, args=(query,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        totals = self.totals
        line = f"{totals.messages:,} messages and {totals.rejects:,} rejects in {totals.batches} batches"
        self._out.write(f"\r{line}\033[K\n" if self._terminal else line + "\n")
        self._out.flush()

    def _loop(self, query: StreamingQuery) -> None:
        while not self._end.wait(1.0 if self._terminal else 10.0):
            progress = query.lastProgress
            source = progress.sources[0] if progress is not None and progress.sources else None
            line = progress_line(
                self.totals, self._rate(), _offset(source, "endOffset"), _offset(source, "latestOffset")
            )
            self._out.write(f"\r{line}\033[K" if self._terminal else line + "\n")
            self._out.flush()

    def _rate(self) -> float:
        now_s, count = time.monotonic(), self.totals.messages
        before_s, before_count = self._before
        self._before = (now_s, count)
        return (count - before_count) / max(now_s - before_s, 0.001)


def progress_line(totals: Totals, rate: float, taken: Offset, latest: Offset) -> str:
    """Return the progress as one line; lag is in messages by the broker's index, ``?`` if there is
    no index.
    """
    times = [offset.time_ms for offset in taken.values() if offset.time_ms is not None]
    reached = time.strftime("%H:%M:%S", time.gmtime(max(times) / 1000)) if times else "-"
    lags = " ".join(_lag(name, taken, latest) for name in sorted(latest))
    line = f"{totals.messages:,} messages  {rate:,.0f}/s  broker time {reached}  lag {lags or '-'}  rejects {totals.rejects:,}"
    delayed_count = sum(totals.delayed_counts.values())
    return f"{line}  waiting {delayed_count:,}" if delayed_count else line


@dataclass(frozen=True)
class Behind:
    """The lag of a topic partition in messages and in the broker's time; None if it is not known."""

    messages: int | None
    time_ms: int | None


def lags_of(progress: Any) -> dict[str, Behind]:
    """Return how far a query is behind its topics, by topic partition, from its progress; empty if
    it does not read with Ledgerlake.
    """
    lags: dict[str, Behind] = {}
    for source in progress.sources:
        taken, latest = _offset(source, "endOffset"), _offset(source, "latestOffset")
        lags |= {name: _behind(taken.get(name), offset) for name, offset in latest.items()}
    return lags


def _behind(taken: PartitionOffset | None, latest: PartitionOffset) -> Behind:
    if taken is not None and taken.position >= latest.position:
        return Behind(0, 0)
    time_ms = None
    if taken is not None and taken.time_ms is not None and latest.time_ms is not None:
        time_ms = max(latest.time_ms - taken.time_ms, 0)
    if latest.index is None or (taken is not None and taken.index is None and taken.position.entry_id >= 0):
        return Behind(None, time_ms)
    taken_index = taken.index if taken is not None and taken.index is not None else -1
    return Behind(latest.index - taken_index, time_ms)


def _lag(name: str, taken: Offset, latest: Offset) -> str:
    partition = split_partition(name)[1]
    label = f"p{partition}:" if partition >= 0 else ""
    messages = _behind(taken.get(name), latest[name]).messages
    return f"{label}?" if messages is None else f"{label}{messages:,}"


def _offset(source: Any, name: str) -> Offset:
    text = getattr(source, name, None)
    if not text or text == "null":
        return {}
    try:
        return from_json(json.loads(text))
    except (ValueError, OffsetError):
        return {}
