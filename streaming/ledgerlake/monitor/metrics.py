"""The metrics of queries, for Prometheus: through Spark's listener for any query on the source, and
from a pipeline's own batches.

| metric | labels | meaning |
|---|---|---|
| ``ledgerlake_lag_messages`` | query, topic_partition | messages behind the last entry, or the stream's ``ending`` if that is earlier, by the broker's index; what a micro-batch reads counts until it ends |
| ``ledgerlake_lag_seconds`` | query, topic_partition | the lag in the broker's time |
| ``ledgerlake_lag_bytes`` | query, topic_partition | the lag in stored bytes, by the average size so far; pipelines only |
| ``ledgerlake_rows_per_second`` | query | of the last micro-batch, by Spark's count of rows; not for pipelines |
| ``ledgerlake_messages_per_second`` | query | of the last micro-batch; pipelines only, as all that follow |
| ``ledgerlake_messages_total`` | query | messages committed since the start |
| ``ledgerlake_rejects_total`` | query | rejects committed since the start |
| ``ledgerlake_rejects_by_reason_total`` | query, reason | the same by reason |
| ``ledgerlake_batches_total`` | query | micro-batches committed since the start |
| ``ledgerlake_incomplete_messages`` | query | incomplete large messages of the topic partitions that had a micro-batch since the start |
| ``ledgerlake_kept_bytes`` | query | bytes of the entries kept of incomplete large messages |
| ``ledgerlake_released_messages_total`` | query | delayed messages that were delivered since the start |
| ``ledgerlake_late_seconds_total`` | query | the time from due to committed of those, together |
| ``ledgerlake_most_late_seconds`` | query | the longest such time in the last micro-batch that released some |
| ``ledgerlake_delayed_messages`` | query, topic_partition | delayed messages |
| ``ledgerlake_next_due_timestamp_seconds`` | query, topic_partition | when the next delayed message is due |
| ``ledgerlake_due_messages`` | query, within | delayed messages that are due within so many seconds, to the precision of a segment of the index |
| ``ledgerlake_commit_seconds`` | query | histogram of what the commits of a micro-batch to all tables took together |
| ``ledgerlake_last_batch_timestamp_seconds`` | query | when the last micro-batch was committed, or the pipeline began |
| ``ledgerlake_is_owner`` | query | 1 if this process owns the stream, 0 if it has lost a subscription or its connection |
| ``ledgerlake_table_files`` | query, table | files of the table when upkeep last looked, as all that follow |
| ``ledgerlake_table_bytes`` | query, table | their bytes |
| ``ledgerlake_upkeep_merged_files_total`` | query, table | small files that were merged since the start |
| ``ledgerlake_upkeep_removed_files_total`` | query, table | unused files that were removed since the start |
| ``ledgerlake_upkeep_failures_total`` | query | attempts of upkeep that failed |
| ``ledgerlake_upkeep_last_success_timestamp_seconds`` | query | when upkeep last went through all tables without a failure |

If the broker adds no entry metadata, or a pipeline is not connected to it, the lag is unknown and
not shown. ``deploy/grafana.json`` and ``deploy/alerts.yaml`` use these names.
"""

from __future__ import annotations

import bisect
import contextlib
import math
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from py4j.protocol import Py4JError
from pyspark.sql.streaming.listener import StreamingQueryListener

from ledgerlake.delay.due_times import delayed_counts, first_due_ms
from ledgerlake.monitor.history import History, Sample
from ledgerlake.monitor.http_server import HttpServer
from ledgerlake.monitor.progress import Behind, lags_now, lags_of
from ledgerlake.monitor.status import Status
from ledgerlake.operators.stage_rows import sum_of
from ledgerlake.options.config import REJECTS_TABLE, MetricsConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import SparkSession

    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.monitor.progress import Reading
    from ledgerlake.operators.stage_rows import Incomplete, Released
    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.commit import BatchResult
    from ledgerlake.pipeline.upkeep import TableUpkeep, UpkeepReport

T = TypeVar("T")

_Family = GaugeMetricFamily | CounterMetricFamily


@dataclass(frozen=True)
class PipelineState:
    """What a pipeline says of itself when its metrics are fetched; ``tables`` are the places of
    those that its configuration names, ``reading`` the micro-batch that runs.
    """

    is_owner: bool
    upkeep: UpkeepReport
    broker: str = ""
    tables: dict[str, str] = field(default_factory=dict)
    reading: Reading | None = None


