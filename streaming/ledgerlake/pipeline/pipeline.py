"""The pipeline put together: checkpoint, cursors, source and sink, in the order that loses nothing.

checked              the checkpoint's stream, the tables' columns and features: nothing is changed
held                 the durable cursors, which are the right to run the stream (see ``cursors``); a new one pins the topic
checked again        the checkpoint against the tables, now that nobody else may change either
begun                tables that are missing are made, the outbox and the staging folder are opened
started              the sink's stages, then ``foreachBatch``; the sink commits, Spark records the batch, the cursors move
"""

from __future__ import annotations

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
from ledgerlake.delay.cancels import CANCEL_PROPERTY, parse_cancel
from ledgerlake.errors import CheckpointError, LedgerlakeError, ProcessLostError, SetupError, UsageError
from ledgerlake.operators.messages import whole_messages
from ledgerlake.operators.stateful import set_up_state
from ledgerlake.operators.writing import TaskSettings
from ledgerlake.options.config import Config, parse_trigger
from ledgerlake.options.source_options import parse_start
from ledgerlake.pipeline.checkpoint import Checkpoint, as_option
from ledgerlake.pipeline.commit import BatchResult, DeltaSink
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.query_settings import settings_of
from ledgerlake.publish.datasource import LedgerlakeDataSource
from ledgerlake.publish.large_messages import LargeMessageProducer
from ledgerlake.publish.outbox import Outbox
from ledgerlake.publish.republisher import Republisher
from ledgerlake.source.bounds import end_position, first_available, resolve_start
from ledgerlake.source.loss import moved_to, tell_tasks
from ledgerlake.source.planning import entry_range
from ledgerlake.source.positions import describe
from ledgerlake.source.wake_ups import load_wakes, save_wakes
from ledgerlake.stored.offsets import VERSION, PartitionOffset, from_json
from ledgerlake.table.spark_table import open_table
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

    from ledgerlake.options.source_options import Bound
    from ledgerlake.pipeline.metrics import ServedMetrics
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.stored.offsets import Offset
    from ledgerlake.table.batch_record import BatchRecord
    from ledgerlake.table.delta_table import Table
    from ledgerlake.wire.message_id import Position

_log = logging.getLogger(__name__)

