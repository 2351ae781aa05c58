"""The stateful stage: incomplete and delayed messages, which outlive a micro-batch, in Spark's
state store, keyed by topic partition.

State, in RocksDB, by topic partition:

    sets     (producer, uuid) -> the incomplete message, as JSON with a version
    parts    (ledger, entry)  -> the entry of a chunk as the broker stored it, or a delayed entry
                              that is alone in its row;
             each entry is a value of its own, which never grows. One that comes to a position that
             has one is refused

and the state variables of ``delayed``.

Rules kept here:
  - Only messages that are incomplete when a micro-batch ends are written. Messages that begin and
    end within one stay in memory, up to ``_FRESH_BYTES``.
  - Rows may come in any order; the reports say what happened when. Several tasks may have read one
    topic partition: their reports are applied in the order of their ranges, so all chunks of a
    message meet here, in order.
  - A topic partition without incomplete or delayed messages and without events costs two reads of
    the state. If its task can tell that, its result passes in one row with other results, and no
    state is read.
  - Messages expire and are due by the time of the batch: the broker's time of its entries, or the
    planner's clock in its offset. A batch that is run again does the same again but for
    ``delivered_at``, which is the worker's clock at delivery. No producer's clock counts.
  - If an idle topic partition is to wake up, the planner makes an empty range of it, whose task
    sends only a report; so Spark calls the processor for it.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from ledgerlake.assembly.assembler import Assembled, Assembly
from ledgerlake.assembly.rules import ChunkedMessageKey, IncompleteMessage
from ledgerlake.client.topics import join_partition
from ledgerlake.decode.large import read_chunks
from ledgerlake.decode.messages import BatchRange, TopicPartition
from ledgerlake.operators.delayed import DelayedMessages, DelayedState
from ledgerlake.operators.outcome_digest import OutcomeDigest
from ledgerlake.operators.outcome_types import Outcome
from ledgerlake.operators.scheduled import schedule_at_once
from ledgerlake.operators.stage_rows import (
    DelayedLargeMessage,
    MessageStarted,
    RowKind,
    StageRow,
    StateSummary,
    TaskReport,
    incomplete_from_dict,
    max_time_ms,
    report_from_json,
)
from ledgerlake.operators.state_variables import StateVariables
from ledgerlake.reasons import MALFORMED_MARKER
from ledgerlake.schedules.cancels import Cancel
from ledgerlake.source.reread import GoneEntries, read_again_by
from ledgerlake.stored.fields import parse_stored
from ledgerlake.wire.chunks import Marker
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pandas as pd
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.stateful_processor import MapState, StatefulProcessorHandle

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.assembly.rules import Chunk, Limits
    from ledgerlake.operators.delayed import DelayedSummary
    from ledgerlake.operators.results import StageSettings
    from ledgerlake.operators.stage_output import StageOutput

INCOMPLETE_VERSION = 1

# The wake-up time for an incomplete message without a time yet: at once.
_AT_ONCE_MS = 1

# Arriving bytes that are kept in memory until the reports are applied; more go into the state
# store.
_FRESH_BYTES = 64 * 1024 * 1024

_STATE_SETTINGS = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Counting rows makes every write a read as well.
    "spark.sql.streaming.stateStore.rocksdb.trackTotalNumberOfRows": "false",
}


# Spark hands its rows to a worker so many bytes at a time, unless the session has a choice of its
# own. The worker has them several times in memory, so its peak is 150 MB lower than with Spark's 64
# MiB.
_ROWS_AT_A_TIME = "spark.sql.execution.arrow.maxBytesPerBatch"
_ROWS_AT_A_TIME_BYTES = 8 * 1024 * 1024


def set_up_state(spark: SparkSession) -> None:
    """Configure a session for the stage."""
    for name, value in _STATE_SETTINGS.items():
        spark.conf.set(name, value)
    if spark.conf.get(_ROWS_AT_A_TIME, None) is None:
        spark.conf.set(_ROWS_AT_A_TIME, str(_ROWS_AT_A_TIME_BYTES))


def stateful(rows: DataFrame, processor: Processor, schema: str) -> DataFrame:
    """Apply the stage to rows of ``STAGE_ROWS``; ``schema`` is that of the processor's output."""
    return rows.groupBy("topic", "partition").transformWithStateInPandas(
        processor, schema, "append", "none"
    )


