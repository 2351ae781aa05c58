"""The weights of Protobuf messages (see ``weights``), by their descriptor.

A message becomes one node for each place where it is in the schema (``kernels.weigh_protobuf``). A
message with a group, which only old schemas have, is not walked through: its weight is the bound by
the number of its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode import kernels as k
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher, bytes_of
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor

    from ledgerlake.decode.columns import Encoded
    from ledgerlake.decode.weights import Weights

_T = FieldDescriptor
_FIXED32 = (_T.TYPE_FIXED32, _T.TYPE_SFIXED32, _T.TYPE_FLOAT)
_FIXED64 = (_T.TYPE_FIXED64, _T.TYPE_SFIXED64, _T.TYPE_DOUBLE)
_SIZED = (_T.TYPE_STRING, _T.TYPE_BYTES)

# The tag and the size or value of a field.
_LEAST_FIELD_BYTES = 2


def protobuf_weigher(message: Descriptor) -> Weigher:
    """Return the weights of messages that hold no message of their own kind."""
    plan = _Plan()
    fixed_bytes, rate = plan.add(message, 1)
    # The root is the first node, and the fields of a node are next to each other.
    nodes: list[list[int]] = []
    rows: list[list[int]] = []
    for of_node in plan.fields:
        nodes.append([len(rows), len(of_node)])
        rows += sorted(of_node)
    node_array, fields = np.array(nodes, np.int64), np.array([*rows, [0, 0, -1, 0]], np.int64)
    depth = plan.depth + 1

    def walk(encoded: Encoded, weights: Weights) -> None:
        data, offsets = bytes_of(encoded.payloads)
        k.weigh_protobuf(data, offsets, node_array, fields, depth, MAX_VALUES_BYTES, weights)

    return Weigher(fixed_bytes, rate, walk)


@dataclass
class _Plan:
    """The fields of each node: number, kind, node of its message, weight of an item."""

    fields: list[list[list[int]]] = field(default_factory=list)
    depth: int = 0

    def add(self, message: Descriptor, depth: int) -> tuple[int, int]:
        """Add the node of a message; return its weight without items, and what each of its bytes adds
        at most.
        """
        self.depth = max(self.depth, depth)
        own: list[list[int]] = []
        self.fields.append(own)
        fixed_bytes, rate = RECORD_BYTES, 0
        for one in message.fields:
            number, kind, node, weight = one.number, _kind(one), -1, PART_BYTES + _name_bytes(one)
            inside = 0
            if one.message_type is not None:
                kind, node = k.F_MESSAGE, len(self.fields)
                weight, inside = self.add(one.message_type, depth + 1)
            fixed_bytes += PART_BYTES if one.is_repeated else weight
            least_bytes = (
                1 if one.is_repeated and kind in (k.F_VARINT, k.F_FIXED32, k.F_FIXED64) else _LEAST_FIELD_BYTES
            )
            rate = max(rate, inside + (-(-weight // least_bytes) if one.is_repeated else 0))
            own.append([number, kind, node, weight if one.is_repeated else 0])
        return fixed_bytes, rate


def _kind(one: Any) -> int:
    if not one.is_repeated or one.type in _SIZED:
        return k.F_SINGLE
    if one.type in _FIXED32:
        return k.F_FIXED32
    return k.F_FIXED64 if one.type in _FIXED64 else k.F_VARINT


def _name_bytes(one: Any) -> int:
    """Return the bytes of the longest name that a field of an enumeration has."""
    if one.enum_type is None:
        return 0
    return max((len(value.name) for value in one.enum_type.values), default=0)
