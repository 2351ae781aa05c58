"""Valid inputs made wrong, with their structure known: fields, lengths and texts at the edges of
what they can be.

Each function takes a ``random.Random`` first and changes one thing or a few.
"""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Rng = random.Random

# Where fields, times, sizes and our own sentinels turn.
EDGES = sorted(
    {edge + step for edge in (0, 2**7, 2**8, 2**14, 2**15, 2**16, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64) for step in (-1, 0, 1)}
    | {9 * 10**15, 9 * 10**15 + 1, 253_402_300_799_999, 253_402_300_800_000, 1_700_000_000_000, 1_700_000_000_000_000}
    | {-(2**62), -(2**63), -(2**31), 10**6, 10**6 + 1, 10**5, 5, 20, 2**64 - 2**62, 2**64 - 2**31, 2**64 - 2}
)  # fmt: skip

_TEXTS = [
    "",
    "\0",
    "a" * 300,
    "ключ",
    "\ud800",
    "²",
    "١٢",
    "-1",
    "1e999",
    "NaN",
    "9" * 25,
    "9" * 5000,
    " ",
    "../../x",
    "%s{}",
]


def edge(rng: Rng) -> int:
    return rng.choice(EDGES) if rng.random() < 0.8 else rng.getrandbits(rng.choice([3, 8, 31, 64]))


def varint(value: int, overlong: int = 0) -> bytes:
    value %= 2**64
    encoded_number = bytearray()
    while value > 0x7F or overlong > 0:
        overlong -= value <= 0x7F
        encoded_number.append(value & 0x7F | 0x80)
        value >>= 7
    encoded_number.append(value)
    return bytes(encoded_number)


def some_bytes(rng: Rng, data: bytes, others: Sequence[bytes] = ()) -> bytes:
    """Flips, cuts, doubles, swaps, splices, edges of big-endian numbers."""
    broken = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        size = len(broken)
        place, end = sorted((rng.randrange(size + 1), rng.randrange(size + 1)))
        kind = rng.randrange(9)
        if kind == 0 and size:
            broken[rng.randrange(size)] ^= 1 << rng.randrange(8)
        elif kind == 1 and size:
            broken[rng.randrange(size)] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        elif kind == 2:
            del broken[place:]
        elif kind == 3:
            del broken[place : min(end, place + rng.choice([1, 4, 64]))]
        elif kind == 4:
            broken[place:place] = broken[place : min(end, place + 200)]
        elif kind == 5:
            broken[place:place] = rng.randbytes(rng.choice([1, 2, 4, 30]))
        elif kind == 6 and size >= 4:
            at = rng.randrange(size - 3)
            stored_number = int.from_bytes(broken[at : at + 4], "big")
            number = rng.choice(
                [
                    stored_number + 1,
                    stored_number - 1,
                    edge(rng),
                    size,
                    size - at,
                    stored_number * 2,
                ]
            )
            broken[at : at + 4] = (number % 2**32).to_bytes(4, "big")
        elif kind == 7 and others:
            other = rng.choice(others)
            broken[place:] = other[rng.randrange(len(other) + 1) :]
        elif kind == 8 and size > 1:
            half = (end - place) // 2
            broken[place:end] = broken[place + half : end] + broken[place : place + half]
    return bytes(broken)


# Protobuf: fields of a message as [number, wire type, value].

Field = list[Any]


def fields_of(data: bytes) -> list[Field] | None:
    """None if the bytes are no message."""
    fields: list[Field] = []
    place = 0
    while place < len(data):
        tag, place = _varint_at(data, place)
        if place < 0 or tag >> 3 == 0:
            return None
        kind = tag & 7
        if kind == 0:
            value, place = _varint_at(data, place)
            if place < 0:
                return None
            fields.append([tag >> 3, 0, value])
            continue
        if kind == 2:
            size, place = _varint_at(data, place)
        else:
            size = {1: 8, 5: 4}.get(kind, -1)
        if place < 0 or not 0 <= size <= len(data) - place:
            return None
        fields.append([tag >> 3, kind, data[place : place + size]])
        place += size
    return fields


def _varint_at(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data) and shift < 70:
        value |= (data[place] & 0x7F) << shift
        place += 1
        if data[place - 1] < 0x80:
            return value % 2**64, place
        shift += 7
    return 0, -1


def encoded(fields: list[Field], rng: Rng | None = None) -> bytes:
    """With ``rng``, now and then a number in more bytes than it needs."""
    encoded_fields = bytearray()
    for number, kind, value in fields:
        odd = rng is not None and rng.random() < 0.01
        encoded_fields += varint(number << 3 | kind, 1 if odd else 0)
        if kind == 0:
            encoded_fields += varint(value, rng.randrange(9) if odd and rng else 0)
        elif kind == 2:
            encoded_fields += varint(len(value)) + value
        else:
            encoded_fields += value
    return bytes(encoded_fields)


def message(rng: Rng, data: bytes, most: int = 3, depth: int = 0) -> bytes:
    """A protobuf message with some of its fields changed; sometimes bytes that are none."""
    fields = fields_of(data)
    if fields is None or rng.random() < 0.05:
        return some_bytes(rng, data)
    for _ in range(rng.randint(1, most)):
        _change_field(rng, fields, depth)
    changed = encoded(fields, rng)
    if rng.random() < 0.05:
        changed = some_bytes(rng, changed)
    return changed