_NOTHING = PartitionOffset(BEFORE_ALL)
# How long an end waits for Spark's commit log and for the cursors.
_FINISH_S = 30.0
# What Spark says of a process that does not answer any more.
_CLOSED = re.compile(r"java\.io\.EOFException|Broken pipe|Connection reset")
_COMMIT_POLL_S = 0.01


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
        self._options = config.parsed_options()
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
        self._sink = DeltaSink(
            messages_table,
            rejects_table,
            TaskSettings(
                messages_table.folder,
                rejects_table.folder,
                config.chunks.limits,
                config.delay_options,
                self._options,
                config.outbox_path,
            ),
            self._outbox,
        )
        self._wake_folder = f"{config.stream.checkpoint}/ledgerlake/wakes"
        self._wakes_ms: dict[str, int] | None = None
        self._stopping = threading.Event()
        self._batch_in_work = threading.Lock()
        self._last_batch: int | None = None
        self._failure: LedgerlakeError | None = None
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
        start = self._hold_cursors(names, [table for table in tables if table not in missing])
        # Making a table takes a cold JVM seconds, and so does the stream.
        with ThreadPoolExecutor(1) as beside:
            made = beside.submit(_create, missing, self._spark)
            stream = self._stream(start)
            made.result()
        self._begin_outbox()
        messages_table = self._sink.messages
        if messages_table.last_batch_of(self.config.stream.name) is None:
            messages_table.begin_stream(self.config.stream.name)
        self._sink.load_floors(names)
        self._sink.begin()
        self._cursors.begin(self._end_with)
        writer = (
            stream.writeStream.queryName(self.config.stream.name)
            .option("checkpointLocation", self.config.stream.checkpoint)
            .foreachBatch(self._write_batch)
        )
        trigger = {"availableNow": True} if once else {"processingTime": parse_trigger(self.config.stream.trigger)}
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
        self._load_wakes()
        set_up_state(self._spark)
        own = {
            "startingOffsets": as_option(start),
            "wakes": self._wake_folder,
            "pinnedBy": self.config.subscription,
        }
        return self._sink.stream(self._spark, self.config.source_options() | own)

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
            if self._stopping.is_set():
                return True
            raise cause_of(error) from None
        if self._failure is not None:
            raise self._failure
        if ended is False:
            return False
        self._cursors.finish(_FINISH_S)
        if self._republisher is not None and not self._stopping.is_set():
            self._republisher.drain(self.config.source.retry_timeout_s)
        return True

    def stop(self) -> None:
        """End after the batch in work, and move the cursors behind it; a batch that comes later is not begun."""
        self._stopping.set()
        with self._batch_in_work:
            pass
        self._await_commit()
        if self.query is not None:
            self.query.stop()
        self._cursors.finish(_FINISH_S)

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

    def _hold_cursors(self, names: list[str], tables: list[Table]) -> Offset:
        """Take the right to run the stream; return the pipeline's very first position, resolved once for all runs.

        Args:
            tables: those that are there already.

        Raises:
            CheckpointError: checkpoint and tables do not belong together.
            SetupError: the checkpoint is lost, or cannot be written.
        """
        bound = parse_start(self.config.source.starting, "[source] starting")
        start = self._checkpoint.start()
        ends = {}
        if start is None:
            self._check_first_start(names, bound, tables)
            ends = {name: end_position(self._cluster, name) for name in names} if bound == "latest" else {}
        self._cursors.hold(names, from_earliest=bound != "latest" or start is not None)
        # Another process may have begun, or gone on, until it let go of the cursors.
        start = self._checkpoint.start()
        self._compare_with_tables(tables)
        self._check_tables_are_newest(tables)
        if start is not None:
            self._compare_with_cursors(start)
        else:
            start = self._first_start(bound, ends)
            self._checkpoint.save_stream(self.config.stream.name)
            self._checkpoint.save_start(start)
            self._cursors.advance({name: offset.position for name, offset in start.items()})
        self._checkpoint.save_stream(self.config.stream.name)
        return start

    def _check_first_start(self, names: list[str], bound: Bound, tables: list[Table]) -> None:
        """Find what can be wrong with a start without a checkpoint before a cursor is made for it.

        Raises:
            SetupError: the tables have messages of this stream, so that a checkpoint there was is lost.
        """
        known = [table.path for table in tables if table.last_batch_of(self.config.stream.name) is not None]
        if known and bound != "cursor" and not self._checkpoint.is_forgotten:
            raise self._lost_checkpoint(f"the table at {known[0]} knows the stream {self.config.stream.name}")
        self._checkpoint.check_writable()
        if bound not in ("cursor", "latest"):
            for name in names:
                resolve_start(self._cluster, name, bound)

    def _first_start(self, bound: Bound, ends: dict[str, Position]) -> Offset:
        """Where a pipeline without a checkpoint begins.

        Args:
            ends: where the topic partitions ended before the cursors were made, for a start at the latest message.

        Raises:
            SetupError: the cursors are older than this start, and something is unread or was read, so that a checkpoint there
                was is lost, and nobody has said what to do.
        """
        positions = self._cursors.positions()
        if bound == "latest":
            for name, end in ends.items():
                if positions[name] < end:
                    raise self._lost_checkpoint(
                        f"the subscription {self.config.subscription} has unread messages of {name} behind {positions[name]}"
                    )
        elif bound != "cursor":
            for name, position in positions.items():
                if position > first_available(self._cluster, name):
                    raise self._lost_checkpoint(
                        f"the subscription {self.config.subscription} has read {name} up to {position}"
                    )
            return {name: resolve_start(self._cluster, name, bound) for name in positions}
        # Where the cursor stands, so that nothing lies between what it pins and what is read.
        return {name: describe(self._cluster, name, position) for name, position in positions.items()}

    def _lost_checkpoint(self, sign: str) -> SetupError:
        return SetupError(
            f"there is no checkpoint at {self.config.stream.checkpoint}, but {sign}; restore the checkpoint, or set starting "
            "to cursor to go on from there (messages may come twice), or begin anew after: ledgerlake forget CONFIG"
        )

    def _compare_with_tables(self, tables: list[Table]) -> None:
        """Check that the checkpoint is not older than the tables.

        Raises:
            CheckpointError: it is, or it is of another run than what the tables hold.
        """
        query_id = self._checkpoint.query_id()
        planned = self._checkpoint.last_planned()
        if query_id is None:
            if planned is not None:
                raise CheckpointError(
                    f"the checkpoint {self.config.stream.checkpoint} lacks its file 'metadata'; restore it from a complete copy"
                )
            self._check_not_begun(tables)
            return
        query = self._query_name(query_id)
        for table in tables:
            recorded = table.recorded(query)
            if recorded is None:
                continue
            if planned is None or recorded.batch_id > planned:
                reached = "no batch" if planned is None else f"batch {planned}"
                raise self._older_checkpoint(table, f"has batch {recorded.batch_id}", f"reaches {reached}")
            # Spark has removed the offsets of older batches (``spark.sql.streaming.minBatchesToRetain``).
            if recorded.range_digest is not None and self._checkpoint.keeps(recorded.batch_id):
                batch = self._checkpoint.record(self.config.stream.name, query, recorded.batch_id)
                if not recorded.is_batch(batch):
                    raise self._older_checkpoint(table, f"has another batch {recorded.batch_id}", "has one of its own")

    def _check_tables_are_newest(self, tables: list[Table]) -> None:
        """Check that no table is older than the checkpoint, or gone: what it lacks the topic need not have any more.

        A folder that the checkpoint never saw, and that knows nothing of the stream, is a new table, which the user chose.

        Raises:
            CheckpointError: one is.
        """
        query_id = self._checkpoint.query_id()
        if query_id is None:
            return
        known = self._cursors.tables()
        for name, table in self._sink.tables.items():
            held = known.get(name)
            if held is None:
                continue
            recorded = table.recorded(self._query_name(query_id)) if table in tables else None
            if (recorded is None and table.path != held.path) or (recorded and recorded.batch_id >= held.batch_id):
                continue
            there = "does not know it" if recorded is None else f"has batch {recorded.batch_id}"
            raise CheckpointError(
                f"the table at {held.path} had batch {held.batch_id} of the stream {self.config.stream.name} by the checkpoint "
                f"{self.config.stream.checkpoint}, and the one at {table.path} {there}: it is an older copy; restore the newest "
                "one, or choose a new folder for what comes from here on, or remove the checkpoint and begin anew after: "
                "ledgerlake forget CONFIG"
            )

    def _compare_with_cursors(self, start: Offset) -> None:
        """Check that the broker has kept what the micro-batch reads that is to be run again.

        A cursor passes it only when it is committed. So if the cursor is past it, the checkpoint is older than the last run.

        Raises:
            CheckpointError: the cursor is past it.
        """
        planned = self._checkpoint.last_planned()
        if planned is None or self._checkpoint.has_committed(planned) or not self._options.fail_on_data_loss:
            return
        begins = start | (self._checkpoint.committed_offset() or {})
        ends = self._checkpoint.offset(planned)
        again = [name for name, end in ends.items() if end.position > begins.get(name, _NOTHING).position]
        for name, position in self._cursors.positions(again).items():
            begin, end = begins.get(name, _NOTHING).position, ends[name].position
            if moved_to(position, begin) != BEFORE_ALL or position.ledger_id > end.ledger_id:
                raise CheckpointError(
                    f"the subscription {self.config.subscription} has read {name} up to {position}, and batch {planned}, which "
                    f"begins behind {begin}, is to be run again: the checkpoint {self.config.stream.checkpoint} is an older copy, "
                    "or somebody moved the subscription; restore the newest one, or set [source] fail_on_data_loss to false to "
                    "go on with what the topic still has"
                )

    def _check_not_begun(self, tables: list[Table]) -> None:
        """Check that a start without any micro-batch in its checkpoint is not one whose micro-batches are missing.

        Raises:
            CheckpointError: the tables have some.
        """
        if self._checkpoint.start() is None or self._checkpoint.is_forgotten:
            return
        for table in tables:
            last = table.last_batch_of(self.config.stream.name)
            if last is not None and last >= 0:
                raise self._older_checkpoint(table, f"has batch {last}", "reaches no batch")

    def _older_checkpoint(self, table: Table, there: str, here: str) -> CheckpointError:
        return CheckpointError(
            f"the table at {table.path} {there} of the stream {self.config.stream.name}, and the checkpoint "
            f"{self.config.stream.checkpoint} {here}: it is an older copy; restore the newest one, or, if messages may "
            "come twice, remove it and set starting to cursor to go on where the subscription stands"
        )

    def _begin_outbox(self) -> None:
        """Open the outbox and start to send it.

        Raises:
            CheckpointError: it is gone, older than the table, or newer than the checkpoint.
        """
        deliver = self.config.deliver
        if self._outbox is None or deliver is None:
            return
        table = self._sink.messages
        query_id = self._checkpoint.query_id()
        recorded = None if query_id is None else table.recorded(self._query_name(query_id))
        committed = None if recorded is None else recorded.batch_id
        self._outbox.begin(committed, self._checkpoint.outbox())
        planned = self._checkpoint.last_planned()
        if self._outbox.last_sent > (-1 if planned is None else planned):
            raise CheckpointError(
                f"the outbox {self._outbox.folder} has sent batch {self._outbox.last_sent}, which the checkpoint does not "
                "have: it belongs to another one; restore both from one copy"
            )
        in_table = table.outbox_messages(self._outbox.name)
        held = -1 if committed is None else self._outbox.messages_up_to(committed)
        if in_table is not None and held < in_table:
            raise CheckpointError(
                f"the outbox {self._outbox.folder} has held {held} messages, and the table at {table.path} says {in_table}: "
                "it is an older copy; restore the newest one"
            )
        self._checkpoint.save_outbox(self._outbox.name)
        self._republisher = Republisher(
            self._outbox,
            self._options.client,
            deliver.topic,
            self.config.stream.name,
            lambda: self._cursors.is_held,
            self._end_with,
        )

    def _write_batch(self, written: DataFrame, batch_id: int) -> None:
        with self._batch_in_work:
            if self._stopping.is_set():
                raise _StoppedError
            query = self._query_name(_query_id(written))
            batch = self._checkpoint.record(self.config.stream.name, query, batch_id)
            tell_tasks(written.sparkSession.sparkContext, self._moved_cursors(batch))
            result = self._sink.write(written, batch, self._cursors.check_held)
            # Who was suspended meanwhile must not write over what its successor has noted beside the checkpoint.
            self._cursors.check_held()
            self._cursors.add(batch_id, result.ends, result.tables)
            self._last_batch = batch_id
            self._note_wakes(batch_id, result.wakes_ms)
            self._waiting |= result.waiting
            if self._republisher is not None:
                self._republisher.notify()
            if self.metrics is not None:
                self.metrics.add_batch(self.config.stream.name, result, time.monotonic())
            if self._on_batch is not None:
                self._on_batch(result)

    def _moved_cursors(self, batch: BatchRecord) -> dict[str, Position]:
        """Return up to where somebody else moved cursors over what a micro-batch reads; asked only where loss is told by it.

        Raises:
            OwnershipError: another process has taken over.
            LedgerlakeError: the broker cannot be asked.
        """
        begins = {span.topic_partition: span.after for span in _without_index(batch) if span.crosses}
        moved = {}
        for name, position in self._cursors.positions_now(begins).items():
            if moved_to(position, begins[name]) != BEFORE_ALL:
                _log.warning(
                    "the subscription %s of %s stands at %s, and the stream has read up to %s: somebody moved it, by message "
                    "TTL or by hand",
                    self.config.subscription,
                    name,
                    position,
                    begins[name],
                )
                moved[name] = position
        return moved

    def _load_wakes(self) -> None:
        """Find out when topic partitions want a micro-batch; if nobody can say it, all of them want one now, which tells it."""
        self._wakes_ms = load_wakes(self._wake_folder)
        committed = self._checkpoint.last_committed()
        if self._wakes_ms is None and committed is not None:
            self._wakes_ms = dict.fromkeys(self._checkpoint.offset(committed), int(time.time() * 1000))
            save_wakes(self._wake_folder, committed, self._wakes_ms)

    def _note_wakes(self, batch_id: int, changed_ms: dict[str, int | None]) -> None:
        """Tell the planner, in a process of its own, when it is to plan a batch although nothing new has come."""
        every_ms = {**(self._wakes_ms or {}), **changed_ms}
        wakes_ms = {name: time_ms for name, time_ms in every_ms.items() if time_ms is not None}
        if wakes_ms != self._wakes_ms:
            save_wakes(self._wake_folder, batch_id, wakes_ms)
        self._wakes_ms = wakes_ms

    def _query_name(self, query_id: str) -> str:
        """What the table knows this query by: its name, and the checkpoint's own id, so that a new checkpoint starts over."""
        return f"ledgerlake:{self.config.stream.name}:{query_id}"


