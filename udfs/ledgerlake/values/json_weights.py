"""The weights of JSON values (see ``weights``), by the columns that they are decoded into.

Marks outside of texts tell how many objects parsing makes. What the columns take beyond that
depends on where they are. So if the marks do not show that a value is light, and do not show that
it is too heavy, it is parsed, and what came out is counted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher, bytes_of, fixed_bytes
from ledgerlake.outside import Unreadable, reading
from ledgerlake.values.json_text import count_marks, parse_json
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from ledgerlake.decode.columns import Encoded
    from ledgerlake.decode.weights import Weights


def json_weigher(kind: pa.DataType) -> Weigher:
    """Return the weights of values that are decoded into a type."""
    item_bytes = _item_bytes(kind)
    # The most for a byte: an object without fields and its comma, three bytes that are two parts.
    # An item of a list has two bytes at least.
    rate = -(-(RECORD_BYTES + 2 * PART_BYTES) // 3) + item_bytes // 2

    def walk(encoded: Encoded, weights: Weights) -> None:
        data, offsets = bytes_of(encoded.payloads)
        commas, colons, braces, brackets, _ = count_marks(data, offsets, np.arange(len(weights))).T
        parts = commas + braces + brackets + 1
        parsed = weights + PART_BYTES * (parts + colons) + RECORD_BYTES * braces
        np.copyto(weights, parsed + item_bytes * parts)
        for row in np.flatnonzero((weights > MAX_VALUES_BYTES) & (parsed <= MAX_VALUES_BYTES)):
            text = data[offsets[row] : offsets[row + 1]].tobytes()
            weights[row] = min(weights[row], parsed[row] + _parsed_bytes(text, kind))

    return Weigher(fixed_bytes(kind), rate, walk)


def _item_bytes(kind: pa.DataType) -> int:
    """Return the weight of the heaviest item of the lists and maps in a type; 0 if there
    are none.
    """
    if pa.types.is_struct(kind):
        return max((_item_bytes(field.type) for field in kind), default=0)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        item = kind.item_type if pa.types.is_map(kind) else kind.value_type
        return max(fixed_bytes(item), _item_bytes(item))
    return 0


def _parsed_bytes(text: bytes, kind: pa.DataType) -> int:
    """Return the weight of the items of a value."""
    try:
        with reading():
            value = parse_json(text)
    except Unreadable:
        # What cannot be counted is not decoded.
        return MAX_VALUES_BYTES
    weight = 0
    waiting: list[tuple[Any, pa.DataType]] = [(value, kind)]
    while waiting and weight <= MAX_VALUES_BYTES:
        value, kind = waiting.pop()
        if isinstance(value, dict) and pa.types.is_struct(kind):
            waiting += [(value[field.name], field.type) for field in kind if value.get(field.name)]
        elif isinstance(value, dict) and pa.types.is_map(kind):
            weight += len(value) * fixed_bytes(kind.item_type)
            waiting += [(item, kind.item_type) for item in value.values() if item]
        elif isinstance(value, list) and pa.types.is_list(kind):
            weight += len(value) * fixed_bytes(kind.value_type)
            if weight <= MAX_VALUES_BYTES:
                waiting += [(item, kind.value_type) for item in value if item]
    return weight
