"""The weights of Avro values (see ``weights``), by the schema that wrote them and the reader's.

The two schemas become one tree of nodes for ``kernels.weigh_avro``. It has the writer's types,
since those say how the bytes go on, and the reader's weights, since its fields are decoded. A field
that the reader lacks weighs nothing. One that only the reader has weighs as much as its default,
with the items and texts in it.

The same walk judges values: bytes that do not fit the writer's schema are none. The compiled loop
of ``avro`` refuses them too, but fastavro takes some for other values: a symbol's number below
zero, a number of more than 64 bits, a boolean of 7.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ledgerlake.decode import kernels as k
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher, bytes_of
from ledgerlake.values.avro_types import named_types, not_null
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from numpy.typing import NDArray

    from ledgerlake.decode.weights import Walk, Weights

_SIZES = {"null": 0, "float": 4, "double": 8}

_NUMBERS = {"int": (-(2**31), 2**31 - 1), "long": (-(2**63), 2**63 - 1)}

# A field that the reader does not have.
_DROPPED = None

# A weight beyond the limit says no more. A limited one times the number of any bytes is a number of
# 64 bits.
_WEIGHT_MOST = MAX_VALUES_BYTES + 1


@dataclass(frozen=True)
class _Part:
    """A node, its weight without items, its fewest bytes, and what each of its bytes adds
    at most.
    """

    node: int
    fixed_bytes: int
    least_bytes: int
    rate: int


def avro_weigher(writer: Any, reader: Any) -> Weigher:
    """Return the weights of values that one schema wrote, if another one reads them.

    Args:
        writer, reader: the parsed schemas, with defaults as they are read. Each has a column.
    """
    root, walk = _walk(writer, reader)
    return Weigher(root.fixed_bytes, root.rate, walk)


def avro_misfits(writer: Any) -> Callable[[pa.BinaryArray], NDArray[np.bool_]]:
    """Return a function that says which payloads are not one value of a schema, from the first byte
    to the last.

    Args:
        writer: the parsed schema, which has a column.
    """
    # What nobody reads has no weight.
    _, walk = _walk(writer, _DROPPED)

    def misfits(payloads: pa.BinaryArray) -> NDArray[np.bool_]:
        weights: Weights = np.zeros(len(payloads), np.int64)
        walk(Encoded(payloads), weights)
        return weights < 0

    return misfits


def _walk(writer: Any, reader: Any) -> tuple[_Part, Walk]:
    plan = _Plan(named_types(writer), named_types(reader))
    root = plan.add(writer, reader)
    nodes, items = (
        np.array(plan.nodes, np.int64).reshape(-1, 4),
        np.array([*plan.items, 0], np.int64),
    )
    # The root is the first node.
    order = [root.node, *(number for number in range(len(nodes)) if number != root.node)]
    places = np.empty(len(order), np.int64)
    places[order] = np.arange(len(order))
    nodes, items = nodes[order], places[items]
    depth = plan.depth + 2

    def walk(encoded: Encoded, weights: Weights) -> None:
        data, offsets = bytes_of(encoded.payloads)
        k.weigh_avro(data, offsets, nodes, items, depth, MAX_VALUES_BYTES, weights)

    return root, walk


@dataclass
class _Plan:
    """
    Args:
        written, read: the named types of the two schemas.
    """

    written: dict[str, Any]
    read: dict[str, Any]
    nodes: list[list[int]] = field(default_factory=list)
    items: list[int] = field(default_factory=list)
    depth: int = 0
    # By fields and types of the reader.
    _of_defaults: dict[int, int] = field(default_factory=dict)
    _of_types: dict[int, int] = field(default_factory=dict)
    # By enumerations of the writer.
    _of_symbols: dict[int, int] = field(default_factory=dict)

    def add(self, writer: Any, reader: Any, depth: int = 0) -> _Part:
        self.depth = max(self.depth, depth)
        if isinstance(writer, list):
            return self._union(writer, reader, depth)
        writer, reader = not_null(writer, self.written), not_null(reader, self.read)
        kind = writer if isinstance(writer, str) else writer["type"]
        weight = 0 if reader is _DROPPED else PART_BYTES
        if kind in ("record", "error"):
            return self._record(writer, reader, depth)
        if kind in ("array", "map"):
            return self._items(writer, reader, kind, depth)
        if kind == "enum":
            if isinstance(reader, dict):
                weight += max(self._longest_symbol(writer), _size(reader.get("default", "")))
            return _Part(self._node(k.W_NUMBER, 0, len(writer["symbols"]) - 1), weight, 1, 0)
        if kind in _NUMBERS:
            return _Part(self._node(k.W_NUMBER, *_NUMBERS[kind]), weight, 1, 0)
        if kind == "boolean":
            return _Part(self._node(k.W_BOOLEAN), weight, 1, 0)
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
        # It is the same for all branches, and found by a walk over the reader's.
        reader = not_null(reader, self.read)
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
            parts.append(
                self.add(
                    part["type"], _DROPPED if of_reader is None else of_reader["type"], depth + 1
                )
            )
        fixed = (0 if reader is _DROPPED else RECORD_BYTES) + sum(
            part.fixed_bytes for part in parts
        )
        fixed += sum(
            self._default_bytes(part) for name, part in fields.items() if name not in matched
        )
        least, rate = (
            sum(part.least_bytes for part in parts),
            max((part.rate for part in parts), default=0),
        )
        return _Part(self._with_children(k.W_RECORD, parts), min(fixed, _WEIGHT_MOST), least, rate)

    def _longest_symbol(self, enumeration: dict[str, Any]) -> int:
        """Return the bytes of the longest symbol. Many fields may have one enumeration."""
        if id(enumeration) not in self._of_symbols:
            self._of_symbols[id(enumeration)] = max(map(_size, enumeration["symbols"]), default=0)
        return self._of_symbols[id(enumeration)]

    def _default_bytes(self, part: dict[str, Any]) -> int:
        """Return what a field weighs that has its default."""
        if id(part) not in self._of_defaults:
            own = self._fixed_bytes(part["type"]) + self._items_bytes(
                part["type"], part.get("default")
            )
            self._of_defaults[id(part)] = own
        return self._of_defaults[id(part)]

    def _fixed_bytes(self, node: Any) -> int:
        """Return what a value of a reader's type weighs without items."""
        if id(node) not in self._of_types:
            self._of_types[id(node)] = _Plan(self.read, self.read).add(node, node).fixed_bytes
        return self._of_types[id(node)]

    def _items_bytes(self, node: Any, value: Any) -> int:
        """Return what the items and texts of a default weigh."""
        node = not_null(node, self.read)
        if isinstance(value, list):
            own = self._fixed_bytes(node["items"])
            return sum(own + self._items_bytes(node["items"], item) for item in value)
        if isinstance(value, dict) and node["type"] == "map":
            own = PART_BYTES + self._fixed_bytes(node["values"])
            return sum(
                own + _size(name) + self._items_bytes(node["values"], item)
                for name, item in value.items()
            )
        if isinstance(value, dict):
            return sum(
                self._items_bytes(part["type"], value[part["name"]]) for part in node["fields"]
            )
        return _size(value)

    def _items(self, writer: dict[str, Any], reader: Any, kind: str, depth: int) -> _Part:
        name = "items" if kind == "array" else "values"
        is_same = isinstance(reader, dict) and reader.get("type") == kind
        item = self.add(writer[name], reader[name] if is_same else _DROPPED, depth + 1)
        weight = item.fixed_bytes
        if kind == "map" and is_same:
            weight += PART_BYTES
        least = item.least_bytes + (kind == "map")
        rate = min(-(-weight // max(least, 1)) + item.rate, _WEIGHT_MOST)
        node = self._with_children(k.W_ARRAY if kind == "array" else k.W_MAP, [item], weight)
        return _Part(node, PART_BYTES if is_same else 0, 1, rate)


def _size(value: Any) -> int:
    """Return the bytes of a text or of bytes."""
    return (
        len(value.encode() if isinstance(value, str) else value)
        if isinstance(value, (str, bytes))
        else 0
    )
