"""The pipeline: checkpoint, cursors, source and sink, started in the order that loses nothing.

check                the checkpoint's stream, the tables' columns and features: nothing is changed
acquire              the durable cursors, which are the right to run the stream (see ``cursors``); a
                     new one pins the topic
check again          the checkpoint against the tables, now that no other process may change either
begin                create tables that are missing, open the outbox and the staging folder
start                the stages of the plan, then ``foreachBatch``; the sink commits, Spark records
                     the batch, the cursors move
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.producer import check_may_send
from ledgerlake.client.topics import split_partition
from ledgerlake.delay.due_times import delayed_counts
from ledgerlake.errors import BrokerError, LedgerlakeError, UsageError
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.options.config import Config
from ledgerlake.pipeline.batch_ends import last_run
from ledgerlake.pipeline.batches import BatchWriter, is_of_stop
from ledgerlake.pipeline.checkpoint import as_option
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.components import make_components
from ledgerlake.pipeline.failures import cause_of
from ledgerlake.pipeline.iceberg import IcebergTables
from ledgerlake.pipeline.left_topics import known_topic_partitions
from ledgerlake.pipeline.plan import plan
from ledgerlake.pipeline.query_settings import settings_of
from ledgerlake.pipeline.upkeep import Upkeep
from ledgerlake.publish.republisher import Republisher
from ledgerlake.runtime.hadoop import connect_store
from ledgerlake.stored.places import to_text
from ledgerlake.table.catalog import locate_tables, register_tables

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.delay.due_times import DueSpan
    from ledgerlake.monitor.metrics import ServedMetrics
    from ledgerlake.monitor.progress import Reading
    from ledgerlake.options.config import MetricsConfig
    from ledgerlake.publish.outbox import Outbox
    from ledgerlake.stored.offsets import Offset

_log = logging.getLogger(__name__)

# How long to wait at the end for the cursors.
_FINISH_S = 30.0


def run(
    spark: SparkSession,
    config: Config,
    *,
    once: bool = False,
    on_batch: Callable[[BatchResult], None] | None = None,
) -> Pipeline:
    """Start the whole pipeline; see ``Pipeline``.

    Args:
        once: end when everything that was in the topics at the start is in the table.
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


def _check_classic(spark: SparkSession) -> None:
    # The module is asked, because the class itself cannot be imported without Spark Connect's
    # packages.
    if type(spark).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "the pipeline needs a classic Spark session, since it commits in the driver's own "
            "process; start one with "
            "start_session. The source and the sink work through Spark Connect too"
        )


