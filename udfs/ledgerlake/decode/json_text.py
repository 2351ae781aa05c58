"""JSON values: how their bytes are read, wherever that is. They are UTF-8, which may begin with a mark
that says so; Python's parser alone would also guess UTF-16 and UTF-32.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode import kernels as k
from ledgerlake.decode.columns import without
from ledgerlake.decode.weights import bytes_of

# Python's parser takes 1000 levels less the calls that it is in.
_LEVELS_MOST = 500


class Number(str):
    """A number of JSON as it is written: a text column takes all of its digits."""

    __slots__ = ()


def parse_json(payload: bytes) -> Any:
    """Return the value of a text.

    Raises:
        ValueError: it is no JSON in UTF-8.
        RecursionError: it has too many levels, see ``without_deep``.
    """
    text = payload.decode("utf-8-sig")
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=Number)


def without_deep(payloads: pa.BinaryArray) -> tuple[pa.BinaryArray, dict[int, str]]:
    """Return payloads without the values that have too many levels, and why those are bad. Parsers
    differ in how many they take.
    """
    data, offsets = bytes_of(payloads)
    # A level has two bytes.
    long = np.flatnonzero(np.diff(offsets) > 2 * _LEVELS_MOST)
    is_deep = np.zeros(len(long), np.bool_)
    if len(long):
        k.find_deep_json(data, offsets, long, _LEVELS_MOST, is_deep)
    deep = dict.fromkeys(long[is_deep].tolist(), f"it has more than {_LEVELS_MOST} levels")
    return without(payloads, deep), deep
