"""A Delta table with one row for each key: the latest message.

Tasks write all messages of a micro-batch into files, as for any table. The driver keeps an index of
the latest row of each key (see ``latest_index``), and commits the files together with the deletion
vectors of all rows that are not the latest any more. So no file is written again when a key
changes, and the commit carries the micro-batch's numbers as every table's does (see
``delta_table``).

The same commit writes files again if most of their rows are deleted, and merges small ones, as far
as that is little work. Nobody else has to: upkeep leaves such a table alone. Files of other writers
only get deletion vectors: their rows may lack a key, a position, or whole columns.

delta-rs commits no deletion vectors from Python, so the commit is written here (see
``log_commit``). The index is read from the table when a query starts. It follows what other writers
change in the table's files: only files that they add are read.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import DeltaError
from pyroaring import BitMap

from ledgerlake.errors import TableAccessError, TableError
from ledgerlake.table.deletion_vectors import live_rows, pack_vectors, read_vector
from ledgerlake.table.delta_table import LATEST, MODE, Table
from ledgerlake.table.latest_index import FileRows, LatestIndex, key_hashes, ranks
from ledgerlake.table.layout import log_text, path_in_file, record_of
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.log_state import read_log_state
from ledgerlake.table.ordered_files import (
    BufferedWriter,
    DataFile,
    data_folder,
    open_file,
    read_row_groups,
)
from ledgerlake.table.own_commits import OwnCommits
from ledgerlake.table.properties import is_on
from ledgerlake.table.record_table import RecordTable
from ledgerlake.table.vacuum import is_own_file
from ledgerlake.values.record_columns import PULSAR_COLUMN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from deltalake import DeltaTable
    from numpy.typing import NDArray

    from ledgerlake.table.log_commit import Action

_VECTORS = "delta.enableDeletionVectors"
_FEATURES = frozenset({"deletionVectors"})
_APPEND_ONLY = "delta.appendOnly"


_KEY_COLUMNS = ("key", "key_bytes", "is_null")
_RANK_COLUMNS = (
    "topic",
    "partition",
    "ledger_id",
    "entry_id",
    "batch_index",
    "broker_timestamp",
    "publish_time",
    "deliver_at",
    "delivered_at",
)

# A file is written again if so much of it is deleted. Small files are merged from so many on. A
# commit writes no more than so many rows and bytes again, but one file at least.
_DELETED_PART = 0.5
_SMALL_ROWS = 100_000
_SMALL_BYTES = 16 * 1024 * 1024
_MOST_SMALL_FILES = 16
_MOST_REWRITTEN_ROWS = 400_000
_MOST_REWRITTEN_BYTES = 64 * 1024 * 1024
_PREFIX = "part-compacted"


@dataclass
class _State:
    """The table in a version: the log's entries of its files, and the index of their rows.
    ``touched`` has the files with rows that the index deletes and the log does not.
    """

    version: int
    entries: dict[str, Action]
    index: LatestIndex = field(default_factory=LatestIndex)
    touched: set[str] = field(default_factory=set)


class _LatestCommits(OwnCommits):
    """The commits of a table with the latest messages, for both shapes."""

    created_with = _FEATURES
    _state: _State | None = None

    def create(self, properties: dict[str, str] | None = None) -> None:
        super().create({_VECTORS: "true", MODE: LATEST} | (properties or {}))

    def _check_mode(self, existing: DeltaTable) -> None:
        protocol = existing.protocol()
        if existing.metadata().configuration.get(MODE) != LATEST:
            raise TableError(
                f'the table at {self.path} was not made with mode = "latest", and may have several '
                "rows of a key; use another path"
            )
        if not is_on(existing, _VECTORS) or "deletionVectors" not in (
            protocol.writer_features or ()
        ):
            raise TableError(
                f"the table at {self.path} has no deletion vectors any more; set {_VECTORS} to "
                "true again"
            )
        if is_on(existing, _APPEND_ONLY):
            raise TableError(
                f"the table at {self.path} has {_APPEND_ONLY}, and its rows have to be deleted; "
                "unset it"
            )

    def _try_to_append(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> int | None:
        """Commit the files with the rows that they make obsolete."""
        state = self._current_state(table)
        if any(file.name in state.entries for file in files):
            raise OSError("the table has the files of this commit already")
        change = _Change(self, state, files, self._keys_of_new(files))
        # The index has the new rows from here on; if they are not committed, it is read again.
        self._state = None
        self._state = change.commit(numbers, metadata)
        return None if self._state is None else self._state.version

    def _current_state(self, table: DeltaTable) -> _State:
        """Return the state of a version of the table: that of the last commit with what other
        writers have changed since.
        """
        known, version = self._state, table.version()
        if known is not None and known.version == version:
            return known
        self._take_columns(table)
        # The index changes in place; after a failure it is read anew.
        self._state = None
        try:
            entries = read_log_state(self.path, version).files
            followed = None if known is None else self._followed(known, version, entries)
            self._state = followed or _State(
                version, entries, *self._read_index(table, _in_order(entries))
            )
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            raise TableAccessError(
                f"the keys of the table at {self.path} cannot be read: {self.path.reason(error)}"
            ) from None
        return self._state

    def _take_columns(self, table: DeltaTable) -> None:
        """Take the columns that the table has by now, which files that are written again must
        keep.
        """

    def _followed(self, known: _State, version: int, entries: dict[str, Action]) -> _State | None:
        """Return the state of a later version. None if only the whole table says it: rows came
        back, a vector is none of ours, or second rows of keys are not deleted in the table yet.
        """
        before, index = known.entries, known.index
        added = [name for name in _in_order(entries) if name not in before]
        changed = [
            name
            for name in before
            if name in entries and _vector(entries[name]) != _vector(before[name])
        ]
        deleted = {name: self._read_vector(entries[name]) for name in (*added, *changed)}
        vectors = {name: vector for name, vector in deleted.items() if vector is not None}
        if (
            known.touched
            or len(vectors) < len(deleted)
            or any(index.deleted[name] - vectors[name] for name in changed)
        ):
            return None
        files = [self._rows_of(name, vectors[name]) for name in added]
        index.drop(before.keys() - entries.keys(), {name: vectors[name] for name in changed})
        return _State(version, entries, index, index.restore(files))

    def _read_index(self, table: DeltaTable, names: list[str]) -> tuple[LatestIndex, set[str]]:
        deleted = _deleted_rows(table)
        index = LatestIndex()
        return index, index.restore(
            self._rows_of(name, deleted.get(name, BitMap())) for name in names
        )

    def _read_vector(self, entry: Action) -> BitMap | None:
        descriptor = _vector(entry)
        return BitMap() if descriptor is None else read_vector(self.path, descriptor)

    def _rows_of(
        self, name: str, deleted: BitMap
    ) -> tuple[str, NDArray[np.bytes_], NDArray[np.bool_]]:
        """Return a file's name, the hashes of its rows' keys, and which rows are live."""
        keys = self._read_columns(name, _KEY_COLUMNS)
        return name, key_hashes(keys), ~_mask(deleted, 0, keys.num_rows)

    def _keys_of_new(self, files: Sequence[DataFile]) -> list[FileRows]:
        """Return the keys of the rows of a micro-batch's files."""
        columns = [self._read_columns(file.name, (*_KEY_COLUMNS, *_RANK_COLUMNS)) for file in files]
        if not columns:
            return []
        rank = ranks(pa.concat_tables(columns))
        ends = np.cumsum([rows.num_rows for rows in columns])
        return [
            FileRows(
                file.name,
                key_hashes(rows),
                rows["is_null"].to_numpy(),
                rank[end - rows.num_rows : end],
            )
            for file, rows, end in zip(files, columns, ends, strict=True)
        ]

    def _read_columns(self, name: str, columns: Sequence[str]) -> pa.Table:
        """Read columns of a file's rows, in the order in which they are in it."""
        with open_file(self.path.filesystem(), (self.path / name).root) as file:
            rows = file.read([path_in_file(self.schema, column) for column in columns])
            count = file.metadata.num_rows
        if record_of(self.schema) is not None and rows.num_columns:
            rows = pa.Table.from_struct_array(rows[PULSAR_COLUMN])
        # Other writers have other types of Arrow for the same columns of Delta, and may leave out
        # columns.
        present = set(rows.column_names)
        types = {column: self.schema.field(column).type for column in columns}
        return pa.table(
            {
                column: rows[column].cast(kind) if column in present else pa.nulls(count, kind)
                for column, kind in types.items()
            }
        )


