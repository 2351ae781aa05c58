"""The types of a parsed Avro schema by their names."""

from __future__ import annotations

from typing import Any

_NAMED = ("record", "error", "enum", "fixed")


def short_name(name: str) -> str:
    """Return the name of a type without its namespace."""
    return name.rpartition(".")[2]


def named_types(schema: Any) -> dict[str, Any]:
    """Return the types that a schema defines, by their short names."""
    named = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if node["type"] in _NAMED:
                named[short_name(node["name"])] = node
            waiting += [node.get(inner) for inner in ("type", "items", "values")]
            waiting += [field["type"] for field in node.get("fields", ())]
    return named


def not_null(node: Any, named: dict[str, Any]) -> Any:
    """Return what the values of a type are that are not null: a type with its definition, if it has
    a name.
    """
    if isinstance(node, list):
        node = next((branch for branch in node if branch != "null"), "null")
    return named.get(short_name(node), node) if isinstance(node, str) else node
