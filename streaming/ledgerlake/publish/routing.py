"""The partition of a topic that a key selects, as Pulsar's clients select it by default."""

from __future__ import annotations


def java_hash(text: str) -> int:
    """Return Java's ``String.hashCode`` of a text, without its sign bit."""
    code = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for offset in range(0, len(units), 2):
        code = (31 * code + int.from_bytes(units[offset : offset + 2], "big")) & 0xFFFFFFFF
    return code & 0x7FFFFFFF
