"""How many delayed messages are due when, in a few dozen numbers: the sooner, the more precise.

A span begins with its first message. Two spans begin within each doubling of the time since the
first of all messages, and the first second is one span. In a bucket of many segments, a message
counts to the precision of its segment; in one of few, to that of a part of the segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.delay.snapshot import metadata_from_bytes, segment_from_bytes
from ledgerlake.delay.storage import METADATA

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from ledgerlake.delay.bucket import Bucket
    from ledgerlake.delay.snapshot import SegmentMetadata

_SPANS_IN_DOUBLING = 2

# The messages of a bucket with so many segments are read to count them by when they are due, since the
# first message of a segment says little about the others. A bucket with more is a matter of percents.
FEW_SEGMENTS = 4
MOST_PARTS = 256


@dataclass(frozen=True)
class DueSpan:
    """So many messages, of which the first is due at ``first_ms``."""

    first_ms: int
    count: int


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
    seconds = np.maximum((first_ms - first_ms.min()) / 1000, 1.0)
    numbers = np.floor(_SPANS_IN_DOUBLING * np.log2(seconds)).astype(np.int64)
    firsts_ms, totals = np.full(numbers.max() + 1, first_ms.max()), np.zeros(numbers.max() + 1, np.int64)
    np.minimum.at(firsts_ms, numbers, first_ms)
    np.add.at(totals, numbers, counts)
    return [DueSpan(int(firsts_ms[number]), int(totals[number])) for number in np.flatnonzero(totals)]
