"""The shared queue over buckets, and which of them become one.

A message leaves the queue when nothing earlier can still come: of every source one batch is held, and whatever stands up
to the smallest of their last keys goes out in order.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from ledgerlake.state.delay.segment import count_through, in_order, key_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from ledgerlake.state.delay.bucket import Bucket


def merge_sorted(sources: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Rows of several sources in order, each source's own in order; their batches are not empty."""
    heads = {number: batch for number, source in enumerate(sources) if (batch := next(source, None)) is not None}
    while heads:
        last = min(key_at(batch, batch.num_rows - 1) for batch in heads.values())
        ready = []
        for number, batch in list(heads.items()):
            count = count_through(batch, last)
            if count:
                ready.append(batch.slice(0, count))
            rest = batch.slice(count) if count < batch.num_rows else next(sources[number], None)
            if rest is None:
                del heads[number]
            else:
                heads[number] = rest
        yield in_order(ready)


def fewest_together(buckets: Sequence[Bucket]) -> int:
    """Of two buckets or more: the place of the first of those two neighbours that have the fewest messages together."""
    sums = [one.waiting + other.waiting for one, other in pairwise(buckets)]
    return sums.index(min(sums))
