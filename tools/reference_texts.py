"""What the reference says of columns, reasons and errors. The names come from the code; a test
fails if a name has no text here, or a text has no name there.
"""

from __future__ import annotations

# Of the table of messages, the table of rejects, and the two views of the bare source.
COLUMNS = {
    "topic": "The topic, without the number of the partition.",
    "partition": "The number of the partition; -1 for a topic without partitions.",
    "message_id": "`ledger:entry`, or `ledger:entry:batch` for a message of a batch.",
    "ledger_id": "The ledger as a number.",
    "entry_id": "The entry in the ledger as a number.",
    "batch_index": "The place in the batch; -1 for a message that was not batched.",
    "broker_timestamp": "The time at which the broker stored the entry (PIP-70). Null if the "
    "broker adds no entry "
    "metadata.",
    "broker_index": "The number of the message in the topic partition (PIP-70). Null if the broker "
    "adds no entry metadata.",
    "publish_time": "The producer's clock. Null if it is out of range (the years 1970 to 9999); "
    "the number is then in "
    "the property `ledgerlake.publish_time`.",
    "event_time": "The application's time. Null if there is none, or if it is out of range; the "
    "number is then in the "
    "property `ledgerlake.event_time`.",
    "deliver_at": "The requested delivery time. Null for a message without one.",
    "delivered_at": "When the message was released, by the clock of the machine that did it. Null "
    "for a message "
    "that Ledgerlake did not delay: one without a delivery time, of a pipeline with `[delay] "
    "enabled = false`, or of the "
    "bare source.",
    "producer_name": "The sender.",
    "sequence_id": "The sender's number of the message. Null if it is 2^63 or more; the number is "
    "then in the property "
    "`ledgerlake.sequence_id`.",
    "key": "The key, if it is text.",
    "key_bytes": "The key, if it is not text.",
    "ordering_key": "The ordering key of a key-shared subscription.",
    "properties": "The properties. Of a key that the message has twice, the last value counts.",
    "schema_version": "The version of the schema that wrote the value.",
    "is_null": "`true` for a message without a value (a tombstone); `value` is null.",
    "late": "`true` if the effective time lies before the watermark of the topic partition: see "
    "[ordering](ordering.md). Always `false` in the bare source.",
    "chunk_count": "The number of chunks of a large message. Null for others.",
    "first_chunk_id": "The id of the first chunk of a large message; `message_id` is that of the "
    "last one.",
    "value": "The bytes of the message.",
    "reason": "Why the entry could not become a message: see [reasons of "
    "rejects](reject-reasons.md).",
    "detail": "What was found, in words.",
    "entry": "The complete entry as the broker stored it, or, in a table of records, the single "
    "message. Null if "
    "neither the state nor the topic has the bytes any more.",
    "chunk_uuid": "The name that all chunks of a large message have. Null for others.",
    "chunk_id": "The number of the chunk, from 0.",
    "chunk_total_bytes": "The size of the large message.",
    "reject_reason": "Null for a message; else the reason, with the bytes of the entry in `value`.",
    "compression": "The codec of the entry.",
    "uncompressed_size": "The size that the entry claims to have without compression.",
    "num_messages_in_batch": "The number of messages in the entry.",
    "encryption_keys": "The names of the keys for which the entry is encrypted.",
}

# Of stored entries.
ENTRY_COLUMNS = COLUMNS | {
    "reject_reason": "Null if the entry can be read; else why it cannot be.",
    "entry": "The complete entry as the broker stored it.",
}

# Of rows that are written to topics.
WRITTEN_COLUMNS = {
    "value": "The content: bytes or text. Null is a message without a value. Required.",
    "key": "The key. It selects the partition. Messages without a key go to each partition in "
    "turn, a hundred rows at a time.",
    "ordering_key": "The ordering key for key-shared subscriptions.",
    "properties": "The properties. Of a key that the message has twice, the last value counts.",
    "event_time": "The application's time.",
    "deliver_at": "When the message is to be delivered.",
    "topic": "The topic of the row. If it is missing or null, the option `topic` counts.",
}

