"""Delta tables in memory, as ``deltalake`` shows them: a log of commits, app transactions, and
conflicts between writers.

A commit that begins from an older version than the newest conflicts with those in between where
they carry one of its app ids; else it lands behind them, as Delta's own writers do it. Some commits
are files that the product writes into the log. Such a file is created only if the log has no commit
of its version.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import deltalake
import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError, TableNotFoundError

from ledgerlake.stored.places import Place
from ledgerlake.table.deletion_vectors import read_vector

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.disk import Disk
    from tests.simulation.world import World


# The property of a table whose commits the product writes itself.
_OWN_COMMITS = "delta.enableDeletionVectors"

_LOG_FILE = re.compile(r"(.+)/_delta_log/(\d{20})\.json")


@dataclass(frozen=True)
class Commit:
    """One version of a table. ``vectors`` says which files have rows that are deleted."""

    files: tuple[str, ...]
    transactions: dict[str, int]
    time_s: float
    metadata: dict[str, str] = field(default_factory=dict)
    removed: frozenset[str] = frozenset()
    vectors: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(eq=False)
class StoredTable:
    """What the log of a table holds."""

    path: str
    schema: deltalake.Schema
    commits: list[Commit] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def has_own_commits(self) -> bool:
        return _OWN_COMMITS in self.properties

    def files(self, version: int) -> dict[str, Commit]:
        """The files of a version, each with the commit that added it."""
        found: dict[str, Commit] = {}
        for commit in self.commits[: version + 1]:
            for name in commit.removed:
                found.pop(name, None)
            found |= dict.fromkeys(commit.files, commit)
        return found

    def deleted(self, version: int) -> dict[str, Any]:
        """The bitmaps of deleted rows by file."""
        return {
            name: read_vector(Place(self.path), commit.vectors[name])
            for name, commit in self.files(version).items()
            if name in commit.vectors
        }

    def transactions(self, version: int) -> dict[str, int]:
        """The app transactions of a version."""
        found: dict[str, int] = {}
        for commit in self.commits[: version + 1]:
            found |= commit.transactions
        return found


@dataclass(eq=False)
class Lake:
    """All tables by path. ``on_commit`` hears of every commit that landed."""

    world: World
    disk: Disk
    tables: dict[str, StoredTable] = field(default_factory=dict)
    on_commit: Callable[[StoredTable, Commit], None] = lambda _table, _commit: None

    def create(self, path: str, schema: pa.Schema, properties: dict[str, str]) -> None:
        self.world.access(f"create {_kind(path)}")
        if path not in self.tables:
            first = Commit((), {}, self.world.now_s)
            self.tables[path] = StoredTable(path, _delta_schema(schema), [first], properties)
            if self.tables[path].has_own_commits:
                self.disk.files[f"{path}/_delta_log/{0:020}.json"] = b"{}"
        self.world.access(f"created {_kind(path)}")

    def create_file(self, path: str, data: bytes) -> bool:
        """Create a file unless it is there; if it is one of a log, that is a commit."""
        matched = _LOG_FILE.fullmatch(path)
        if matched is None:
            return self.disk.create(path, data)
        kind = _kind(matched[1])
        if self.world.access(f"commit {kind}") == "fail" or self.disk.is_full:
            raise OSError("the store said no")
        if path in self.disk.files:
            return False
        self.disk.files[path] = data
        self._land(self.tables[matched[1]], list(map(json.loads, data.splitlines())))
        if self.world.access(f"committed {kind}") == "fail":
            raise OSError("the answer was lost")
        return True

    def _land(self, stored: StoredTable, actions: list[dict[str, Any]]) -> None:
        added = [action["add"] for action in actions if "add" in action]
        commit = Commit(
            tuple(one["path"] for one in added),
            {one["txn"]["appId"]: one["txn"]["version"] for one in actions if "txn" in one},
            self.world.now_s,
            next(one["commitInfo"] for one in actions if "commitInfo" in one),
            frozenset(one["remove"]["path"] for one in actions if "remove" in one),
            {one["path"]: one["deletionVector"] for one in added if "deletionVector" in one},
        )
        stored.commits.append(commit)
        version = len(stored.commits) - 1
        self.world.say(f"{_kind(stored.path)}: version {version} with {len(added)} files lands")
        self.on_commit(stored, commit)


class MemoryTable:
    """As much of ``deltalake.DeltaTable`` as is used."""

    lake: Lake

    def __init__(self, path: str, version: int | None = None, storage_options: None = None) -> None:
        self._path = path
        stored = self.lake.tables.get(path)
        if stored is None:
            raise TableNotFoundError(f"no table at {path}")
        self._stored = stored
        self._version = len(stored.commits) - 1 if version is None else version

    def update_incremental(self) -> None:
        self.lake.world.access(f"load {_kind(self._path)}")
        self._version = len(self._stored.commits) - 1

    def is_newest(self) -> bool:
        """Whether the log has no later version, as one request for the next commit says it."""
        self.lake.world.access(f"load {_kind(self._path)}")
        return self._version == len(self._stored.commits) - 1

    def version(self) -> int:
        return self._version

    def schema(self) -> deltalake.Schema:
        return self._stored.schema

    def metadata(self) -> Any:
        return SimpleNamespace(
            id=self._path, configuration=self._stored.properties, partition_columns=[]
        )

    def protocol(self) -> Any:
        features = ["deletionVectors"] if self._stored.has_own_commits else []
        return SimpleNamespace(writer_features=features, min_writer_version=2)

    def history(self, limit: int) -> list[dict[str, Any]]:
        commits = [
            {"version": number, **one.metadata} for number, one in enumerate(self._stored.commits)
        ]
        return commits[: self._version + 1][::-1][:limit]

    def deletion_vectors(self) -> pa.Table:
        deleted = self._stored.deleted(self._version)
        masks = [[row not in rows for row in range(max(rows) + 1)] for rows in deleted.values()]
        return pa.table(
            {
                "filepath": pa.array([f"{self._path}/{name}" for name in deleted], pa.string()),
                "selection_vector": pa.array(masks, pa.list_(pa.bool_())),
            }
        )

    def create_checkpoint(self) -> None:
        """The log is read from its beginning, so it needs none."""

    def cleanup_metadata(self) -> None:
        """Nothing of the log is old enough."""

    def get_add_actions(self, flatten: bool = False) -> pa.Table:
        files = list(self._stored.files(self._version).items())
        times_ms = [int(commit.time_s * 1000) for _, commit in files]
        return pa.table(
            {
                "path": [name for name, _ in files],
                "modification_time": pa.array(times_ms, pa.int64()),
            }
        )

    def rows(self) -> pa.Table:
        """The rows of all files that are not deleted, as the store has them."""
        deleted = self._stored.deleted(self._version)
        parts = [pa.schema(self._stored.schema.to_arrow()).empty_table()]
        for name in self.get_add_actions()["path"].to_pylist():
            rows = pq.read_table(pa.BufferReader(self.lake.disk.files[f"{self._path}/{name}"]))
            gone = deleted.get(name, ())
            parts.append(rows.take([row for row in range(rows.num_rows) if row not in gone]))
        return pa.concat_tables(parts, promote_options="permissive")

    def transaction_version(self, app_id: str) -> int | None:
        for commit in reversed(self._stored.commits[: self._version + 1]):
            if app_id in commit.transactions:
                return commit.transactions[app_id]
        return None

    def create_write_transaction(
        self, actions: list[Any], mode: str, schema: Any, commit_properties: Any = None, **_: Any
    ) -> None:
        world, stored, kind = self.lake.world, self._stored, _kind(self._path)
        assert mode == "append"
        transactions = {one.app_id: one.version for one in commit_properties.app_transactions or ()}
        verdict = world.access(f"commit {kind}")
        if verdict == "fail":
            raise CommitFailedError("the store said no")
        if any(
            not transactions.keys().isdisjoint(commit.transactions)
            for commit in stored.commits[self._version + 1 :]
        ):
            raise CommitFailedError("a concurrent transaction has the same app id")
        commit = Commit(
            tuple(action.path for action in actions),
            transactions,
            world.now_s,
            commit_properties.custom_metadata or {},
        )
        stored.commits.append(commit)
        self._version = len(stored.commits) - 1
        world.say(f"{kind}: version {self._version} with {len(commit.files)} files lands")
        self.lake.on_commit(stored, commit)
        if world.access(f"committed {kind}") == "fail":
            raise CommitFailedError("the answer was lost")


class Sql:
    """As much of ``deltalake.QueryBuilder`` as is used; DuckDB answers."""

    def register(self, name: str, table: MemoryTable) -> Sql:
        self._name, self._rows = name, table.rows()
        return self

    def execute(self, query: str) -> pa.RecordBatchReader:
        with duckdb.connect() as connection:
            # The engine of delta-rs calls it so.
            connection.execute("create macro to_timestamp_micros(us) as make_timestamptz(us)")
            connection.register(self._name, self._rows)
            return connection.sql(query).to_arrow_table().to_reader()


def _kind(path: str) -> str:
    return path.rpartition("/")[2]


_schemas: dict[str, deltalake.Schema] = {}


def _delta_schema(schema: pa.Schema) -> deltalake.Schema:
    """Kept, since making one takes long."""
    key = str(schema)
    if key not in _schemas:
        _schemas[key] = deltalake.Schema.from_arrow(schema)
    return _schemas[key]