class Processor(StatefulProcessor):  # type: ignore[misc]
    """The processor that Spark calls in the stateful stage: once for each topic partition and
    micro-batch, with all of its rows.

    Args:
        output: makes what takes the outcomes of one topic partition.
    """

    def __init__(
        self,
        settings: StageSettings,
        output: Callable[[TopicPartition], StageOutput],
    ) -> None:
        self.settings = settings
        self.output = output

    def init(self, handle: StatefulProcessorHandle) -> None:
        variables = StateVariables(handle)
        self._incomplete = variables.getMapState(
            "sets", "producer string, uuid string", "set string"
        )
        self._entries = variables.getMapState(
            "parts", "ledger_id bigint, entry_id bigint", "entry binary"
        )
        self._delayed = DelayedState(variables)

    def handleInputRows(
        self, key: tuple[str, int], rows: Iterator[pd.DataFrame], timerValues: Any
    ) -> Iterator[pd.DataFrame]:
        topic_partition = TopicPartition(*key)
        output = self.output(topic_partition)
        kept_entries = _StateEntries(self._entries)
        read_chunks_again = partial(self._read_chunks, topic_partition, GoneEntries())
        delayed = DelayedMessages(
            topic_partition, self._delayed, self.settings.delay, kept_entries, read_chunks_again
        )
        reports: list[TaskReport] = []
        for frame in rows:
            stage_rows = [StageRow._make(row) for row in frame.itertuples(index=False, name=None)]
            if all(row.kind == RowKind.ROWS for row in stage_rows):
                yield frame
                continue
            passing = [
                row for row in stage_rows if not _take_row(row, kept_entries, delayed, reports)
            ]
            if passing:
                yield from output.pass_on(passing)
        if reports:
            reports.sort(key=lambda report: report.end)
            yield from self._run_batch(output, kept_entries, delayed, reports)

    def _run_batch(
        self,
        output: StageOutput,
        kept_entries: _StateEntries,
        delayed: DelayedMessages,
        reports: list[TaskReport],
    ) -> Iterator[pd.DataFrame]:
        """Apply the tasks' reports, in the order of their ranges, and release the due messages."""
        stored = self._load() if self._incomplete.exists() else {}
        oldest_first = sorted(stored.values(), key=lambda incomplete: incomplete.positions[0])
        assembly = Assembly(
            self.settings.limits,
            kept_entries,
            oldest_first,
            delays_messages=self.settings.delay.enabled,
        )
        for outcome in _apply_reports(assembly, kept_entries, delayed, reports):
            yield from output.take(outcome)
        after = min(report.after for report in reports)
        end = max(report.end for report in reports)
        for due in delayed.release(max_time_ms(report.now_ms for report in reports), after, end):
            yield from output.take(due)
        kept_entries.store_fresh()
        incomplete = assembly.pending.messages
        self._store(stored, incomplete)
        yield from output.finish(
            _summary(incomplete, delayed.save(), reports, self.settings.limits)
        )

    def close(self) -> None:
        pass

    def _read_chunks(
        self, topic_partition: TopicPartition, gone: GoneEntries, message: DelayedLargeMessage
    ) -> Iterator[Entry]:
        name = join_partition(topic_partition.topic, topic_partition.partition)
        entries = read_again_by(self.settings.options, name, message.positions, gone)
        sender = None if message.key is None else (message.key.producer_name, message.key.uuid)
        for entry, _ in read_chunks(
            entries, len(message.positions), self.settings.limits.max_message_bytes, sender
        ):
            yield entry

    def _load(self) -> dict[ChunkedMessageKey, IncompleteMessage]:
        messages = [incomplete_from_json(value[0]) for _, value in self._incomplete.iterator()]
        return {message.key: message for message in messages}

    def _store(
        self,
        before: dict[ChunkedMessageKey, IncompleteMessage],
        messages: tuple[IncompleteMessage, ...],
    ) -> None:
        after = {message.key: message for message in messages}
        for key in before.keys() - after.keys():
            self._incomplete.removeKey((key.producer_name, key.uuid))
        for key, message in after.items():
            if before.get(key) != message:
                self._incomplete.updateValue(
                    (key.producer_name, key.uuid), (incomplete_to_json(message),)
                )


class _StateEntries:
    """Entries by position, in memory up to ``_FRESH_BYTES`` of this micro-batch, and else in the
    state variable ``parts``. The positions of refused entries are known until the micro-batch ends.
    """

    def __init__(self, state: MapState) -> None:
        self._state = state
        self._fresh: dict[Position, bytes] = {}
        self._fresh_bytes = 0
        self._refused: set[Position] = set()

    def put(self, position: Position, entry: bytes) -> bool:
        if position in self._fresh or self._is_stored(position):
            self._refused.add(position)
            return False
        if self._fresh_bytes + len(entry) > _FRESH_BYTES:
            self._state.updateValue((position.ledger_id, position.entry_id), (entry,))
            self._may_be_stored = True
        else:
            self._fresh[position] = entry
            self._fresh_bytes += len(entry)
        return True

    def is_refused(self, position: Position) -> bool:
        return position in self._refused

    def _is_stored(self, position: Position) -> bool:
        # Where nothing waits, an entry costs no call.
        return self._may_be_stored and bool(
            self._state.containsKey((position.ledger_id, position.entry_id))
        )

    @cached_property
    def _may_be_stored(self) -> bool:
        return bool(self._state.exists())

    def get(self, position: Position) -> bytes | None:
        if position in self._fresh:
            return self._fresh[position]
        row = self._state.getValue((position.ledger_id, position.entry_id))
        return None if row is None else bytes(row[0])

    def take(self, position: Position) -> bytes | None:
        entry = self.get(position)
        if entry is not None:
            self.drop(position)
        return entry

    def drop(self, position: Position) -> None:
        entry = self._fresh.pop(position, None)
        if entry is None:
            self._state.removeKey((position.ledger_id, position.entry_id))
        else:
            self._fresh_bytes -= len(entry)

    def store_fresh(self) -> None:
        """Store the entries of this micro-batch that were neither taken nor dropped, so that they
        outlive it.
        """
        for position, entry in self._fresh.items():
            self._state.updateValue((position.ledger_id, position.entry_id), (entry,))