def state_of(
    config: Config, *, is_owner: bool, upkeep: UpkeepReport, reading: Reading | None = None
) -> PipelineState:
    """Return the state of the pipeline of a configuration."""
    tables = {
        table.name: str(table.place) for table in config.table_options if not table.is_template
    }
    tables[REJECTS_TABLE] = str(config.rejects_place)
    return PipelineState(is_owner, upkeep, config.source.client.service_url, tables, reading)


# The time until delayed messages are due, in seconds.
HORIZON_S = (0.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0, 7 * 86400.0, 30 * 86400.0, math.inf)


class Histogram:
    """Counts durations by the upper bounds of Prometheus' buckets, each the more precise the
    smaller.
    """

    BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

    def __init__(self) -> None:
        self.counts = [0] * (len(self.BOUNDS_S) + 1)
        self.sum_s = 0.0
        self.last_s: float | None = None

    def add(self, taken_s: float) -> None:
        self.counts[bisect.bisect_left(self.BOUNDS_S, taken_s)] += 1
        self.sum_s += taken_s
        self.last_s = taken_s

    @property
    def mean_s(self) -> float | None:
        return None if self.last_s is None else self.sum_s / sum(self.counts)

    @property
    def buckets(self) -> list[tuple[str, float]]:
        """Return each upper bound, and how many durations are at or below it."""
        bounds = [str(bound) for bound in self.BOUNDS_S] + ["+Inf"]
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass
class QueryNumbers:
    """The latest numbers of one query."""

    lags: dict[str, Behind] = field(default_factory=dict)
    rows_per_second: float | None = None
    durations_ms: dict[str, int] = field(default_factory=dict)
    messages: int = 0
    rejects: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    stored_bytes: int = 0
    messages_per_second: float | None = None
    incomplete: dict[str, Incomplete] = field(default_factory=dict)
    delayed_counts: dict[str, int] = field(default_factory=dict)
    next_due_ms: dict[str, int | None] = field(default_factory=dict)
    due_spans: dict[str, list[DueSpan]] = field(default_factory=dict)
    released_messages: int = 0
    late_seconds: float = 0.0
    most_late_seconds: float | None = None
    batch_ended_s: float | None = None
    last_batch_timestamp_seconds: float | None = None
    commits: Histogram = field(default_factory=Histogram)
    history: History = field(default_factory=History)

    def add_released(self, released: Released, clock_ms: int) -> None:
        """Count the delayed messages of a micro-batch."""
        self.released_messages += released.count
        # They were due by the broker's clock, and this one may be behind it.
        self.late_seconds += released.count * max(clock_ms - released.mean_due_ms, 0) / 1000
        if released.first_due_ms is not None:
            self.most_late_seconds = max(clock_ms - released.first_due_ms, 0) / 1000

    def forget_gone(self) -> None:
        """Forget the topic partitions that are read no more and have no message in the state."""
        held = {name for name, count in self.delayed_counts.items() if count}
        held |= {name for name, incomplete in self.incomplete.items() if incomplete.count}
        gone = (self.delayed_counts.keys() | self.incomplete.keys()) - held - self.lags.keys()
        for by_name in (self.delayed_counts, self.next_due_ms, self.due_spans, self.incomplete):
            for name in gone & by_name.keys():
                del by_name[name]

    @property
    def incomplete_messages(self) -> int:
        return sum_of(self.incomplete.values()).count

    @property
    def kept_bytes(self) -> int:
        return sum_of(self.incomplete.values()).kept_bytes

    @property
    def bytes_per_message(self) -> float | None:
        return self.stored_bytes / self.messages if self.messages else None

    def lags_now(self, state: PipelineState | None) -> dict[str, Behind]:
        """Return the lags, with the micro-batch that runs."""
        return (
            self.lags
            if state is None
            else lags_now(self.lags, state.reading, is_owner=state.is_owner)
        )

    def sample(self, now_ms: int, lags_now: dict[str, Behind]) -> None:
        """Add the numbers of this time to the history."""
        lags = [lag.messages for lag in lags_now.values() if lag.messages is not None]
        lag = sum(lags) if lags else None
        self.history.add(Sample(now_ms, self.messages, lag, sum(self.delayed_counts.values())))

    def due_within(self, now_ms: int) -> list[int]:
        """Return how many delayed messages are due within each time of ``HORIZON_S``."""
        counts = [0] * len(HORIZON_S)
        for span in chain.from_iterable(self.due_spans.values()):
            counts[bisect.bisect_left(HORIZON_S, (span.first_ms - now_ms) / 1000)] += span.count
        return list(accumulate(counts))


