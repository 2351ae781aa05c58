"""A stream of bundles as a stream of whole, decoded messages and of rejects, for sinks that are not ours.

Everything passes the stateful stage here: bundles untouched, chunks one by one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, as_view, rejects_as_view
from ledgerlake.decode.split import ENTRIES, only_entry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.chunk_entries import read_alone
from ledgerlake.operators.outcomes import OutcomeDecoder, read_flow
from ledgerlake.operators.processor import assemble
from ledgerlake.operators.rows import FLOW_DDL, Event, Report, Standing, flow_row, report_to_json
from ledgerlake.source.partition_reader import Piece, check_broker_metadata, piece_as_view
from ledgerlake.state.chunks import Chunk, Limits
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark.sql import DataFrame

    from ledgerlake.source.options import SourceOptions


def whole_messages(bundles: DataFrame, options: SourceOptions, limits: Limits) -> DataFrame:
    """Rows of ``schema.VIEW``: messages, and what is none with its ``reject_reason``."""
    assembled = assemble(bundles.mapInArrow(_forward, FLOW_DDL), limits)
    return assembled.mapInArrow(lambda rows: _decode(rows, options, limits), from_arrow_schema(schema.VIEW))


def _forward(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of ``schema.BUNDLES`` as rows of ``FLOW``."""
    reports: dict[TopicPartition, Report] = {}
    for batch in batches:
        for number in range(batch.num_rows):
            row = {name: batch[name][number].as_py() for name in batch.schema.names if name != "frames"}
            source = TopicPartition(row["topic"], row["partition"])
            end = Position(row["end_ledger_id"], row["end_entry_id"])
            report = reports.setdefault(source, Report(end, row["clock_ms"], {}))
            yield from _forward_row(source, row, batch["frames"][number].as_buffer(), report.events)
    for source, report in reports.items():
        now_ms = max([event.time_ms for event in report.events if hasattr(event, "time_ms")], default=report.now_ms)
        yield flow_row(source, "report", note=report_to_json(Report(report.end, now_ms, {}, report.events)))


def _forward_row(
    source: TopicPartition, row: dict[str, Any], frames: pa.Buffer, events: list[Event]
) -> Iterator[pa.RecordBatch]:
    if row["kind"] == ENTRIES:
        yield flow_row(source, ENTRIES, note=json.dumps(row["after_batch_index"]), entry=frames.to_pybytes())
        return
    position, entry = only_entry(frames)
    try:
        event = read_alone(row["kind"], entry, position)
    except CorruptEntryError as error:
        yield flow_row(source, "reject", position, error.reason, bytes(entry))
        return
    events.append(event)
    if isinstance(event, Chunk):
        yield flow_row(source, "chunk", position, entry=bytes(entry))


def _decode(rows: Iterable[pa.RecordBatch], options: SourceOptions, limits: Limits) -> Iterator[pa.RecordBatch]:
    for source, found in read_flow(rows):
        if isinstance(found, Piece):
            yield from piece_as_view(found, source, options)
        elif not isinstance(found, Standing):
            decoder = OutcomeDecoder(source, options.client, limits.max_message_bytes)
            decoded = decoder.decode(found)
            if isinstance(decoded, list):
                yield from (rejects_as_view(one) for table in decoder.whole(decoded) for one in table.to_batches())
            else:
                check_broker_metadata(options.require_broker_metadata, decoded, source)
                yield as_view(decoded)
