"""The metrics of queries, for Prometheus: through Spark's listener for any query on the source, and
from a pipeline's own batches.

| metric | labels | meaning |
|---|---|---|
| ``ledgerlake_lag_messages`` | query, topic_partition | messages behind the last entry, by the broker's index |
| ``ledgerlake_lag_seconds`` | query, topic_partition | the lag in the broker's time |
| ``ledgerlake_lag_bytes`` | query, topic_partition | the lag in stored bytes, by the average size so far; pipelines only |
| ``ledgerlake_rows_per_second`` | query | of the last micro-batch, by Spark's count of rows; not for pipelines |
| ``ledgerlake_messages_per_second`` | query | of the last micro-batch; pipelines only, as all that follow |
| ``ledgerlake_messages_total`` | query | messages committed since the start |
| ``ledgerlake_rejects_total`` | query | rejects committed since the start |
| ``ledgerlake_rejects_by_reason_total`` | query, reason | the same by reason |
| ``ledgerlake_batches_total`` | query | micro-batches committed since the start |
| ``ledgerlake_open_sets`` | query | incomplete large messages after the last micro-batch |
| ``ledgerlake_held_bytes`` | query | bytes kept of incomplete large messages |
| ``ledgerlake_released_messages_total`` | query | delayed messages that were due and committed since the start |
| ``ledgerlake_late_seconds_total`` | query | the time from due to committed of those, together |
| ``ledgerlake_most_late_seconds`` | query | the longest such time in the last micro-batch that released some |
| ``ledgerlake_waiting_messages`` | query, topic_partition | delayed messages |
| ``ledgerlake_next_due_timestamp_seconds`` | query, topic_partition | when the next delayed message is due |

If the broker adds no entry metadata, the lag is unknown and not shown.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from pyspark.sql.streaming.listener import StreamingQueryListener

from ledgerlake.errors import SetupError
from ledgerlake.pipeline.progress import Behind, lags_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from ledgerlake.operators.rows import Released
    from ledgerlake.pipeline.commit import BatchResult

# A collector's sample: name, text, label values, number.
_Family = GaugeMetricFamily | CounterMetricFamily


@dataclass
class _Query:
    """The latest numbers of one query."""

    lags: dict[str, Behind] = field(default_factory=dict)
    rows_per_second: float | None = None
    messages: int = 0
    rejects: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    stored_bytes: int = 0
    messages_per_second: float | None = None
    open_sets: int = 0
    held_bytes: int = 0
    delayed_counts: dict[str, int] = field(default_factory=dict)
    next_due_ms: dict[str, int | None] = field(default_factory=dict)
    released_messages: int = 0
    late_seconds: float = 0.0
    most_late_seconds: float | None = None
    batch_ended_s: float | None = None

    def add_released(self, released: Released, clock_ms: int) -> None:
        """Count the delayed messages of a micro-batch."""
        self.released_messages += released.count
        self.late_seconds += released.count * (clock_ms - released.mean_due_ms) / 1000
        if released.first_due_ms is not None:
            self.most_late_seconds = (clock_ms - released.first_due_ms) / 1000

    @property
    def bytes_per_message(self) -> float | None:
        return self.stored_bytes / self.messages if self.messages else None


class Metrics:
    """The latest numbers of every query, as a collector of ``prometheus_client``."""

    def __init__(self) -> None:
        self._queries: dict[str, _Query] = {}
        self._lock = threading.Lock()

    def add_progress(self, query: str, lags: dict[str, Behind], rows_per_second: float) -> None:
        """Take Spark's numbers of a micro-batch."""
        with self._lock:
            numbers = self._of(query)
            numbers.lags, numbers.rows_per_second = lags, rows_per_second

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
                numbers.messages_per_second = result.messages / max(now_s - numbers.batch_ended_s, 0.001)
            numbers.batch_ended_s = now_s
            numbers.open_sets, numbers.held_bytes = result.incomplete_count, result.kept_bytes
            numbers.delayed_counts |= result.delayed_counts
            numbers.next_due_ms |= result.next_due_ms

    def forget(self, query: str) -> None:
        """Remove a query that has ended."""
        with self._lock:
            self._queries.pop(query, None)

    def collect(self) -> Iterator[_Family]:
        """Yield every metric with its current values."""
        with self._lock:
            yield from self._by_partition()
            yield from self._by_query()

    def _of(self, query: str) -> _Query:
        return self._queries.setdefault(query, _Query())

    def _by_partition(self) -> Iterator[_Family]:
        samples: dict[str, list[tuple[str, str, float | None]]] = {name: [] for name in _PARTITION_GAUGES}
        for query, numbers in self._queries.items():
            for name, lag in numbers.lags.items():
                size = numbers.bytes_per_message
                size_bytes = None if lag.messages is None or size is None else lag.messages * size
                samples["lag_messages"].append((query, name, lag.messages))
                samples["lag_seconds"].append((query, name, None if lag.time_ms is None else lag.time_ms / 1000))
                samples["lag_bytes"].append((query, name, size_bytes))
            samples["waiting_messages"] += [(query, name, count) for name, count in numbers.delayed_counts.items()]
            for name, due_ms in numbers.next_due_ms.items():
                samples["next_due_timestamp_seconds"].append((query, name, None if due_ms is None else due_ms / 1000))
        for metric, text in _PARTITION_GAUGES.items():
            family = GaugeMetricFamily(f"ledgerlake_{metric}", text, labels=["query", "topic_partition"])
            for query, name, value in samples[metric]:
                if value is not None:
                    family.add_metric([query, name], value)
            yield family

    def _by_query(self) -> Iterator[_Family]:
        for metric, (text, kind) in _QUERY_METRICS.items():
            family = kind(f"ledgerlake_{metric}", text, labels=["query"])
            is_pipelines = metric != "rows_per_second"
            for query, numbers in self._queries.items():
                value = getattr(numbers, metric)
                if value is not None and is_pipelines == bool(numbers.batches):
                    family.add_metric([query], value)
            yield family
        by_reason = CounterMetricFamily("ledgerlake_rejects_by_reason", _BY_REASON, labels=["query", "reason"])
        for query, numbers in self._queries.items():
            for reason, count in sorted(numbers.reasons.items()):
                by_reason.add_metric([query, reason], count)
        yield by_reason