class Metrics:
    """The latest numbers of every query, as a collector of ``prometheus_client``.

    Args:
        clock: the time in seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._queries: dict[str, QueryNumbers] = {}
        self._pipelines: dict[str, Callable[[], PipelineState]] = {}
        self._lock = threading.Lock()

    def add_progress(
        self,
        query: str,
        lags: dict[str, Behind],
        rows_per_second: float,
        durations_ms: dict[str, int] | None = None,
    ) -> None:
        """Take Spark's numbers of a micro-batch."""
        with self._lock:
            numbers = self._of(query)
            numbers.lags, numbers.rows_per_second = lags, rows_per_second
            numbers.forget_gone()
            numbers.durations_ms = durations_ms or {}

    def watch(self, query: str, state: Callable[[], PipelineState]) -> None:
        """Ask a pipeline for its state whenever metrics are fetched."""
        with self._lock:
            self._pipelines[query] = state
            # The counters begin at zero, so that an alert sees the first micro-batch.
            self._of(query).last_batch_timestamp_seconds = self._clock()

    def add_batch(self, query: str, result: BatchResult, now_s: float, clock_ms: int) -> None:
        """Take the result of a pipeline's micro-batch.

        Args:
            now_s: the time by a clock that does not jump.
            clock_ms: the time in milliseconds since 1970.
        """
        with self._lock:
            numbers = self._of(query)
            numbers.batches += 1
            if not result.repeated:
                numbers.messages += result.messages
                numbers.rejects += result.rejects
                numbers.reasons.update(result.reasons)
                numbers.stored_bytes += result.stored_bytes
                numbers.add_released(result.released, clock_ms)
            if numbers.batch_ended_s is not None:
                numbers.messages_per_second = result.messages / max(
                    now_s - numbers.batch_ended_s, 0.001
                )
            numbers.batch_ended_s = now_s
            numbers.last_batch_timestamp_seconds = clock_ms / 1000
            numbers.commits.add(result.commit_s)
            numbers.sample(clock_ms, numbers.lags)
            numbers.incomplete |= result.incomplete
            numbers.delayed_counts |= result.delayed_counts
            numbers.next_due_ms |= result.next_due_ms
            numbers.due_spans |= result.due_spans

    def add_delayed(self, query: str, due_spans: dict[str, list[DueSpan]]) -> None:
        """Take the delayed messages of topic partitions that wait since an earlier run."""
        with self._lock:
            numbers = self._of(query)
            numbers.due_spans |= due_spans
            numbers.delayed_counts |= delayed_counts(due_spans)
            numbers.next_due_ms |= first_due_ms(due_spans)

    def read(self, read: Callable[[str, QueryNumbers, PipelineState | None], T]) -> list[T]:
        """Return what a function makes of the numbers of each query, while they do not change."""
        with self._lock:
            states = {query: state() for query, state in self._pipelines.items()}
            names = sorted({*self._queries, *states})
            return [read(name, self._of(name), states.get(name)) for name in names]

    def forget(self, query: str) -> None:
        """Remove a query that has ended."""
        with self._lock:
            self._queries.pop(query, None)
            self._pipelines.pop(query, None)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its current values."""
        with self._lock:
            states = {query: state() for query, state in self._pipelines.items()}
            yield from self._by_partition(states)
            yield from self._by_query()
            yield from self._of_pipelines(states)

    def _of(self, query: str) -> QueryNumbers:
        return self._queries.setdefault(query, QueryNumbers())

    def _by_partition(self, states: dict[str, PipelineState]) -> Iterator[Metric]:
        samples: dict[str, list[tuple[str, str, float | None]]] = {
            name: [] for name in _PARTITION_GAUGES
        }
        for query, numbers in self._queries.items():
            for name, lag in numbers.lags_now(states.get(query)).items():
                size = numbers.bytes_per_message
                size_bytes = None if lag.messages is None or size is None else lag.messages * size
                samples["lag_messages"].append((query, name, lag.messages))
                samples["lag_seconds"].append(
                    (query, name, None if lag.time_ms is None else lag.time_ms / 1000)
                )
                samples["lag_bytes"].append((query, name, size_bytes))
            samples["delayed_messages"] += [
                (query, name, count) for name, count in numbers.delayed_counts.items()
            ]
            for name, due_ms in numbers.next_due_ms.items():
                samples["next_due_timestamp_seconds"].append(
                    (query, name, None if due_ms is None else due_ms / 1000)
                )
        for metric, text in _PARTITION_GAUGES.items():
            family = GaugeMetricFamily(
                f"ledgerlake_{metric}", text, labels=["query", "topic_partition"]
            )
            for query, name, value in samples[metric]:
                if value is not None:
                    family.add_metric([query, name], value)
            yield family

    def _by_query(self) -> Iterator[Metric]:
        for metric, (text, kind) in _QUERY_METRICS.items():
            family = kind(f"ledgerlake_{metric}", text, labels=["query"])
            is_pipelines = metric != "rows_per_second"
            for query, numbers in self._queries.items():
                value = getattr(numbers, metric)
                if value is not None and is_pipelines == (
                    query in self._pipelines or bool(numbers.batches)
                ):
                    family.add_metric([query], value)
            yield family
        by_reason = CounterMetricFamily(
            "ledgerlake_rejects_by_reason", _BY_REASON, labels=["query", "reason"]
        )
        for query, numbers in self._queries.items():
            for reason, count in sorted(numbers.reasons.items()):
                by_reason.add_metric([query, reason], count)
        yield by_reason
        due = GaugeMetricFamily("ledgerlake_due_messages", _DUE, labels=["query", "within"])
        now_ms = int(self._clock() * 1000)
        for query, numbers in self._queries.items():
            if numbers.batches or numbers.due_spans:
                for horizon_s, count in zip(HORIZON_S, numbers.due_within(now_ms), strict=True):
                    due.add_metric(
                        [query, "+Inf" if horizon_s == math.inf else f"{horizon_s:.0f}"], count
                    )
        yield due
        commits = HistogramMetricFamily("ledgerlake_commit_seconds", _COMMITS, labels=["query"])
        for query, numbers in self._queries.items():
            if numbers.batches:
                commits.add_metric([query], numbers.commits.buckets, numbers.commits.sum_s)
        yield commits

    def _of_pipelines(self, states: dict[str, PipelineState]) -> Iterator[Metric]:
        for metric, (text, kind, value_of) in _PIPELINE_METRICS.items():
            family = kind(f"ledgerlake_{metric}", text, labels=["query"])
            for query, state in states.items():
                value = value_of(state)
                if value is not None:
                    family.add_metric([query], value)
            yield family
        for metric, (text, kind, value_of_table) in _TABLE_METRICS.items():
            family = kind(f"ledgerlake_{metric}", text, labels=["query", "table"])
            for query, state in states.items():
                for table in state.upkeep.tables:
                    value = value_of_table(table)
                    if value is not None:
                        family.add_metric([query, table.table], value)
            yield family


_DUE = "Delayed messages that are due within so many seconds."
_COMMITS = "What the commits of a micro-batch to all tables took together."
_BY_REASON = "Rejects committed, by reason."
_PARTITION_GAUGES = {
    "lag_messages": "Messages behind the last entry of the topic partition, or the stream's ending.",
    "lag_seconds": "Broker time behind the last entry of the topic partition, or the stream's ending.",
    "lag_bytes": "Stored bytes behind the last entry of the topic partition, or the stream's ending, estimated.",
    "delayed_messages": "Delayed messages that are held back.",
    "next_due_timestamp_seconds": "When the next delayed message is due.",
}
_QUERY_METRICS: dict[str, tuple[str, type[_Family]]] = {
    "rows_per_second": ("Rows of the source a second in the last micro-batch.", GaugeMetricFamily),
    "messages_per_second": ("Messages a second in the last micro-batch.", GaugeMetricFamily),
    "messages": ("Messages committed.", CounterMetricFamily),
    "rejects": ("Rejects committed.", CounterMetricFamily),
    "batches": ("Micro-batches committed.", CounterMetricFamily),
    "last_batch_timestamp_seconds": (
        "When the last micro-batch was committed, or the pipeline began.",
        GaugeMetricFamily,
    ),
    "released_messages": ("Delayed messages released and committed.", CounterMetricFamily),
    "late_seconds": (
        "Time from due to committed of the released messages, together.",
        CounterMetricFamily,
    ),
    "most_late_seconds": (
        "Longest time from due to committed in the last release.",
        GaugeMetricFamily,
    ),
    "incomplete_messages": ("Large messages that are incomplete.", GaugeMetricFamily),
    "kept_bytes": ("Bytes of the entries kept of incomplete large messages.", GaugeMetricFamily),
}
_PIPELINE_METRICS: dict[str, tuple[str, type[_Family], Callable[[PipelineState], float | None]]] = {
    "is_owner": (
        "Whether this process owns the stream.",
        GaugeMetricFamily,
        lambda state: state.is_owner,
    ),
    "upkeep_failures": (
        "Attempts of upkeep that failed.",
        CounterMetricFamily,
        lambda state: state.upkeep.failed_attempts,
    ),
    "upkeep_last_success_timestamp_seconds": (
        "When upkeep last went through all tables without a failure.",
        GaugeMetricFamily,
        lambda state: (
            None if state.upkeep.last_round_ms is None else state.upkeep.last_round_ms / 1000
        ),
    ),
}
_TABLE_METRICS: dict[str, tuple[str, type[_Family], Callable[[TableUpkeep], float | None]]] = {
    "table_files": (
        "Files of the table when upkeep last looked.",
        GaugeMetricFamily,
        lambda table: None if table.size is None else table.size.files,
    ),
    "table_bytes": (
        "Bytes of the table's files when upkeep last looked.",
        GaugeMetricFamily,
        lambda table: None if table.size is None else table.size.size_bytes,
    ),
    "upkeep_merged_files": (
        "Small files merged.",
        CounterMetricFamily,
        lambda table: table.merged_files,
    ),
    "upkeep_removed_files": (
        "Unused files removed.",
        CounterMetricFamily,
        lambda table: table.removed_files,
    ),
}


class MetricsListener(StreamingQueryListener):  # type: ignore[misc]
    """``spark.streams.addListener(MetricsListener(metrics))``: the lag of every query that reads
    the source.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._names: dict[str, str] = {}

    def onQueryStarted(self, event: Any) -> None:
        self._names[str(event.id)] = event.name or str(event.id)

    def onQueryProgress(self, event: Any) -> None:
        progress = event.progress
        lags = lags_of(progress)
        if lags:
            # The query may have started before this listener.
            name = self._names.setdefault(str(progress.id), progress.name or str(progress.id))
            durations_ms = {
                str(step): int(taken_ms) for step, taken_ms in progress.durationMs.items()
            }
            self._metrics.add_progress(name, lags, progress.inputRowsPerSecond or 0.0, durations_ms)

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing: there are no new numbers."""

    def onQueryTerminated(self, event: Any) -> None:
        self._metrics.forget(self._names.pop(str(event.id), str(event.id)))


class ServedMetrics(Metrics):
    """Metrics of a session's queries, and the status page (see ``monitor.status``), served by HTTP;
    port 0 is a free one, and ``port`` says which. ``url`` is that of the page.

    Raises:
        UsageError, SetupError: as ``HttpServer``.
    """

    def __init__(
        self, spark: SparkSession, port: int, address: str = MetricsConfig.address, token: str = ""
    ) -> None:
        super().__init__()
        registry = CollectorRegistry()
        registry.register(self)
        self._status = Status(self)
        try:
            self._server = HttpServer(
                port, address, token, {"/metrics": make_wsgi_app(registry), **self._status.pages}
            )
        except BaseException:
            self._status.problems.close()
            raise
        self.port = self._server.port
        host = (
            "localhost"
            if address in ("0.0.0.0", "::")
            else f"[{address}]"
            if ":" in address
            else address
        )
        self.url = f"http://{host}:{self.port}/"
        self._streams = spark.streams
        self._listener = MetricsListener(self)
        self._streams.addListener(self._listener)

    def close(self) -> None:
        # Java may have ended.
        with contextlib.suppress(Py4JError):
            self._streams.removeListener(self._listener)
        self._status.problems.close()
        self._server.close()