def incomplete_to_json(message: IncompleteMessage) -> str:
    """Write an incomplete message for the state."""
    return json.dumps({"version": INCOMPLETE_VERSION, **asdict(message)})


def incomplete_from_json(text: str) -> IncompleteMessage:
    """Read an incomplete message from state.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "incomplete messages", incomplete_from_dict, INCOMPLETE_VERSION)


def _take_row(
    row: StageRow, kept_entries: _StateEntries, delayed: DelayedMessages, reports: list[TaskReport]
) -> bool:
    """Take a row of a task; return False for one that passes the stage."""
    if row.kind == RowKind.CHUNK:
        kept_entries.put(Position(int(row.ledger_id), int(row.entry_id)), row.entry)
    elif row.kind == RowKind.DELAYED and isinstance(row.header, str):
        position = Position(int(row.ledger_id), int(row.entry_id))
        delayed.add_partial(position, row.entry, BatchRange(*json.loads(row.header)))
    elif row.kind == RowKind.DELAYED:
        delayed.add(row.entry)
    elif row.kind == RowKind.SCHEDULES:
        delayed.controls.events.add_row(row.entry)
    elif row.kind == RowKind.REPORT:
        reports.append(report_from_json(row.header))
    else:
        return False
    return True


def _apply_reports(
    assembly: Assembly,
    kept_entries: _StateEntries,
    delayed: DelayedMessages,
    reports: list[TaskReport],
) -> Iterator[Outcome]:
    for report in reports:
        for event in report.events:
            if isinstance(event, DelayedLargeMessage):
                _add_large(assembly, kept_entries, delayed, event)
            elif isinstance(event, Cancel):
                delayed.controls.add_cancel(event)
            else:
                yield from _delay_large_messages(_apply(assembly, event), delayed)
    now_ms = max_time_ms(report.now_ms for report in reports)
    if now_ms is not None:
        yield from assembly.expire(now_ms)


def _add_large(
    assembly: Assembly,
    kept_entries: _StateEntries,
    delayed: DelayedMessages,
    message: DelayedLargeMessage,
) -> None:
    """Add a message that a task has completed. Reject it if one of its chunks was refused, or if a
    marker completed it and lists a chunk of another incomplete message.
    """
    if message.bytes_kept and any(map(kept_entries.is_refused, message.positions)):
        delayed.reject_known(message)
    elif not message.bytes_kept and assembly.pending.has_chunk_of_another(
        message.key, message.positions
    ):
        delayed.reject_large(message, MALFORMED_MARKER)
    else:
        delayed.add_large(message)


def _delay_large_messages(
    outcomes: Iterator[Outcome], delayed: DelayedMessages
) -> Iterator[Outcome]:
    """Add complete messages that are to be delivered later to the index; yield all other outcomes.

    The ``entries`` of a delayed message are not iterated, so its chunks stay among the kept
    entries.
    """
    for outcome in outcomes:
        scheduled = schedule_at_once(outcome)
        if scheduled is not None:
            delayed.controls.events.add(scheduled)
        if isinstance(outcome, Assembled) and outcome.deliver_ms is not None:
            delayed.add_large(DelayedLargeMessage.of(outcome, outcome.deliver_ms))
        else:
            yield outcome


def _apply(
    assembly: Assembly, event: Chunk | MessageStarted | IncompleteMessage | Marker
) -> Iterator[Outcome]:
    if isinstance(event, MessageStarted):
        return assembly.supersede(event.key)
    if isinstance(event, IncompleteMessage):
        return assembly.adopt(event)
    if isinstance(event, Marker):
        return assembly.apply_marker(event)
    return assembly.arrive(event)


def _summary(
    incomplete: tuple[IncompleteMessage, ...],
    delayed: DelayedSummary,
    reports: list[TaskReport],
    limits: Limits,
) -> StateSummary:
    return StateSummary(
        results=[report.result for report in reports],
        oldest_incomplete=min((message.positions[0] for message in incomplete), default=None),
        expires_ms=min((_expires_ms(message, limits) for message in incomplete), default=None),
        incomplete_count=len(incomplete),
        kept_bytes=sum(message.kept_bytes for message in incomplete),
        delayed_count=delayed.count,
        next_due_ms=delayed.next_due_ms,
        more_due=delayed.more_due,
        oldest_to_reread=delayed.oldest_to_reread,
        due_spans=delayed.due_spans,
        digest=OutcomeDigest(released=delayed.left, waited=delayed.waited),
    )


def _expires_ms(message: IncompleteMessage, limits: Limits) -> int:
    # A batch at that very time would not give the message up, and none would follow on an idle
    # topic.
    return (
        _AT_ONCE_MS if message.opened_ms is None else message.opened_ms + limits.expire_after_ms + 1
    )
