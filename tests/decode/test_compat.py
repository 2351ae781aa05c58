"""The columns of the JVM connectors."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from typing import Any

import pyarrow as pa
import pytest

from ledgerlake.decode.compat import as_compat, compat_columns
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.errors import CorruptEntryError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.values.typed import type_values
from ledgerlake.wire.message_id import from_bytes
from ledgerlake.wire.value_schema import ValueSchema
from tests.entries import batch, bundle, single

TOPIC = "persistent://public/default/t"


def rows(*entries: bytes, partition: int = -1) -> pa.RecordBatch:
    (decoded,) = decode_bundle(
        bundle(entries), TopicPartition(TOPIC, partition), chunks_as_rejects=False
    )
    return decoded.messages


def compat(*entries: bytes, partition: int = -1) -> list[dict[str, Any]]:
    return list(as_compat(rows(*entries, partition=partition)).to_pylist())


def test_a_message_has_their_columns() -> None:
    properties = [pb.KeyValue(key="a", value="1")]
    (row,) = compat(
        single(b"v", partition_key="k", properties=properties, event_time=1000), partition=3
    )
    message_id = row.pop("__messageId")
    assert (str(from_bytes(message_id)), pb.MessageIdData.FromString(message_id).partition) == (
        "7:0",
        3,
    )
    assert row == {
        "value": b"v",
        "__key": b"k",
        "__topic": f"{TOPIC}-partition-3",
        "__publishTime": datetime.fromtimestamp(1_700_000_000.5, tz=timezone.utc),
        "__eventTime": datetime.fromtimestamp(1, tz=timezone.utc),
        "__messageProperties": [("a", "1")],
    }


def test_a_binary_key_a_batch_and_what_is_absent() -> None:
    binary = compat(single(b"v", partition_key="/w==", partition_key_b64_encoded=True))[0]
    assert binary["__key"] == b"\xff"
    first, second = compat(batch([b"a", b"b"]))
    assert [str(from_bytes(row["__messageId"])) for row in (first, second)] == ["7:0:0", "7:0:1"]
    assert (first["__key"], first["__eventTime"], first["__topic"]) == (None, None, TOPIC)


def test_fields_of_a_record_stand_for_themselves() -> None:
    fields = [{"name": name, "type": ["null", "int"]} for name in ("a", "b")]
    schema = ValueSchema(
        pb.Schema.Json, json.dumps({"type": "record", "name": "R", "fields": fields}).encode()
    )
    typed = type_values(
        rows(single(b'{"a":1}'), single(b"", null_value=True)),
        schema,
        lambda _: schema,
        keep_bytes=False,
    )
    columns = as_compat(typed)
    assert columns.schema == compat_columns(typed.schema)
    assert columns.schema.names[:2] == ["a", "b"]
    assert (columns["a"].to_pylist(), columns["b"].to_pylist()) == ([1, None], [None, None])


def test_what_is_no_message_is_an_error_that_names_it_and_says_how_to_go_on() -> None:
    chunk = single(b"x", uuid="u", chunk_id=0, num_chunks_from_msg=2, total_chunk_msg_size=2)
    with pytest.raises(
        CorruptEntryError,
        match=r"7:1 of .* is a chunk of a large message, for .*; use compat\(messages\(spark, "
        r"config\)\) .*large messages whole",
    ):
        as_compat(rows(single(b"v"), chunk))
    schema = ValueSchema(pb.Schema.Int32)
    typed = type_values(
        rows(single(b"\0\0\0\1"), single(b"x")), schema, lambda _: schema, keep_bytes=False
    )
    with pytest.raises(CorruptEntryError, match=r"7:1 of .* is no message \(undecodable_value\)"):
        as_compat(typed)


def test_a_whole_large_message_has_the_id_of_both_ends() -> None:
    message = rows(single(b"v"))
    place = message.schema.get_field_index("first_chunk_id")
    large = message.set_column(place, "first_chunk_id", pa.array(["6:9"], pa.string()))
    assert str(from_bytes(as_compat(large)["__messageId"][0].as_py())) == "6:9;7:0"
