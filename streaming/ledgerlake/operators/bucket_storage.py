"""Stores the snapshots of delayed messages' buckets in Spark's state store, or in a folder.

The state store drops the values that a failed micro-batch wrote, and keeps those that an older
version of the state names; a folder does neither. There, a bucket that the record does not name
gets a mark (``<bucket id>.dropped``), and is removed when the mark is a day old. A bucket whose
first segments are finished gets one with the number of the first that is not (``<bucket
id>-<segment>.dropped``), and the blocks before it are removed. So the state of any micro-batch of
the last day finds its segments, and buckets that killed tasks left are removed too.
"""

from __future__ import annotations

import abc
import bisect
import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.message import DecodeError
from pyarrow import fs

from ledgerlake.delay.snapshot import VERSION
from ledgerlake.delay.storage import METADATA, missing
from ledgerlake.errors import OffsetError, refuse_newer
from ledgerlake.pb import delay_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pyspark.sql.streaming.stateful_processor import MapState

    from ledgerlake.delay.bucket import SegmentRange
    from ledgerlake.stored.places import Place

# How long a bucket that is no longer used stays readable.
_KEPT_S = 24 * 3600

# How often a worker process looks for buckets that may go.
_SWEEP_EVERY_S = 3600

_DROPPED = ".dropped"

# Reading costs about 20 ms for a mebibyte.
_BLOCK_BYTES = 256 * 1024

_DIRECTORY = -1

Stored = TypeVar("Stored", pb.SegmentBlock, pb.BlockDirectory)


class _PackedStorage(abc.ABC):
    """Packs segments into blocks, since a segment may be small and a stored value costs a call.

    Stored by number: 0 the metadata, -1 the directory of the blocks, and each block at the number
    of its first segment.
    """

    def create_bucket(self) -> int:
        return secrets.randbits(62) + 1

    def save_all_segments(self, bucket_id: int, snapshots: Iterable[tuple[int, bytes]]) -> None:
        directory = pb.BlockDirectory(version=VERSION)
        block = pb.SegmentBlock()
        size = 0
        for number, value in snapshots:
            if size and (number == METADATA or size + len(value) > _BLOCK_BYTES):
                self._put(bucket_id, directory.first_segments[-1], block.SerializeToString())
                block, size = pb.SegmentBlock(), 0
            if number == METADATA:
                self._put(bucket_id, _DIRECTORY, directory.SerializeToString())
                self._put(bucket_id, METADATA, value)
                continue
            if not size:
                directory.first_segments.append(number)
            block.segments.append(value)
            size += len(value)

    @abc.abstractmethod
    def delete_segments(self, segments: SegmentRange) -> None: ...

    def get_segment(self, bucket_id: int, number: int) -> bytes:
        if number == METADATA:
            return self._values(bucket_id, METADATA)[0]
        firsts = _read_directory(self._values(bucket_id, _DIRECTORY)[0])
        place = bisect.bisect_right(firsts, number) - 1
        if place < 0:
            raise missing(bucket_id, number)
        segments = self._values(bucket_id, firsts[place])
        if number - firsts[place] >= len(segments):
            raise missing(bucket_id, number)
        return segments[number - firsts[place]]

    def _values(self, bucket_id: int, number: int) -> list[bytes]:
        values = _recent.get(bucket_id, number)
        if values is None:
            value = self._get(bucket_id, number)
            if value is None:
                raise missing(bucket_id, number)
            values = segments_of_block(value) if number > 0 else [value]
            _recent.put(bucket_id, number, values)
        return values

    @abc.abstractmethod
    def _put(self, bucket_id: int, number: int, value: bytes) -> None: ...

    @abc.abstractmethod
    def _get(self, bucket_id: int, number: int) -> bytes | None: ...


class StateStorage(_PackedStorage):
    """Buckets in a map of the state store: (bucket id, number) -> value."""

    def __init__(self, state: MapState) -> None:
        self._state = state

    def start(self) -> None:
        pass

    def delete_segments(self, segments: SegmentRange) -> None:
        firsts = _read_directory(self._values(segments.bucket_id, _DIRECTORY)[0])
        for number, following in pairwise(firsts):
            if segments.first < following <= segments.end:
                self._state.removeKey((segments.bucket_id, number))

    def delete_bucket(self, bucket_id: int) -> None:
        directory = self._get(bucket_id, _DIRECTORY)
        firsts = _read_directory(directory) if directory is not None else []
        for number in (METADATA, _DIRECTORY, *firsts):
            self._state.removeKey((bucket_id, number))

    def _put(self, bucket_id: int, number: int, value: bytes) -> None:
        self._state.updateValue((bucket_id, number), (value,))

    def _get(self, bucket_id: int, number: int) -> bytes | None:
        row = self._state.getValue((bucket_id, number))
        return None if row is None else bytes(row[0])


