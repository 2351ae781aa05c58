"""How many delayed messages are due when, in a limited number of spans: the sooner, the more
precise.

A span is a second of the clock in the minute after the first of all messages, a minute in the two
hours after it, an hour in the eight days after it, a day in the 400 days after it, 100 days in the
century after it, and a million days beyond. In a bucket of many segments, a message counts to the
precision of its segment; in one of few, to that of a part of the segment.
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

# The lengths of spans. Each is a multiple of the one before.
_LENGTHS_MS = np.array([_SECOND_MS, _MINUTE_MS, _HOUR_MS, _DAY_MS, 100 * _DAY_MS, 1_000_000 * _DAY_MS])

# How far from the first message spans have each length but the last.
_REACHES_MS = np.array([_MINUTE_MS, 2 * _HOUR_MS, 8 * _DAY_MS, 400 * _DAY_MS, 36_500 * _DAY_MS])

# The messages of a bucket with so many segments are read to count them by when they are due, since the
# first message of a segment says little about the others. A bucket with more is a matter of percents.
FEW_SEGMENTS = 4
MOST_PARTS = 256


@dataclass(frozen=True)
class DueSpan:
    """So many messages that are due within a span of the clock, the first at ``first_ms``. The span
    begins at a multiple of its length.
    """

    first_ms: int
    length_ms: int
    count: int

    @property
    def begin_ms(self) -> int:
        return self.first_ms - self.first_ms % self.length_ms

    @property
    def end_ms(self) -> int:
        return min(self.begin_ms + self.length_ms, MAX_TIME_MS + 1)


@dataclass(frozen=True)
class DueTimes:
    """When the first messages of the parts of a bucket are due, in order, and how many messages each
    part has.
    """

    first_ms: NDArray[np.int64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, segments: Sequence[SegmentMetadata]) -> DueTimes:
        """Return those of segments, each as one part."""
        first_ms = [segment.min_ms for segment in segments]
        return cls(np.array(first_ms, np.int64), np.array([segment.count for segment in segments], np.int64))

    @classmethod
    def of_messages(cls, times_ms: NDArray[np.int64]) -> DueTimes:
        """Return those of messages in order, in a limited number of parts."""
        size = -(-len(times_ms) // MOST_PARTS) or 1
        starts = np.arange(0, len(times_ms), size)
        return cls(times_ms[starts], np.diff(np.append(starts, len(times_ms))))

    @property
    def count(self) -> int:
        """Return how many messages these are."""
        return int(self.counts.sum())

    def of_last(self, count: int, next_ms: int) -> DueTimes:
        """Return those of the last messages, of which the next one is due at ``next_ms``."""
        # The messages after each part.
        later = self.counts.sum() - np.cumsum(self.counts)
        part = int(np.argmax(later < count))
        first_ms, counts = self.first_ms[part:].copy(), self.counts[part:].copy()
        first_ms[0], counts[0] = next_ms, count - later[part]
        return DueTimes(first_ms, counts)


def due_times(bucket: Bucket, get_segment: Callable[[int, int], bytes]) -> DueTimes:
    """Return when the messages of a bucket are due, at least of the segments with messages that wait.

    Args:
        get_segment: as ``delay.storage.SnapshotStorage.get_segment``; asked for what ``needed`` says.
    """
    snapshots = [get_segment(bucket.bucket_id, number) for number in needed(bucket)]
    if bucket.segments > FEW_SEGMENTS:
        return DueTimes.of(metadata_from_bytes(snapshots[0]))
    return DueTimes.of_messages(np.concatenate([segment_from_bytes(data).column(0).to_numpy() for data in snapshots]))


def needed(bucket: Bucket) -> Sequence[int]:
    """Return the numbers of the snapshots that ``due_times`` reads."""
    return [METADATA] if bucket.segments > FEW_SEGMENTS else range(bucket.segment, bucket.segments + 1)


def due_spans(times: Sequence[DueTimes]) -> list[DueSpan]:
    """Return the spans of all messages."""
    if not times:
        return []
    first_ms = np.concatenate([part.first_ms for part in times])
    counts = np.concatenate([part.counts for part in times])
    order = np.argsort(first_ms, kind="stable")
    first_ms, counts = first_ms[order], counts[order]
    lengths_ms = _LENGTHS_MS[np.searchsorted(_REACHES_MS, first_ms - first_ms[0], side="right")]
    begins_ms = first_ms - first_ms % lengths_ms
    is_first = (np.diff(begins_ms, prepend=begins_ms[0] - 1) != 0) | (np.diff(lengths_ms, prepend=0) != 0)
    firsts = np.flatnonzero(is_first)
    columns = (first_ms[firsts], lengths_ms[firsts], np.add.reduceat(counts, firsts))
    return [DueSpan(*numbers) for numbers in zip(*(column.tolist() for column in columns), strict=True)]


def spans_of_length(spans: Iterable[DueSpan], length_ms: int) -> list[DueSpan]:
    """Return spans of at least a length, in order and apart: a span within a longer one is a part of
    it.

    Args:
        spans: those of several topic partitions.
        length_ms: a length that divides those of all longer spans, as a minute, an hour or a day.
    """
    found: dict[tuple[int, int], DueSpan] = {}
    # A longer one is found before what is within it.
    for span in sorted(spans, key=lambda span: -span.length_ms):
        shortest_ms = max(span.length_ms, length_ms)
        lengths_ms = [longer_ms for longer_ms in _LENGTHS_MS.tolist() if longer_ms > shortest_ms]
        places = [(span.first_ms // longer_ms, longer_ms) for longer_ms in lengths_ms]
        place = next((place for place in places if place in found), (span.first_ms // shortest_ms, shortest_ms))
        before = found.get(place, DueSpan(span.first_ms, place[1], 0))
        found[place] = DueSpan(min(before.first_ms, span.first_ms), place[1], before.count + span.count)
    return sorted(found.values(), key=lambda span: span.first_ms)