# Error: whose fault it is, its cause, and the cure.
ERRORS: dict[str, tuple[str, str, str]] = {
    "UsageError": (
        "the caller's",
        "An option, a key of the configuration or an argument is wrong. Nothing was started.",
        "Correct what the message names; it has the nearest known name.",
    ),
    "SetupError": (
        "this machine's",
        "Java, a package, a file or a right is missing, or something else on this machine does not "
        "fit.",
        "Install or change what the message names.",
    ),
    "TransportError": (
        "the network's or the broker's",
        "The broker cannot be reached, or went away. It was tried again for `retry_timeout_s`.",
        "Check the address and the broker, then start again.",
    ),
    "DeadlineError": (
        "the broker's",
        "The broker is there, but did not answer in time.",
        "Look at the load of the broker, then start again.",
    ),
    "ProtocolError": (
        "the peer's",
        "The peer sent bytes that break the protocol.",
        "Check that the port is the one of Pulsar's binary protocol, and not of HTTP or another "
        "service.",
    ),
    "FrameTooLargeError": (
        "the peer's",
        "A frame is longer than the limit on which both sides agreed.",
        "Check the port. If maxMessageSize of the broker was made less than entries that it "
        "stores, raise it again.",
    ),
    "MalformedFrameError": (
        "the peer's",
        "A frame, or the command in it, does not parse.",
        "Check the port. If the peer is a broker, report it.",
    ),
    "BrokerError": (
        "the broker's answer",
        "The broker understood the request and refused it; `code` is the protocol's name of the "
        "reason.",
        "Act on the code: for example `AuthorizationError` asks for a right of the role.",
    ),
    "TopicNotFoundError": (
        "the caller's",
        "The topic does not exist. A pipeline never creates a topic that it reads.",
        "Create the topic, or correct its name.",
    ),
    "ConsumerBusyError": (
        "another process's",
        "Another consumer holds the exclusive subscription.",
        "Stop the other process of the stream. A second stream needs a name, a checkpoint and "
        "tables of its own.",
    ),
    "CorruptEntryError": (
        "the producer's",
        "A stored entry cannot become messages. A pipeline makes a row of `rejects` of it and goes "
        "on; other reads may end with it.",
        "See [reasons of rejects](reject-reasons.md) for `reason`.",
    ),
    "DecryptionError": (
        "the caller's",
        "No key opens an entry, and `crypto_failure_action` is `fail`.",
        "Add the key, or choose `reject`.",
    ),
    "DataLossError": (
        "the topic's",
        "The topic no longer has entries that were to be read next, and `fail_on_data_loss` is "
        "`true`.",
        "Find out what removed them. To go on without them, set `fail_on_data_loss = false`. See "
        "[loss](loss.md).",
    ),
    "OffsetError": (
        "the caller's",
        "An offset or a checkpoint is of a newer release, or is damaged.",
        "Upgrade Ledgerlake, or restore the checkpoint. See [upgrade](upgrade.md).",
    ),
    "CheckpointError": (
        "the caller's",
        "The checkpoint is incomplete, older than the table, or of another stream; or the table "
        "has the topic from another stream. The table was not changed.",
        "See [recover a checkpoint](recover.md).",
    ),
    "OwnershipError": (
        "another process's",
        "Another process has taken over the stream. This one must not write any more.",
        "Run one process for each stream.",
    ),
    "ProducerNameError": (
        "another producer's",
        "Another producer has used the name of a producer of Ledgerlake, and the broker drops "
        "messages for it.",
        "Look at who may write to the topic; then set `pulsar.producer.producerName` to another "
        "name.",
    ),
    "ProcessLostError": (
        "outside",
        "A process of Spark's was ended from outside: by hand, or because memory ran out. Or an "
        "executor was lost, and its task, run again, found other messages in a topic.",
        "Start again. If it comes back, give the machine or `[spark] memory` more memory.",
    ),
    "TableError": (
        "the table's",
        "The table has another schema, or features or properties that do not fit.",
        "Act on the message; then start again.",
    ),
    "TableAccessError": (
        "the store's, or another writer's",
        "The table cannot be read or written now: its store does not answer or refuses, or other "
        "writers were there first.",
        "Look at the store and its rights; then start again.",
    ),
}

# Metric: when it is there, and what it is for, beyond its help text.
METRICS = {
    "ledgerlake_lag_messages": "By the broker's index. Unknown, and not shown, if the broker adds "
    "no entry metadata, or a pipeline is not connected to it.",
    "ledgerlake_lag_seconds": "By the broker's time. Unknown, and not shown, if the broker adds no "
    "entry metadata, or a pipeline is not connected to it.",
    "ledgerlake_lag_bytes": "By the average size of the messages so far. Pipelines only.",
    "ledgerlake_delayed_messages": "A cancelled or replaced one counts until it would have been "
    "due. Pipelines only.",
    "ledgerlake_next_due_timestamp_seconds": "Seconds since 1970. It may be one that was cancelled "
    "or replaced. Pipelines only.",
    "ledgerlake_rows_per_second": "By Spark's count of rows. Queries on the bare source only.",
    "ledgerlake_messages_per_second": "Pipelines only.",
    "ledgerlake_messages_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_rejects_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_batches_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_incomplete_messages": "Of the topic partitions that had a micro-batch since the "
    "start. Pipelines only.",
    "ledgerlake_kept_bytes": "Of the topic partitions that had a micro-batch since the start. "
    "Pipelines only.",
    "ledgerlake_rejects_by_reason_total": "Since the start of the process. The reasons: [reasons "
    "of rejects](reject-reasons.md). "
    "Pipelines only.",
    "ledgerlake_last_batch_timestamp_seconds": "Seconds since 1970. Pipelines only.",
    "ledgerlake_released_messages_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_late_seconds_total": "Divided by the number of messages, it is the mean lateness. "
    "Pipelines only.",
    "ledgerlake_most_late_seconds": "Pipelines only.",
    "ledgerlake_due_messages": "After the last micro-batch; a label says how many seconds. "
    "Pipelines only.",
    "ledgerlake_commit_seconds": "Since the start of the process. Pipelines only.",
    "ledgerlake_is_owner": "0 if its subscription or the connection was lost. Pipelines only.",
    "ledgerlake_upkeep_failures_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_upkeep_last_success_timestamp_seconds": "Seconds since 1970. Pipelines only.",
    "ledgerlake_table_files": "Pipelines only.",
    "ledgerlake_table_bytes": "Pipelines only.",
    "ledgerlake_upkeep_merged_files_total": "Since the start of the process. Pipelines only.",
    "ledgerlake_upkeep_removed_files_total": "Since the start of the process. Pipelines only.",
}
