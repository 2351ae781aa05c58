"""Messages in the columns of the JVM connectors (StreamNative's and Databricks'), for queries that
were written for them.

    value, or the fields of a record      by the topic's schema
    __key binary, __topic string, __messageId binary (as every Pulsar client serialises it),
    __publishTime timestamp, __eventTime timestamp, __messageProperties map<string,string>

These columns have no place for a reject, so a reject is an error, as in those connectors. A source
leaves out the rejects that its options allow (``source.views``).
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import schema
from ledgerlake.errors import CorruptEntryError
from ledgerlake.wire.message_id import ChunkMessageId, MessageId, parse_message_id, to_bytes

_METADATA = [
    pa.field("__key", pa.binary()),
    pa.field("__topic", pa.string()),
    pa.field("__messageId", pa.binary()),
    pa.field("__publishTime", schema.TIMESTAMP),
    pa.field("__eventTime", schema.TIMESTAMP),
    pa.field("__messageProperties", schema.PROPERTIES),
]


def compat_columns(columns: pa.Schema) -> pa.Schema:
    """Return the connectors' columns for messages with these columns; each field of a record is
    one.
    """
    value = columns.field("value")
    fields = list(value.type) if pa.types.is_struct(value.type) else [value]
    return pa.schema([*(pa.field(field.name, field.type) for field in fields), *_METADATA])


def as_compat(messages: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of the table or of the source in the connectors' columns.

    Raises:
        CorruptEntryError: a row is a reject.
    """
    _refuse_what_is_no_message(messages)
    value = messages["value"]
    values = _fields(value) if pa.types.is_struct(value.type) else [value]
    partitions = messages["partition"].to_pylist()
    names = zip(messages["topic"].to_pylist(), partitions, strict=True)
    metadata = [
        pc.coalesce(messages["key_bytes"], messages["key"].cast(pa.binary())),
        pa.array(
            [name if number < 0 else f"{name}-partition-{number}" for name, number in names],
            pa.string(),
        ),
        _serialised_ids(messages),
        messages["publish_time"],
        messages["event_time"],
        messages["properties"],
    ]
    return pa.RecordBatch.from_arrays([*values, *metadata], schema=compat_columns(messages.schema))


def _fields(records: pa.StructArray) -> list[pa.Array]:
    """Return the fields of records, null if the record is null."""
    return list(records.flatten())


def _serialised_ids(messages: pa.RecordBatch) -> pa.Array:
    names = ("partition", "ledger_id", "entry_id", "batch_index", "first_chunk_id")
    rows = zip(*(messages[name].to_pylist() for name in names), strict=True)
    return pa.array([_serialised(*row) for row in rows], pa.binary())


def _serialised(
    partition: int, ledger_id: int, entry_id: int, batch_index: int, first_chunk_id: str | None
) -> bytes:
    message_id = MessageId(ledger_id, entry_id, batch_index)
    if first_chunk_id is None:
        return to_bytes(message_id, partition)
    first = parse_message_id(first_chunk_id)
    assert isinstance(first, MessageId)
    return to_bytes(ChunkMessageId(first, message_id), partition)


def _refuse_what_is_no_message(messages: pa.RecordBatch) -> None:
    for name, what in (
        ("reject_reason", "no message"),
        ("chunk_uuid", "a chunk of a large message"),
    ):
        if name not in messages.schema.names or messages[name].null_count == messages.num_rows:
            continue
        row = pc.index(pc.is_valid(messages[name]), True).as_py()
        detail = f" ({messages[name][row]})" if name == "reject_reason" else ""
        raise CorruptEntryError(
            f"{messages['message_id'][row]} of {messages['topic'][row]} is {what}{detail}, for "
            "which there is no column; use compat(messages(spark, config)) of "
            "ledgerlake.decode.as_udf and ledgerlake.api, which has these columns with values as "
            "bytes, large messages whole, and no rejects; or view = messages, with a row for each "
            "chunk and reject",
            reason=str(messages[name][row]),
        )
