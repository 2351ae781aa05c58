"""The interface of a storage for the snapshots of immutable buckets (PIP-195's
BucketSnapshotStorage).

A bucket is numbered values: 0 is its metadata, from 1 on its segments (see ``snapshot``). It is
written once, metadata last, so a bucket that has metadata is complete; it never changes, and ids
are never used again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ledgerlake.errors import OffsetError

if TYPE_CHECKING:
    from collections.abc import Iterable

METADATA = 0


class SnapshotStorage(Protocol):
    """Raises errors of its own. After one, the caller starts again from the last saved record."""

    def start(self) -> None:
        """Prepare for use."""

    def create_bucket(self) -> int:
        """Return an id for a new bucket."""

    def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
        """Store the values of a bucket by number, one after the other."""

    def get_segment(self, bucket_id: int, number: int) -> bytes:
        """Return the bytes of one segment.

        Raises:
            OffsetError: it is not there.
        """

    def delete_bucket(self, bucket_id: int) -> None:
        """Remove a bucket, at once or later. It may be incomplete or gone already."""


class MemoryStorage:
    """Buckets in memory, for tests and experiments."""

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

    def delete_bucket(self, bucket_id: int) -> None:
        self.buckets.pop(bucket_id, None)


def missing(bucket_id: int, number: int) -> OffsetError:
    return OffsetError(
        f"bucket {bucket_id} of delayed messages lacks its value {number}; restore the checkpoint and what belongs to it"
    )
