"""The function that Spark calls for each micro-batch: it writes and commits the batch, and hands
its ends to the cursors.

Spark may call it again for a micro-batch that the table has; the sink checks for that. After a
stop, no further micro-batch is begun: Spark plans it again at the next start.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import OwnershipError, SetupError
from ledgerlake.monitor.progress import Reading
from ledgerlake.pipeline.batch_ends import LastRun
from ledgerlake.pipeline.moved_cursors import moved_cursors
from ledgerlake.pipeline.start import query_name
from ledgerlake.source.loss_watch import pass_moved_cursors

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import DataFrame

    from ledgerlake.pipeline.commit import BatchResult
    from ledgerlake.pipeline.components import Components

# How long to wait at the end for Spark's commit log.
_COMMIT_S = 30.0
_COMMIT_POLL_S = 0.01


class BatchWriter:
    """Writes the micro-batches of one run.

    Args:
        stopping: set when no further micro-batch is to begin.
        on_batch: called after each committed micro-batch.

    ``reading`` is the micro-batch that runs.
    """

    def __init__(
        self,
        stream: str,
        components: Components,
        stopping: threading.Event,
        on_batch: Callable[[BatchResult], None],
    ) -> None:
        self._stream = stream
        self._components = components
        self._stopping = stopping
        self._on_batch = on_batch
        self._at_work = threading.Lock()
        self._last: int | None = None
        # The greatest number that the next micro-batch may have.
        self._next = 0
        self.failure: Exception | None = None
        self.reading: Reading | None = None

    def begin(self) -> None:
        """Note how far the stream has come. What this process reads from the checkpoint after this
        is right only if no other process runs a micro-batch before the query begins.
        """
        log = self._components.checkpoint.log
        committed, planned = log.last_committed(), log.last_planned()
        self._next = max(0 if committed is None else committed + 1, planned or 0)

    def write(self, written: DataFrame, batch_id: int) -> None:
        """Run the plan of a micro-batch and commit what it wrote.

        Raises:
            LedgerlakeError: as ``DeltaSink.write``, or this process does not own the stream any
                more.
        """
        with self._at_work:
            if self._stopping.is_set():
                raise _StoppedError
            try:
                self._write(written, batch_id)
            except Exception as error:
                self.failure = error
                raise
            finally:
                self.reading = None

    def wait(self, is_active: Callable[[], bool]) -> None:
        """Wait until the current micro-batch is written, and Spark has recorded it. If the query
        ended before that, Spark would run it again.
        """
        with self._at_work:
            pass
        deadline_s = time.monotonic() + _COMMIT_S
        while self._last is not None and is_active() and time.monotonic() < deadline_s:
            if self._components.checkpoint.log.has_committed(self._last):
                return
            time.sleep(_COMMIT_POLL_S)

    def _write(self, written: DataFrame, batch_id: int) -> None:
        components = self._components
        if batch_id > self._next:
            # It was suspended between its start and its query.
            raise self._run_by_another(batch_id - 1)
        query = query_name(self._stream, _query_id(written))
        batch = components.checkpoint.log.record(
            self._stream, query, batch_id, components.start.number
        )
        self.reading = Reading(batch, time.monotonic())
        pass_moved_cursors(
            written.sparkSession.sparkContext, moved_cursors(components.cursors, batch)
        )
        with_state = self._with_state(batch_id)
        topics = [split_partition(name)[0] for name in batch.ranges]
        components.tables.add_for_topics(topics)
        components.tables.check(written.sparkSession)
        schemas = components.schemas.learn(
            topics, {split_partition(name)[0] for name in batch.with_messages}
        )
        if components.tables.open_for(batch):
            components.cursors.check_owner()
            components.checkpoint.save_tables(components.tables.places)
        result = components.sink.write(
            written, batch, with_state, components.cursors.check_owner, schemas
        )
        # A process that was suspended must not overwrite its successor's files in the checkpoint.
        components.cursors.check_owner()
        if components.checkpoint.log.has_committed(batch_id):
            raise self._run_by_another(batch_id)
        if self._last is None:
            components.start.save_selected()
        components.wakeups.update(batch_id, result.wakeup_times_ms, result.due_spans)
        components.cursors.add(
            LastRun(batch_id, components.wakeups.batch_id), result.ends, result.tables
        )
        self._last, self._next = batch_id, batch_id + 1
        self._on_batch(result)

    def _run_by_another(self, batch_id: int) -> OwnershipError:
        return OwnershipError(
            f"another process has run batch {batch_id} of the stream {self._stream}; let only one "
            "process run it"
        )

    def _with_state(self, batch_id: int) -> list[str] | None:
        """Return the topic partitions with messages in state before a micro-batch; None if they are
        not known.
        """
        if batch_id == 0:
            return []
        # A micro-batch that is run again begins before the state that the wake-up times tell of.
        is_next = self._last is not None and self._last < batch_id
        return self._components.wakeups.topic_partitions() if is_next else None


def _query_id(batch: DataFrame) -> str:
    query_id = batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId")
    if not query_id:
        raise SetupError(
            "Spark did not tell the query's id, without which batches cannot be told apart; use "
            "classic Spark"
        )
    return str(query_id)


class _StoppedError(Exception):
    """A micro-batch that came after the stop; it was not begun."""


def is_of_stop(error: BaseException) -> bool:
    """Return whether a query failed only because a micro-batch came after the stop. Spark passes
    the error on as text.
    """
    return _StoppedError.__name__ in str(error)