class FolderStorage(_PackedStorage):
    """Buckets in a folder of any filesystem that pyarrow knows: ``<folder>/<bucket id>/<number>``.

    Args:
        folder: the folder of one query's topic partition; nothing else may be in it.
        used: the first unfinished segment of each bucket that the record names.
    """

    def __init__(self, folder: Place, used: Mapping[int, int]) -> None:
        self._folder, self._filesystem, self._root = folder, folder.filesystem(), folder.root
        self._used = {str(bucket_id): segment for bucket_id, segment in used.items()}

    def start(self) -> None:
        self._folder.make()
        if _is_time_to_sweep(self._root):
            self._sweep()

    def create_bucket(self) -> int:
        bucket_id = super().create_bucket()
        (self._folder / str(bucket_id)).make()
        return bucket_id

    def _put(self, bucket_id: int, number: int, value: bytes) -> None:
        with self._filesystem.open_output_stream(f"{self._root}/{bucket_id}/{number}") as stream:
            stream.write(value)

    def delete_segments(self, segments: SegmentRange) -> None:
        """Leave them until ``start`` finds that they are finished, and the bucket is not."""

    def delete_bucket(self, bucket_id: int) -> None:
        """Mark a bucket as dropped; it is removed later."""
        self._mark(str(bucket_id))

    def _mark(self, name: str) -> None:
        with self._filesystem.open_output_stream(f"{self._root}/{name}{_DROPPED}"):
            pass

    def _get(self, bucket_id: int, number: int) -> bytes | None:
        try:
            with self._filesystem.open_input_stream(f"{self._root}/{bucket_id}/{number}") as stream:
                return bytes(stream.read())
        except FileNotFoundError:
            return None

    def _sweep(self) -> None:
        """Mark buckets that the record does not name, and finished segments, as dropped. Remove a
        mark if a restored record uses its bucket or segment. Delete buckets and segments that were
        marked long ago.
        """
        files = self._filesystem.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        marks = {
            file.base_name.removesuffix(_DROPPED): file
            for file in files
            if file.base_name.endswith(_DROPPED)
        }
        for file in files:
            name = file.base_name
            if name.isdecimal() and name not in self._used and name not in marks:
                self._mark(name)
        for bucket, segment in self._used.items():
            if segment > 1 and (name := f"{bucket}-{segment}") not in marks:
                self._mark(name)
        oldest_s = time.time() - _KEPT_S
        for name, mark in marks.items():
            bucket, _, end = name.partition("-")
            if bucket in self._used and (not end or self._used[bucket] < int(end)):
                self._filesystem.delete_file(mark.path)
            elif mark.mtime_ns / 1e9 < oldest_s:
                self._remove(bucket, int(end or 0))
                self._filesystem.delete_file(mark.path)

    def _remove(self, bucket: str, end: int) -> None:
        """Remove the blocks of a bucket that are wholly before a segment, or, if that is 0, all of
        it.
        """
        folder = f"{self._root}/{bucket}"
        with contextlib.suppress(FileNotFoundError):
            if not end:
                self._filesystem.delete_dir(folder)
                return
            files = self._filesystem.get_file_info(fs.FileSelector(folder))
            numbers = sorted(int(file.base_name) for file in files if file.base_name.isdecimal())
            for number, following in pairwise(numbers):
                if number > METADATA and following <= end:
                    self._filesystem.delete_file(f"{folder}/{number}")


class _Recent:
    """A cache of blocks that this worker process has read: every batch needs the first unfinished
    segments.

    Values never change and ids are never used again, so no entry can be stale.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._values: OrderedDict[tuple[int, int], list[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, bucket_id: int, number: int) -> list[bytes] | None:
        with self._lock:
            if (bucket_id, number) in self._values:
                self._values.move_to_end((bucket_id, number))
            return self._values.get((bucket_id, number))

    def put(self, bucket_id: int, number: int, values: list[bytes]) -> None:
        with self._lock:
            if (bucket_id, number) in self._values:
                return
            self._values[bucket_id, number] = values
            self._bytes += sum(map(len, values))
            while self._bytes > self._max_bytes:
                _, old = self._values.popitem(last=False)
                self._bytes -= sum(map(len, old))


def segments_of_block(block: bytes) -> list[bytes]:
    """Return the segments in a block.

    Raises:
        OffsetError: it is damaged.
    """
    return list(_parse(pb.SegmentBlock, block).segments)


def _parse(kind: type[Stored], data: bytes) -> Stored:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise OffsetError(
            f"a bucket of delayed messages is damaged ({error}); restore the checkpoint"
        ) from None


def _read_directory(data: bytes) -> list[int]:
    directory = _parse(pb.BlockDirectory, data)
    refuse_newer("a bucket of delayed messages", directory.version, VERSION)
    return list(directory.first_segments)


_recent = _Recent(32 * 1024 * 1024)
_swept_s: dict[str, float] = {}


def _is_time_to_sweep(root: str) -> bool:
    now_s = time.monotonic()
    if now_s - _swept_s.get(root, float("-inf")) < _SWEEP_EVERY_S:
        return False
    _swept_s[root] = now_s
    return True
