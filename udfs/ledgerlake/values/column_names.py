"""When two names are one column to readers: whether they differ in case at most, as Java has it.

Spark compares names by ``String.equalsIgnoreCase``, which folds each character to its upper case
and that to its lower case, and Delta's checks by ``String.toLowerCase``. So the Kelvin sign is a
``k``, the long s an ``s``, and i with a dot or without one an ``i``.
"""

from __future__ import annotations

from functools import lru_cache

_DOT_ABOVE = "\u0307"


def folded(name: str) -> str:
    """Return what two names have in common that are one column to readers."""
    if name.isascii():
        return name.lower()
    # ``toLowerCase`` makes two characters of the capital i with a dot.
    return "".join(map(_folded, name)).replace("i" + _DOT_ABOVE, "i")


@lru_cache(maxsize=10_000)
def _folded(character: str) -> str:
    """Return the lower case of the upper case, one character each. Python has full mappings: a
    character whose upper case has several is its own, or that of its lower case.
    """
    upper = character.upper()
    return (upper if len(upper) == 1 else character).lower()[0]
