"""Commits that create a table, or change its columns, its properties or its features.

delta-rs (1.6) adds ``variantType`` to the features of a table that it makes with deletion vectors, or
to which it adds a time without a zone, and readers that do not know that feature then refuse the
table. It also commits a schema that it cannot read back. So such commits are written here, by two
rules: a table has only the features that it needs, and a schema is committed only if the readers of
its log can read it.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from ledgerlake.decode.columns import first_line
from ledgerlake.errors import SetupError, TableAccessError, TableError
from ledgerlake.table.delta_table import Table
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.values.record_columns import PULSAR_COLUMN

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place
    from ledgerlake.table.log_commit import Action

_ATTEMPTS = 20

# The features of a table of writer version 2, which names none.
_LEGACY_VERSION = 2
_LEGACY_FEATURES = ["appendOnly", "invariants"]
_FEATURES_VERSION, _READER_FEATURES_VERSION = 7, 3

# A type that is a feature of its own.
_WITHOUT_ZONE = "timestamp_ntz"
_WITHOUT_ZONE_FEATURE = "timestampNtz"


class MetadataCommits(Table):
    """A table whose columns and properties change by commits that are written here."""

    def _add_fields(self, fields: pa.Schema) -> None:
        """Add columns, or parts of columns, that the table lacks.

        Raises:
            TableError: the table cannot be changed.
        """
        more = json.loads(deltalake.Schema.from_arrow(fields).to_json())

        def actions(table: DeltaTable) -> list[Action]:
            schema = _merged(json.loads(table.schema().to_json()), more)
            needed = _features_of(schema)
            protocol = protocol_change(table, str(self.path), needed, needed)
            return [*protocol, _changed_metadata(table, schema=schema)]

        self._change("ADD COLUMNS", {"columns": ",".join(fields.names)}, actions)

    def _set_property(self, name: str, value: str) -> None:
        def actions(table: DeltaTable) -> list[Action]:
            return [_changed_metadata(table, properties={name: value})]

        self._change("SET TBLPROPERTIES", {"properties": log_text({name: value})}, actions)

    def _change(
        self,
        operation: str,
        parameters: dict[str, Any],
        actions: Callable[[DeltaTable], list[Action]],
    ) -> None:
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


def create_table(path: Place, schema: pa.Schema, properties: dict[str, str], features: Collection[str]) -> None:
    """Create a table with features, unless there is one.

    Args:
        features: those that its properties need, of readers and writers.

    Raises:
        SetupError: the readers of a table could not read its schema.
        OSError: the table cannot be created.
    """
    delta_schema = json.loads(readable_schema(schema))
    needed = _features_of(delta_schema) | set(features)
    now_ms = int(time.time() * 1000)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": log_text(delta_schema),
        "partitionColumns": [],
        "configuration": properties,
        "createdTime": now_ms,
    }
    (path / "_delta_log").make()
    actions = [_protocol({*_LEGACY_FEATURES, *needed}, needed), {"metaData": metadata}]
    OwnCommit(path, "CREATE TABLE", {"mode": "Ignore"}, -1, actions).create(0)


def readable_schema(columns: pa.Schema) -> str:
    """Return a schema as Delta's log has it, after it was read back from that.

    Raises:
        SetupError: a table with these columns could not be read from its log.
    """
    try:
        schema = deltalake.Schema.from_arrow(columns)
        text: str = schema.to_json()
        is_read = deltalake.Schema.from_json(text) == schema
        reason = "they are others when they are read from its log"
    except Exception as error:  # delta-rs has no error of its own for what its own checks find
        is_read, reason = False, first_line(error)
    if not is_read:
        names = ", ".join(name for name in columns.names if name != PULSAR_COLUMN)[:200]
        raise SetupError(f"a Delta table cannot have the columns {names}: {reason}")
    return text


def protocol_change(
    table: DeltaTable,
    place: str,
    features: Collection[str],
    reader_features: Collection[str] = (),
) -> list[Action]:
    """Return the action that gives a table features, if it lacks them.

    Args:
        place: where it is, for the error.
        reader_features: the features that readers must know too.

    Raises:
        TableError: its protocol cannot get features.
    """
    protocol = table.protocol()
    known = protocol.writer_features
    writers = {*(_LEGACY_FEATURES if known is None else known)}
    readers = {*(protocol.reader_features or ())}
    if (not features or known is not None) and writers.issuperset(features) and readers.issuperset(reader_features):
        return []
    if known is None and protocol.min_writer_version > _LEGACY_VERSION:
        raise TableError(
            f"the table at {place} has an older protocol of writer version "
            f"{protocol.min_writer_version}, which cannot get the features "
            f"{', '.join(sorted(features))} here; use another path"
        )
    return [_protocol(writers.union(features), readers.union(reader_features), protocol.min_reader_version)]


def _protocol(writers: Collection[str], readers: Collection[str], reader_version: int = 1) -> Action:
    content: Action = {
        "minReaderVersion": _READER_FEATURES_VERSION if readers else reader_version,
        "minWriterVersion": _FEATURES_VERSION,
        "writerFeatures": sorted(writers),
    }
    if readers:
        content["readerFeatures"] = sorted(readers)
    return {"protocol": content}


def _changed_metadata(
    table: DeltaTable, schema: Action | None = None, properties: dict[str, str] | None = None
) -> Action:
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


def _features_of(schema: Action) -> set[str]:
    """Return the features that the types of a schema need."""
    return {_WITHOUT_ZONE_FEATURE} if _has_type(schema, _WITHOUT_ZONE) else set()


def _has_type(kind: Any, name: str) -> bool:
    """Return whether a type of Delta is, or has at any depth, one of that name."""
    if isinstance(kind, dict):
        parts = [field["type"] for field in kind.get("fields", ())]
        return any(_has_type(part, name) for part in (*parts, kind.get("elementType"), kind.get("valueType")))
    return bool(kind == name)


def _merged(known: Any, more: Any) -> Any:
    """Return a type of Delta with the fields of both; those that are known, and maps, stay as they
    are (see ``record_columns.united``).
    """
    if not (isinstance(known, dict) and isinstance(more, dict) and known["type"] == more["type"]):
        return known
    if known["type"] == "struct":
        others = {field["name"].lower(): field for field in more["fields"]}
        fields = []
        for field in known["fields"]:
            other = others.pop(field["name"].lower(), field)
            fields.append({**field, "type": _merged(field["type"], other["type"])})
        return {**known, "fields": [*fields, *others.values()]}
    if known["type"] == "array":
        return {**known, "elementType": _merged(known["elementType"], more["elementType"])}
    return known
