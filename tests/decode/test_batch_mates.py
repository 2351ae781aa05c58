"""What becomes of a message does not depend on the others of its batch."""

from __future__ import annotations

import base64
import json
import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.decode.columns import Encoded
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.schemas import decoder
from ledgerlake.wire.value_schema import ValueSchema
from tests.decode.protobuf_schemas import protobuf
from tests.decode.test_weights import a_value, record, with_lists, written
from tests.decode.values_limit import values_limit
from tests.values.test_schemas import key_value

if TYPE_CHECKING:
    from collections.abc import Sequence

KINDS = ("avro", "json", "key and value", "separate key", "protobuf")

Pair = tuple["bytes | None", "bytes | None"]


def a_json(rng: random.Random, definition: Any) -> bytes:
    text = json.dumps(
        a_value(rng, definition), default=lambda data: base64.b64encode(data).decode()
    )
    return text.encode(rng.choice(["utf-8"] * 4 + ["utf-8-sig", "utf-16"]))


def damaged(rng: random.Random, payload: bytes) -> bytes:
    if rng.random() < 0.6 or not payload:
        return payload
    place = rng.randrange(len(payload))
    return payload[:place] + rng.randbytes(rng.randrange(3)) + payload[place + rng.randrange(3) :]


def with_key(key: bytes, value: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in (key, value))


def a_case(rng: random.Random, kind: str) -> tuple[ValueSchema, list[Pair]]:
    """A schema, and messages: their keys and values."""
    if kind == "protobuf":
        return protobuf("shop.Order"), [(None, rng.randbytes(rng.randrange(12))) for _ in range(6)]
    definitions = [
        record(name, value=with_lists(rng, 0, []), other="string") for name in ("Key", "Value")
    ]
    texts = [
        [damaged(rng, a_json(rng, definition)) for definition in definitions] for _ in range(6)
    ]
    schemas = [
        ValueSchema(pb.Schema.Json, json.dumps(definition).encode()) for definition in definitions
    ]
    if kind == "json":
        return schemas[1], [(None, value) for _, value in texts]
    if kind == "avro":
        payloads = [
            damaged(rng, written(definitions[1], a_value(rng, definitions[1]))) for _ in range(6)
        ]
        schema = ValueSchema(pb.Schema.Avro, json.dumps(definitions[1]).encode())
        return schema, [(None, payload) for payload in payloads]
    if kind == "separate key":
        return key_value(schemas[0], schemas[1], "SEPARATED", ("JSON", "JSON")), [
            (key, value) for key, value in texts
        ]
    payloads = [with_key(key, value) for key, value in texts]
    return key_value(schemas[0], schemas[1], "INLINE", ("JSON", "JSON")), [
        (None, damaged(rng, payload)) for payload in payloads
    ]


def outcomes(schema: ValueSchema, messages: Sequence[Pair]) -> list[Any]:
    """The value of each message, or why it has none."""
    keys = pa.array([key for key, _ in messages], pa.binary())
    payloads = pa.array([value for _, value in messages], pa.binary())
    decoded = decoder(schema, schema)(Encoded(payloads, keys))
    rows = [str(value) for value in decoded.values.to_pylist()]
    return [decoded.bad.get(number, row) for number, row in enumerate(rows)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_is_the_same_alone_with_a_bad_neighbour_and_in_two_cuts(
    kind: str, seed: int
) -> None:
    rng = random.Random(f"{kind} {seed}")
    schema, messages = a_case(rng, kind)
    with values_limit(rng.choice([700, 2000, 8000, 2**28])):
        alone = [outcomes(schema, [message])[0] for message in messages]
        beside = [
            outcomes(schema, [(None, b"\xff" * 9), message, (None, b"{" * 5000)])[1]
            for message in messages
        ]
        cut = rng.randrange(len(messages))
        pieces = [*outcomes(schema, messages[:cut]), *outcomes(schema, messages[cut:])]
        assert alone == beside == pieces == outcomes(schema, messages)
