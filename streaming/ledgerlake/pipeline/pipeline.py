"""The pipeline put together: checkpoint, cursors, source and sink, in the order that loses nothing.

checked              the checkpoint's stream, the tables' columns and features: nothing is changed
held                 the durable cursors, which are the right to run the stream (see ``cursors``); a new one pins the topic
checked again        the checkpoint against the tables, now that nobody else may change either
begun                tables that are missing are made, the outbox and the staging folder are opened
started              the sink's stages, then ``foreachBatch``; the sink commits, Spark records the batch, the cursors move
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.decode import kernels, schema
from ledgerlake.errors import LedgerlakeError, SetupError
from ledgerlake.operators.facts import TaskSettings
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.options.config import Config
from ledgerlake.pipeline.checkpoint import Checkpoint, as_option
from ledgerlake.pipeline.commit import BatchResult, DeltaSink
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.failures import cause_of, own_error
from ledgerlake.pipeline.moved_cursors import moved_cursors
from ledgerlake.pipeline.plan import plan
from ledgerlake.pipeline.query_settings import settings_of
from ledgerlake.pipeline.start import Start, query_name
from ledgerlake.pipeline.wake_ups import WakeUps
from ledgerlake.publish.outbox import Outbox
from ledgerlake.publish.republisher import Republisher
from ledgerlake.source.loss import tell_tasks
from ledgerlake.table.spark_table import open_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.pipeline.metrics import ServedMetrics
    from ledgerlake.stored.offsets import Offset
    from ledgerlake.table.delta_table import Table

_log = logging.getLogger(__name__)

# How long an end waits for Spark's commit log and for the cursors.
_FINISH_S = 30.0
_COMMIT_POLL_S = 0.01


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
        self._options = config.source
        self._cluster = Cluster(self._options.client)
        self._topics = self._options.topics
        self._checkpoint = Checkpoint(config.stream.checkpoint)
        self._cursors = CursorKeeper(self._cluster, config.subscription, self._checkpoint)
        self._outbox = Outbox(config.outbox_path) if config.outbox_path else None
        self._republisher: Republisher | None = None
        self.metrics: ServedMetrics | None = None
        staging = f"{config.stream.checkpoint}/ledgerlake/staging"
        delta = config.delta
        messages_table = open_table(delta.path, schema.MESSAGES, delta.writer, f"{staging}/messages")
        rejects_table = open_table(delta.rejects_path, schema.REJECTS, delta.writer, f"{staging}/rejects")
        self._task_settings = TaskSettings(
            messages_table.folder,
            rejects_table.folder,
            config.chunks.limits,
            config.delay_options,
            self._options,
            config.outbox_path,
        )
        self._sink = DeltaSink(messages_table, rejects_table, self._outbox)
        self._start = Start(config, self._cluster, self._checkpoint, self._cursors, self._sink.tables)
        self._wake_ups = WakeUps(self._checkpoint)
        self._stopping = threading.Event()
        self._batch_in_work = threading.Lock()
        self._last_batch: int | None = None
        self._failure: LedgerlakeError | None = None
        self._batch_failure: Exception | None = None
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
        self._checkpoint.check_stream(self.config.stream.name)
        names = self._cluster.all_partitions(self._topics)
        tables = (self._sink.messages, self._sink.rejects)
        missing = [table for table in tables if not table.check(self._spark)]
        start = self._start.hold(names, [table for table in tables if table not in missing])
        # Making a table takes a cold JVM seconds, and so does the stream.
        with ThreadPoolExecutor(1) as beside:
            made = beside.submit(_create, missing, self._spark)
            stream = self._stream(start)
            made.result()
        if self._outbox is not None:
            self._begin_delivery(self._outbox)
        messages_table = self._sink.messages
        if messages_table.last_batch_of(self.config.stream.name) is None:
            messages_table.begin_stream(self.config.stream.name)
        self._sink.load_reached_times(names)
        self._sink.begin()
        self._cursors.begin(self._end_with)
        writer = (
            stream.writeStream.queryName(self.config.stream.name)
            .option("checkpointLocation", self.config.stream.checkpoint)
            .foreachBatch(self._write_batch)
        )
        trigger = (
            {"availableNow": True} if once else {"processingTime": f"{self.config.stream.trigger_ms} milliseconds"}
        )
        if self.config.metrics is not None:
            self._serve_metrics(self.config.metrics.port)
        # Topics that match a pattern come and go.
        most_keys = max(1, len(names)) if self._topics.pattern is None else None
        with settings_of(self._spark, self.config.stream.checkpoint, most_keys):
            self.query = writer.trigger(**trigger).start()
        self._checkpoint.end_forgetting()
        if self._republisher is not None:
            self._republisher.start()

    def _stream(self, start: Offset) -> DataFrame:
        self._wake_ups.load()
        set_up_state(self._spark)
        own = {
            "startingOffsets": as_option(start),
            "wakes": self._wake_ups.folder,
            "pinnedBy": self.config.subscription,
        }
        return plan(self._spark, self.config.source_options() | own, self._task_settings)

    def _begin_delivery(self, outbox: Outbox) -> None:
        """Open the outbox, and make ready what sends it.

        Raises:
            CheckpointError: it is gone, older than the table, or newer than the checkpoint.
        """
        assert self.config.deliver is not None
        self._start.open_outbox(outbox)
        self._republisher = Republisher(
            outbox,
            self._options.client,
            self.config.deliver.topic,
            self.config.stream.name,
            lambda: self._cursors.is_held,
            self._end_with,
        )

    def _serve_metrics(self, port: int) -> None:
        from ledgerlake.pipeline.metrics import ServedMetrics

        self.metrics = ServedMetrics(self._spark, port)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; False when ``timeout_s`` passed first.

        Raises:
            LedgerlakeError: the query failed; ours if the cause was ours, else a SetupError with Spark's word.
        """
        from pyspark.errors import StreamingQueryException

        if self.query is None:
            return True
        try:
            ended = self.query.awaitTermination(timeout_s) if timeout_s is not None else self.query.awaitTermination()
        except StreamingQueryException as error:
            if self._failure is not None:
                raise self._failure from None
            if not self._stopping.is_set():
                raise cause_of(error) from None
            self._raise_own(error)
            return True
        if self._failure is not None:
            raise self._failure
        if ended is False:
            return False
        self._cursors.finish(_FINISH_S)
        if self._republisher is not None and not self._stopping.is_set():
            self._republisher.drain(self.config.source.retry_timeout_ms / 1000)
        return True

    def stop(self) -> None:
        """End after the batch in work, and move the cursors behind it; a batch that comes later is not begun.

        Raises:
            LedgerlakeError: the batch in work failed, or the query had failed before.
        """
        self._stopping.set()
        with self._batch_in_work:
            pass
        self._await_commit()
        failure = None
        if self.query is not None:
            failure = self._batch_failure or self.query.exception()
            self.query.stop()
        self._cursors.finish(_FINISH_S)
        if failure is not None:
            self._raise_own(failure)

    def close(self) -> None:
        """Let go of the broker; the cursors stay on it, and what was not sent stays in the outbox."""
        if self._republisher is not None:
            self._republisher.stop()
        self._cursors.close()
        self._cluster.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    def _await_commit(self) -> None:
        """Let Spark record the batch that was written last; ended before, it would be run again."""
        deadline_s = time.monotonic() + _FINISH_S
        while self._last_batch is not None and self.query is not None and self.query.isActive:
            if self._checkpoint.has_committed(self._last_batch) or time.monotonic() > deadline_s:
                return
            time.sleep(_COMMIT_POLL_S)

    def _end_with(self, error: LedgerlakeError) -> None:
        """End the query from a thread beside it."""
        self._failure = self._failure or error
        self._stopping.set()
        if self.query is not None:
            self.query.stop()

    @staticmethod
    def _raise_own(failure: BaseException) -> None:
        """Raise the error of ours in a failure, if there is one; what else a query says that is being stopped comes of the stop."""
        error = own_error(failure)
        if error is not None:
            raise error from None

    def _write_batch(self, written: DataFrame, batch_id: int) -> None:
        with self._batch_in_work:
            if self._stopping.is_set():
                raise _StoppedError
            try:
                self._write(written, batch_id)
            except Exception as error:
                self._batch_failure = error
                raise

    def _write(self, written: DataFrame, batch_id: int) -> None:
        query = query_name(self.config.stream.name, _query_id(written))
        batch = self._checkpoint.record(self.config.stream.name, query, batch_id)
        tell_tasks(written.sparkSession.sparkContext, moved_cursors(self._cursors, batch))
        result = self._sink.write(written, batch, self._cursors.check_held)
        # Who was suspended meanwhile must not write over what its successor has noted beside the checkpoint.
        self._cursors.check_held()
        self._cursors.add(batch_id, result.ends, result.tables)
        self._last_batch = batch_id
        self._wake_ups.note(batch_id, result.wakes_ms)
        self._waiting |= result.waiting
        if self._republisher is not None:
            self._republisher.notify()
        if self.metrics is not None:
            self.metrics.add_batch(self.config.stream.name, result, time.monotonic())
        if self._on_batch is not None:
            self._on_batch(result)


def _query_id(batch: DataFrame) -> str:
    query_id = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise SetupError(
            "Spark did not tell the query's id, without which batches cannot be told apart; use classic Spark"
        )
    return str(query_id)


def _create(tables: list[Table], spark: SparkSession) -> None:
    for table in tables:
        table.create(spark)


class _StoppedError(Exception):
    """A batch that came after ``stop``; it was not begun and will be planned again."""
