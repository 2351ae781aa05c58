"""What must hold, judged by what producers had confirmed and what stands in the table; it knows
nothing of the product.

once              no message twice in the table, by payload and by (topic partition, message id); of
                  one that repeats, no occurrence twice; on the topic of due messages, a message
                  that was sent after a copy of the checkpoint was made may come once more if that
                  copy is restored
nothing missing   each confirmed message is in the table at the end. A message that was cancelled or
                  replaced in time is in ``rejects``, and so is each chunk that is of no whole
                  message, once. If one table gets all messages and others get parts, they have
                  the same
in order          within a topic partition every commit holds a later stretch than the one before,
                  except for rows that are marked late
never early       no message in the table before its time, by the broker's clock, unless a run holds
                  none back; no occurrence that was due in a pause
nothing unpinned  a cursor has not passed messages that are neither in a table nor in state that
                  Spark has committed
latest            a table with the latest messages has one row of each key: that of the last
                  micro-batch with the key, and in it the last one: by position on a topic
                  partition, by the time between two, and by the time of its delivery if it was
                  delayed
lost is said      a run ends with an error only if a checkpoint was lost or restored from a copy, or
                  while a fault lasts, or if an option was changed that has to be set back once; the
                  error is one of ours and says what to do, and a run that was refused has changed
                  nothing
files             every file of the tables is there
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

from ledgerlake.reasons import (
    CANCEL_REFUSED,
    CHUNK_EXPIRED,
    CHUNK_ORPHAN,
    PAUSE_REFUSED,
    REPLAYED,
)
from ledgerlake.wire.message_id import Position
from tests.simulation.driver import COPY, LATEST, REJECTS, UNDECRYPTABLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.disk import Disk
    from tests.simulation.lake import Commit, Lake, StoredTable

_COLUMNS = [
    "topic",
    "partition",
    "message_id",
    "ledger_id",
    "entry_id",
    "batch_index",
    "properties",
]
_CHUNK_REASONS = (CHUNK_EXPIRED, CHUNK_ORPHAN)

# Effective time, ledger, entry, batch index.
Key = tuple[int, int, int, int]

_TIMES = ["broker_timestamp", "publish_time", "deliver_at", "delivered_at"]

_NEVER_MS = 1 << 60

# A payload and the number of its occurrence, 0 of a message that does not repeat.
Delivery = tuple[bytes, int]


@dataclass(eq=False)
class Pause:
    """A pause of what repeats. It begins and ends between two times each; they differ if clocks
    do.
    """

    begins_ms: tuple[int, int]
    ends_ms: tuple[int, int] = (_NEVER_MS, _NEVER_MS)

    @property
    def is_open(self) -> bool:
        return self.ends_ms[0] == _NEVER_MS

    def may_hold(self, due_ms: int) -> bool:
        return self.begins_ms[0] < due_ms <= self.ends_ms[1]

    def must_hold(self, due_ms: int) -> bool:
        return self.begins_ms[1] < due_ms <= self.ends_ms[0]


@dataclass(eq=False)
class Sent:
    """A message that its producer had confirmed; ``positions`` has the positions of its chunks, or
    of its entry.
    """

    payload: bytes
    topic: str
    positions: tuple[Position, ...]
    stored_ms: int
    deliver_ms: int = 0
    key: str | None = None
    schedule: str | None = None
    # Of a message that repeats, the occurrences that have to be delivered, and the times of those
    # that may be.
    repeats: bool = False
    must: set[int] = field(default_factory=set)
    may: dict[int, int] = field(default_factory=dict)
    delivered: set[int] = field(default_factory=set)
    is_ended: bool = False
    is_cancelled: bool = False
    may_be_cancelled: set[str] = field(default_factory=set)
    # It repeats and was hit, so that it must become a reject.
    is_cut: bool = False
    # It is encrypted, so that without its key it is a reject.
    is_encrypted: bool = False
    is_rejected: bool = False
    # The pauses of its id, if it repeats.
    pauses: list[Pause] = field(default_factory=list)
    # Its chunks may come too late, so that each becomes a reject; or must, if it is a chunk of no
    # whole message.
    may_expire: bool = False
    must_be_rejected: bool = False
    rejected: set[Position] = field(default_factory=set)
    # More of its chunks are to come.
    is_sending: bool = False
    is_held: bool = False
    is_excused: bool = False
    # The position of the marker that completes it, if one does.
    stands_at: Position | None = None

    def stands_before(self, position: Position) -> bool:
        """Whether a message that is stored there can hit it."""
        return not self.is_sending and (self.stands_at or self.positions[-1]) < position

    def __str__(self) -> str:
        return (
            f"{self.payload[:24].decode()} at {self.topic.rpartition('/')[2]} {self.positions[-1]}"
        )


@dataclass(eq=False)
class Oracle:
    """The judge of one history. ``violations`` are sentences."""

    disk: Disk
    clock_ms: Callable[[], int]
    sent: dict[bytes, Sent] = field(default_factory=dict)
    unsettled: set[bytes] = field(default_factory=set)
    violations: list[str] = field(default_factory=list)
    awaits_publishing: bool = False
    unpublished: set[Delivery] = field(default_factory=set)
    has_copy: bool = False
    # Some runs do not hold messages back.
    may_come_at_once: bool = False
    # A message may have a row beside the rejects of its chunks.
    is_replayed: bool = False

    def __post_init__(self) -> None:
        self._not_owed: set[tuple[str, Position]] = set()
        self._by_position: dict[tuple[str, Position], list[Sent]] = {}
        self._ids: set[tuple[str, str, int, int]] = set()
        self._reached: dict[tuple[str, str], int] = {}
        self._copied: set[Delivery] = set()
        self._in_table: set[Delivery] = set()
        self._published: set[Delivery] = set()
        self._published_at_copy: set[Delivery] = set()
        # What a restored copy of the checkpoint does not know of; it is sent again.
        self._forgotten: set[Delivery] = set()
        self.commits = 0
        # A broker's clock may be set back; due messages stay due.
        self.latest_ms = 0
        # Of all that repeat, by topic.
        self.pauses: dict[str, list[Pause]] = {}

    def confirm(self, one: Sent) -> None:
        self.latest_ms = max(self.latest_ms, one.stored_ms)
        self.sent[one.payload] = one
        self.unsettled.add(one.payload)
        for position in one.positions:
            self._place(one, position)
        if one.repeats:
            # All of its occurrences may be in a pause.
            self.settle(one)

    def add_chunk(self, one: Sent, position: Position, is_last: bool) -> None:
        """A large message has another chunk."""
        one.positions += (position,)
        one.is_sending = not is_last
        self._place(one, position)

    def _place(self, one: Sent, position: Position) -> None:
        self._by_position.setdefault((one.topic, position), []).append(one)
        if (one.topic, position) in self._not_owed:
            self._excuse(one)

    def _excuse(self, one: Sent) -> None:
        one.is_excused = True
        self.unsettled.discard(one.payload)

    def excuse(self, topic: str, position: Position) -> None:
        """What stands there is not owed."""
        self._not_owed.add((topic, position))
        for one in self._by_position.get((topic, position), ()):
            self._excuse(one)

    def waiting_before(
        self, topic: str, position: Position, time_ms: int, **target: str
    ) -> list[Sent]:
        """What a cancel by key, or a message with the id of a schedule, that is stored
        there hits.
        """
        return [
            one
            for one in self.sent.values()
            if one.topic == topic
            and all(getattr(one, name) == value for name, value in target.items())
            and one.stands_before(position)
            and (one.deliver_ms > time_ms or any(due_ms > time_ms for due_ms in one.may.values()))
        ]

    def complain(self, words: str) -> None:
        self.violations.append(words)

    def committed(self, table: StoredTable, commit: Commit) -> None:
        """A commit has landed."""
        self.commits += 1
        for name in commit.files:
            data = self.disk.files.get(f"{table.path}/{name}")
            if data is None:
                self.complain(f"files: {name} is committed and is not there")
            elif table.path == REJECTS:
                self._take_rejects(data)
            elif table.path != LATEST:
                self._take_messages(data, table.path)
        if table.path not in (REJECTS, LATEST):
            for name, time_us in self._stretch.items():
                place = (table.path, name)
                self._reached[place] = max(time_us, self._reached.get(place, time_us))
            self._stretch.clear()
            self._compare_files()

    _stretch: dict[str, int] = field(default_factory=dict)
    _files: dict[str, list[tuple[Key, Key]]] = field(default_factory=dict)

    def _compare_files(self) -> None:
        """Complain of files of one commit that overlap in a topic partition."""
        for topic, stretches in self._files.items():
            for (_, last), (first, _) in pairwise(sorted(stretches)):
                if first < last:
                    self.complain(
                        f"in order: a file of {topic} begins at {first}, before {last}, where "
                        "another one ends"
                    )
        self._files.clear()

    @property
    def differs_from_copy(self) -> set[bytes]:
        """Return the messages in a routed table but not in the copy, or the other way round."""
        return {payload for payload, _ in self._in_table ^ self._copied} if self.has_copy else set()

    def _take_copy(self, row: dict[str, Any]) -> None:
        delivery = row["value"], _occurrence(row)
        if delivery in self._copied:
            self.complain(f"once: {delivery} is in the copy twice")
        self._copied.add(delivery)

    def _take_messages(self, data: bytes, path: str) -> None:
        stretches: dict[str, tuple[Key, Key]] = {}
        for row in _rows(data):
            topic = (
                row["topic"]
                if row["partition"] < 0
                else f"{row['topic']}-partition-{row['partition']}"
            )
            if path == COPY:
                self._take_copy(row)
            else:
                self._take_row(topic, row)
            time_us = row["broker_timestamp"] or row["publish_time"] or 0
            if row["delivered_at"] is not None:
                time_us = max(time_us, row["deliver_at"])
            key = (
                time_us,
                row["ledger_id"],
                row["entry_id"],
                -1 if row["batch_index"] is None else row["batch_index"],
            )
            first, before = stretches.get(topic, (key, key))
            if key < before:
                self.complain(
                    f"in order: {row['message_id']} of {topic} stands behind {before} in its file"
                )
            stretches[topic] = first, key
            if not row["late"] and time_us < self._reached.get((path, topic), time_us):
                self.complain(
                    f"in order: {row['message_id']} of {topic} is earlier than a commit before and "
                    "not late"
                )
            self._stretch[topic] = max(time_us, self._stretch.get(topic, time_us))
        for topic, stretch in stretches.items():
            self._files.setdefault(topic, []).append(stretch)

    def _take_row(self, topic: str, row: dict[str, Any]) -> None:
        payload, occurrence = row["value"], _occurrence(row)
        assert isinstance(payload, bytes)
        one = self.sent.get(payload)
        if one is None:
            return self.complain(f"once: {payload[:30]!r} was never confirmed")
        batch_index = -1 if row["batch_index"] is None else int(str(row["batch_index"]))
        own = (topic, str(row["message_id"]), batch_index, occurrence)
        delivery = payload, occurrence
        if delivery in self._in_table or own in self._ids:
            self.complain(f"once: {one} is in the table twice")
        if topic != one.topic or (row["ledger_id"], row["entry_id"]) != (
            one.positions[-1].ledger_id,
            one.positions[-1].entry_id,
        ):
            self.complain(f"once: {one} stands in the table as {own}")
        if one.is_cancelled:
            self.complain(f"nothing early: {one} was cancelled or replaced and is in the table")
        at_once = self.may_come_at_once and row["delivered_at"] is None
        if one.repeats and occurrence not in one.may and not at_once:
            self.complain(
                f"once: the occurrence {occurrence} of {one} must not be, it has {one.may}"
            )
        if one.rejected and not self.is_replayed:
            self.complain(f"once: {one} is in the table, and its chunks are in rejects")
        due_ms = one.may.get(occurrence, one.deliver_ms)
        if one.repeats and not at_once and self._is_paused(one, due_ms, Pause.must_hold):
            self.complain(f"never early: {one}, due at {due_ms}, was paused and came")
        if occurrence and row["deliver_at"] != due_ms * 1000:
            self.complain(f"in order: {one}, due at {due_ms}, says {row['deliver_at']}")
        if one.deliver_ms and not at_once:
            if row["delivered_at"] is None or int(str(row["delivered_at"])) // 1000 < due_ms:
                self.complain(f"never early: {one}, due at {due_ms}, says {row['delivered_at']}")
            if max(self.clock_ms(), self.latest_ms) < due_ms:
                self.complain(f"never early: {one}, due at {due_ms}, came at {self.clock_ms()}")
        self._in_table.add(delivery)
        if self.awaits_publishing and one.deliver_ms:
            self.unpublished.add(delivery)
        self._ids.add(own)
        one.delivered.add(occurrence)
        self.settle(one)
        return None

    def _take_rejects(self, data: bytes) -> None:
        columns = ["topic", "partition", "ledger_id", "entry_id", "reason"]
        table = pq.ParquetFile(io.BytesIO(data)).read(columns, use_threads=False)
        for row in table.to_pylist():
            topic = (
                row["topic"]
                if row["partition"] < 0
                else f"{row['topic']}-partition-{row['partition']}"
            )
            position = Position(row["ledger_id"], row["entry_id"])
            if row["reason"] in (CANCEL_REFUSED, PAUSE_REFUSED, REPLAYED):
                # The message is a row all the same.
                continue
            for one in self._by_position.get((topic, position), ()):
                if row["reason"] in one.may_be_cancelled and len(one.positions) > 1:
                    self._take_chunk(one, position)
                elif row["reason"] in one.may_be_cancelled:
                    if one.is_rejected or (one.delivered and not one.repeats):
                        self.complain(f"once: {one} is in rejects twice, or in both")
                    one.is_rejected = True
                    self.settle(one)
                elif one.must_be_rejected or (one.may_expire and row["reason"] in _CHUNK_REASONS):
                    self._take_chunk(one, position)
                elif row["reason"] == UNDECRYPTABLE and one.is_encrypted:
                    # It stays there if a run that found the key has the message too.
                    one.is_rejected = True
                    self.settle(one)
                elif position == one.positions[-1] and not one.is_excused:
                    self.complain(f"nothing missing: {one} is rejected: {row['reason']}")

    def _take_chunk(self, one: Sent, position: Position) -> None:
        if position in one.rejected or one.delivered:
            self.complain(f"once: {one}, {position} is in rejects twice, or in both")
        one.rejected.add(position)
        self.settle(one)

    def _is_paused(self, one: Sent, due_ms: int, holds: Callable[[Pause, int], bool]) -> bool:
        return any(holds(pause, due_ms) for pause in [*one.pauses, *self.pauses.get(one.topic, ())])

    def published(self, payload: bytes, properties: dict[str, str]) -> None:
        """The topic of due messages has stored one."""
        delivery = payload, int(properties.get("ledgerlake.occurrence", 0))
        one = self.sent.get(payload)
        if one is None:
            return self.complain(f"once: {payload[:30]!r} on the topic was never confirmed")
        if delivery in self._published - self._forgotten:
            self.complain(f"once: {delivery} is on the topic twice")
        if delivery not in self._in_table:
            self.complain(f"once: {delivery} is on the topic and not in the table")
        self._published.add(delivery)
        self._forgotten.discard(delivery)
        self.unpublished.discard(delivery)
        return None

    def copied(self) -> None:
        """A copy of the checkpoint begins."""
        self._published_at_copy = set(self._published)

    def restored(self) -> None:
        """The checkpoint is the copy now."""
        self._forgotten = self._published - self._published_at_copy

    def check_latest(self, lake: Lake) -> None:
        """Compare the table with the latest messages with what the copy has got."""
        expected: dict[str, Delivery] = {}
        for commit in lake.tables[COPY].commits:
            files = [self.disk.files[f"{COPY}/{name}"] for name in commit.files]
            # The table takes messages with a key, and orders nothing but what it takes.
            rows = [row for data in files for row in _rows(data) if row["key"] is not None]
            for row in sorted(_with_times(rows), key=lambda row: row["place"]):
                expected[row["key"]] = row["value"], _occurrence(row)
        stored = lake.tables[LATEST]
        newest = len(stored.commits) - 1
        deleted = stored.deleted(newest)
        found: dict[str, list[Delivery]] = {}
        for name in stored.files(newest):
            for number, row in enumerate(_rows(self.disk.files[f"{LATEST}/{name}"])):
                if number not in deleted.get(name, ()):
                    delivery = row["value"], _occurrence(row)
                    found.setdefault(row["key"], []).append(delivery)
        for key in expected.keys() | found.keys():
            if found.get(key) != [expected.get(key)]:
                self.complain(f"latest: {key} has {found.get(key)}, not {expected.get(key)}")

    def settle(self, one: Sent) -> None:
        """Nothing is owed of a message any more if it, or each of its chunks, is in rejects, or has
        been delivered: of one that repeats, all occurrences that must be, and the reject if it has
        to be one.
        """
        is_done = (
            one.is_rejected
            or (not one.is_cut and (one.repeats or bool(one.delivered)))
            or (one.rejected >= set(one.positions) and not one.is_sending)
        )
        came_at_once = self.may_come_at_once and 0 in one.delivered
        owed = {
            number
            for number in one.must - one.delivered
            if not self._is_paused(one, one.may[number], Pause.may_hold)
        }
        if (is_done and not owed) or came_at_once:
            self.unsettled.discard(one.payload)

    def passed(
        self, topic: str, before: Position, to: Position, committed_to: Position | None
    ) -> None:
        """A cursor has moved; ``committed_to`` is how far the batches reach that Spark has
        recorded.
        """
        for payload in list(self.unsettled):
            one = self.sent[payload]
            if one.topic != topic:
                continue
            for position in one.positions:
                if before < position <= to:
                    one.is_held = committed_to is not None and position <= committed_to
                    if not one.is_held:
                        self.complain(
                            f"nothing unpinned: the cursor passed {one}, which is in no table and "
                            "no committed state"
                        )

    def lost(self, still_there: Callable[[str, Position], bool]) -> list[Sent]:
        """Return the messages that are in no table and no longer on the broker, and were not in the
        checkpoint when the broker removed them.
        """
        return [
            one
            for one in map(self.sent.__getitem__, sorted(self.unsettled))
            if not one.is_held
            and not all(still_there(one.topic, position) for position in one.positions)
        ]


def _rows(data: bytes) -> list[dict[str, Any]]:
    """The rows of a file, with their times in microseconds."""
    table = pq.ParquetFile(io.BytesIO(data)).read(
        [*_COLUMNS, *_TIMES, "late", "value", "key"], use_threads=False
    )
    for name in _TIMES:
        place = table.schema.get_field_index(name)
        table = table.set_column(place, name, table.column(place).cast("int64"))
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _with_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of a micro-batch, each with its place among them: on a topic partition, a message
    that was not delayed is behind all that stand before it. A delayed one without a time of the
    broker is behind all others.
    """
    reached_us: dict[tuple[str, int], int] = {}
    positions = ["ledger_id", "entry_id", "batch_index"]
    for row in rows:
        row["position"] = tuple(-1 if row[name] is None else row[name] for name in positions)
    for row in sorted(rows, key=lambda row: row["position"]):
        topic = row["topic"], row["partition"]
        time_us = row["broker_timestamp"] or row["publish_time"] or 0
        is_delayed = row["delivered_at"] is not None
        if is_delayed:
            time_us = max(time_us, row["deliver_at"])
        else:
            time_us = reached_us[topic] = max(time_us, reached_us.get(topic, 0))
        is_behind_all = is_delayed and row["broker_timestamp"] is None
        row["place"] = is_behind_all, time_us, row["position"]
    return rows


def _occurrence(row: dict[str, Any]) -> int:
    return int(dict(row["properties"] or ()).get("ledgerlake.occurrence", 0))
