"""Which row of a table has the latest message of each key. Pure: keys and places in, deleted rows
out.

A key is known by 16 bytes of a hash over the message's key. The index is three arrays in the order
of the hashes: hash, file, row. It has 24 bytes for each key, so ten million keys take 240 MB.
Another writer's row may have no key. It is in no index, so no message ever hides it.

Within a micro-batch, the later of two messages of a key is the one with the greater rank (see
``ranks``). A message of a later micro-batch is later than all of an earlier one.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyroaring import BitMap

from ledgerlake.table.ordered_files import effective_times

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from numpy.typing import NDArray

    Hashes = NDArray[np.bytes_]
    Numbers = NDArray[np.int64]

HASH_BYTES = 16
# So many names of files that are gone are kept.
_MOST_NAMES = 1000
_HASH = np.dtype(f"S{HASH_BYTES}")
_NO_KEY = bytes(HASH_BYTES)


@dataclass
class FileRows:
    """The rows of a file, in the order in which they are in it: the hash of each one's key, whether
    it deletes the key, and its rank.
    """

    name: str
    hashes: Hashes
    is_deletion: NDArray[np.bool_]
    rank: Numbers


@dataclass
class LatestIndex:
    """The latest row of each key, and the deleted rows of each file."""

    files: list[str] = field(default_factory=list)
    deleted: dict[str, BitMap] = field(default_factory=dict)
    _hashes: Hashes = field(default_factory=lambda: np.empty(0, dtype=_HASH))
    _file: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _row: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))

    def __len__(self) -> int:
        return len(self._hashes)

    def add(self, added: Iterable[FileRows]) -> set[str]:
        """Add the rows of new files; return the names of the files with rows that are deleted
        now.
        """
        new = list(added)
        numbers = np.repeat(
            np.arange(len(self.files), len(self.files) + len(new)),
            [len(rows.hashes) for rows in new],
        )
        self.files += [rows.name for rows in new]
        self.deleted |= {rows.name: BitMap() for rows in new}
        if not len(numbers):
            return set()
        hashes = np.concatenate([rows.hashes for rows in new])
        rows = np.concatenate([np.arange(len(part.hashes)) for part in new])
        order = np.lexsort((np.concatenate([part.rank for part in new]), hashes))
        is_deletion = np.concatenate([part.is_deletion for part in new])
        return self._take(hashes[order], numbers[order], rows[order], is_deletion[order])

    def restore(self, files: Iterable[tuple[str, Hashes, NDArray[np.bool_]]]) -> set[str]:
        """Take the files of a table that the index does not know yet, in the order of their
        commits: the hashes of their rows, and which are live. Another writer may have added a
        second row of a key: the last one counts.

        Returns:
            The names of the files with rows that have to be deleted.
        """
        parts: list[tuple[Hashes, Numbers, Numbers]] = []
        for name, hashes, is_live in files:
            number = len(self.files)
            self.files.append(name)
            self.deleted[name] = BitMap(np.flatnonzero(~is_live).astype(np.uint32))
            rows = np.flatnonzero(is_live)
            parts.append((hashes[rows], np.full(len(rows), number), rows))
        if not parts:
            return set()
        hashes, numbers, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((rows, numbers, hashes))
        return self._take(
            hashes[order], numbers[order], rows[order], np.zeros(len(order), dtype=bool)
        )

    def drop(self, gone: Collection[str], deleted: Mapping[str, BitMap]) -> None:
        """Drop what another writer has removed: whole files, and rows by the names of their
        files.
        """
        numbers = {name: number for number, name in enumerate(self.files)}
        is_gone = np.isin(self._file, [numbers[name] for name in gone])
        changed = np.flatnonzero(np.isin(self._file, [numbers[name] for name in deleted]))
        for name, rows in deleted.items():
            of_file = changed[self._file[changed] == numbers[name]]
            is_gone[of_file] = np.isin(
                self._row[of_file], np.array(rows - self.deleted[name], dtype=np.int32)
            )
            self.deleted[name] |= rows
        kept = np.flatnonzero(~is_gone)
        self._hashes, self._file, self._row = self._hashes[kept], self._file[kept], self._row[kept]
        self.remove_files(gone)

    def move(self, live: Mapping[str, int], name: str) -> None:
        """Take a new file that has the live rows of others, one file after another.

        Args:
            live: how many rows the new file has of each of the others, in this order.
        """
        numbers = {name: number for number, name in enumerate(self.files)}
        changed = np.flatnonzero(np.isin(self._file, [numbers[old] for old in live]))
        files, rows = self._file[changed], self._row[changed]
        first = 0
        for old, count in live.items():
            of_file = files == numbers[old]
            before = np.searchsorted(np.array(self.deleted[old], dtype=np.int32), rows[of_file])
            self._row[changed[of_file]] = first + rows[of_file] - before
            first += count
        self._file[changed] = len(self.files)
        self.files.append(name)
        self.deleted[name] = BitMap()

    def remove_files(self, names: Iterable[str]) -> None:
        """Forget files without a row that is the latest of its key."""
        for name in names:
            del self.deleted[name]
        if len(self.files) > 2 * len(self.deleted) + _MOST_NAMES:
            kept = [number for number, name in enumerate(self.files) if name in self.deleted]
            numbers = np.full(len(self.files), -1, dtype=np.int32)
            numbers[kept] = np.arange(len(kept))
            self._file = numbers[self._file]
            self.files = [self.files[number] for number in kept]

    def _take(
        self, hashes: Hashes, files: Numbers, rows: Numbers, is_deletion: NDArray[np.bool_]
    ) -> set[str]:
        """Take rows whose hashes rise, the later row of a key behind the earlier one; they are
        later than all rows that the index has. Return the names of the files that have deleted
        rows.
        """
        # They come first.
        keyless = np.searchsorted(hashes, _NO_KEY, side="right")
        hashes, files, rows, is_deletion = (
            hashes[keyless:],
            files[keyless:],
            rows[keyless:],
            is_deletion[keyless:],
        )
        is_last = _is_last(hashes)
        touched = self._delete(files[~is_last], rows[~is_last])
        hashes, files, rows, is_deletion = (
            hashes[is_last],
            files[is_last],
            rows[is_last],
            is_deletion[is_last],
        )
        touched |= self._delete(files[is_deletion], rows[is_deletion])
        places = np.searchsorted(self._hashes, hashes)
        is_known = places < len(self._hashes)
        is_known[is_known] = self._hashes[places[is_known]] == hashes[is_known]
        known = places[is_known]
        touched |= self._delete(self._file[known], self._row[known])
        self._replace(hashes, files, rows, is_deletion, places, is_known)
        return touched

    def _delete(self, files: NDArray[np.integer], rows: NDArray[np.integer]) -> set[str]:
        touched = set()
        for number in np.unique(files).tolist():
            name = self.files[number]
            self.deleted[name] |= BitMap(rows[files == number].astype(np.uint32))
            touched.add(name)
        return touched

    def _replace(
        self,
        hashes: Hashes,
        files: Numbers,
        rows: Numbers,
        is_deletion: NDArray[np.bool_],
        places: NDArray[np.int64],
        is_known: NDArray[np.bool_],
    ) -> None:
        """Put the latest rows in place of earlier ones; the hashes rise."""
        changed = is_known & ~is_deletion
        self._file[places[changed]] = files[changed]
        self._row[places[changed]] = rows[changed]
        fresh, gone = ~is_known & ~is_deletion, places[is_known & is_deletion]
        at = places[fresh]
        self._hashes = np.insert(self._hashes, at, hashes[fresh])
        self._file = np.insert(self._file, at, files[fresh])
        self._row = np.insert(self._row, at, rows[fresh])
        if len(gone):
            # Each of them has moved behind those that were inserted before it.
            moved = gone + np.searchsorted(at, gone, side="right")
            self._hashes = np.delete(self._hashes, moved)
            self._file = np.delete(self._file, moved)
            self._row = np.delete(self._row, moved)


def _is_last(hashes: Hashes) -> NDArray[np.bool_]:
    """Return which of sorted hashes are the last of equal ones."""
    return np.append(hashes[1:] != hashes[:-1], np.ones(min(1, len(hashes)), dtype=bool))


def key_hashes(rows: pa.Table) -> Hashes:
    """Return the hash of each message's key. A text and the same bytes are two keys, as they are to
    Pulsar. The hash of none is zero.
    """
    texts, others = (rows[name].to_pylist() for name in ("key", "key_bytes"))
    hashes = [_hash(text, other) for text, other in zip(texts, others, strict=True)]
    return np.frombuffer(b"".join(hashes), dtype=_HASH)


def _hash(text: str | None, other: bytes | None) -> bytes:
    if text is None and other is None:
        return _NO_KEY
    packed = b"b" + other if other is not None else b"t" + (text or "").encode()
    return hashlib.blake2b(packed, digest_size=HASH_BYTES).digest()


def ranks(rows: pa.Table) -> Numbers:
    """Return numbers that rise from an earlier message to a later one, over all rows of a
    micro-batch.

    On a topic partition the position counts, whatever the producers' clocks said. A delayed message
    counts from its delivery on, or as later than all others if the broker gives no times. Between
    topic partitions the effective time counts.
    """
    times = effective_times(rows).copy()
    position = [rows[name].to_numpy() for name in ("ledger_id", "entry_id", "batch_index")]
    names = pc.binary_join_element_wise(rows["topic"], rows["partition"].cast(pa.string()), "\0")
    partitions = (
        pa.chunked_array([names.combine_chunks()]).chunk(0).dictionary_encode().indices.to_numpy()
    )
    is_plain = rows["delivered_at"].is_null().to_numpy()
    order = np.lexsort((*reversed(position), partitions))
    plain = order[is_plain[order]]
    for number in np.unique(partitions[plain]).tolist():
        of_partition = plain[partitions[plain] == number]
        times[of_partition] = np.maximum.accumulate(times[of_partition])
    result = np.empty(len(times), dtype=np.int64)
    is_behind_all = ~is_plain & rows["broker_timestamp"].is_null().to_numpy()
    result[np.lexsort((*reversed(position), times, is_behind_all))] = np.arange(len(times))
    return result
