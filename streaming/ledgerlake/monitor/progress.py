"""The progress of a running pipeline in numbers: rate, lag by topic partition, the broker's time
reached, rejects. ``progress_screen`` shows them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import OffsetError
from ledgerlake.operators.stage_rows import sum_of
from ledgerlake.stored.offsets import (
    VERSION,
    Offset,
    PartitionOffset,
    from_json,
    messages_between,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.operators.stage_rows import Incomplete
    from ledgerlake.pipeline.commit import BatchResult
    from ledgerlake.table.batch_commit import BatchCommit


_SHOWN_COMMITS = 5

# A micro-batch that runs longer is told of before it ends.
_LONG_S = 3.0


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
        self.delayed_counts = self.delayed_counts | result.delayed_counts
        if not result.repeated:
            self.messages += result.messages
            self.rejects += result.rejects
        self.batches += 1


@dataclass(frozen=True)
class Commit:
    """A committed micro-batch: what it brought, what its commits took, and when they had landed."""

    batch_id: int
    messages: int
    rejects: int
    taken_ms: int
    time_ms: int


@dataclass
class Details:
    """What the live screen shows beside the totals: rejects by reason, incomplete large messages,
    when delayed messages are due, and the last commits. Its thread reads while micro-batches are
    added, so collections are replaced and never changed.
    """

    reasons: Counter[str] = field(default_factory=Counter)
    incomplete: dict[str, Incomplete] = field(default_factory=dict)
    next_due_ms: dict[str, int | None] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)

    def add(self, result: BatchResult, now_ms: int) -> None:
        if not result.repeated:
            self.reasons = self.reasons + result.reasons
        self.incomplete = self.incomplete | result.incomplete
        self.next_due_ms = self.next_due_ms | result.next_due_ms
        commit = Commit(
            result.batch_id, result.messages, result.rejects, round(result.commit_s * 1000), now_ms
        )
        self.commits = [*self.commits, commit][-_SHOWN_COMMITS:]


@dataclass(frozen=True)
class Reading:
    """A micro-batch that runs, and since when by a clock that does not jump."""

    batch: BatchCommit
    begun_s: float

    @cached_property
    def lags(self) -> dict[str, Behind]:
        """Return how far its end is from its start, by topic partition."""
        starts = self._offset("start")
        return {name: behind(starts.get(name), end) for name, end in self._offset("end").items()}

    @property
    def messages(self) -> int | None:
        """Return how many messages it reads; None if the broker gives no index."""
        counts = [lag.messages for lag in self.lags.values()]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def _offset(self, side: str) -> Offset:
        positions = {name: span[side] for name, span in self.batch.ranges.items() if span[side]}
        return from_json({"version": VERSION, "positions": positions})

    def text(self, now_s: float) -> str:
        """Return a sentence on the running micro-batch; empty until it has run for some seconds."""
        taken_s = now_s - self.begun_s
        if taken_s < _LONG_S:
            return ""
        messages = self.messages
        content = f" of {counted(messages, 'new message', 'new messages')}" if messages else ""
        return f"a micro-batch{content} has been running for {taken_s:.0f} s"


@dataclass(frozen=True)
class Progress:
    """The progress of a pipeline at a time: the totals, the messages a second now and before, how
    far it has come, and a sentence on the running micro-batch. ``lost_ms`` is the time of the loss
    of the connection to the broker; None if there is a connection.
    """

    name: str
    totals: Totals
    details: Details
    rates: list[float]
    taken: Offset
    lags: dict[str, Behind]
    now_ms: int
    reading: str = ""
    lost_ms: int | None = None

    @property
    def lost(self) -> str:
        """Return a phrase on the lost connection; empty if there is a connection."""
        return (
            ""
            if self.lost_ms is None
            else f"no connection to the broker since {clock_text(self.lost_ms)} UTC"
        )

    @property
    def rate(self) -> float:
        return self.rates[-1] if self.rates else 0.0

    def as_json(self) -> str:
        """Return the progress as one line of JSON."""
        due_ms = [time_ms for time_ms in self.details.next_due_ms.values() if time_ms is not None]
        return json.dumps(
            {
                "time_ms": self.now_ms,
                "stream": self.name,
                "messages": self.totals.messages,
                "messages_per_second": round(self.rate, 1),
                "rejects": self.totals.rejects,
                "rejects_by_reason": self.details.reasons,
                "batches": self.totals.batches,
                "broker_time_ms": _reached_ms(self.taken),
                "lag_messages": {name: lag.messages for name, lag in self.lags.items()},
                "lag_unknown_since_ms": self.lost_ms,
                "delayed": sum(self.totals.delayed_counts.values()),
                "next_due_ms": min(due_ms, default=None),
                "incomplete_messages": sum_of(self.details.incomplete.values()).count,
            }
        )


def progress_line(progress: Progress) -> str:
    """Return the progress as one line; lag is in messages by the broker's index, ``?`` if it is not
    known.
    """
    totals, taken = progress.totals, progress.taken
    lags = " ".join(_labelled(progress.lags))
    line = (
        f"{counted(totals.messages, 'message', 'messages')}  {progress.rate:,.0f}/s  broker time "
        f"{broker_time(taken)}  lag {lags or '-'}  rejects {totals.rejects:,}"
    )
    delayed_count = sum(totals.delayed_counts.values())
    delayed = f"delayed {delayed_count:,}" if delayed_count else ""
    return "  ".join(part for part in (line, delayed, progress.lost, progress.reading) if part)


def counted(count: int, one: str, many: str) -> str:
    """Return a count with what it counts, in the singular or plural."""
    return f"{count:,} {one if count == 1 else many}"


def broker_time(taken: Offset) -> str:
    """Return the broker's time up to which messages are taken, as a clock shows it."""
    reached_ms = _reached_ms(taken)
    return "-" if reached_ms is None else clock_text(reached_ms)