class LatestTable(_LatestCommits):
    """A table of messages with the latest of each key."""


class LatestRecordTable(_LatestCommits, RecordTable):
    """A table of records with the latest of each key."""

    def _take_columns(self, table: DeltaTable) -> None:
        self._adopt(table)


class _Change:
    """A commit to a table: new files, deletion vectors, and files that are written again.

    The index is changed at once. If the commit fails, it has to be read again.
    """

    def __init__(
        self, table: Table, state: _State, files: Sequence[DataFile], added: Sequence[FileRows]
    ) -> None:
        self._table = table
        self._state = state
        self._new = {file.name: file for file in files}
        self._index = state.index
        self._touched = state.touched | state.index.add(added)

    def commit(self, numbers: dict[str, int], metadata: dict[str, str] | None) -> _State | None:
        """Commit; return the state of the new version, None if another writer's commit came first.

        Raises:
            OSError: the store does not do what it is asked.
        """
        rewritten, written = self._rewrite()
        entries = dict(self._state.entries)
        removed = [entries.pop(name) for name in {*rewritten, *self._touched} if name in entries]
        added = self._entries(rewritten, written)
        version = self._state.version + 1
        if not self._commit(removed, list(added.values()), numbers, metadata).land(version):
            return None
        return _State(version, entries | added, self._index)

    def _entries(self, rewritten: Sequence[str], written: Sequence[DataFile]) -> dict[str, Action]:
        """Return the log's entries of new and changed files."""
        now_ms = int(time.time() * 1000)
        sizes = {
            file.name: (file.size_bytes, file.rows, json.loads(file.stats))
            for file in (*self._new.values(), *written)
        }
        for name in self._touched:
            entry = self._state.entries.get(name)
            if entry is not None:
                rows = self._rows(entry)
                # Another writer may have left the number out, which a vector needs.
                sizes[name] = entry["size"], rows, _stats(entry) | {"numRecords": rows}
        live = {
            name: sizes[name]
            for name in sizes
            if name not in rewritten and len(self._index.deleted[name]) < sizes[name][1]
        }
        gone = {*rewritten, *(name for name in sizes if name not in live)}
        vectors = {name: self._index.deleted[name] for name in live if self._index.deleted[name]}
        descriptors: dict[str, Action] = {}
        if vectors:
            name, content, descriptors = pack_vectors(vectors)
            (self._table.path / name).create_file(content)
        self._index.remove_files(gone)
        return {
            name: {
                "path": name,
                "partitionValues": {},
                "size": size_bytes,
                "modificationTime": now_ms,
                "dataChange": True,
                "stats": log_text(stats | ({"tightBounds": False} if name in descriptors else {})),
                **({"deletionVector": descriptors[name]} if name in descriptors else {}),
            }
            for name, (size_bytes, _, stats) in live.items()
        }

    def _rewrite(self) -> tuple[list[str], list[DataFile]]:
        """Write the live rows of some of our files to a new one; return the names of the old ones,
        and the new one.
        """
        files = {file.name: (file.rows, file.size_bytes) for file in self._new.values()}
        files |= {
            name: (self._rows(entry), entry["size"])
            for name, entry in self._state.entries.items()
            if is_own_file(name)
        }
        names = _to_rewrite(
            [_Sized(name, *sizes, len(self._index.deleted[name])) for name, sizes in files.items()]
        )
        if not names:
            return [], []
        writer = BufferedWriter(
            data_folder(self._table.path, self._table.schema, _PREFIX), makes_one_file=True
        )
        live = dict.fromkeys(names, 0)
        for name in names:
            for part in self._live_rows(name):
                writer.write(part)
                live[name] += part.num_rows
        (written,) = writer.finish()
        self._index.move(live, written.name)
        return names, [written]

    def _rows(self, entry: Action) -> int:
        """Return the number of rows of a file, with the deleted ones; the log of another writer
        need not have it.
        """
        count = _stats(entry).get("numRecords")
        if count is None:
            place = self._table.path
            count = pq.read_metadata(
                (place / entry["path"]).root, filesystem=place.filesystem()
            ).num_rows
        return int(count)

    def _live_rows(self, name: str) -> Iterator[pa.Table]:
        deleted = self._index.deleted[name]
        first = 0
        folder = data_folder(self._table.path, self._table.schema, _PREFIX)
        for rows in read_row_groups(folder, name):
            live = rows.filter(pa.array(~_mask(deleted, first, rows.num_rows)))
            first += rows.num_rows
            if live.num_rows:
                yield live

    def _commit(
        self,
        removed: Sequence[Action],
        added: Sequence[Action],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> OwnCommit:
        now_ms = int(time.time() * 1000)
        actions: list[Action] = [
            *(
                {"txn": {"appId": name, "version": number, "lastUpdated": now_ms}}
                for name, number in numbers.items()
            ),
            *({"remove": _removed(entry, now_ms)} for entry in removed),
            *({"add": entry} for entry in added),
        ]
        return OwnCommit(
            self._table.path, "WRITE", {"mode": "Append"}, self._state.version, actions, metadata
        )


@dataclass(frozen=True)
class _Sized:
    """A file, and how many of its rows are deleted."""

    name: str
    rows: int
    size_bytes: int
    deleted: int

    @property
    def live(self) -> int:
        return self.rows - self.deleted

    @property
    def is_small(self) -> bool:
        return self.rows <= _SMALL_ROWS and self.size_bytes <= _SMALL_BYTES


def _to_rewrite(files: Sequence[_Sized]) -> list[str]:
    """Return the files to write again in a commit, into one file."""
    sparse = [file for file in files if 0 < file.live <= file.rows * (1 - _DELETED_PART)]
    small = [file for file in files if file.live and file.is_small]
    wanted = {
        file.name: file for file in (*sparse, *(small if len(small) > _MOST_SMALL_FILES else ()))
    }
    chosen: list[str] = []
    left_rows, left_bytes = _MOST_REWRITTEN_ROWS, _MOST_REWRITTEN_BYTES
    for file in sorted(wanted.values(), key=lambda file: file.live):
        left_rows -= file.live
        left_bytes -= file.size_bytes
        if chosen and (left_rows < 0 or left_bytes < 0):
            break
        chosen.append(file.name)
    return chosen


def _removed(entry: Action, now_ms: int) -> Action:
    vector = _vector(entry)
    return {
        "path": entry["path"],
        "deletionTimestamp": now_ms,
        "dataChange": True,
        "extendedFileMetadata": True,
        "partitionValues": entry.get("partitionValues") or {},
        "size": entry["size"],
        **({"deletionVector": vector} if vector else {}),
    }


def _stats(entry: Action) -> dict[str, Any]:
    stats: dict[str, Any] = json.loads(entry.get("stats") or "{}")
    return stats


def _vector(entry: Action) -> Action | None:
    return entry.get("deletionVector") or None


def _in_order(entries: dict[str, Action]) -> list[str]:
    """Return the names of files in the order of their commits."""
    return sorted(entries, key=lambda name: (entries[name].get("modificationTime", 0), name))


def _mask(numbers: BitMap, first: int, count: int) -> NDArray[np.bool_]:
    """Return which of some neighbouring numbers are in a bitmap."""
    mask = np.zeros(count, dtype=bool)
    found = np.array(numbers & BitMap(range(first, first + count)), dtype=np.int64) - first
    mask[found] = True
    return mask


def _deleted_rows(table: DeltaTable) -> dict[str, BitMap]:
    return {
        name: BitMap(np.flatnonzero(~live).astype(np.uint32))
        for name, live in live_rows(table).items()
    }
