"""Targets of typed values that stand for much: any schema, and an item of it that is repeated."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING, Any

import fastavro
import pyarrow as pa
from google.protobuf import message_factory

from ledgerlake.decode import schema
from ledgerlake.decode.columns import Encoded
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.errors import SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values import protobufs
from ledgerlake.values.record_columns import record_of
from ledgerlake.values.record_rows import record_cuts, record_rows
from ledgerlake.values.schemas import decoder
from ledgerlake.values.typed import typed_parts
from ledgerlake.wire.limits import DECODING_FACTOR
from ledgerlake.wire.value_schema import ValueSchema
from tests.decode.protobuf_schemas import protobuf
from tests.decode.test_weights import a_value, array, record, with_lists
from tests.decode.values_limit import values_limit
from tests.entries import SOURCE, batch, bundle
from tests.fuzz import mutate
from tests.fuzz.engine import MIB, Target

if TYPE_CHECKING:
    from tests.fuzz.mutate import Rng

_LIMIT_BYTES = 8 * MIB
_MOST_PLAIN_BYTES = MIB
_SYMBOLS = {"type": "enum", "name": "E", "symbols": ["S" * 900, "T"]}


def _repeated(rng: Rng) -> bytes:
    """A schema, the bytes of an item and what stands around the items, and their number."""
    kind = rng.choice([pb.Schema.Avro, pb.Schema.Json, pb.Schema.ProtobufNative])
    if kind == pb.Schema.ProtobufNative:
        definition, head, item, glue, tail = _protobuf_parts(rng)
    else:
        definition, head, item, glue, tail = _record_parts(rng, kind)
    most = max(_MOST_PLAIN_BYTES // (len(item) + len(glue) + 1), 1)
    count = min(rng.choice([1, 3, 1000, 100_000, most]), most)
    if kind == pb.Schema.Avro:
        head = mutate.varint(count << 1)
    if rng.random() < 0.3:
        item = mutate.some_bytes(rng, item)
    return mutate.packed(
        kind.to_bytes(4, "big"), definition, head, item, glue, tail, count.to_bytes(4, "big")
    )


def _record_parts(rng: Rng, kind: int) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    item_type: Any = rng.choice([_SYMBOLS, with_lists(rng, 0, []), with_lists(rng, 2, [])])
    if rng.random() < 0.2:
        item_type = record(
            "Wide", **{f"f{number}": ["null", "int"] for number in range(rng.choice([5, 300]))}
        )
    definition = record("Root", l=array(item_type))
    items = [
        rng.choice(_SYMBOLS["symbols"]) if item_type is _SYMBOLS else a_value(rng, item_type)
        for _ in range(4)
    ]
    if kind == pb.Schema.Json:
        texts = [
            json.dumps(item, default=lambda data: data.decode("latin1")).encode() for item in items
        ]
        return (
            json.dumps(definition).encode(),
            b'{"l":[',
            min([*texts, b"null"], key=len),
            b",",
            b"]}",
        )
    parsed = fastavro.parse_schema(definition["fields"][0]["type"]["items"])
    encoded = []
    for item in items:
        stream = io.BytesIO()
        fastavro.schemaless_writer(stream, parsed, item)
        encoded.append(stream.getvalue())
    return json.dumps(definition).encode(), b"", min(encoded, key=len), b"", b"\0"


def _protobuf_parts(rng: Rng) -> tuple[bytes, bytes, bytes, bytes, bytes]:
    reader = protobuf("shop.Order")
    message: Any = message_factory.GetMessageClass(protobufs._root(reader))()
    if rng.random() < 0.5:
        message.items.add(count=rng.randrange(3))
    else:
        message.tags[rng.randrange(2)] = ""
    item = rng.choice([message.SerializeToString(), b"\x12\0", b"\x32\0", b"\x08\1", b"\xf8\1\1"])
    return reader.definition, b"", item, b"", b""


def _judge_repeated(data: bytes) -> int:
    """All ways from a message to a typed value or a reject."""
    parts = [*mutate.unpacked(data), *[b""] * 7][:7]
    kind, definition, head, item, glue, tail, number = parts
    reader = ValueSchema(int.from_bytes(kind, "big") % 2**31, definition)
    count = int.from_bytes(number, "big")
    count = min(count, _MOST_PLAIN_BYTES // (len(item) + len(glue) + 1) + 1)
    payload = head + glue.join([item] * count) + tail
    with values_limit(_LIMIT_BYTES):
        decode = decoder(reader, reader)
        decoded = decode(Encoded(pa.array([payload, None, payload], pa.binary())))
        decoded.values.validate(full=True)
        assert set(decoded.bad) in (set(), {0, 2})
        entry = batch([payload] * 3, pb.ZSTD, schema_version=bytes(8))
        rows = 0
        for decoded_part in decode_bundle(bundle([entry]), SOURCE):
            messages = decoded_part.messages.select(schema.MESSAGES.names)
            for part in typed_parts(messages, reader, lambda _version: reader, keep_bytes=False):
                assert part.num_rows - part["reject_reason"].null_count == (
                    part.num_rows if decoded.bad else 0
                )
                rows += part.num_rows
            rows -= _rows(messages, reader)
        assert rows == 0
    return 1


def _rows(messages: pa.RecordBatch, reader: ValueSchema) -> int:
    columns = record_of(reader)
    count = 0
    for start, stop in record_cuts(messages, lambda _version: reader, reader, columns):
        part = messages.slice(start, stop - start)
        rows, misfits = record_rows(part, lambda _version: reader, reader, columns)
        count += int(rows.num_rows) + len(misfits)
    return count


TARGETS = [
    Target(
        "values-repeated",
        "decode.weights and all of typed values, if a few bytes stand for much",
        _repeated,
        _judge_repeated,
        (SetupError,),
        memory_bytes=2 * (2 * _LIMIT_BYTES + DECODING_FACTOR * _MOST_PLAIN_BYTES),
        cost=10,
    ),
]