def clock_text(time_ms: int) -> str:
    """Return a time of day in UTC."""
    return time.strftime("%H:%M:%S", time.gmtime(time_ms / 1000))


def _reached_ms(taken: Offset) -> int | None:
    return max(
        (offset.time_ms for offset in taken.values() if offset.time_ms is not None), default=None
    )


@dataclass(frozen=True)
class Behind:
    """The lag of a topic partition in messages and in the broker's time; None if it is not
    known.
    """

    messages: int | None
    time_ms: int | None


def lags_of(progress: Any) -> dict[str, Behind]:
    """Return how far a query is behind its topics, by topic partition, from its progress; empty if
    it does not read with Ledgerlake.
    """
    lags: dict[str, Behind] = {}
    for source in progress.sources:
        taken, latest = offset_of(source, "endOffset"), offset_of(source, "latestOffset")
        lags |= {name: behind(taken.get(name), offset) for name, offset in latest.items()}
    return lags


def lags_now(
    lags: dict[str, Behind], reading: Reading | None, *, is_owner: bool
) -> dict[str, Behind]:
    """Return lags as of the last micro-batch together with what the one that runs reads: that is
    not in the tables before it ends. Without a connection to the broker, nobody knows where the
    topics end.
    """
    if not is_owner:
        return dict.fromkeys(lags, Behind(None, None))
    if reading is None:
        return lags
    return lags | {name: _greater(lag, lags.get(name, lag)) for name, lag in reading.lags.items()}


def _greater(lag: Behind, other: Behind) -> Behind:
    messages = [count for count in (lag.messages, other.messages) if count is not None]
    times_ms = [time_ms for time_ms in (lag.time_ms, other.time_ms) if time_ms is not None]
    return Behind(max(messages, default=None), max(times_ms, default=None))


def behind(taken: PartitionOffset | None, latest: PartitionOffset) -> Behind:
    """Return the lag of a topic partition."""
    if taken is not None and taken.position >= latest.position:
        return Behind(0, 0)
    time_ms = None
    if taken is not None and taken.time_ms is not None and latest.time_ms is not None:
        time_ms = max(latest.time_ms - taken.time_ms, 0)
    if latest.index is None or (
        taken is not None and taken.index is None and taken.position.entry_id >= 0
    ):
        return Behind(None, time_ms)
    taken_index = taken.index if taken is not None and taken.index is not None else -1
    return Behind(messages_between(taken_index, latest.index), time_ms)


def _labelled(lags: dict[str, Behind]) -> Iterator[str]:
    """Yield the lag of each topic partition in order, with the name of its topic, which has its
    namespace if topics of several have the same name.
    """
    topics = {split_partition(name)[0] for name in lags}
    is_short = len({topic.rpartition("/")[2] for topic in topics}) == len(topics)
    for name, lag in sorted(lags.items(), key=lambda item: split_partition(item[0])):
        topic, partition = split_partition(name)
        label = topic.rpartition("/" if is_short else "://")[2] + (
            f"-p{partition}" if partition >= 0 else ""
        )
        yield f"{label}:{'?' if lag.messages is None else format(lag.messages, ',')}"


def offset_of(source: Any, name: str) -> Offset:
    """Return an offset from the progress of a query's source; empty if it is not Ledgerlake's."""
    text = getattr(source, name, None)
    if not text or text == "null":
        return {}
    try:
        return from_json(json.loads(text))
    except (ValueError, OffsetError):
        return {}
