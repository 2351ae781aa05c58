"""The units of times, if one schema wrote them and another one reads them.

Avro's rules convert numbers and ignore their units. Here a timestamp is read in the unit that it
was written in. A value does not fit if the reader has another kind of time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ledgerlake.values.avro_types import named_types, not_null

# The kind of time of a number, and its unit.
_UNITS: dict[tuple[str, str], tuple[str, str]] = {
    ("int", "date"): ("dates", "d"),
    ("int", "time-millis"): ("times of a day", "ms"),
    ("long", "time-micros"): ("times of a day", "us"),
    ("long", "timestamp-millis"): ("instants", "ms"),
    ("long", "timestamp-micros"): ("instants", "us"),
    ("long", "timestamp-nanos"): ("instants", "ns"),
    ("long", "local-timestamp-millis"): ("local times", "ms"),
    ("long", "local-timestamp-micros"): ("local times", "us"),
    ("long", "local-timestamp-nanos"): ("local times", "ns"),
}

_CONVERTED = ("ms", "us")


def in_written_units(physical: pa.DataType, writer: Any, reader: Any) -> pa.DataType:
    """Return a reader's type with the units of the writer. A part whose times do not fit is null.

    Args:
        physical: the type of the reader's values.
        writer, reader: the schemas, as parsed JSON with full names.
    """
    return _Pair(named_types(writer), named_types(reader)).of(physical, writer, reader)


@dataclass(frozen=True)
class _Pair:
    """The named types of the two schemas."""

    written: dict[str, Any]
    read: dict[str, Any]

    def of(self, physical: pa.DataType, writer: Any, reader: Any) -> pa.DataType:
        writer, reader = not_null(writer, self.written), not_null(reader, self.read)
        if not isinstance(writer, dict) or not isinstance(reader, dict):
            return physical
        if pa.types.is_struct(physical):
            return self._record(physical, writer, reader)
        if pa.types.is_list(physical):
            return pa.list_(self.of(physical.value_type, writer.get("items"), reader["items"]))
        if pa.types.is_map(physical):
            return pa.map_(
                pa.string(), self.of(physical.item_type, writer.get("values"), reader["values"])
            )
        return _of_number(physical, writer, reader)

    def _record(
        self, physical: pa.StructType, writer: dict[str, Any], reader: dict[str, Any]
    ) -> pa.DataType:
        written = {part["name"]: part["type"] for part in writer.get("fields", ())}
        fields = []
        for column, part in zip(physical, reader["fields"], strict=True):
            names = [name for name in (part["name"], *part.get("aliases", ())) if name in written]
            of_writer = written[names[0]] if names else None
            fields.append(column.with_type(self.of(column.type, of_writer, part["type"])))
        return pa.struct(fields)


def _of_number(
    physical: pa.DataType, writer: dict[str, Any], reader: dict[str, Any]
) -> pa.DataType:
    theirs, ours = (
        _UNITS.get((str(node.get("type")), str(node.get("logicalType"))))
        for node in (writer, reader)
    )
    if theirs is None or ours is None or theirs == ours:
        return physical
    is_converted = (
        pa.types.is_timestamp(physical) and theirs[0] == ours[0] and theirs[1] in _CONVERTED
    )
    return pa.timestamp(theirs[1], physical.tz) if is_converted else pa.null()
