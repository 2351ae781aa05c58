"""The types of an Avro schema by their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

NAMED = ("record", "error", "enum", "fixed")


def short_name(name: str) -> str:
    """Return the name of a type without its namespace."""
    return name.rpartition(".")[2]


def with_full_names(definition: Any) -> Any:
    """Return a schema that names each of its types in full, where it is defined and where it is
    used. A type that is wrapped, as in ``{"type": {"type": "int"}}`` or ``{"type": "Color"}``,
    stands there without the wrapping.
    """
    return _Names().full(definition, "")


@dataclass
class _Names:
    """The full names of the types that a schema has defined so far, and the last one of each short
    name.
    """

    known: set[str] = field(default_factory=set)
    by_short: dict[str, str] = field(default_factory=dict)

    def full(self, node: Any, namespace: str) -> Any:
        """Return a type with full names.

        Args:
            namespace: the namespace of the type around it.
        """
        if isinstance(node, list):
            return [self.full(branch, namespace) for branch in node]
        if isinstance(node, str):
            return self._resolved(node, namespace)
        if not isinstance(node, dict):
            return node
        kind = node.get("type")
        if isinstance(kind, (dict, list)) or (
            isinstance(kind, str) and self._resolved(kind, namespace) in self.known
        ):
            return self.full(kind, namespace)
        if kind in NAMED:
            node = self._defined(node, namespace)
            namespace = node["namespace"]
        named = dict(node)
        for inner in ("items", "values"):
            if inner in node:
                named[inner] = self.full(node[inner], namespace)
        if "fields" in node:
            named["fields"] = [
                {**part, "type": self.full(part["type"], namespace)} for part in node["fields"]
            ]
        return named

    def _defined(self, node: dict[str, Any], namespace: str) -> dict[str, Any]:
        own, dot, short = str(node.get("name")).rpartition(".")
        if not dot:
            own = namespace if node.get("namespace") is None else str(node["namespace"])
        name = f"{own}.{short}" if own else short
        self.known.add(name)
        self.by_short[short] = name
        return {**node, "name": name, "namespace": own}

    def _resolved(self, word: str, namespace: str) -> str:
        """Return the full name for a word. If its own namespace has no such type, the last type of
        that name stands for it, as in schemas of clients that leave out namespaces.
        """
        in_namespace = word if "." in word or not namespace else f"{namespace}.{word}"
        exact = [name for name in (in_namespace, word) if name in self.known]
        return exact[0] if exact else self.by_short.get(short_name(word), word)


def named_types(schema: Any) -> dict[str, Any]:
    """Return the types that a schema defines, by their full names."""
    named = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            if node["type"] in NAMED:
                named[node["name"]] = node
            waiting += [node.get(inner) for inner in ("type", "items", "values")]
            waiting += [part["type"] for part in node.get("fields", ())]
    return named


def not_null(node: Any, named: dict[str, Any]) -> Any:
    """Return what the values of a type are that are not null: a type with its definition, if it has
    a name.
    """
    if isinstance(node, list):
        node = next((branch for branch in node if branch != "null"), "null")
    return named.get(node, node) if isinstance(node, str) else node
