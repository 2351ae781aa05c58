"""The weights of Protobuf messages (see ``weights``), by their descriptor.

A message becomes one node for each place where it is in the schema (``kernels.weigh_protobuf``).
What its writer may write again and again is counted each time: items of repeated fields; messages
in a union, since the parser keeps each one that another field replaces; and, beside a closed
enumeration, fields that become objects of their own (see ``closed_fields``). A message with a
group, which only old schemas have, is not walked through: its weight is the bound by the number of
its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from ledgerlake.decode import kernels as k
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher, bytes_of
from ledgerlake.values.protobuf_maps import is_map
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

# A field that the parser keeps as unknown, as an object.
_UNKNOWN_BYTES = 2 * PART_BYTES


def closed_fields(message: Descriptor) -> dict[int, Any]:
    """Return the fields of a message, by number, that take only the numbers which their enumeration
    has. Protobuf keeps other numbers as unknown fields; so with such a field, all unknown fields of
    the message become objects, and those whose bytes are of another kind than their schema says.
    """
    return {one.number: one for one in message.fields if _is_closed(one)}


def _is_closed(one: Any) -> bool:
    kind = one.message_type.fields_by_name["value"].enum_type if is_map(one) else one.enum_type
    return kind is not None and bool(kind.is_closed)


def protobuf_weigher(message: Descriptor) -> Weigher:
    """Return the weights of messages that hold no message of their own kind."""
    plan = _Plan()
    fixed_bytes, rate = plan.add(message, 1)
    # The root is the first node, and the fields of a node are next to each other.
    nodes: list[list[int]] = []
    rows: list[list[int]] = []
    for of_node, unknown_bytes in zip(plan.fields, plan.unknown_bytes, strict=True):
        nodes.append([len(rows), len(of_node), unknown_bytes])
        rows += sorted(of_node)
    node_array, fields = np.array(nodes, np.int64), np.array([*rows, [0, 0, -1, 0]], np.int64)
    depth = plan.depth + 1

    def walk(encoded: Encoded, weights: Weights) -> None:
        data, offsets = bytes_of(encoded.payloads)
        k.weigh_protobuf(data, offsets, node_array, fields, depth, MAX_VALUES_BYTES, weights)

    return Weigher(fixed_bytes, rate, walk)


@dataclass
class _Plan:
    """The fields of each node: number, kind, node of its message, weight of each time that it is
    written. ``unknown_bytes`` are the weights of unknown ones.
    """

    fields: list[list[list[int]]] = field(default_factory=list)
    unknown_bytes: list[int] = field(default_factory=list)
    depth: int = 0
    # By enumerations: many fields may have one.
    _longest_names: dict[str, int] = field(default_factory=dict)

    def _name_bytes(self, one: Any) -> int:
        """Return the bytes of the longest name that a field of an enumeration has."""
        if one.enum_type is None:
            return 0
        name = one.enum_type.full_name
        if name not in self._longest_names:
            self._longest_names[name] = max(
                (len(value.name) for value in one.enum_type.values), default=0
            )
        return self._longest_names[name]

    def add(self, message: Descriptor, depth: int) -> tuple[int, int]:
        """Add the node of a message; return its weight without items, and what each of its bytes
        adds at most.
        """
        self.depth = max(self.depth, depth)
        own: list[list[int]] = []
        unknown_bytes = _UNKNOWN_BYTES if closed_fields(message) else 0
        self.fields.append(own)
        self.unknown_bytes.append(unknown_bytes)
        fixed_bytes, rate = RECORD_BYTES, unknown_bytes // _LEAST_FIELD_BYTES
        for one in message.fields:
            number, kind, node, weight = (
                one.number,
                _kind(one),
                -1,
                PART_BYTES + self._name_bytes(one),
            )
            inside = 0
            if one.message_type is not None:
                kind, node = k.F_MESSAGE, len(self.fields)
                weight, inside = self.add(one.message_type, depth + 1)
            fixed_bytes += PART_BYTES if one.is_repeated else weight
            least_bytes = (
                1
                if one.is_repeated and kind in (k.F_VARINT, k.F_FIXED32, k.F_FIXED64)
                else _LEAST_FIELD_BYTES
            )
            each_bytes = weight if one.is_repeated or _is_replaced(one) else unknown_bytes
            rate = max(rate, inside + -(-each_bytes // least_bytes))
            own.append([number, kind, node, each_bytes])
        return fixed_bytes, rate


def _is_replaced(one: Any) -> bool:
    """Return whether a field is a message in whose place another field may come."""
    union = one.containing_oneof
    return one.message_type is not None and union is not None and len(union.fields) > 1


def _kind(one: Any) -> int:
    if not one.is_repeated or one.type in _SIZED:
        return k.F_SINGLE
    if one.type in _FIXED32:
        return k.F_FIXED32
    return k.F_FIXED64 if one.type in _FIXED64 else k.F_VARINT
