"""JSON values: how their bytes are read, wherever that is. They are UTF-8, which may begin with a
mark that says so; Python's parser alone would also guess UTF-16 and UTF-32.

Two parsers read them, Arrow's and Python's, and which one reads a value depends on the others of
its batch. So Python's is made to take all that Arrow's takes: it knows more words for numbers that
are none.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode import kernels as k
from ledgerlake.decode.columns import without
from ledgerlake.decode.weights import bytes_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.decode.weights import Bytes, Offsets

# What Arrow takes, and Python's name for it.
_WORDS = {"Inf": "Infinity", "-NaN": "NaN"}

# A quotation mark, one of the words, or two characters of a text that are neither.
_MARK = re.compile(r'"|Inf(?!inity)|-NaN|\\.', re.DOTALL)

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
    if any(word in text for word in _WORDS):
        text = _in_pythons_words(text)
    return json.loads(text, parse_int=Number, parse_float=Number, parse_constant=Number)


def _in_pythons_words(text: str) -> str:
    # One expression for a whole text would take a hundred bytes of memory for each of its escapes.
    pieces: list[str] = []
    start, is_text = 0, False
    for found in _MARK.finditer(text):
        mark = found[0]
        if mark == '"':
            is_text = not is_text
        elif mark in _WORDS and not is_text:
            pieces += [text[start : found.start()], _WORDS[mark]]
            start = found.end()
    return "".join([*pieces, text[start:]])


def without_deep(payloads: pa.BinaryArray) -> tuple[pa.BinaryArray, dict[int, str]]:
    """Return payloads without the values that have too many levels, and why those are bad. Parsers
    differ in how many they take.
    """
    data, offsets = bytes_of(payloads)
    # A level has two bytes.
    long = np.flatnonzero(np.diff(offsets) > 2 * _LEVELS_MOST)
    deep: dict[int, str] = {}
    if len(long):
        levels = count_marks(data, offsets, long)[:, 4]
        deep = dict.fromkeys(
            long[levels > _LEVELS_MOST].tolist(), f"it has more than {_LEVELS_MOST} levels"
        )
    return without(payloads, deep), deep


def count_marks(data: Bytes, offsets: Offsets, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each of some rows how many commas, colons, braces and brackets it has outside of
    texts, and how many levels.
    """
    counts = np.zeros((len(rows), 5), np.int64)
    k.count_json(data, offsets, rows, counts)
    return counts
