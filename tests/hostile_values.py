"""Different values with one hash, for hashes that have no secret. Each is found by solving the
hash's equation for one half of the value.
"""

from __future__ import annotations

from functools import cache

import numpy as np

_MASK = 2**64 - 1
_LETTERS = np.frombuffer(
    b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ-_", np.uint8
)
_PRINTED = np.frombuffer(bytes(range(33, 127)), np.uint8)

# The factors of Arrow's hash of short texts, and of Python's hash of a tuple.
_FIRST, _SECOND = 11400714785074694791, 14029467366897019727
_TUPLE_START = 2870177450012600261
_TUPLE_END = 2 ^ (_TUPLE_START ^ 3527539)

# The factor of DuckDB's hash of texts of up to 12 bytes.
_OF_DUCKDB = 0xD6E8FEB86659FD93
_SALT_OF_12 = (0xE17A1465 ^ (12 * 0xC6A4A7935BD1E995)) & _MASK


@cache
def texts_of_arrow(count: int) -> list[str]:
    """Texts of 16 bytes for which Arrow's hash tables are slow."""
    found: list[bytes] = []
    first = 0
    while len(found) < count:
        numbers = np.arange(first, first + 2**20, dtype=np.uint64)
        first += 2**20
        last = np.stack(
            [_LETTERS[(numbers >> np.uint64(6 * place)) & np.uint64(63)] for place in range(8)], 1
        )
        hashed = (last.view("<u8").ravel() * np.uint64(_FIRST)).byteswap()
        wanted = (hashed ^ np.uint64(0x0123456789ABCDEF)).byteswap()
        begin = wanted * np.uint64(pow(_SECOND, -1, 2**64))
        found += _ascii(begin, last)
    return [text.decode() for text in found[:count]]


@cache
def texts_of_duckdb(count: int) -> list[str]:
    """Texts of 12 bytes that have one hash of DuckDB."""
    found: list[bytes] = []
    target = 0
    while len(found) < count:
        target = (target + 0xB4B4246 * 2**32 + 0x5A5A1234DEADBEEF) & _MASK
        found = []
        for numbers in np.array_split(np.arange(94**4), 20):
            last = np.zeros((len(numbers), 8), np.uint8)
            for place in range(4):
                last[:, place] = _PRINTED[numbers // 94**place % 94]
            mixed = np.uint64(target) ^ last.view("<u8").ravel()
            begin = np.uint64(_SALT_OF_12) ^ (mixed * np.uint64(pow(_OF_DUCKDB, -1, 2**64)))
            found += _ascii(begin, last[:, :4])
    return [text.decode() for text in found[:count]]


def pairs_of_python(count: int) -> list[tuple[int, int]]:
    """Pairs of numbers whose tuples have one hash of Python, as ledger and entry."""
    wanted = ((123456789 - _TUPLE_END) & _MASK) * pow(_FIRST, -1, 2**64) & _MASK
    wanted = (wanted >> 31 | wanted << 33) & _MASK
    found: list[tuple[int, int]] = []
    ledger = 0
    while len(found) < count:
        ledger += 1
        mixed = (_TUPLE_START + ledger * _SECOND) & _MASK
        mixed = (mixed << 31 | mixed >> 33) * _FIRST & _MASK
        entry = (wanted - mixed) * pow(_SECOND, -1, 2**64) & _MASK
        if entry < 2**61 - 1:
            found.append((ledger, entry))
    return found


def numbers_of_protobuf(count: int) -> list[int]:
    """Numbers of 64 bits whose halves are the same, which Protobuf's hash of them makes 0."""
    return [number << 32 | number for number in range(1, count + 1)]


def _ascii(begin: np.ndarray, rest: np.ndarray) -> list[bytes]:
    first = begin.view(np.uint8).reshape(-1, 8)
    is_ascii = ((first < 0x7F) & (first > 0x20)).all(1)
    return [row.tobytes() for row in np.concatenate([first[is_ascii], rest[is_ascii]], 1)]