def _change_field(rng: Rng, fields: list[Field], depth: int) -> None:
    kind = rng.randrange(10)
    if not fields or kind == 0:
        fields.insert(rng.randrange(len(fields) + 1), _new_field(rng))
        return
    at = rng.randrange(len(fields))
    field = fields[at]
    if kind == 1:
        del fields[at]
    elif kind == 2:
        fields.insert(rng.randrange(len(fields) + 1), list(field))
        if rng.random() < 0.3:
            fields.extend(list(field) for _ in range(rng.choice([2, 10, 200])))
    elif kind == 3:
        field[0] = rng.choice([rng.randrange(1, 40), 2**29 - 1, 1000, field[0] + 1])
    elif kind == 4:
        field[1:] = _new_field(rng)[1:]
    elif kind == 5:
        rng.shuffle(fields)
    elif field[1] == 0:
        field[2] = rng.choice([edge(rng), field[2] + 1, field[2] - 1, -field[2]])
    elif field[1] == 2:
        field[2] = _changed_value(rng, field[2], depth)
    else:
        field[2] = rng.randbytes(len(field[2]))


def _new_field(rng: Rng) -> Field:
    number = rng.randrange(1, 40)
    kind = rng.choice([0, 0, 0, 2, 2, 1, 5, 3, 4])
    if kind == 0:
        return [number, 0, edge(rng)]
    if kind == 2:
        return [
            number,
            2,
            rng.choice(
                [
                    a_text(rng).encode("utf-8", "surrogatepass"),
                    rng.randbytes(rng.choice([0, 1, 8, 40])),
                ]
            ),
        ]
    return [number, kind, rng.randbytes({1: 8, 5: 4}.get(kind, 0))]


def _changed_value(rng: Rng, value: bytes, depth: int) -> bytes:
    if depth < 4 and rng.random() < 0.6 and value and fields_of(value):
        return message(rng, value, 2, depth + 1)
    if rng.random() < 0.3:
        return a_text(rng).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        return value * rng.choice([2, 30])
    return some_bytes(rng, value)


# Texts and JSON.


def a_text(rng: Rng) -> str:
    return rng.choice(_TEXTS) if rng.random() < 0.8 else str(edge(rng))


def text(rng: Rng, content: str, others: Sequence[str] = ()) -> str:
    """A text with characters, numbers or whole words changed."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, end = sorted((rng.randrange(len(content) + 1), rng.randrange(len(content) + 1)))
        kind = rng.randrange(8)
        if kind == 0:
            content = (
                content[:place]
                + rng.choice("0123456789:;-+.,/\\[]{}\"'=²١ \n\t\0aZ%_éT")
                + content[place:]
            )
        elif kind == 1:
            content = content[:place] + content[place + 1 :]
        elif kind == 2:
            content = content[:place]
        elif kind == 3:
            content = content[:place] + a_text(rng) + content[end:]
        elif kind == 4:
            content = content[:end] + content[place:]
        elif kind == 5 and others:
            other = rng.choice(others)
            content = content[:place] + other[rng.randrange(len(other) + 1) :]
        elif kind == 6:
            content = content[:place] + str(edge(rng)) + content[min(end, place + 4) :]
        else:
            content = (
                content[:place]
                + rng.choice('[({"') * rng.choice([1, 1, 1, 60, 60, 3000])
                + content[end:]
            )
    return content[:20_000]


def json_value(rng: Rng) -> Any:
    """A value that stands where another belongs."""
    simple: list[Callable[[], Any]] = [
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: edge(rng),
        lambda: -edge(rng),
        lambda: rng.choice([0.5, -1.5, float("inf"), float("nan"), 1e300]),
        lambda: a_text(rng),
        lambda: [],
        lambda: {},
        lambda: [json_value(rng)],
        lambda: {a_text(rng): json_value(rng)},
    ]
    return rng.choice(simple)()


def json_tree(rng: Rng, tree: Any) -> Any:
    """A tree with one place changed: a value, a key, an item more or less."""
    places = list(_places(tree))
    if not places or rng.random() < 0.02:
        return json_value(rng)
    holder, key = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[rng.choice([a_text(rng), f"{key}s", str(key).upper()])] = (
            holder[key] if kind else holder.pop(key)
        )
    elif kind == 1:
        holder.extend([holder[key]] * rng.choice([1, 3, 100]))
    elif kind == 2 and isinstance(holder[key], str):
        holder[key] = text(rng, holder[key])
    elif kind == 2 and isinstance(holder[key], int):
        holder[key] += rng.choice([-1, 1])
    else:
        holder[key] = json_value(rng)
    return tree


def json_text(rng: Rng, content: str) -> str:
    """JSON with some places changed, or no JSON any more."""
    if rng.random() < 0.15:
        return text(rng, content)
    tree = json.loads(content)
    for _ in range(rng.choice([1, 1, 2, 4])):
        tree = json_tree(rng, tree)
    return json.dumps(tree)


def _places(tree: Any) -> Any:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield tree, key
            yield from _places(value)
    elif isinstance(tree, list):
        for key, value in enumerate(tree):
            yield tree, key
            yield from _places(value)


# Inputs of several parts.


def packed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpacked(data: bytes) -> list[bytes]:
    parts = []
    place = 0
    while place + 4 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        parts.append(data[place + 4 : place + 4 + size])
        place += 4 + size
    return parts
