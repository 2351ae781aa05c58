"""Buckets of delayed messages in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.delay.storage import missing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.delay.bucket import SegmentRange


class MemoryStorage:
    def __init__(self) -> None:
        self.buckets: dict[int, dict[int, bytes]] = {}
        self._last_id = 0

    def start(self) -> None:
        pass

    def create_bucket(self) -> int:
        self._last_id += 1
        return self._last_id

    def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
        bucket = self.buckets.setdefault(bucket_id, {})
        for number, value in snapshots:
            bucket[number] = value

    def get_segment(self, bucket_id: int, number: int) -> bytes:
        try:
            return self.buckets[bucket_id][number]
        except KeyError:
            raise missing(bucket_id, number) from None

    def delete_segments(self, segments: SegmentRange) -> None:
        values = self.buckets.get(segments.bucket_id, {})
        for number in [number for number in values if segments.first <= number < segments.end]:
            del values[number]

    def delete_bucket(self, bucket_id: int) -> None:
        self.buckets.pop(bucket_id, None)
