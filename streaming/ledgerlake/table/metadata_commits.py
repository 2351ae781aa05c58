"""Commits that change a table's columns, its properties or its features, by the rules of
``creation``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

from ledgerlake.errors import TableAccessError, TableError
from ledgerlake.table.creation import LEGACY_FEATURES, LEGACY_VERSION, features_of, protocol_of
from ledgerlake.table.delta_table import Table
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.values.column_names import folded

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from deltalake import DeltaTable

    from ledgerlake.table.log_commit import Action

_ATTEMPTS = 20


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
            needed = features_of(schema)
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
            raise TableAccessError(
                f"the table at {self.path} cannot be changed: {self.path.reason(error)}"
            ) from None
        raise TableAccessError(f"other writers commit to the table at {self.path} without pause")


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
    writers = {*(LEGACY_FEATURES if known is None else known)}
    readers = {*(protocol.reader_features or ())}
    if (
        (not features or known is not None)
        and writers.issuperset(features)
        and readers.issuperset(reader_features)
    ):
        return []
    if known is None and protocol.min_writer_version > LEGACY_VERSION:
        raise TableError(
            f"the table at {place} has an older protocol of writer version "
            f"{protocol.min_writer_version}, which cannot get the features "
            f"{', '.join(sorted(features))} here; use another path"
        )
    return [
        protocol_of(
            writers.union(features), readers.union(reader_features), protocol.min_reader_version
        )
    ]


def _changed_metadata(
    table: DeltaTable, schema: Action | None = None, properties: dict[str, str] | None = None
) -> Action:
    """Return the action that gives a table another schema, or more properties."""
    known = table.metadata()
    named = {
        "name": known.name,
        "description": known.description,
        "createdTime": known.created_time,
    }
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


def _merged(known: Any, more: Any) -> Any:
    """Return a type of Delta with the fields of both; those that are known, and maps, stay as they
    are (see ``record_columns.united``).
    """
    if not (isinstance(known, dict) and isinstance(more, dict) and known["type"] == more["type"]):
        return known
    if known["type"] == "struct":
        others = {folded(field["name"]): field for field in more["fields"]}
        fields = []
        for field in known["fields"]:
            other = others.pop(folded(field["name"]), field)
            fields.append({**field, "type": _merged(field["type"], other["type"])})
        return {**known, "fields": [*fields, *others.values()]}
    if known["type"] == "array":
        return {**known, "elementType": _merged(known["elementType"], more["elementType"])}
    return known
