"""Messages with typed values: versions in one batch, what has no typed value, and the bytes on
demand.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.decode import schema
from ledgerlake.decode.columns import DecodedValues, Decoder, Encoded
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.weights import Weigher
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.schemas import column_type
from ledgerlake.values.typed import type_values, typed_columns
from ledgerlake.wire.value_schema import ValueSchema
from tests.entries import batch, bundle, single

SOURCE = TopicPartition("persistent://public/default/t", -1)
OLD, NEW, GARBAGE, ABSENT = b"\0" * 8, b"\0" * 7 + b"\1", b"\0" * 7 + b"\2", b"\0" * 7 + b"\3"


def record(*names: str) -> ValueSchema:
    fields = [{"name": name, "type": ["null", "int"], "default": None} for name in names]
    return ValueSchema(
        pb.Schema.Json, json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    )


VERSIONS = {OLD: record("a"), NEW: record("a", "b"), GARBAGE: ValueSchema(pb.Schema.String)}


def typed(
    *entries: bytes, keep_bytes: bool = False, reader: ValueSchema = VERSIONS[NEW]
) -> list[dict[str, Any]]:
    (decoded,) = decode_bundle(bundle(entries), SOURCE, chunks_as_rejects=False)
    rows = type_values(decoded.messages, reader, VERSIONS.get, keep_bytes=keep_bytes)
    assert rows.schema == typed_columns(schema.VIEW, reader)
    return list(rows.to_pylist())


def test_versions_in_one_batch_are_read_as_the_readers_in_their_order() -> None:
    rows = typed(
        single(b'{"a":1,"b":2}', schema_version=NEW),
        single(b'{"a":3}', schema_version=OLD),
        single(b'{"b":4}'),
        batch([b'{"a":5}', b'{"a":6}'], schema_version=NEW),
    )
    assert [row["value"] for row in rows] == [
        {"a": 1, "b": 2},
        {"a": 3, "b": None},
        {"a": None, "b": 4},
        {"a": 5, "b": None},
        {"a": 6, "b": None},
    ]
    assert {row["value_bytes"] for row in rows} == {row["reject_reason"] for row in rows} == {None}


def test_what_has_no_typed_value_keeps_its_bytes_and_says_why() -> None:
    rows = typed(
        single(b'{"a":1}', schema_version=NEW),
        single(b"oops", schema_version=NEW),
        single(b"text", schema_version=GARBAGE),
        single(b"{}", schema_version=ABSENT),
        single(b"", null_value=True, schema_version=NEW),
        single(
            b"part",
            uuid="u",
            chunk_id=0,
            num_chunks_from_msg=2,
            total_chunk_msg_size=8,
            schema_version=NEW,
        ),
    )
    assert [(row["reject_reason"], row["value_bytes"]) for row in rows] == [
        (None, None),
        ("undecodable_value", b"oops"),
        ("undecodable_value", b"text"),
        ("unknown_schema", b"{}"),
        (None, None),
        (None, b"part"),
    ]
    assert [row["value"] for row in rows] == [{"a": 1, "b": None}, *[None] * 5]


def test_a_time_that_python_does_not_have_is_no_typed_value() -> None:
    fields = [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}]
    reader = ValueSchema(
        pb.Schema.Json, json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    )
    rows = typed(single(b'{"at":0}'), single(b'{"at":1700000000000000}'), reader=reader)
    assert [row["value"] for row in rows] == [{"at": datetime(1970, 1, 1, tzinfo=UTC)}, None]
    assert [row["reject_reason"] for row in rows] == [None, "undecodable_value"]


def test_a_value_on_which_a_library_fails_as_nobody_foresaw_is_rejected_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(encoded: Encoded) -> DecodedValues:
        if b"odd" in encoded.payloads.to_pylist():
            raise SystemError("a library failed")
        return DecodedValues(
            pa.array([{"a": 1, "b": 2}] * len(encoded.payloads), column_type(VERSIONS[NEW]))
        )

    monkeypatch.setattr(
        "ledgerlake.values.typed.decoder", lambda *_schemas: Decoder(read, Weigher(0))
    )
    rows = typed(*(single(value) for value in (b"x", b"y", b"odd", b"z")))
    assert [row["reject_reason"] for row in rows] == [None, None, "undecodable_value", None]
    assert [row["value"] is None for row in rows] == [False, False, True, False]


def test_bytes_are_kept_on_demand() -> None:
    rows = typed(single(b'{"a":1}', schema_version=NEW), keep_bytes=True)
    assert rows[0]["value_bytes"] == b'{"a":1}'


def test_rows_of_an_empty_batch() -> None:
    empty = pa.RecordBatch.from_pylist(
        [], schema=next(decode_bundle(bundle([single(b"x")]), SOURCE)).messages.schema
    )
    assert type_values(empty, VERSIONS[NEW], VERSIONS.get, keep_bytes=True).num_rows == 0
