"""The fields of JSON values, as a configuration declares them for topics without a schema.

A table of TOML names the fields. A field is a type's name, a list of one type for an array, or a
table for a record:

    json_fields = { customer = "string", amount = "double", tags = ["string"], address = { city =
    "string" } }

It becomes an Avro record, as the registry would have for a JSON schema. So the values are decoded
as with such a schema: a missing field is null, and an unknown one is left out.
"""

from __future__ import annotations

import json
from typing import Any

from ledgerlake.errors import UsageError
from ledgerlake.options.kinds import Kind

_PLAIN = ("string", "int", "long", "float", "double", "boolean")
_LOGICAL = {
    "date": "int",
    "timestamp-millis": "long",
    "timestamp-micros": "long",
}


def _definition(fields: Any, where: str) -> str:
    """Return the definition of the record, as JSON."""
    if not isinstance(fields, dict) or not fields:
        raise UsageError(f'{where} must be a table of fields, such as {{ customer = "string" }}')
    return json.dumps(_record(fields, where, "Value"))


def _record(fields: dict[str, Any], where: str, name: str) -> dict[str, Any]:
    typed = [
        {"name": field, "type": ["null", _type(kind, f"{where} {field}", f"{name}_{number}")]}
        for number, (field, kind) in enumerate(fields.items())
    ]
    return {"type": "record", "name": name, "fields": typed}


def _type(kind: Any, where: str, name: str) -> Any:
    """
    Args:
        name: of the record, if it is one; Avro wants each to have its own.
    """
    if isinstance(kind, dict) and kind:
        return _record(kind, where, name)
    if isinstance(kind, list) and len(kind) == 1:
        return {"type": "array", "items": ["null", _type(kind[0], where, name)]}
    if kind in _PLAIN:
        return kind
    if isinstance(kind, str) and kind in _LOGICAL:
        return {"type": _LOGICAL[kind], "logicalType": kind}
    known = ", ".join((*_PLAIN, *_LOGICAL))
    raise UsageError(
        f"{where} has the type {kind!r}; known are {known}, a list of one type, and a table of "
        "fields"
    )


def _parse(text: str, where: str) -> str:
    try:
        fields = json.loads(text)
    except ValueError:
        raise UsageError(f"{where} must be the fields as JSON") from None
    return _definition(fields, where)


JSON_FIELDS = Kind(
    "the fields as JSON",
    _parse,
    _definition,
    takes_in_toml="a table of fields and their types",
)
