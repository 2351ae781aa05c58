"""The options of the sink, which writes rows as messages; those that Pulsar's producer has are
named as for the Java client.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ledgerlake.client.topics import full_name
from ledgerlake.errors import UsageError
from ledgerlake.options.client_options import ClientOptions
from ledgerlake.options.declared import from_spark, option
from ledgerlake.options.kinds import COUNT, FLAG, LIMIT, TEXT, choice

if TYPE_CHECKING:
    from collections.abc import Mapping

# Spark adds these to every sink by itself.
_SPARKS_OWN = frozenset({"path", "checkpointlocation"})

# It is the upper half of sequence ids, which have 63 bits.
_MOST_VERSION = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class SinkOptions(ClientOptions):
    """Checked options of a write."""

    topic: str | None = option(TEXT, None, "The topic of rows that name none.", spark="topic")
    producer_name: str | None = option(
        TEXT,
        None,
        "The beginning of every producer's name. It has to be the same for every run of a query, "
        "and no other query may have it.",
        spark="pulsar.producer.producerName",
        shown_default="the query's id",
    )
    txn_version: int | None = option(
        LIMIT,
        None,
        "The number of a batch write, for example of that in `foreachBatch`. It has to rise from "
        "one write under `pulsar.producer.producerName` to the next, and be the same when a write "
        "is run again.",
        spark="txnVersion",
        shown_default="each write stores its messages",
    )
    batching_enabled: bool = option(
        FLAG, True, "Put several messages into an entry.", spark="pulsar.producer.batchingEnabled"
    )
    batching_max_messages: int = option(
        COUNT, 1000, "The most messages of an entry.", spark="pulsar.producer.batchingMaxMessages"
    )
    batching_max_bytes: int = option(
        COUNT,
        128 * 1024,
        "The most bytes of an entry: payloads, keys and properties.",
        spark="pulsar.producer.batchingMaxBytes",
    )
    compression_type: str = option(
        choice("none", "lz4", "zlib", "zstd", "snappy"),
        "none",
        "The compression of entries.",
        spark="pulsar.producer.compressionType",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.full_topic  # noqa: B018 - what cannot be is refused at once
        if self.txn_version is None:
            return
        if not self.producer_name:
            raise UsageError(
                "'txnVersion' numbers the writes of one producer; name it by "
                "'pulsar.producer.producerName'"
            )
        if self.txn_version > _MOST_VERSION:
            raise UsageError(
                f"'txnVersion' is {self.txn_version}, and the most is {_MOST_VERSION}; give the "
                "number of the micro-batch"
            )

    @cached_property
    def full_topic(self) -> str | None:
        """The topic's name with tenant and namespace."""
        return full_name(self.topic) if self.topic else None


def parse_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Check the options that a user wrote for Spark.

    Raises:
        UsageError: an option is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    ours = ((name, text) for name, text in given.items() if name.lower() not in _SPARKS_OWN)
    return from_spark(SinkOptions, ours, "sink")
