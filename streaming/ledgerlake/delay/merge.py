"""The shared queue over buckets, and which of them become one."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.decode.sorted_runs import merge_sorted
from ledgerlake.delay.segment import in_order, key_columns

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ledgerlake.delay.bucket import Bucket


def shared_queue(sources: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Waiting messages of several sources in order, each source's own in order; their batches are
    not empty.
    """
    return merge_sorted(sources, key_columns, pa.RecordBatch.slice, in_order)


def fewest_together(buckets: Sequence[Bucket]) -> int:
    """Of two buckets or more: the place of the first of those two neighbours that have the fewest
    messages together.
    """
    sums = [one.waiting + other.waiting for one, other in pairwise(buckets)]
    return sums.index(min(sums))
