"""The columns of tables and views. Users depend on their names and meaning.

``MESSAGES`` is the Delta table of messages, ``REJECTS`` that of rejects. ``VIEW`` is the bare
source's ``view = messages``: the table's columns, followed by those for single chunks and for
rejects. ``ENTRIES`` is the bare source's ``view = entries``.
"""

from __future__ import annotations

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")
PROPERTIES = pa.map_(pa.string(), pa.string())

MESSAGES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("message_id", pa.string()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("batch_index", pa.int32()),
        ("broker_timestamp", TIMESTAMP),
        ("broker_index", pa.int64()),
        ("publish_time", TIMESTAMP),
        ("event_time", TIMESTAMP),
        ("deliver_at", TIMESTAMP),
        ("delivered_at", TIMESTAMP),
        ("producer_name", pa.string()),
        ("sequence_id", pa.int64()),
        ("key", pa.string()),
        ("key_bytes", pa.binary()),
        ("ordering_key", pa.binary()),
        ("properties", PROPERTIES),
        ("schema_version", pa.binary()),
        ("is_null", pa.bool_()),
        ("late", pa.bool_()),
        ("chunk_count", pa.int32()),
        ("first_chunk_id", pa.string()),
        ("value", pa.binary()),
    ]
)

_CHUNK = [("chunk_uuid", pa.string()), ("chunk_id", pa.int32()), ("chunk_total_bytes", pa.int64())]

VIEW = pa.schema(
    [*MESSAGES, *(pa.field(*column) for column in _CHUNK), pa.field("reject_reason", pa.string())]
)

REJECTS = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("message_id", pa.string()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("broker_timestamp", TIMESTAMP),
        ("broker_index", pa.int64()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("entry", pa.binary()),
    ]
)

ENTRIES = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("ledger_id", pa.int64()),
        ("entry_id", pa.int64()),
        ("broker_timestamp", TIMESTAMP),
        ("broker_index", pa.int64()),
        ("producer_name", pa.string()),
        ("sequence_id", pa.int64()),
        ("publish_time", TIMESTAMP),
        ("event_time", TIMESTAMP),
        ("deliver_at", TIMESTAMP),
        ("key", pa.string()),
        ("properties", PROPERTIES),
        ("schema_version", pa.binary()),
        ("compression", pa.string()),
        ("uncompressed_size", pa.int64()),
        ("num_messages_in_batch", pa.int32()),
        ("chunk_uuid", pa.string()),
        ("chunk_id", pa.int32()),
        ("chunk_count", pa.int32()),
        ("chunk_total_bytes", pa.int64()),
        ("encryption_keys", pa.list_(pa.string())),
        ("reject_reason", pa.string()),
        ("entry", pa.binary()),
    ]
)

# One row has MESSAGE frames as received from the broker: consecutive ones of about a mebibyte (kind
# ``entries``), or another kind of ``split``. Every row of a range has ``end_*``, the end of the
# micro-batch's range of this topic partition, and ``clock_ms``, the time of the micro-batch if it
# has one. Of the first entry, only the messages after ``after_batch_index`` and up to
# ``until_batch_index`` belong to the range (null: no such bound). ``broker_ms`` is the broker's
# time of the last entry, null if it has none.
