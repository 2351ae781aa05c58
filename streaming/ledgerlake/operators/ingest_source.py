"""The pipeline's own data source: its tasks do not hand entries to Spark, they write them.

It returns the few rows of ``operators.stage_rows``. So entries cross into the JVM neither on their
way from the broker nor on their way to the table.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

from ledgerlake.assembly.rules import Limits
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.operators.ingest import decode_ranges, write_ranges
from ledgerlake.operators.results import BatchSettings, StageSettings, TaskSettings
from ledgerlake.operators.stage_rows import STAGE_ROWS
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import SourceOptions, parse_options
from ledgerlake.options.table_options import TableOptions
from ledgerlake.source.pieces import read_pieces_by_range
from ledgerlake.source.planning import group
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.stored.places import from_text, to_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from ledgerlake.source.planning import EntryRange

_TASK_OPTION = "task"


def ingest(
    spark: SparkSession, source_options: dict[str, str], settings: StageSettings
) -> DataFrame:
    """Return a stream of rows of ``STAGE_ROWS``. With ``TaskSettings``, its tasks write their
    ranges into files.
    """
    spark.dataSource.register(_IngestDataSource)
    options = source_options | {_TASK_OPTION: json.dumps(_fields_of(settings))}
    return spark.readStream.format(_IngestDataSource.name()).options(**options).load()


def _fields_of(settings: StageSettings) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "limits": asdict(settings.limits),
        # Delayed messages are kept by the stateful stage, and not by these tasks.
        "delay": asdict(replace(settings.delay, folder=None)),
    }
    if isinstance(settings, TaskSettings):
        fields |= {
            "tables": [table.fields() for table in settings.tables],
            "rejects_folder": to_text(settings.rejects_folder),
            "stops_at_misfits": settings.stops_at_misfits,
        }
    return fields


def _settings_of(fields: dict[str, Any], options: SourceOptions) -> StageSettings:
    limits = Limits(**fields["limits"])
    delay = DelayOptions(
        **{**fields["delay"], "settings": DelaySettings(**fields["delay"]["settings"])}
    )
    if "tables" not in fields:
        return StageSettings(limits, delay, options)
    return TaskSettings(
        limits,
        delay,
        options,
        tuple(TableOptions.from_fields(table) for table in fields["tables"]),
        from_text(fields["rejects_folder"]),
        stops_at_misfits=fields["stops_at_misfits"],
    )


class _IngestDataSource(DataSource):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "ledgerlake-ingest"

    def schema(self) -> StructType:
        return from_arrow_schema(STAGE_ROWS)

    def streamReader(self, schema: StructType) -> _IngestStreamReader:
        source_options = dict(self.options)
        fields = json.loads(source_options.pop(_TASK_OPTION))
        options = parse_options(source_options)
        return _IngestStreamReader(options, _settings_of(fields, options))


class _RangesPartition(InputPartition):  # type: ignore[misc]
    """The ranges of entries that one task reads, as Spark carries them to it.
    ``is_sole_reader``: no other task has a range of their topic partitions.
    """

    def __init__(self, spans: list[EntryRange], *, is_sole_reader: bool) -> None:
        super().__init__(spans)
        self.spans = spans
        self.is_sole_reader = is_sole_reader


class _IngestStreamReader(LedgerlakeStreamReader):
    def __init__(self, options: SourceOptions, settings: StageSettings) -> None:
        super().__init__(options)
        self._settings = settings

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_settings": self._settings}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Plan the tasks. Which ranges share a task depends on what the planner has seen, and not
        on the offsets alone. It decides which file a message is in, and nothing else.
        """
        spans = self._ranges(start, end)
        groups = group(spans, self._open_planner().entry_bytes(spans), self._options.min_partitions)
        counts = Counter(span.topic_partition for span in spans)
        return [
            _RangesPartition(
                together, is_sole_reader=all(counts[span.topic_partition] == 1 for span in together)
            )
            for together in groups
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        ranges = read_pieces_by_range(self._options, partition.spans)
        if not isinstance(self._settings, TaskSettings):
            return decode_ranges(ranges, self._settings)
        return write_ranges(
            ranges,
            self._settings,
            BatchSettings.of_this_task(),
            is_sole_reader=partition.is_sole_reader,
        )
