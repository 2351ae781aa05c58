"""What a table has that plain appended files would violate: features of its protocol, and columns
other than those that are expected.

Each is told as words, with which a start refuses the table.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa

if TYPE_CHECKING:
    from deltalake import DeltaTable

# The features of a protocol whose tables delta-rs commits to, and which appended files honour. A
# table with any other feature is delta-spark's.
HONOURED_FEATURES = {
    "appendOnly",
    "invariants",
    "deletionVectors",
    "timestampNtz",
    "v2Checkpoint",
    "variantType",
    "variantType-preview",
}

# What our files cannot carry may be said by a property too, or by a column. Protocols before
# features have only those; the last of them requires identity columns, which delta-rs lacks.
_REFUSED_PROPERTIES = {
    "delta.columnMapping.mode": "columnMapping",
    "delta.enableChangeDataFeed": "changeDataFeed",
    "delta.enableRowTracking": "rowTracking",
}
_REFUSED_COLUMNS = {
    "delta.generationExpression": "generatedColumns",
    "delta.invariants": "column invariants",
}
_IDENTITY_VERSION = 6

# The metadata of a column whose values Spark computes begins with one of these.
_COMPUTED = ("delta.generationExpression", "delta.identity.", "CURRENT_DEFAULT")

# The features of a table with liquid clustering.
CLUSTERED = frozenset({"clustering", "domainMetadata"})

# The feature of a table that is partitioned.
PARTITIONED = "partition columns"

# How many columns of a kind an error names.
_DIFFERENCES_MOST = 3


def special_features(table: DeltaTable) -> list[str]:
    """Return the features of a table that plain appended files would violate."""
    metadata = table.metadata()
    protocol = table.protocol()
    features = set(protocol.writer_features or []) - HONOURED_FEATURES
    if protocol.min_writer_version == _IDENTITY_VERSION:
        features.add("identityColumns")
    for name, value in metadata.configuration.items():
        if name in _REFUSED_PROPERTIES and value not in ("none", "false"):
            features.add(_REFUSED_PROPERTIES[name])
        if name.startswith("delta.constraints."):
            features.add("checkConstraints")
    for column in _fields(table.schema()):
        features.update(
            _REFUSED_COLUMNS[name] for name in column["metadata"] if name in _REFUSED_COLUMNS
        )
    if metadata.partition_columns:
        features.add(PARTITIONED)
    return sorted(features)


def unfillable_columns(schema: pa.Schema, table: DeltaTable) -> list[str]:
    """Return the columns of a table that ``schema`` lacks, that need a value in each row, and that
    Spark does not compute; each as a phrase.
    """
    partitions, own = table.metadata().partition_columns, set(schema.names)
    return [
        f"the {'partition ' if column['name'] in partitions else ''}column {column['name']}"
        for column in _fields(table.schema())
        if column["name"] not in own
        and (column["name"] in partitions or not column["nullable"])
        and not any(name.startswith(_COMPUTED) for name in column["metadata"])
    ]


def null_constraints(schema: pa.Schema, table: DeltaTable) -> list[str]:
    """Return the columns of ``schema``, or values in them, that must not be null in the table; each
    as words.
    """
    ours, theirs, own = _never_null(schema), _never_null(table.schema()), set(schema.names)
    return [
        f"NOT NULL on {path}"
        for path, column in theirs.items()
        if column in own and path not in ours
    ]


def _never_null(schema: pa.Schema | deltalake.Schema) -> dict[str, str]:
    """Return the fields that are never null, as Spark names them, with their columns' names."""
    found = {}
    for field in _fields(schema):
        name, kind, is_nullable = field["name"], field["type"], field["nullable"]
        if not is_nullable:
            found[name] = name
        if isinstance(kind, dict) and not kind.get("valueContainsNull", True):
            found[f"{name}.value"] = name
    return found


def _column_types(schema: pa.Schema | deltalake.Schema) -> dict[str, str]:
    """Return the types of columns by name, as Delta names them."""
    return {field["name"]: _type_name(field["type"]) for field in _fields(schema)}


def _fields(schema: pa.Schema | deltalake.Schema) -> list[dict[str, Any]]:
    """Return the columns as Delta's log describes them."""
    delta_schema = deltalake.Schema.from_arrow(schema) if isinstance(schema, pa.Schema) else schema
    fields: list[dict[str, Any]] = json.loads(delta_schema.to_json())["fields"]
    return fields


def _type_name(kind: str | dict[str, Any]) -> str:
    if isinstance(kind, str):
        return kind
    return (
        f"map<{_type_name(kind['keyType'])},{_type_name(kind['valueType'])}>"
        if kind["type"] == "map"
        else kind["type"]
    )


def column_differences(
    schema: pa.Schema, table: DeltaTable
) -> tuple[list[str], list[str], list[str]]:
    """Return the missing columns of a table, its extra columns, and its columns of another type;
    each as a phrase.
    """
    expected, actual = _column_types(schema), _column_types(table.schema())
    missing = [f"it lacks {name}" for name in expected if name not in actual]
    extra = [f"it has {name}" for name in actual if name not in expected]
    changed = [name for name in expected if name in actual and expected[name] != actual[name]]
    return (
        missing,
        extra,
        [f"{name} is {actual[name]} instead of {expected[name]}" for name in changed],
    )


def listed(*differences: list[str]) -> str:
    """Return the first differences of each kind as one phrase, and how many there are more."""
    phrases = []
    for kind in differences:
        more = len(kind) - _DIFFERENCES_MOST
        phrases += [*kind[:_DIFFERENCES_MOST], *([f"and {more} more"] if more > 0 else [])]
    return "; ".join(phrases)
