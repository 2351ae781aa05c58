"""Delayed messages in columns, and how the messages of a bucket are cut into segments.

Order everywhere: (time, ledger, entry). A segment ends before a message that is due a whole time
step or more after the segment's first, but not before it has some hundred messages: a segment costs
as much as those. It also ends when it is full by count or by bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode.sorted_runs import merge_sorted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from ledgerlake.wire.message_id import Position

DEFAULT_TIME_STEP_MS = 300_000
DEFAULT_MAX_INDEXES = 5000
DEFAULT_MIN_INDEXES = 250

# A segment with its entries. One segment of each bucket is in memory.
SEGMENT_BYTES = 256 * 1024

# One row is one delayed message: when it is due, its position, and its entry with the frame that it
# came in. The frame is null if the bytes are elsewhere, or only the topic has them.
INDEX_SCHEMA = pa.schema(
    [
        ("time_ms", pa.int64()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("frame", pa.binary()),
    ]
)

Key = tuple[int, int, int]


def index_rows(keys: Sequence[Key], frames: Sequence[bytes | None] | None = None) -> pa.RecordBatch:
    """Return rows of ``INDEX_SCHEMA`` from single messages."""
    columns = zip(*keys, strict=True) if keys else ((), (), ())
    key_arrays = [pa.array(column, pa.int64()) for column in columns]
    frame_array = (
        pa.array(frames, pa.binary()) if frames is not None else pa.nulls(len(keys), pa.binary())
    )
    return pa.RecordBatch.from_arrays([*key_arrays, frame_array], schema=INDEX_SCHEMA)


def key_columns(
    batch: pa.RecordBatch,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return time, ledger and entry of each row."""
    time_ms, ledger_id, entry_id = (batch.column(number).to_numpy() for number in range(3))
    return time_ms, ledger_id, entry_id


def are_until(
    ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64], last: Position
) -> NDArray[np.bool_]:
    """Return which messages stand at a position or before it."""
    result: NDArray[np.bool_] = (ledger_ids < last.ledger_id) | (
        (ledger_ids == last.ledger_id) & (entry_ids <= last.entry_id)
    )
    return result


def key_at(batch: pa.RecordBatch, row: int) -> Key:
    time_ms, ledger_id, entry_id = (batch.column(number)[row].as_py() for number in range(3))
    return time_ms, ledger_id, entry_id


def sort_rows(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """Return all rows in one batch, in order; if rows have the same key, one of them."""
    joined = (
        batches[0]
        if len(batches) == 1
        else pa.Table.from_batches(batches, INDEX_SCHEMA).combine_chunks().to_batches()[0]
    )
    columns = key_columns(joined)
    order = np.lexsort(columns[::-1])
    is_repeated = np.ones(max(len(order) - 1, 0), dtype=bool)
    for column in columns:
        is_repeated &= column[order[1:]] == column[order[:-1]]
    if is_repeated.any():
        order = order[np.concatenate(([True], ~is_repeated))]
    elif (order[1:] > order[:-1]).all():
        return joined
    return joined.take(pa.array(order))


def cut_segments(
    batches: Iterable[pa.RecordBatch],
    time_step_ms: int = DEFAULT_TIME_STEP_MS,
    max_indexes: int = DEFAULT_MAX_INDEXES,
    min_indexes: int = DEFAULT_MIN_INDEXES,
) -> Iterator[pa.RecordBatch]:
    """Yield segments of delayed messages, which come in order. No segment is empty; a single frame
    may be larger than a segment.
    """
    buffer: pa.RecordBatch | None = None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        buffer = batch if buffer is None else sort_rows([buffer, batch])
        while (
            end := _segment_end(buffer, time_step_ms, max_indexes, min_indexes)
        ) < buffer.num_rows:
            yield buffer.slice(0, end)
            buffer = buffer.slice(end)
    if buffer is not None:
        yield buffer


def _segment_end(
    batch: pa.RecordBatch, time_step_ms: int, max_indexes: int, min_indexes: int
) -> int:
    head = batch.slice(0, max_indexes)
    time_ms = head.column(0).to_numpy()
    by_time = max(min_indexes, int(np.searchsorted(time_ms, time_ms[0] + time_step_ms, "left")))
    by_bytes = int(np.searchsorted(frame_sizes(head).cumsum(), SEGMENT_BYTES, "right"))
    return max(1, min(by_time, by_bytes, len(time_ms)))


def frame_sizes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Return the bytes of each frame, 0 if there is none."""
    frames = batch.column(3)
    offsets = np.frombuffer(frames.buffers()[1], dtype=np.int32)[
        frames.offset : frames.offset + len(frames) + 1
    ]
    sizes = np.diff(offsets).astype(np.int64)
    return np.where(frames.is_valid().to_numpy(zero_copy_only=False), sizes, 0)


def shared_queue(sources: Sequence[Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    """Yield the delayed messages of several sources in order. The messages of each source must be
    in order, and no batch empty.
    """
    return merge_sorted(sources, key_columns, pa.RecordBatch.slice, sort_rows)
