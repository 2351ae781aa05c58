"""Creates tables: the first commit of a log, for all kinds of tables.

delta-rs (1.6) adds ``variantType`` to the features of a table that it makes with deletion vectors,
or to which it adds a time without a zone, and readers that do not know that feature then refuse the
table. It leaves out a feature that a type within a map needs, and commits a schema that it cannot
read back; nothing opens such a table. So the commits that have a schema are written by Ledgerlake,
by two rules: a table has exactly the features that it needs, and a schema is committed only if a
table with it was opened.
"""

from __future__ import annotations

import json
import tempfile
import time
import uuid
from typing import TYPE_CHECKING, Any

import deltalake
from deltalake import DeltaTable

from ledgerlake.decode.columns import first_line
from ledgerlake.errors import SetupError
from ledgerlake.stored.places import Place
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.values.record_columns import PULSAR_COLUMN

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import pyarrow as pa

    from ledgerlake.table.log_commit import Action

# The features of a table of writer version 2, which names none.
LEGACY_VERSION = 2
LEGACY_FEATURES = ("appendOnly", "invariants")
_FEATURES_VERSION, _READER_FEATURES_VERSION = 7, 3

# The types that are features of their own.
_FEATURES_OF_TYPES = {"timestamp_ntz": "timestampNtz"}


def create_table(
    path: Place,
    schema: pa.Schema,
    properties: dict[str, str],
    partition_by: Sequence[str] = (),
    features: Collection[str] = (),
) -> None:
    """Create a table, unless there is one.

    Args:
        partition_by: the columns by which it is partitioned.
        features: those that its properties need, of readers and writers.

    Raises:
        SetupError: the readers of a table could not read its schema.
        OSError: the table cannot be created.
    """
    _create(path, json.loads(readable_schema(schema)), properties, partition_by, features)


def readable_schema(columns: pa.Schema) -> str:
    """Return a schema as Delta's log has it, after a table with it was opened.

    Raises:
        SetupError: a table with these columns could not be opened.
    """
    try:
        schema = deltalake.Schema.from_arrow(columns)
        text: str = schema.to_json()
        with tempfile.TemporaryDirectory(prefix="ledgerlake-") as folder:
            _create(Place(folder), json.loads(text), {})
            is_read = DeltaTable(folder).schema() == schema
        reason = "they are others when they are read from its log"
    except Exception as error:  # delta-rs has no error of its own for what its own checks find
        is_read, reason = False, first_line(error)
    if not is_read:
        names = ", ".join(name for name in columns.names if name != PULSAR_COLUMN)[:200]
        raise SetupError(f"a Delta table cannot have the columns {names}: {reason}")
    return text


def _create(
    path: Place,
    schema: Action,
    properties: dict[str, str],
    partition_by: Sequence[str] = (),
    features: Collection[str] = (),
) -> None:
    needed = features_of(schema) | set(features)
    metadata = {
        "id": str(uuid.uuid4()),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": log_text(schema),
        "partitionColumns": list(partition_by),
        "configuration": properties,
        "createdTime": int(time.time() * 1000),
    }
    legacy = {"protocol": {"minReaderVersion": 1, "minWriterVersion": LEGACY_VERSION}}
    protocol = protocol_of({*LEGACY_FEATURES, *needed}, needed) if needed else legacy
    (path / "_delta_log").make()
    OwnCommit(
        path, "CREATE TABLE", {"mode": "Ignore"}, -1, [protocol, {"metaData": metadata}]
    ).create(0)


def protocol_of(
    writers: Collection[str], readers: Collection[str], reader_version: int = 1
) -> Action:
    """Return the action that gives a table its features.

    Args:
        readers: those that readers must know too.
        reader_version: the version for readers, if they must know none.
    """
    content: Action = {
        "minReaderVersion": _READER_FEATURES_VERSION if readers else reader_version,
        "minWriterVersion": _FEATURES_VERSION,
        "writerFeatures": sorted(writers),
    }
    if readers:
        content["readerFeatures"] = sorted(readers)
    return {"protocol": content}


def features_of(schema: Action) -> set[str]:
    """Return the features that the types of a schema need."""
    return {_FEATURES_OF_TYPES[name] for name in _type_names(schema) if name in _FEATURES_OF_TYPES}


def _type_names(kind: Any) -> Iterator[str]:
    """Yield the names of the types in a type of Delta, at any depth."""
    if isinstance(kind, str):
        yield kind
        return
    inner = [kind[name] for name in ("elementType", "keyType", "valueType") if name in kind]
    for part in (*inner, *(field["type"] for field in kind.get("fields", ()))):
        yield from _type_names(part)
