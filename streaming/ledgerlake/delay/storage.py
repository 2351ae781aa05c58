"""The interface of a storage for the snapshots of immutable buckets (PIP-195's
BucketSnapshotStorage).

A bucket is numbered values: 0 is its metadata, from 1 on its segments (see ``snapshot``). It is
written once, metadata last, so a bucket that has metadata is complete; its values never change, and
ids are never used again. Its segments are deleted in their order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ledgerlake.errors import OffsetError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.delay.bucket import SegmentRange

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

    def delete_segments(self, segments: SegmentRange) -> None:
        """Remove the first segments of a bucket, at once or later. Those before them were deleted,
        and so may some of these be.
        """

    def delete_bucket(self, bucket_id: int) -> None:
        """Remove a bucket, at once or later. It may be incomplete or gone already."""


def missing(bucket_id: int, number: int) -> OffsetError:
    return OffsetError(
        f"bucket {bucket_id} of delayed messages lacks its value {number}; restore the checkpoint "
        "and what belongs to it"
    )
