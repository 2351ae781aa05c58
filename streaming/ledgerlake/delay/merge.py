"""Merges the messages of buckets into one queue, and chooses the buckets that become one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.decode.sorted_runs import merge_sorted
from ledgerlake.delay.segment import key_columns, sort_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ledgerlake.delay.bucket import Bucket


def shared_queue(sources: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Yield the delayed messages of several sources in order. The messages of each source must be in
    order, and no batch empty.
    """
    return merge_sorted(sources, key_columns, pa.RecordBatch.slice, sort_rows)


def smallest_neighbours(buckets: Sequence[Bucket]) -> int:
    """Return the place of the first of those two neighbours that have the fewest messages between
    them; there must be two buckets or more.
    """
    sums = [left.waiting + right.waiting for left, right in pairwise(buckets)]
    return sums.index(min(sums))
