"""A Delta table with liquid clustering: its log names the columns by which upkeep clusters its
files (see ``clusters`` and ``compaction``), and other writers' ``OPTIMIZE`` does likewise.

    protocol         writer version 7 with the features clustering and domainMetadata
    domainMetadata   delta.clustering: {"clusteringColumns": [["customer"]], "domainName": "delta.clustering"}

delta-rs (1.6) reads such a table and commits nothing to it. So all commits are written here, also
those that add columns. Other columns may be named from one run to the next; files that are
clustered already stay as they are.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from ledgerlake.errors import TableAccessError, TableError
from ledgerlake.table.features import CLUSTERED
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.log_state import CLUSTERING_DOMAIN, clustering_columns
from ledgerlake.table.ordered_files import bounded_paths
from ledgerlake.table.own_commits import OwnCommits
from ledgerlake.table.record_table import RecordTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place
    from ledgerlake.table.log_commit import Action
    from ledgerlake.table.ordered_files import DataFile

_ATTEMPTS = 20

# What a table of writer version 2 has, before it has features.
_LEGACY_VERSION = 2
_LEGACY_FEATURES = ["appendOnly", "invariants"]
_FEATURES_VERSION, _READER_FEATURES_VERSION = 7, 3

# A type that is a feature of its own.
_WITHOUT_ZONE = "timestamp_ntz"
_WITHOUT_ZONE_FEATURE = frozenset({"timestampNtz"})


class _ClusteredCommits(OwnCommits):
    """The commits of a clustered table, for both shapes; ``cluster_by`` are its columns."""

    cluster_by: Sequence[str] = ()
    own_features = CLUSTERED

    def examine(self) -> bool:
        exists = super().examine()
        known = bounded_paths(self.schema)
        unknown = set(self.cluster_by) - set(known)
        if exists and unknown:
            raise TableError(
                f"cluster_by names {min(unknown)}, by which the table at {self.path} cannot be clustered; it can be by "
                f"{', '.join(known)}"
            )
        return exists

    def begin(self, previous_writer: int | None) -> None:
        super().begin(previous_writer)
        self._declare()

    def _declare(self) -> None:
        """Name the columns in the log, unless it has them.

        Raises:
            TableError: the log cannot be read or written, or other writers commit without pause.
        """
        columns = list(self.cluster_by)

        def actions(table: DeltaTable) -> list[Action]:
            if clustering_columns(self.path, table.version()) == columns:
                return []
            content = {"clusteringColumns": [name.split(".") for name in columns], "domainName": CLUSTERING_DOMAIN}
            domain = {"domain": CLUSTERING_DOMAIN, "configuration": log_text(content), "removed": False}
            return [*self._protocol(table, CLUSTERED), {"domainMetadata": domain}]

        self._change("CLUSTER BY", {"newClusteringColumns": ",".join(columns)}, actions)

    def _protocol(
        self, table: DeltaTable, features: frozenset[str], reader_features: frozenset[str] = frozenset()
    ) -> list[Action]:
        """Return the action that gives the table features, if it lacks them.

        Args:
            reader_features: those of them that readers have to know too.
        """
        protocol = table.protocol()
        if protocol.writer_features is None and protocol.min_writer_version > _LEGACY_VERSION:
            raise TableError(
                f"the table at {self.path} has an older protocol of writer version {protocol.min_writer_version}, which cannot become "
                "clustered here; use another path"
            )
        writers = {*(_LEGACY_FEATURES if protocol.writer_features is None else protocol.writer_features)}
        readers = {*(protocol.reader_features or ())}
        if writers >= features and readers >= reader_features:
            return []
        content: Action = {
            "minReaderVersion": _READER_FEATURES_VERSION if readers | reader_features else protocol.min_reader_version,
            "minWriterVersion": _FEATURES_VERSION,
            "writerFeatures": sorted(writers | features),
        }
        if readers | reader_features:
            content["readerFeatures"] = sorted(readers | reader_features)
        return [{"protocol": content}]

    def _change(self, operation: str, parameters: dict[str, Any], actions: Any) -> None:
        """Commit what ``actions`` returns for the current version of the table, if anything.

        Raises:
            TableError: the log cannot be read or written, or other writers commit without pause.
        """
        table = self._current()
        try:
            for _ in range(_ATTEMPTS):
                content = actions(table)
                version = table.version()
                if not content:
                    return
                if OwnCommit(self.path, operation, parameters, version, content).land(version + 1):
                    self._load()
                    return
                table = self._load()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise TableAccessError(f"the table at {self.path} cannot be changed: {self.path.reason(error)}") from None
        raise TableAccessError(f"other writers commit to the table at {self.path} without pause")

    def _try_to_append(
        self, table: DeltaTable, files: list[DataFile], numbers: dict[str, int], metadata: dict[str, str] | None
    ) -> int | None:
        now_ms = self._modified_ms = self._next_modified_ms(table)
        actions: list[Action] = [
            *({"txn": {"appId": name, "version": number, "lastUpdated": now_ms}} for name, number in numbers.items()),
            *({"add": _added(file, now_ms)} for file in files),
        ]
        version = table.version()
        commit = OwnCommit(self.path, "WRITE", {"mode": "Append"}, version, actions, metadata, is_blind=True)
        return version + 1 if commit.land(version + 1) else None


class ClusteredTable(_ClusteredCommits):
    """A clustered table of messages.

    Args:
        cluster_by: its columns; with a dot for one inside another.
    """

    def __init__(self, path: Place, schema: pa.Schema, cluster_by: Sequence[str]) -> None:
        super().__init__(path, schema)
        self.cluster_by = cluster_by


class ClusteredRecordTable(_ClusteredCommits, RecordTable):
    """A clustered table of records."""

    def __init__(self, path: Place, cluster_by: Sequence[str]) -> None:
        RecordTable.__init__(self, path)
        self.cluster_by = cluster_by

    def _add_fields(self, fields: pa.Schema) -> None:
        more = json.loads(deltalake.Schema.from_arrow(fields).to_json())

        def actions(table: DeltaTable) -> list[Action]:
            schema = _merged(json.loads(table.schema().to_json()), more)
            needed = _WITHOUT_ZONE_FEATURE if _has_type(schema, _WITHOUT_ZONE) else frozenset[str]()
            return [*self._protocol(table, needed, needed), _metadata(table, schema=schema)]

        self._change("ADD COLUMNS", {"columns": ",".join(fields.names)}, actions)

    def _set_property(self, name: str, value: str) -> None:
        def actions(table: DeltaTable) -> list[Action]:
            return [_metadata(table, properties={name: value})]

        self._change("SET TBLPROPERTIES", {"properties": log_text({name: value})}, actions)


def _added(file: DataFile, now_ms: int) -> Action:
    return {
        "path": file.name,
        "partitionValues": {},
        "size": file.size_bytes,
        "modificationTime": now_ms,
        "dataChange": True,
        "stats": file.stats,
    }


def _metadata(table: DeltaTable, schema: Action | None = None, properties: dict[str, str] | None = None) -> Action:
    """Return the action that gives a table another schema, or more properties."""
    known = table.metadata()
    named = {"name": known.name, "description": known.description, "createdTime": known.created_time}
    return {
        "metaData": {
            "id": str(known.id),
            **{name: value for name, value in named.items() if value is not None},
            "format": {"provider": "parquet", "options": {}},
            "schemaString": table.schema().to_json() if schema is None else log_text(schema),
            "partitionColumns": known.partition_columns,
            "configuration": known.configuration | (properties or {}),
        }
    }


def _has_type(kind: Any, name: str) -> bool:
    """Return whether a type of Delta is, or has at any depth, one of that name."""
    if isinstance(kind, dict):
        parts = [field["type"] for field in kind.get("fields", ())]
        return any(_has_type(part, name) for part in (*parts, kind.get("elementType"), kind.get("valueType")))
    return bool(kind == name)


def _merged(known: Any, more: Any) -> Any:
    """Return a type of Delta with the fields of both; those that are known stay as they are."""
    if not (isinstance(known, dict) and isinstance(more, dict) and known["type"] == more["type"]):
        return known
    if known["type"] == "struct":
        others = {field["name"].lower(): field for field in more["fields"]}
        fields = []
        for field in known["fields"]:
            other = others.pop(field["name"].lower(), field)
            fields.append({**field, "type": _merged(field["type"], other["type"])})
        return {**known, "fields": [*fields, *others.values()]}
    part = "elementType" if known["type"] == "array" else "valueType"
    return {**known, part: _merged(known[part], more[part])}
