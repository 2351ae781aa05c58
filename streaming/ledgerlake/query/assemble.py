"""The pipeline put together: cursor, source, sink, in the order that loses nothing.

tables checked         before a cursor is made; those that are missing are made beside the next step
durable cursors made   before anything is read, so that the broker keeps what we have not taken
query started          the sink's stages, then ``foreachBatch``; the sink commits, then the cursors move
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ledgerlake import errors as _errors
from ledgerlake.client.cluster import Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.decode import kernels, schema
from ledgerlake.errors import LedgerlakeError, SetupError, TopicNotFoundError, UsageError
from ledgerlake.operators.processor import set_up_state
from ledgerlake.operators.whole import whole_messages
from ledgerlake.query.config import Config, parse_trigger
from ledgerlake.query.session import settings_of
from ledgerlake.query.start import as_option, load_start, save_start
from ledgerlake.sinks.datasource import LedgerlakeDataSource
from ledgerlake.sinks.delta import BatchResult, DeltaSink
from ledgerlake.sinks.outbox import Outbox
from ledgerlake.sinks.pulsar import LargeMessageProducer
from ledgerlake.sinks.republish import Republisher
from ledgerlake.sinks.spark_table import open_table
from ledgerlake.sinks.writing import TaskSettings
from ledgerlake.source.bounds import first_available, resolve_start
from ledgerlake.source.offsets import PartitionOffset
from ledgerlake.source.options import parse_start
from ledgerlake.source.wakes import load_wakes, save_wakes
from ledgerlake.state.delay.cancels import CANCEL_PROPERTY, parse_cancel
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.query.metrics import ServedMetrics
    from ledgerlake.sinks.tables import Table
    from ledgerlake.source.offsets import Offset
    from ledgerlake.source.options import Bound
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)


def messages(spark: SparkSession, config: Config) -> DataFrame:
    """A streaming DataFrame of whole, decoded messages with the table's columns, for any sink or transformation.

    Large messages are put together, and delayed ones wait, in the state of whatever query this becomes a part of; so
    that they leave it in time, an idle topic still has a micro-batch every second. What cannot become a message is not in
    it: ``rejects`` streams that.
    """
    return _whole(spark, config).where("reject_reason is null").select(*schema.MESSAGES.names)


def rejects(spark: SparkSession, config: Config) -> DataFrame:
    """A streaming DataFrame of what ``messages`` leaves out: position, reason, and the whole entry in ``value``."""
    return _whole(spark, config).where("reject_reason is not null")


def run(
    spark: SparkSession, config: Config, *, once: bool = False, on_batch: Callable[[BatchResult], None] | None = None
) -> Pipeline:
    """Start the whole pipeline; see ``Pipeline``.

    Args:
        once: end when everything that was there at the start is in the table.
        on_batch: called after each committed micro-batch, for progress.

    Raises:
        UsageError, SetupError, TableError, BrokerError, TransportError: nothing was started.
    """
    pipeline = Pipeline(spark, config, on_batch)
    try:
        pipeline.start(once)
    except BaseException:
        pipeline.close()
        raise
    return pipeline


class Pipeline:
    """A running query with its cursors."""

    def __init__(
        self, spark: SparkSession, config: Config, on_batch: Callable[[BatchResult], None] | None = None
    ) -> None:
        self.config = config
        self._spark = spark
        self._on_batch = on_batch
        options = config.parsed_options()
        self._cluster = Cluster(options.client)
        self._topics = options.topics
        self._cursors: dict[str, DurableCursor] = {}
        self._outbox = Outbox(config.outbox_path) if config.outbox_path else None
        self._republisher: Republisher | None = None
        if self._outbox is not None and config.deliver is not None:
            self._republisher = Republisher(self._outbox, options.client, config.deliver.topic, config.stream.name)
        self.metrics: ServedMetrics | None = None
        staging = f"{config.stream.checkpoint}/ledgerlake/staging"
        delta = config.delta
        found = open_table(delta.path, schema.MESSAGES, delta.writer, f"{staging}/messages")
        rejected = open_table(delta.rejects_path, schema.REJECTS, delta.writer, f"{staging}/rejects")
        self._sink = DeltaSink(
            found,
            rejected,
            TaskSettings(
                found.folder,
                rejected.folder,
                config.chunks.limits,
                config.delay_options,
                options,
                config.outbox_path,
            ),
            self._outbox,
        )
        self._wake_file = f"{config.stream.checkpoint}/ledgerlake/wakes.json"
        self._wakes_ms: dict[str, int] = {}
        self._stopping = threading.Event()
        self._batch_in_work = threading.Lock()
        self._waiting: dict[str, int] = {}
        self.query: StreamingQuery | None = None

    @property
    def waiting(self) -> int:
        """Delayed messages that wait on the topic partitions that had a batch since the start."""
        return sum(self._waiting.values())

    def start(self, once: bool) -> None:
        if not kernels.is_kept:
            _log.warning(
                "there is no folder for compiled code, so every worker compiles for itself at its start; set NUMBA_CACHE_DIR"
            )
        names = self._cluster.all_partitions(self._topics)
        missing = [table for table in (self._sink.messages, self._sink.rejects) if not table.check(self._spark)]
        # Making a table takes a cold JVM seconds, and so does the stream.
        with ThreadPoolExecutor(1) as beside:
            made = beside.submit(_create, missing, self._spark)
            start = self._hold_cursors(names)
            stream = self._stream(start)
            made.result()
        self._sink.load_floors(names)
        self._sink.begin()
        writer = (
            stream.writeStream.queryName(self.config.stream.name)
            .option("checkpointLocation", self.config.stream.checkpoint)
            .foreachBatch(self._write_batch)
        )
        trigger = {"availableNow": True} if once else {"processingTime": parse_trigger(self.config.stream.trigger)}
        if self._republisher is not None:
            self._republisher.start()
        if self.config.metrics is not None:
            self._serve_metrics(self.config.metrics.port)
        # Topics that match a pattern come and go.
        most_keys = max(1, len(names)) if self._topics.pattern is None else None
        with settings_of(self._spark, self.config.stream.checkpoint, most_keys):
            self.query = writer.trigger(**trigger).start()

    def _stream(self, start: Offset) -> DataFrame:
        self._wakes_ms = load_wakes(self._wake_file)
        set_up_state(self._spark)
        own = {"startingOffsets": as_option(start), "wakes": self._wake_file}
        return self._sink.stream(self._spark, self.config.source_options() | own)

    def _serve_metrics(self, port: int) -> None:
        from ledgerlake.query.metrics import ServedMetrics

        self.metrics = ServedMetrics(self._spark, port)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when ``timeout_s`` passed first.

        Raises:
            LedgerlakeError: the query failed; ours where the cause was ours, else a SetupError with Spark's word.
        """
        from pyspark.errors import StreamingQueryException

        if self.query is None:
            return True
        try:
            ended = self.query.awaitTermination(timeout_s) if timeout_s is not None else self.query.awaitTermination()
        except StreamingQueryException as error:
            if self._stopping.is_set():
                return True
            raise cause_of(error) from None
        if ended is not False and self._republisher is not None and not self._stopping.is_set():
            self._republisher.drain(self.config.source.retry_timeout_s)
        return ended is not False

    def stop(self) -> None:
        """End after the batch in work; one that comes later finds the door closed and is not begun."""
        self._stopping.set()
        with self._batch_in_work:
            pass
        if self.query is not None:
            self.query.stop()

    def close(self) -> None:
        """Let go of the broker; the cursors stay on it, and what was not sent stays in the outbox."""
        if self._republisher is not None:
            self._republisher.stop()
        for cursor in self._cursors.values():
            cursor.close()
        self._cluster.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    def _hold_cursors(self, names: list[str]) -> Offset:
        """Make the cursors before anything is read; the pipeline's very first position, resolved once for all runs."""
        bound = parse_start(self.config.source.starting, "[source] starting")
        start = load_start(self.config.stream.checkpoint)
        try:
            for name in names:
                cursor = DurableCursor(self._cluster, name, self.config.subscription)
                cursor.ensure(from_earliest=bound != "latest" or start is not None)
                self._cursors[name] = cursor
            if start is not None:
                return start
            first = self._first_start(names, bound)
            save_start(self.config.stream.checkpoint, first)
        except LedgerlakeError:
            if start is None:
                self._forget_unused_cursors()
            raise
        for name, offset in first.items():
            self._cursors[name].advance(offset.position)
        return first

    def _forget_unused_cursors(self) -> None:
        """A pipeline that never began leaves nothing on the broker; a cursor that has moved is one of an earlier run."""
        for name, cursor in self._cursors.items():
            with contextlib.suppress(LedgerlakeError):
                if cursor.position() <= first_available(self._cluster, name):
                    cursor.forget()

    def _first_start(self, names: list[str], bound: Bound) -> Offset:
        """Where a pipeline without a checkpoint begins.

        Raises:
            SetupError: its cursors have moved already, so that a checkpoint there was is lost, and nobody has said what to do.
        """
        stands = {name: cursor.position() for name, cursor in self._cursors.items()}
        if bound == "cursor":
            return {name: PartitionOffset(stands[name]) for name in names}
        start = {name: resolve_start(self._cluster, name, bound) for name in names}
        for name, position in stands.items() if bound != "latest" else ():
            if position > first_available(self._cluster, name):
                raise SetupError(
                    f"there is no checkpoint at {self.config.stream.checkpoint}, but the subscription "
                    f"{self.config.subscription} has read {name} up to {position}; restore the checkpoint, or set starting to "
                    "cursor to go on from there, or begin anew after: ledgerlake forget CONFIG"
                )
        return start

    def _advance_cursor(self, name: str, position: Position) -> None:
        """Move a topic partition's cursor; made here for one that came while the query runs. Of a deleted topic there is none."""
        if name not in self._cursors:
            self._cursors[name] = DurableCursor(self._cluster, name, self.config.subscription)
        with contextlib.suppress(TopicNotFoundError):
            self._cursors[name].advance(position)

    def _write_batch(self, written: DataFrame, batch_id: int) -> None:
        with self._batch_in_work:
            if self._stopping.is_set():
                raise _StoppedError
            result = self._sink.write(written, self._query_identity(written), batch_id)
            for name, position in result.ends.items():
                self._advance_cursor(name, position)
            self._note_wakes(result.wakes_ms)
            self._waiting |= result.waiting
            if self._republisher is not None:
                self._republisher.notify()
            if self.metrics is not None:
                self.metrics.add_batch(self.config.stream.name, result, time.monotonic())
            if self._on_batch is not None:
                self._on_batch(result)

    def _note_wakes(self, changed_ms: dict[str, int | None]) -> None:
        """Tell the planner when to plan a batch although nothing new has come."""
        every_ms = {**self._wakes_ms, **changed_ms}
        wakes_ms = {name: time_ms for name, time_ms in every_ms.items() if time_ms is not None}
        if wakes_ms != self._wakes_ms:
            save_wakes(self._wake_file, wakes_ms)
        self._wakes_ms = wakes_ms

    def _query_identity(self, batch: DataFrame) -> str:
        """What the table knows this query by: its name, and the checkpoint's own id, so that a new checkpoint starts over."""
        query_id = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
        if not query_id:
            raise SetupError(
                "Spark did not tell the query's id, without which batches cannot be told apart; use classic Spark"
            )
        return f"ledgerlake:{self.config.stream.name}:{query_id}"


