"""``spark.readStream.format("ledgerlake")``: offsets and planning in the driver's planner process,
reading in tasks.

Nothing is opened before the first call of Spark, because Spark creates some readers only to pickle
them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ledgerlake.source.batch_reader import RangePartition
from ledgerlake.source.planner import Planner
from ledgerlake.source.planning import ranges, split
from ledgerlake.source.views import read_view
from ledgerlake.stored.offsets import from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange


class LedgerlakeStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    """The streaming source of a query. Pickled with its options only; the connections belong to the
    planner process.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._planner: Planner | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_options": self._options, "_planner": None}

    def initialOffset(self) -> dict[str, Any]:
        return to_json(self._open_planner().initial())

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        limited = not isinstance(limit, ReadAllAvailable)
        return to_json(self._open_planner().plan_end(from_json(start), limited))

    def getDefaultReadLimit(self) -> ReadLimit:
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        if self._options.max_rows_per_trigger is not None:
            return ReadMaxRows(self._options.max_rows_per_trigger)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return to_json(self._open_planner().reported_offsets())

    def prepareForTriggerAvailableNow(self) -> None:
        self._open_planner().fix_end()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        return [RangePartition(span) for span in self._ranges(start, end)]

    def _ranges(self, start: dict[str, Any], end: dict[str, Any]) -> list[EntryRange]:
        return split(self._open_planner().with_pins(ranges(from_json(start), from_json(end))))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_view(self._options, partition.span)

    def commit(self, end: dict[str, Any]) -> None:
        self._open_planner().committed(from_json(end))

    def stop(self) -> None:
        if self._planner is not None:
            self._planner.close()
            self._planner = None

    def _open_planner(self) -> Planner:
        if self._planner is None:
            self._planner = Planner(self._options)
        return self._planner
