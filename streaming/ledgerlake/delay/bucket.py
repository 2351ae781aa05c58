"""The description of each bucket, so that the tracker need not open it, and the record of all
buckets, which is stored in state (versioned JSON).

A bucket's messages are in order over its segments, and are delivered in that order. So one place, a
segment and an offset into it, says which messages have left.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ledgerlake.stored.fields import fields_of, parse_stored, stored
from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Sequence

VERSION = 1


@dataclass(frozen=True)
class Bucket:
    """A stored bucket of the delayed index.

    ``first`` and ``last`` are the least and greatest position in it. ``waiting`` counts the
    messages that have not left. ``segment`` (from 1) and ``offset`` give the next message, due at
    ``next_ms``; the last one is due at ``last_ms``. A bucket that is not ``sealed`` is mutable: it
    may be merged with its neighbours. No waiting message whose bytes are outside the bucket has a
    position before ``reread_from``; None if the bucket has the bytes of all messages.
    """

    bucket_id: int
    first: Position
    last: Position
    segments: int
    waiting: int
    next_ms: int
    last_ms: int
    sealed: bool
    reread_from: Position | None
    segment: int = 1
    offset: int = 0


@dataclass(frozen=True)
class SegmentRange:
    """The segments of a bucket from number ``first`` up to, and without, number ``end``."""

    bucket_id: int
    first: int
    end: int


@dataclass(frozen=True)
class IndexRecord:
    """A topic partition's delayed index between micro-batches.

    ``buckets`` are in the order in which they were written. ``range_end`` is the last ledger of the
    mutable buckets' range; ``reached`` the greatest position that was ever added. ``outputs`` are
    the mark-delete positions: messages up to there are not for that output. ``doomed`` buckets are
    no longer used, and deleted next time; so are the ``finished`` segments of other buckets, whose
    messages have all left.
    """

    buckets: list[Bucket] = field(default_factory=list)
    range_end: int = -1
    reached: Position = BEFORE_ALL
    outputs: dict[str, Position] = field(default_factory=dict)
    doomed: list[int] = field(default_factory=list)
    finished: list[SegmentRange] = field(default_factory=list)


def record_to_json(record: IndexRecord) -> str:
    return json.dumps({"version": VERSION, **fields_of(record)}, default=fields_of)


def record_from_json(text: str) -> IndexRecord:
    """Read the record of an index.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "delayed index", _record, VERSION)


def _record(fields: dict[str, Any]) -> IndexRecord:
    record: IndexRecord = stored(IndexRecord, fields)
    ids = [bucket.bucket_id for bucket in record.buckets]
    reached = {bucket.bucket_id: bucket.segment for bucket in record.buckets}
    are_finished = all(
        1 <= part.first < part.end <= reached.get(part.bucket_id, part.end)
        for part in record.finished
    )
    if len(set(ids)) != len(ids) or not all(map(_is_sound, record.buckets)) or not are_finished:
        raise ValueError("its buckets contradict themselves")
    return record


def _is_sound(bucket: Bucket) -> bool:
    is_used_up = not bucket.waiting and bucket.segment == bucket.segments + 1
    return (
        bucket.waiting >= 0
        and bucket.offset >= 0
        and (1 <= bucket.segment <= bucket.segments or is_used_up)
    )


def smallest_neighbours(buckets: Sequence[Bucket]) -> int:
    """Return the place of the first of those two neighbours that have the fewest messages between
    them; there must be two buckets or more.
    """
    sums = [left.waiting + right.waiting for left, right in pairwise(buckets)]
    return sums.index(min(sums))