class Pipeline:
    """A running query with its cursors.

    ``delayed_since_earlier`` has the delayed messages by when they are due, as they were at the
    start: the lags of the topic partitions that the checkpoint lists.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: Config,
        on_batch: Callable[[BatchResult], None] | None = None,
    ) -> None:
        _check_classic(spark)
        self.config = config = locate_tables(spark, config, makes=True)
        self._spark = spark
        self._on_batch = on_batch
        self._components = make_components(config)
        self._republisher: Republisher | None = None
        self._upkeep = Upkeep(config)
        self._iceberg = IcebergTables(config)
        self._stopping = threading.Event()
        self._batches = BatchWriter(
            config.stream.name, self._components, self._stopping, self._after_batch
        )
        self._failure: LedgerlakeError | None = None
        # ``stop`` has told Spark to end, which makes what runs there fail.
        self._is_interrupted = False
        self._has_finished = False
        self.delayed_since_earlier: dict[str, list[DueSpan]] = {}
        self._delayed_counts: dict[str, int] = {}
        self.metrics: ServedMetrics | None = None
        self.query: StreamingQuery | None = None

    @property
    def delayed(self) -> int:
        """Return the number of delayed messages."""
        return sum(self._delayed_counts.values())

    @property
    def reading(self) -> Reading | None:
        """Return the micro-batch that runs."""
        return self._batches.reading

    @property
    def is_owner(self) -> bool:
        """Return whether this process is connected to the broker, and owns the stream."""
        return self._components.cursors.is_owner

    def start(self, once: bool) -> None:
        """Acquire the right to run the stream, create missing tables, and start the query; see
        ``run``.
        """
        components, stream_name = self._components, self.config.stream.name
        connect_store(self._spark, self.config.checkpoint_place)
        components.checkpoint.check_stream(stream_name)
        names = components.cluster.all_partitions(self.config.source.topics)
        if not names:
            _log.warning("%s yet", self.config.source.topics.nothing_there)
        tables = components.tables
        topics = {
            split_partition(name)[0]
            for name in (*names, *known_topic_partitions(components.checkpoint))
        }
        tables.add_for_topics(sorted(topics))
        start = components.start.acquire(names, tables.check(self._spark))
        self._batches.begin()
        tables.leave_out_missing({split_partition(name)[0] for name in names})
        components.schemas.learn([split_partition(name)[0] for name in names])
        with ThreadPoolExecutor(1) as executor:
            creation = executor.submit(tables.create)
            stream = self._stream(start)
            creation.result()
        register_tables(self._spark, self.config)
        if components.outbox is not None:
            self._begin_delivery(components.outbox)
        tables.begin_stream(names)
        tables.begin()
        components.checkpoint.save_tables(tables.places)
        components.cursors.begin(self.config.source.topics, self._end_with)
        if self.config.metrics is not None:
            self._serve_metrics(self.config.metrics)
        self._start_query(stream, once, len(names))
        components.checkpoint.end_forgetting()
        if self._republisher is not None:
            self._republisher.start()
        if self.config.upkeep.enabled and not once:
            self._upkeep.start()
        self._iceberg.start()

    def _start_query(self, stream: DataFrame, once: bool, topic_partitions: int) -> None:
        settings, checkpoint = self.config.stream, self._components.checkpoint.folder
        writer = (
            stream.writeStream.queryName(settings.name)
            .option("checkpointLocation", checkpoint.hadoop_uri)
            .foreachBatch(self._batches.write)
        )
        # The planner keeps the times of the configured trigger.
        trigger = {"availableNow": True} if once else {"processingTime": "0 milliseconds"}
        # Topics that match a pattern come and go, and so may a topic's first partition.
        most_keys = topic_partitions or None if self.config.source.topics.pattern is None else None
        with settings_of(self._spark, checkpoint, most_keys):
            self.query = writer.trigger(**trigger).start()

    def _stream(self, start: Offset) -> DataFrame:
        self._components.wakeups.load(last_run(self._components.checkpoint))
        self.delayed_since_earlier = self._components.wakeups.due_spans
        self._delayed_counts = delayed_counts(self.delayed_since_earlier)
        set_up_state(self._spark)
        pipeline_options = {
            "startingOffsets": as_option(start),
            "wakes": to_text(self._components.wakeups.folder),
            "trigger": f"{self.config.stream.trigger_ms} ms",
            "pinnedBy": self.config.subscription,
            "taskSlots": str(self._spark.sparkContext.defaultParallelism),
        }
        return plan(
            self._spark,
            self.config.source_options() | pipeline_options,
            self._components.task_settings.with_delivery(self._components.start.delivery),
        )

    def _begin_delivery(self, outbox: Outbox) -> None:
        """Open the outbox, and create its sender.

        Raises:
            CheckpointError: it is gone, older than the table, or newer than the checkpoint.
            BrokerError: the role of the credentials may not send to the topic.
        """
        assert self.config.deliver is not None
        if self.config.plain_text_warning:
            _log.warning("%s", self.config.plain_text_warning)
        self._check_may_send(self.config.deliver.topic)
        self._components.start.open_outbox(outbox)
        self._republisher = Republisher(
            outbox,
            self.config.source.client,
            self.config.deliver.topic,
            self.config.stream.name,
            lambda: self._components.cursors.is_owner,
            self._end_with,
        )

    def _check_may_send(self, topic: str) -> None:
        """Check the permission. Whatever else keeps messages from being sent may pass, and the
        tables do not wait for it.
        """
        cluster = Cluster(replace(self.config.source.client, give_up_after_s=0.0))
        try:
            check_may_send(cluster, topic)
        except BrokerError as error:
            if error.code == "AuthorizationError":
                raise
        except LedgerlakeError:
            pass
        finally:
            cluster.close()

    def _serve_metrics(self, config: MetricsConfig) -> None:
        from ledgerlake.monitor.metrics import ServedMetrics, state_of

        self.metrics = ServedMetrics(self._spark, config.port, config.address, config.token)
        self.metrics.add_delayed(self.config.stream.name, self.delayed_since_earlier)
        upkeep = self._upkeep
        self.metrics.watch(
            self.config.stream.name,
            lambda: state_of(
                self.config, is_owner=self.is_owner, upkeep=upkeep.report, reading=self.reading
            ),
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; return False if ``timeout_s`` passed first.

        Raises:
            LedgerlakeError: the query failed; Ledgerlake's own error if that was the cause, else a
                SetupError with Spark's message.
        """
        from py4j.protocol import Py4JError
        from pyspark.errors import StreamingQueryException

        if self.query is None:
            return True
        try:
            ended = (
                self.query.awaitTermination(timeout_s)
                if timeout_s is not None
                else self.query.awaitTermination()
            )
        except (StreamingQueryException, Py4JError) as error:
            self._note_failure(error)
            ended = True
        if self._failure is not None:
            raise self._failure
        if ended is False:
            return False
        if not self._has_finished:
            self._components.cursors.finish(_FINISH_S)
            self._has_finished = True
        if self._republisher is not None and not self._stopping.is_set():
            return self._republisher.drain(self.config.source.retry_timeout_ms / 1000, timeout_s)
        return True

    def stop(self) -> None:
        """End after the current batch, and move the cursors past it; no later batch is begun.

        Raises:
            LedgerlakeError: the current batch failed, or the query had failed before; as ``wait``.
        """
        self._stopping.set()
        self._upkeep.end()
        self._batches.wait(lambda: self.query is not None and self.query.isActive)
        if self.query is not None:
            self._note_failure(self._batches.failure or self.query.exception())
            self._is_interrupted = True
            self.query.stop()
        self._components.cursors.finish(_FINISH_S)
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Disconnect from the broker; the cursors stay on it, and unsent messages stay in the
        outbox. No later micro-batch is begun.
        """
        self._stopping.set()
        self._upkeep.end()
        if self._republisher is not None:
            self._republisher.stop()
        self._components.cursors.close()
        self._components.cluster.close()
        self._upkeep.wait()
        self._iceberg.close()
        if self.metrics is not None:
            self.metrics.close()
            self.metrics = None

    def _end_with(self, error: LedgerlakeError) -> None:
        """End the query, from another thread."""
        self._failure = self._failure or error
        self._stopping.set()
        if self.query is not None:
            self.query.stop()

    def _note_failure(self, error: BaseException | None) -> None:
        """Note why the query failed, if it is not by the stop: a micro-batch that came after it, or
        what Spark interrupted.
        """
        if self._failure is None and error is not None and not self._is_interrupted:
            self._failure = None if is_of_stop(error) else cause_of(error)

    def _after_batch(self, result: BatchResult) -> None:
        self._delayed_counts |= result.delayed_counts
        if self._republisher is not None:
            self._republisher.notify()
        if self.metrics is not None:
            self.metrics.add_batch(
                self.config.stream.name, result, time.monotonic(), int(time.time() * 1000)
            )
        if self._on_batch is not None:
            self._on_batch(result)