_BY_REASON = "Rejects committed, by reason."
_PARTITION_GAUGES = {
    "lag_messages": "Messages behind the last entry of the topic partition.",
    "lag_seconds": "Broker time behind the last entry of the topic partition.",
    "lag_bytes": "Stored bytes behind the last entry of the topic partition, estimated.",
    "waiting_messages": "Delayed messages that wait.",
    "next_due_timestamp_seconds": "When the next delayed message is due.",
}
_QUERY_METRICS: dict[str, tuple[str, type[_Family]]] = {
    "rows_per_second": ("Rows of the source a second in the last micro-batch.", GaugeMetricFamily),
    "messages_per_second": ("Messages a second in the last micro-batch.", GaugeMetricFamily),
    "messages": ("Messages committed.", CounterMetricFamily),
    "rejects": ("Rejects committed.", CounterMetricFamily),
    "batches": ("Micro-batches committed.", CounterMetricFamily),
    "released_messages": ("Delayed messages released and committed.", CounterMetricFamily),
    "late_seconds": ("Time from due to committed of the released messages, together.", CounterMetricFamily),
    "most_late_seconds": ("Longest time from due to committed in the last release.", GaugeMetricFamily),
    "open_sets": ("Large messages that are not whole.", GaugeMetricFamily),
    "held_bytes": ("Bytes held for large messages that are not whole.", GaugeMetricFamily),
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
            name = progress.name or str(progress.id)
            self._metrics.add_progress(name, lags, progress.inputRowsPerSecond or 0.0)

    def onQueryIdle(self, event: Any) -> None:
        """Do nothing: there are no new numbers."""

    def onQueryTerminated(self, event: Any) -> None:
        self._metrics.forget(self._names.pop(str(event.id), str(event.id)))


class ServedMetrics(Metrics):
    """Metrics of a session's queries at ``/metrics`` of a port, 0 for a free one; ``port`` says
    which.

    Raises:
        SetupError: the port is taken.
    """

    def __init__(self, spark: SparkSession, port: int) -> None:
        super().__init__()
        registry = CollectorRegistry()
        registry.register(self)
        self._server = _serve(port, registry)
        self.port: int = self._server.server_port
        self._streams = spark.streams
        self._listener = MetricsListener(self)
        self._streams.addListener(self._listener)

    def close(self) -> None:
        self._streams.removeListener(self._listener)
        self._server.shutdown()
        self._server.server_close()


def check_port(port: int) -> None:
    """Check that metrics can be served on a port.

    Raises:
        SetupError: the port is taken.
    """
    server = _serve(port, CollectorRegistry())
    server.shutdown()
    server.server_close()


def _serve(port: int, registry: CollectorRegistry) -> Any:
    try:
        return start_http_server(port, registry=registry)[0]
    except OSError as error:
        raise SetupError(
            f"metrics cannot be served on port {port} ({error.strerror}); set another [metrics] port"
        ) from None
