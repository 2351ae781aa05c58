"""The weights of JSON values (see ``weights``), by the columns that they are decoded into.

Marks outside of texts tell how many objects parsing makes. What the columns take beyond that
depends on where they are. So if the marks do not show that a value is light, and do not show that
it is too heavy, it is parsed, and what came out is counted.

Values with too many levels are found here too: parsers differ in how many they take.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import kernels as k
from ledgerlake.decode.weights import PART_BYTES, RECORD_BYTES, Weigher, fixed_bytes, offsets_of
from ledgerlake.wire.limits import MAX_VALUES_BYTES

if TYPE_CHECKING:
    from ledgerlake.decode.weights import Bytes, Offsets, Weights

# Python's parser takes 1000 levels less the calls that it is in.
_LEVELS_MOST = 500

_MARKS = [ord(mark) for mark in ",:{["]


def without_deep(payloads: pa.BinaryArray) -> tuple[pa.BinaryArray, dict[int, str]]:
    """Return payloads without the values that have too many levels, and why those are bad."""
    offsets = offsets_of(payloads)
    # A level has two bytes.
    long = np.flatnonzero(np.diff(offsets) > 2 * _LEVELS_MOST)
    is_deep = np.zeros(len(long), np.bool_)
    if len(long):
        k.find_deep_json(np.frombuffer(payloads.buffers()[2], np.uint8), offsets, long, _LEVELS_MOST, is_deep)
    deep = dict.fromkeys(long[is_deep].tolist(), f"it has more than {_LEVELS_MOST} levels")
    if not deep:
        return payloads, {}
    others = np.ones(len(payloads), np.bool_)
    others[list(deep)] = False
    return pc.if_else(pa.array(others), payloads, None), deep


def json_weigher(kind: pa.DataType) -> Weigher:
    """Return the weights of values that are decoded into a type."""
    item_bytes = _item_bytes(kind)
    # The most for a byte: an object without fields and its comma, three bytes that are two parts. An
    # item of a list has two bytes at least.
    rate = -(-(RECORD_BYTES + 2 * PART_BYTES) // 3) + item_bytes // 2

    def bound(data: Bytes) -> int:
        return _weight([int(np.count_nonzero(data == mark)) for mark in _MARKS], item_bytes)

    def walk(data: Bytes, offsets: Offsets, weights: Weights) -> None:
        counts = np.zeros((len(weights), 4), np.int64)
        k.count_json(data, offsets, counts)
        for row, marks in enumerate(counts.tolist()):
            fixed = int(weights[row])
            weights[row] = fixed + _weight(marks, item_bytes)
            parsing = fixed + _weight(marks, 0)
            if item_bytes and weights[row] > MAX_VALUES_BYTES >= parsing:
                text = data[offsets[row] : offsets[row + 1]].tobytes()
                weights[row] = min(int(weights[row]), parsing + _parsed_bytes(text, kind))

    return Weigher(fixed_bytes(kind), rate, walk, bound)


def _weight(marks: list[int], item_bytes: int) -> int:
    commas, colons, braces, brackets = marks
    parts = commas + braces + brackets + 1
    return PART_BYTES * (parts + colons) + RECORD_BYTES * braces + item_bytes * parts


def _item_bytes(kind: pa.DataType) -> int:
    """Return the weight of the heaviest item of the lists and maps in a type; 0 if there are none."""
    if pa.types.is_struct(kind):
        return max((_item_bytes(field.type) for field in kind), default=0)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        item = kind.item_type if pa.types.is_map(kind) else kind.value_type
        return max(fixed_bytes(item), _item_bytes(item))
    return 0


def _parsed_bytes(text: bytes, kind: pa.DataType) -> int:
    """Return the weight of the items of a value."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return 0  # It cannot be decoded either.
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
