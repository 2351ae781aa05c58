"""Turns a stream of bundles into a stream of complete, decoded messages and rejects, for sinks that
are not Ledgerlake's.

Everything passes the stateful stage here, plain messages too (see ``operators.stage_input``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.messages import as_view, rejects_as_view
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.stage_input import forward_bundles
from ledgerlake.operators.stage_output import read_stage_rows
from ledgerlake.operators.stage_rows import STAGE_ROWS_DDL, StateSummary
from ledgerlake.operators.stateful import Processor, stateful
from ledgerlake.schedules.cancels import Cancels
from ledgerlake.source.views import check_broker_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

    from ledgerlake.assembly.rules import Limits
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.options.delay_options import DelayOptions
    from ledgerlake.options.source_options import SourceOptions


def complete_messages(
    bundles: DataFrame, options: SourceOptions, limits: Limits, delay: DelayOptions
) -> DataFrame:
    """Return rows of ``schema.VIEW``: messages, and rejects with their ``reject_reason``."""
    forwarded = bundles.mapInArrow(
        lambda rows: forward_bundles(rows, options, delay.enabled), STAGE_ROWS_DDL
    )
    assembled = stateful(forwarded, Processor(limits, delay, options.client), STAGE_ROWS_DDL)
    return assembled.mapInArrow(
        lambda rows: _decode(rows, options, limits, delay.enabled), from_arrow_schema(schema.VIEW)
    )


def _decode(
    rows: Iterable[pa.RecordBatch], options: SourceOptions, limits: Limits, delays_messages: bool
) -> Iterator[pa.RecordBatch]:
    decoders: dict[TopicPartition, OutcomeDecoder] = {}
    for topic_partition, output in read_stage_rows(rows):
        if topic_partition not in decoders:
            decoders[topic_partition] = OutcomeDecoder(
                topic_partition, options, limits.max_message_bytes, delays_messages=delays_messages
            )
        if isinstance(output, pa.RecordBatch):
            yield output
        elif isinstance(output, Cancels):
            decoders[topic_partition].cancels = output
        elif isinstance(output, StateSummary):
            del decoders[topic_partition]
        else:
            yield from _as_view(output, decoders[topic_partition], topic_partition, options)


def _as_view(
    outcome: Outcome,
    decoder: OutcomeDecoder,
    topic_partition: TopicPartition,
    options: SourceOptions,
) -> Iterator[pa.RecordBatch]:
    for decoded in decoder.decode(outcome):
        if isinstance(decoded, list):
            for rejects in decoder.reject_tables(decoded):
                yield from map(rejects_as_view, rejects.to_batches())
        else:
            check_broker_metadata(options.require_broker_metadata, decoded, topic_partition)
            yield as_view(decoded)