def _create(tables: list[Table], spark: SparkSession) -> None:
    for table in tables:
        table.create(spark)


class _StoppedError(Exception):
    """A batch that came after ``stop``; it was not begun and will be planned again."""


def check_reachable(config: Config) -> None:
    """Find out at once, before Spark starts, whether the broker is there and knows the topics.

    Raises:
        TransportError, BrokerError, TopicNotFoundError.
    """
    options = config.parsed_options()
    cluster = Cluster(replace(options.client, give_up_after_s=0.0))
    try:
        cluster.all_partitions(options.topics)
    finally:
        cluster.close()


def forget(config: Config) -> list[str]:
    """Remove the pipeline's durable cursors from the broker; the topic partitions that had one."""
    options = config.parsed_options()
    cluster = Cluster(options.client)
    try:
        names = cluster.all_partitions(options.topics)
        for name in names:
            DurableCursor(cluster, name, config.subscription).forget()
    finally:
        cluster.close()
    return names


def cancel(config: Config, by: Literal["id", "key"], target: str) -> list[str]:
    """Cancel waiting messages: one cancel to each topic partition, since an id does not say where it belongs.

    Raises:
        UsageError: the target is no message id.
        BrokerError, TransportError, TopicNotFoundError: it was not stored everywhere; sending it again is harmless.
    """
    value = f"{by}={target}"
    if parse_cancel(value, BEFORE_ALL, 0) is None:
        raise UsageError(f"'{target}' is no {'message id' if by == 'id' else 'key'}")
    options = config.parsed_options()
    cluster = Cluster(options.client)
    try:
        names = cluster.all_partitions(options.topics)
        for name in names:
            producer = LargeMessageProducer(cluster, name)
            producer.send(b"", properties={CANCEL_PROPERTY: value})
            producer.close()
    finally:
        cluster.close()
    return names


def cause_of(error: BaseException) -> LedgerlakeError:
    """The error of ours inside Spark's, which carries Python tracebacks as text."""
    text = str(error)
    found = re.findall(r"^(?:E\s+)?ledgerlake\.errors\.(\w+): (.*)$", text, flags=re.MULTILINE)
    if found:
        name, message = found[-1]
        kind = getattr(_errors, name, SetupError)
        return kind(message.strip())
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return SetupError(f"the query failed: {lines[0][:300] if lines else type(error).__name__}")


def _whole(spark: SparkSession, config: Config) -> DataFrame:
    spark.dataSource.register(LedgerlakeDataSource)
    set_up_state(spark)
    bundles = (
        spark.readStream.format("ledgerlake")
        .options(**config.source_options() | {"view": "bundles", "wakes": "always"})
        .load()
    )
    return whole_messages(bundles, config.parsed_options(), config.chunks.limits, config.delay.options)
