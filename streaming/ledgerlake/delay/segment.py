"""Waiting messages in columns, and how a bucket's are cut into segments.

Order everywhere: (time, ledger, entry). A segment ends where the next message is due a whole time
step or more after the segment's first, or where the segment is full by count or by bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

DEFAULT_TIME_STEP_MS = 300_000
DEFAULT_MAX_INDEXES = 5000

# With its entries; one of each bucket is in memory.
SEGMENT_BYTES = 256 * 1024

# One row is one waiting message: when it is due, where it stands, and its entry with the frame that
# it came in. The frame is null if the bytes are kept elsewhere, or nowhere.
WAITING = pa.schema(
    [("time_ms", pa.int64()), ("ledger_id", pa.int64()), ("entry_id", pa.int64()), ("frame", pa.binary())]
)

Key = tuple[int, int, int]


def waiting(keys: Sequence[Key], frames: Sequence[bytes | None] | None = None) -> pa.RecordBatch:
    """Rows of ``WAITING`` from single messages."""
    columns = zip(*keys, strict=True) if keys else ((), (), ())
    numbers = [pa.array(column, pa.int64()) for column in columns]
    kept = pa.array(frames, pa.binary()) if frames is not None else pa.nulls(len(keys), pa.binary())
    return pa.RecordBatch.from_arrays([*numbers, kept], schema=WAITING)


def key_columns(batch: pa.RecordBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Time, ledger and entry of each row."""
    time_ms, ledger_id, entry_id = (batch.column(number).to_numpy() for number in range(3))
    return time_ms, ledger_id, entry_id


def key_at(batch: pa.RecordBatch, row: int) -> Key:
    time_ms, ledger_id, entry_id = (batch.column(number)[row].as_py() for number in range(3))
    return time_ms, ledger_id, entry_id


def in_order(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """All rows in one batch, in order; of rows with the same key one is left."""
    whole = (
        batches[0] if len(batches) == 1 else pa.Table.from_batches(batches, WAITING).combine_chunks().to_batches()[0]
    )
    columns = key_columns(whole)
    order = np.lexsort(columns[::-1])
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        same &= column[order[1:]] == column[order[:-1]]
    if same.any():
        order = order[np.concatenate(([True], ~same))]
    elif (order[1:] > order[:-1]).all():
        return whole
    return whole.take(pa.array(order))


def cut(
    batches: Iterable[pa.RecordBatch], time_step_ms: int = DEFAULT_TIME_STEP_MS, max_indexes: int = DEFAULT_MAX_INDEXES
) -> Iterator[pa.RecordBatch]:
    """Segments of waiting messages, which come in order; no segment is empty, and one frame alone
    may be larger.
    """
    rest: pa.RecordBatch | None = None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        rest = batch if rest is None else in_order([rest, batch])
        while (end := _segment_end(rest, time_step_ms, max_indexes)) < rest.num_rows:
            yield rest.slice(0, end)
            rest = rest.slice(end)
    if rest is not None:
        yield rest


def _segment_end(batch: pa.RecordBatch, time_step_ms: int, max_indexes: int) -> int:
    head = batch.slice(0, max_indexes)
    time_ms = head.column(0).to_numpy()
    by_time = int(np.searchsorted(time_ms, time_ms[0] + time_step_ms, "left"))
    by_bytes = int(np.searchsorted(frame_sizes(head).cumsum(), SEGMENT_BYTES, "right"))
    return max(1, min(by_time, by_bytes, len(time_ms)))


def frame_sizes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Bytes of each frame, 0 if there is none."""
    frames = batch.column(3)
    offsets = np.frombuffer(frames.buffers()[1], dtype=np.int32)[frames.offset : frames.offset + len(frames) + 1]
    sizes = np.diff(offsets).astype(np.int64)
    return np.where(frames.is_valid().to_numpy(zero_copy_only=False), sizes, 0)
