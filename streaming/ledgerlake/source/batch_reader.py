"""``spark.read.format("ledgerlake")``: a bounded read over the same planning as the stream."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.source.bounds import check_partitions, resolve_end, resolve_start
from ledgerlake.source.planning import EntryRange, parts_for, ranges, split
from ledgerlake.source.views import read_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from ledgerlake.options.source_options import SourceOptions


class RangePartition(InputPartition):  # type: ignore[misc]
    """A range of entries, as Spark carries it to a task."""

    def __init__(self, span: EntryRange) -> None:
        super().__init__(span)
        self.span = span


class LedgerlakeBatchReader(DataSourceReader):  # type: ignore[misc]
    """Reads from ``startingOffsets`` (default earliest) to ``endingOffsets`` (default the end of
    the topic now).
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        cluster = Cluster(options.first_client)
        try:
            names = find_topic_partitions(cluster, options.topics)
            for _, by_topic in (options.starts, options.ends):
                check_partitions(names, by_topic)
            # The ends come first: behind them, nothing is read before a start that is not reached
            # yet.
            end = {name: resolve_end(cluster, name, options.ending_of(name)) for name in names}
            start = {
                name: resolve_start(
                    cluster, name, options.starting_of(name, "earliest"), is_bounded=True
                )
                for name in names
            }
        finally:
            cluster.close()
        spans = ranges(start, end)
        parts = parts_for(spans, options.min_partitions)
        spans = [replace(span, parts=count) for span, count in zip(spans, parts, strict=True)]
        return [RangePartition(span) for span in split(spans)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        # If there is no partition, Spark makes an empty one of its own class.
        return (
            read_view(self._options, partition.span)
            if isinstance(partition, RangePartition)
            else iter(())
        )
