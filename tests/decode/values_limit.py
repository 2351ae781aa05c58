"""A smaller limit of the values of one message, so that tests reach it quickly."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest.mock import patch

from ledgerlake.decode import columns, weights
from ledgerlake.values import avro_weights, json_weights, protobuf_weights

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULES = (avro_weights, columns, json_weights, protobuf_weights, weights)


@contextmanager
def values_limit(limit_bytes: int) -> Iterator[None]:
    """Set ``MAX_VALUES_BYTES`` where it is used."""
    patches = [patch.object(module, "MAX_VALUES_BYTES", limit_bytes) for module in _MODULES]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
