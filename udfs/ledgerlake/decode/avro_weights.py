"""The weights of Avro values (see ``weights``), by the schema that wrote them and the reader's.

The two schemas become one tree of nodes for ``kernels.weigh_avro``. It has the writer's types,
since those say how the bytes go on, and the reader's weights, since its fields are decoded. A field
that the reader lacks weighs nothing. One that only the reader has weighs as much as its default.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.decode.avro import short_name
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from ledgerlake.decode.weights import Bytes, Offsets, Weights

_SIZES = {"null": 0, "boolean": 1, "float": 4, "double": 8}

# A field that the reader does not have.
_DROPPED = None


@dataclass(frozen=True)
class _Part:
    """A node, its weight without items, its fewest bytes, and what each of its bytes adds at most."""

    node: int
    fixed_bytes: int
    least_bytes: int
    rate: int


def avro_weigher(writer: Any, reader: Any) -> Weigher:
    """Return the weights of values that one schema wrote, if another one reads them.

    Args:
        writer, reader: the schemas, as parsed JSON, of which each has a column.
    """
    plan = _Plan()
    root = plan.add(writer, reader)
    nodes, items = np.array(plan.nodes, np.int64).reshape(-1, 4), np.array([*plan.items, 0], np.int64)
    # The root is the first node.
    order = [root.node, *(number for number in range(len(nodes)) if number != root.node)]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    nodes, items = nodes[order], places[items]
    depth = plan.depth + 2

    def walk(data: Bytes, offsets: Offsets, weights: Weights) -> None:
        k.weigh_avro(data, offsets, nodes, items, depth, MAX_VALUES_BYTES, weights)

    return Weigher(root.fixed_bytes, root.rate, walk)


@dataclass
class _Plan:
    nodes: list[list[int]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    depth: int = 0
    _written: dict[str, Any] = field(default_factory=dict)
    _read: dict[str, Any] = field(default_factory=dict)

    def add(self, writer: Any, reader: Any, depth: int = 0) -> _Part:
        self.depth = max(self.depth, depth)
        writer, reader = _resolved(writer, self._written), _resolved(reader, self._read)
        if isinstance(writer, list):
            return self._union(writer, reader, depth)
        if isinstance(reader, list):
            reader = next((branch for branch in reader if branch != "null"), _DROPPED)
            return self.add(writer, reader, depth)
        kind = writer if isinstance(writer, str) else writer["type"]
        weight = 0 if reader is _DROPPED else PART_BYTES
        if kind in ("record", "error"):
            return self._record(writer, reader, depth)
        if kind in ("array", "map"):
            return self._items(writer, reader, kind, depth)
        if kind == "enum":
            weight += max((len(str(symbol).encode()) for symbol in writer["symbols"]), default=0) if weight else 0
            return _Part(self._node(k.W_VARINT), weight, 1, 0)
        if kind in ("int", "long"):
            return _Part(self._node(k.W_VARINT), weight, 1, 0)
        if kind in ("string", "bytes"):
            return _Part(self._node(k.W_BYTES), weight, 1, 0)
        size = int(writer["size"]) if kind == "fixed" else _SIZES[kind]
        return _Part(self._node(k.W_FIXED, size), weight, size, 0)

    def _node(self, kind: int, argument: int = 0, count: int = 0, weight: int = 0) -> int:
        self.nodes.append([kind, argument, count, weight])
        return len(self.nodes) - 1

    def _with_children(self, kind: int, parts: list[_Part], weight: int = 0) -> int:
        first = len(self.items)
        self.items += [part.node for part in parts]
        return self._node(kind, first, len(parts), weight)

    def _union(self, branches: list[Any], reader: Any, depth: int) -> _Part:
        parts = [self.add(branch, reader, depth) for branch in branches]
        fixed = max((part.fixed_bytes for part in parts), default=0)
        least = 1 + min((part.least_bytes for part in parts), default=0)
        rate = max((part.rate for part in parts), default=0)
        return _Part(self._with_children(k.W_UNION, parts), fixed, least, rate)

    def _record(self, writer: dict[str, Any], reader: Any, depth: int) -> _Part:
        fields = {}
        if isinstance(reader, dict) and reader.get("type") in ("record", "error"):
            fields = {part["name"]: part for part in reader["fields"]}
        else:
            reader = _DROPPED
        by_alias = {alias: part for part in fields.values() for alias in part.get("aliases", ())}
        parts, matched = [], set()
        for part in writer["fields"]:
            of_reader = fields.get(part["name"]) or by_alias.get(part["name"])
            if of_reader is not None:
                matched.add(of_reader["name"])
            parts.append(self.add(part["type"], _DROPPED if of_reader is None else of_reader["type"], depth + 1))
        fixed = (0 if reader is _DROPPED else RECORD_BYTES) + sum(part.fixed_bytes for part in parts)
        fixed += sum(self._default_bytes(part) for name, part in fields.items() if name not in matched)
        least = sum(part.least_bytes for part in parts)
        return _Part(
            self._with_children(k.W_RECORD, parts), fixed, least, max((part.rate for part in parts), default=0)
        )

    def _default_bytes(self, part: dict[str, Any]) -> int:
        """Return what a field weighs that has its default."""
        own = _Plan(_written=dict(self._read), _read=dict(self._read)).add(part["type"], part["type"])
        default = part.get("default")
        size = len(json.dumps(default))
        return own.fixed_bytes + (PART_BYTES * size if isinstance(default, (list, dict)) else size)

    def _items(self, writer: dict[str, Any], reader: Any, kind: str, depth: int) -> _Part:
        name = "items" if kind == "array" else "values"
        is_same = isinstance(reader, dict) and reader.get("type") == kind
        item = self.add(writer[name], reader[name] if is_same else _DROPPED, depth + 1)
        weight = item.fixed_bytes
        if kind == "map" and is_same:
            weight += PART_BYTES
        least = item.least_bytes + (kind == "map")
        rate = -(-weight // max(least, 1)) + item.rate
        node = self._with_children(k.W_ARRAY if kind == "array" else k.W_MAP, [item], weight)
        return _Part(node, PART_BYTES if is_same else 0, 1, rate)


def _resolved(node: Any, named: dict[str, Any]) -> Any:
    """Return a type in place of its name, and note the names that it defines."""
    while isinstance(node, dict) and isinstance(node.get("type"), (dict, list)):
        node = node["type"]
    kind = node.get("type") if isinstance(node, dict) else node
    if isinstance(node, dict) and kind in ("record", "error", "enum", "fixed"):
        named[short_name(str(node["name"]))] = node
    elif isinstance(kind, str) and short_name(kind) in named:
        return named[short_name(kind)]
    elif isinstance(node, dict) and kind not in ("array", "map"):
        return kind
    return node
