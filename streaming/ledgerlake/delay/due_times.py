"""How many delayed messages are due when, in a limited number of spans: the sooner, the more
precise.

Spans are stretches of the clock that do not overlap. For at least a minute after the first message,
a span is a second long. Then it is a minute long up to two hours after that message, and an hour up
to eight days. It is a day long up to 400 days, 100 days up to a century, and a hundred times as
long beyond. Each length goes on until a span of the next one can begin.

The times of single messages are not always known. A bucket of many segments gives the first and the
last time of each segment. A bucket of few segments gives them for each of up to ``MOST_PARTS``
parts. The messages between them count as evenly spread, so these counts are estimates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.delay.snapshot import metadata_from_bytes, segment_from_bytes
from ledgerlake.delay.storage import METADATA
from ledgerlake.wire.limits import MAX_TIME_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from ledgerlake.delay.bucket import Bucket
    from ledgerlake.delay.snapshot import SegmentMetadata

_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS = 1_000, 60_000, 3_600_000, 86_400_000

# The lengths of spans; each is a multiple of the one before. All but the last with how far from the
# first message spans have that length.
_LENGTHS_MS = (_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS, 100 * _DAY_MS, 36_500 * _DAY_MS)
_REACHES_MS = (_MINUTE_MS, 2 * _HOUR_MS, 8 * _DAY_MS, 400 * _DAY_MS, 36_500 * _DAY_MS)

# The messages of a bucket with so many segments are read to count them by when they are due, since
# the first message of a segment says little about the others. A bucket with more is a matter of
# percents.
FEW_SEGMENTS = 4
MOST_PARTS = 256

# In so many places at most are the messages of a segment or part that no one span holds.
_MOST_PLACES = 256


@dataclass(frozen=True)
class DueSpan:
    """So many messages that are due within a span of the clock, the first at ``first_ms``. The span
    begins at a multiple of its length.
    """

    first_ms: int
    length_ms: int
    count: int
    is_estimate: bool = False

    @property
    def begin_ms(self) -> int:
        return self.first_ms - self.first_ms % self.length_ms

    @property
    def end_ms(self) -> int:
        return min(self.begin_ms + self.length_ms, MAX_TIME_MS + 1)


@dataclass(frozen=True)
class DueTimes:
    """When the first and the last messages of the parts of a bucket are due, in order, and how many
    messages each part has.
    """

    first_ms: NDArray[np.int64]
    last_ms: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[SegmentMetadata]) -> DueTimes:
        """Return the due times of segments, each as one part."""
        columns = zip(
            *((segment.min_ms, segment.max_ms, segment.count) for segment in segments), strict=True
        )
        return cls(*(np.array(column, np.int64) for column in columns))

    @classmethod
    def of_messages(cls, times_ms: NDArray[np.int64]) -> DueTimes:
        """Return the due times of messages in order, in a limited number of parts."""
        size = -(-len(times_ms) // MOST_PARTS) or 1
        starts = np.arange(0, len(times_ms), size)
        ends = np.append(starts[1:], len(times_ms))
        return cls(times_ms[starts], times_ms[ends - 1], ends - starts)

    @property
    def count(self) -> int:
        """Return how many messages these are."""
        return int(self.counts.sum())

    def of_last(self, count: int, next_ms: int) -> DueTimes:
        """Return the due times of the last messages; the next one is due at ``next_ms``."""
        # The messages after each part.
        later = self.counts.sum() - np.cumsum(self.counts)
        part = int(np.argmax(later < count))
        first_ms, counts = self.first_ms[part:].copy(), self.counts[part:].copy()
        first_ms[0], counts[0] = next_ms, count - later[part]
        return DueTimes(first_ms, np.maximum(self.last_ms[part:], first_ms), counts)


def due_times(bucket: Bucket, get_segment: Callable[[int, int], bytes]) -> DueTimes:
    """Return when the messages of a bucket are due, at least of the segments with messages that
    wait.

    Args:
        get_segment: as ``delay.storage.SnapshotStorage.get_segment``; asked for what ``needed``
            says.
    """
    snapshots = [get_segment(bucket.bucket_id, number) for number in needed(bucket)]
    if bucket.segments > FEW_SEGMENTS:
        return DueTimes.of(metadata_from_bytes(snapshots[0]))
    return DueTimes.of_messages(
        np.concatenate([segment_from_bytes(data).column(0).to_numpy() for data in snapshots])
    )


def needed(bucket: Bucket) -> Sequence[int]:
    """Return the numbers of the snapshots that ``due_times`` reads."""
    return (
        [METADATA] if bucket.segments > FEW_SEGMENTS else range(bucket.segment, bucket.segments + 1)
    )


def due_spans(times: Sequence[DueTimes]) -> list[DueSpan]:
    """Return the spans of all messages."""
    if not times:
        return []
    first_ms = np.concatenate([part.first_ms for part in times])
    last_ms = np.concatenate([part.last_ms for part in times])
    counts = np.concatenate([part.counts for part in times])
    grid = _Grid(int(first_ms.min()), _SECOND_MS)
    is_spread = (counts > 1) & (grid.begins_ms(first_ms) != grid.begins_ms(last_ms))
    spread = _spread(first_ms[is_spread], last_ms[is_spread], counts[is_spread])
    first_ms, counts = (
        np.append(column[~is_spread], more)
        for column, more in zip((first_ms, counts), spread, strict=True)
    )
    is_estimate = np.arange(len(first_ms)) >= np.count_nonzero(~is_spread)
    return grid.spans(first_ms, counts, is_estimate)


def spans_of_length(spans: Iterable[DueSpan], length_ms: int) -> list[DueSpan]:
    """Return the spans of several topic partitions as one, of at least a length.

    Args:
        length_ms: a minute, an hour or a day.
    """
    columns = [(span.first_ms, span.count, span.is_estimate) for span in spans]
    if not columns:
        return []
    first_ms, counts, is_estimate = (np.array(column) for column in zip(*columns, strict=True))
    return _Grid(int(first_ms.min()), length_ms).spans(first_ms, counts, is_estimate)


def delayed_counts(due_spans: dict[str, list[DueSpan]]) -> dict[str, int]:
    """Return how many messages wait, by topic partition."""
    return {name: sum(span.count for span in spans) for name, spans in due_spans.items()}


def first_due_ms(due_spans: dict[str, list[DueSpan]]) -> dict[str, int | None]:
    """Return when the next message is due, by topic partition; None if none waits."""
    return {name: spans[0].first_ms if spans else None for name, spans in due_spans.items()}


class _Grid:
    """Where spans begin and how long they are, if the first message is due at ``first_ms`` and no
    span is shorter than ``shortest_ms``.
    """

    def __init__(self, first_ms: int, shortest_ms: int) -> None:
        self._lengths_ms = np.maximum(_LENGTHS_MS, shortest_ms)
        ends_ms = [first_ms + reach_ms for reach_ms in _REACHES_MS]
        self._limits_ms = np.array(
            [
                -(-end_ms // length_ms) * length_ms
                for end_ms, length_ms in zip(ends_ms, _LENGTHS_MS[1:], strict=True)
            ]
        )

    def begins_ms(self, times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where the spans of messages begin."""
        return times_ms - times_ms % self._lengths_of(times_ms)

    def spans(
        self, first_ms: NDArray[np.int64], counts: NDArray[np.int64], is_estimate: NDArray[np.bool_]
    ) -> list[DueSpan]:
        """Return the spans of so many messages at each time."""
        order = np.argsort(first_ms, kind="stable")
        first_ms, counts, is_estimate = first_ms[order], counts[order], is_estimate[order]
        begins_ms = self.begins_ms(first_ms)
        firsts = np.flatnonzero(np.diff(begins_ms, prepend=begins_ms[0] - 1))
        columns = (
            first_ms[firsts],
            self._lengths_of(first_ms[firsts]),
            np.add.reduceat(counts, firsts),
            np.logical_or.reduceat(is_estimate, firsts),
        )
        return [
            DueSpan(*numbers)
            for numbers in zip(*(column.tolist() for column in columns), strict=True)
        ]

    def _lengths_of(self, times_ms: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths_ms: NDArray[np.int64] = self._lengths_ms[
            np.searchsorted(self._limits_ms, times_ms, side="right")
        ]
        return lengths_ms


def _spread(
    first_ms: NDArray[np.int64], last_ms: NDArray[np.int64], counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the messages of parts as evenly spread: times, and how many are at each."""
    places = np.minimum(counts, _MOST_PLACES)
    part = np.repeat(np.arange(len(counts)), places)
    place = np.arange(len(part)) - np.repeat(np.cumsum(places) - places, places)
    # The first message at each place, and at the next.
    number, next_number = (shifted * counts[part] // places[part] for shifted in (place, place + 1))
    times_ms = first_ms[part] + (last_ms - first_ms)[part] * number // (counts[part] - 1)
    return times_ms, next_number - number