def _without_index(batch: BatchRecord) -> Iterator[EntryRange]:
    """The ranges of a micro-batch of which not both ends have the broker's index."""
    ranges = {name: one for name, one in batch.ranges.items() if one["start"] is not None}
    starts, ends = ({name: one[end] for name, one in ranges.items()} for end in ("start", "end"))
    before, after = (from_json({"version": VERSION, "positions": one}) for one in (starts, ends))
    for name, start in before.items():
        if start.index is None or after[name].index is None:
            yield entry_range(name, start, after[name])


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
    """Remove the pipeline's durable cursors from the broker, and let a start without a checkpoint begin anew.

    Returns:
        The topic partitions that had a cursor.

    Raises:
        CheckpointError: the checkpoint is still there; nothing was removed.
        BrokerError, TransportError, TopicNotFoundError: not all cursors are removed.
    """
    checkpoint = Checkpoint(config.stream.checkpoint)
    checkpoint.check_gone()
    options = config.parsed_options()
    cluster = Cluster(options.client)
    try:
        names = cluster.all_partitions(options.topics)
        for name in names:
            DurableCursor(cluster, name, config.subscription).forget()
    finally:
        cluster.close()
    checkpoint.forget()
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
    # Text of Java's that tells where the exception comes from.
    trace = str(getattr(error, "_stackTrace", ""))
    if "PythonStreamingSourceRunner" in trace and _CLOSED.search(trace):
        return ProcessLostError(
            "the Python process that plans the micro-batches was ended from outside, by hand or because memory ran out; start "
            "the pipeline again, and it goes on where it was"
        )
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
