"""Schedules by id: which delayed message waits under an id, which ones are no longer to be
delivered, and which occurrences a message has that repeats.

Rules kept here:
  - A message with an id, or a cancel of the id, hits the messages of that id that stand before it
    and are due after the time when it was stored: the rule of ``schedules.cancels``. So the result
    does not depend on how the stream was cut into micro-batches.
  - A message that is due already when it is stored hits others, and nothing hits it: it does not
    wait under its id.
  - If ``MOST_WAITING`` messages wait under an id, another one that replaces none of them changes
    nothing of the id. It is refused: at once if it repeats, else when it would have been due.
  - A message that was hit stays in the index. Its position is marked with the reason, and it
    becomes a reject when it would have been due.
  - A position has one mark: ``SCHEDULED`` or ``REPEATING`` while its message waits under its id, or
    the reason. ``release`` removes the mark. The state keeps the message for a while after that:
    one without such a mark does not wait any more, and a release costs no call into the state
    store.
  - A message that repeats waits in the index for its start, and then for one occurrence at a time.
    ``advance`` says what becomes of that one, and which one follows.
  - If the one that waits is released more than a minute late, a stop, or a micro-batch of more than
    a minute, has delayed it and all that are due with it. Then catch-up ``last`` delivers only the
    newest of them, and ``none`` only if that one is not as late. If it is not as late, all are
    delivered.
  - The rates of the messages that repeat, each as if its occurrences were always as near as its
    rule allows, are within a limit. A message beyond it is refused, and changes nothing of its id.
    Those that come in one micro-batch are taken in the order of the blocks of their ids, and a
    message counts until its last occurrence has left. So the refused messages depend on the cut
    into micro-batches.
  - If a message that repeats is hit while an occurrence waits that was due before, that occurrence
    is delivered, with all others up to the time of the hit.
  - A pause holds back the occurrences that are due after the time when it was stored, up to the
    time when its end was stored. They are not delivered later. A pause that has ended is kept while
    an occurrence may come that is due by its end: one that waits, or, in a pause of all, one of a
    message that is stored later, which is due at the time of the micro-batch at the earliest. If
    ``MOST_PAUSES`` are kept, no other one begins.
  - A pause of an id is of the last message before it: those before that one have ended.

A large message that its marker completes stands at the marker, and waits at its last chunk. So
events come in the order in which their messages stand.

A topic that was created again in another cluster may have lower ledger ids than what waits from the
former one. So what waits stands before a message that comes, unless it is behind it by position and
was not stored earlier. Then the one that waits hits the one that comes.

The messages of an id are in the order of the topic. Of two that wait, neither hits the other, and
each is due when it was stored or later. So the earlier one is due when the later one was stored, or
before: the times at which they were stored rise, and so do those at which they are due, whatever
the clocks of senders say. An event that goes back from the end stops at the first message that was
stored before it, and hits all others on its way: however many wait, its work is that of those it
removes.
"""

from __future__ import annotations

import base64
import json
from bisect import bisect_left
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from pyroaring import BitMap

from ledgerlake.reasons import CANCELLED, REPETITION_REFUSED, REPLACED, SCHEDULE_REFUSED, Reason
from ledgerlake.schedules.repetition import (
    CatchUp,
    Occurrence,
    RepetitionLimit,
    RepetitionRate,
    occurrences,
)
from ledgerlake.stored.fields import exactly, fields_of, parse_stored, stored
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.schedules.repetition import Repetition

VERSION = 1

SCHEDULED = "scheduled"
REPEATING = "repeating"


# The marks of messages that wait in the index and are not to be delivered.
REASONS = (REPLACED, CANCELLED, REPETITION_REFUSED, SCHEDULE_REFUSED)
_MARKS = (SCHEDULED, REPEATING, *REASONS)

# If the occurrence that waits is released later than this after it was due, a stop, or a
# micro-batch of more than a minute, has delayed the message (``CatchUp``).
MISSED_AFTER_MS = 60_000

# The messages that wait under an id: they are in one value of the state. By the broker's times it
# is one, and more only while a backlog is read. Clocks of senders may be years ahead, so that each
# message is due when the next one is stored.
MOST_WAITING = 10_000

# The pauses that have ended and are kept, of a message that repeats, or of all: likewise.
MOST_PAUSES = 1_000


def is_hit(deliver_ms: int, time_ms: int) -> bool:
    """Return whether a message that is due at ``deliver_ms`` is hit by one that is stored behind it
    at ``time_ms``.
    """
    return deliver_ms > time_ms


@dataclass(slots=True)
class Pauses:
    """The pauses of a message that repeats, or of all: when the one began that has not ended, and
    begins and ends of earlier ones, in order, as long as an occurrence may come that is due within.
    """

    since_ms: int | None = None
    ended_ms: list[int] = field(default_factory=list)

    def begin(self, time_ms: int) -> bool:
        """Begin a pause; return False if there is no room for it. Of two that have begun the
        earlier time counts: a sender whose clock is ahead does not undo the pause of another.
        """
        if self.since_ms is None and len(self.ended_ms) >= 2 * MOST_PAUSES:
            return False
        since_ms = max([time_ms, *self.ended_ms[-1:]])
        self.since_ms = since_ms if self.since_ms is None else min(since_ms, self.since_ms)
        return True

    def end(self, time_ms: int) -> None:
        since_ms, self.since_ms = self.since_ms, None
        if since_ms is None or time_ms <= since_ms:
            return
        if self.ended_ms[-1:] == [since_ms]:
            self.ended_ms[-1] = time_ms
        else:
            self.ended_ms += [since_ms, time_ms]

    def holds_back(self, due_ms: int) -> bool:
        """Return whether a time is after the begin of a pause, and not after its end."""
        is_within = bisect_left(self.ended_ms, due_ms) % 2 == 1
        return is_within or (self.since_ms is not None and self.since_ms < due_ms)

    def forget_before(self, due_ms: int) -> None:
        """Forget the pauses that ended before a time."""
        del self.ended_ms[: bisect_left(self.ended_ms, due_ms) // 2 * 2]


@dataclass(frozen=True, slots=True)
class Repeating:
    """How far a message that repeats has come.

    ``start_ms`` is the time from which its rule counts, ``occurrence`` the one that waits in the
    index, None until the start. Occurrences that are due after ``ends_ms`` are not delivered, for
    the reason ``ends_by``; those due in ``pauses`` neither. ``rate`` counts towards the limit.
    """

    start_ms: int
    occurrence: Occurrence | None = None
    ends_ms: int | None = None
    ends_by: str | None = None
    pauses: Pauses = field(default_factory=Pauses)
    rate: RepetitionRate = field(default_factory=RepetitionRate)

    def is_over(self, occurrence: Occurrence) -> bool:
        """Return whether the message was hit before an occurrence is due."""
        return self.ends_ms is not None and occurrence.due_ms > self.ends_ms

    def has_due(self, occurrence: Occurrence | None, cutoff_ms: int) -> bool:
        """Return whether there is an occurrence that is due by a time, and the message is
        not over.
        """
        return (
            occurrence is not None
            and occurrence.due_ms <= cutoff_ms
            and not self.is_over(occurrence)
        )


@dataclass(frozen=True, slots=True)
class ScheduledMessage:
    """A message that waits under an id: where it stands, when it was stored, and when it is due."""

    position: Position
    time_ms: int
    deliver_ms: int
    repeating: Repeating | None = None

    def stands_before(self, position: Position, time_ms: int) -> bool:
        """Return whether a message that waits stands before one that comes and was stored at
        ``time_ms``; see the module.
        """
        return self.position != position and (self.position < position or self.time_ms < time_ms)


@dataclass(frozen=True, slots=True)
class Step:
    """What becomes of a message that repeats when it is due: the occurrence to deliver, if any, and
    when the message is due again, None if it has ended. ``is_empty``: it never had an occurrence.
    ``passed``: so many further occurrences are not delivered either.
    """

    delivered: Occurrence | None
    next_ms: int | None
    is_empty: bool = False
    passed: int = 0


class ScheduleStore(Protocol):
    """The messages that wait, by id. ``rate`` is that of all that repeat."""

    rate: RepetitionRate

    def load(self, schedule_id: str) -> list[ScheduledMessage]:
        """Return the messages that wait under an id, as a list that may be changed."""

    def store(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        """Keep the messages that wait under an id; if there are none, forget the id."""

    def load_repeating(self, schedule_id: str) -> list[ScheduledMessage]:
        """Return those messages of an id that repeat, as a list that may be changed."""

    def store_repeating(self, schedule_id: str, messages: list[ScheduledMessage]) -> None:
        """Keep those messages of an id that repeat."""


class MarkedPositions:
    """Positions with a mark, as bitmaps by mark and ledger."""

    def __init__(self) -> None:
        self._bitmaps: dict[str, dict[int, BitMap]] = {}

    def __bool__(self) -> bool:
        return bool(self._bitmaps)

    def mark(self, position: Position, mark: str) -> None:
        """Give a position a mark in place of the one that it has."""
        self.take(position)
        self._bitmaps.setdefault(mark, {}).setdefault(position.ledger_id, BitMap()).add(
            position.entry_id
        )

    def has(self, position: Position, mark: str) -> bool:
        """Return whether a position has a mark."""
        return position.entry_id in self._bitmaps.get(mark, {}).get(position.ledger_id, ())

    def is_waiting(self, position: Position) -> bool:
        """Return whether a message waits under its id."""
        return self.has(position, SCHEDULED) or self.has(position, REPEATING)

    def take(self, position: Position) -> str | None:
        """Remove the mark of a position, and return it."""
        for mark, ledgers in self._bitmaps.items():
            entries = ledgers.get(position.ledger_id)
            if entries is None or position.entry_id not in entries:
                continue
            entries.discard(position.entry_id)
            if not entries:
                del ledgers[position.ledger_id]
            if not ledgers:
                del self._bitmaps[mark]
            return mark
        return None

    def discard(
        self, mark: str, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]
    ) -> None:
        """Remove a mark of many positions."""
        ledgers = self._bitmaps.get(mark, {})
        # Marks may be in many more ledgers than the messages that are due together.
        for ledger_id in ledgers.keys() & set(np.unique(ledger_ids).tolist()):
            ledgers[ledger_id] -= BitMap(entry_ids[ledger_ids == ledger_id].astype(np.uint32))
            if not ledgers[ledger_id]:
                del ledgers[ledger_id]
        if not ledgers:
            self._bitmaps.pop(mark, None)

    def are_marked(
        self,
        ledger_ids: NDArray[np.int64],
        entry_ids: NDArray[np.int64],
        marks: Iterable[str] = _MARKS,
    ) -> NDArray[np.bool_]:
        """Return a mask of the positions that have one of some marks."""
        is_marked = np.zeros(len(ledger_ids), dtype=bool)
        of_rows = set(np.unique(ledger_ids).tolist())
        for mark in marks:
            ledgers = self._bitmaps.get(mark, {})
            for ledger_id in ledgers.keys() & of_rows:
                rows = np.flatnonzero(ledger_ids == ledger_id)
                hits = BitMap(entry_ids[rows].astype(np.uint32)) & ledgers[ledger_id]
                is_marked[rows] |= np.isin(entry_ids[rows], np.array(hits.to_array(), np.int64))
        return is_marked

    def to_fields(self) -> dict[str, dict[str, str]]:
        """Return the bitmaps for JSON."""
        return {
            mark: {str(ledger): _text(entries) for ledger, entries in ledgers.items()}
            for mark, ledgers in self._bitmaps.items()
        }

    @classmethod
    def from_fields(cls, fields: Any) -> MarkedPositions:
        """Read what ``to_fields`` returned.

        Raises:
            ValueError: it is something else.
        """
        marked = cls()
        for mark, ledgers in stored(dict[str, dict[str, str]], fields).items():
            if mark not in _MARKS:
                raise ValueError(f"the mark {mark}")
            marked._bitmaps[mark] = {int(ledger): _bitmap(text) for ledger, text in ledgers.items()}
        return marked


def _text(entries: BitMap) -> str:
    # Neighbours often have an id each.
    entries.run_optimize()
    return base64.b64encode(entries.serialize()).decode()


def _bitmap(text: str) -> BitMap:
    try:
        return BitMap.deserialize(base64.b64decode(text, validate=True))
    except IndexError:
        raise ValueError("a damaged bitmap") from None


class Schedules:
    """The schedules of one topic partition in one micro-batch.

    Args:
        pauses: the pauses of all schedules.
        limit: of the messages that repeat.
    """

    def __init__(
        self,
        store: ScheduleStore,
        marked: MarkedPositions,
        pauses: Pauses | None = None,
        limit: RepetitionLimit | None = None,
    ) -> None:
        self.marked = marked
        self.pauses = pauses or Pauses()
        self._store = store
        self._limit = limit or RepetitionLimit()

    def put(
        self, schedule_id: str, message: ScheduledMessage, stands_at: Position | None = None
    ) -> bool:
        """Add a delayed message: it replaces those that wait under its id. Return False if it
        repeats and is refused, because there are too many.

        Args:
            stands_at: the position of the marker that completed it, if one did.
        """
        stands_at = stands_at or message.position
        if message.repeating is None and message.deliver_ms <= message.time_ms:
            self.end(schedule_id, stands_at, message.time_ms, REPLACED)
            return True
        if not self._has_room(schedule_id, message, stands_at):
            self.marked.mark(
                message.position, REPETITION_REFUSED if message.repeating else SCHEDULE_REFUSED
            )
            return message.repeating is None
        position = message.position
        waiting, place = self._hit(schedule_id, stands_at, message.time_ms, REPLACED)
        first_behind = waiting[place] if place < len(waiting) else None
        # It waits already if the rest of its entry was read, after a range that ended within.
        is_known = first_behind is not None and first_behind.position == position
        if (
            first_behind is not None
            and not is_known
            and is_hit(message.deliver_ms, first_behind.time_ms)
        ):
            self.marked.mark(position, REPLACED)
        elif not is_known:
            waiting.insert(place, message)
            self.marked.mark(position, SCHEDULED if message.repeating is None else REPEATING)
            self._store.rate += _rate_of(message)
        self._store.store(schedule_id, waiting)
        return True

    def _has_room(self, schedule_id: str, message: ScheduledMessage, stands_at: Position) -> bool:
        """Return whether a message is within the limits, if it replaces the last one of its id at
        most.
        """
        last = self._last_before(schedule_id, stands_at, message.time_ms)
        replaced = last if last is not None and is_hit(last.deliver_ms, message.time_ms) else None
        if replaced is None and len(self._store.load(schedule_id)) >= MOST_WAITING:
            return False
        if message.repeating is None:
            return True
        freed = RepetitionRate() if replaced is None else _rate_of(replaced)
        return self._limit.allows(self._store.rate - freed + _rate_of(message))

    def end(self, schedule_id: str, position: Position, time_ms: int, reason: Reason) -> None:
        """End a schedule: by a message with its id that was delivered at once, or by a cancel."""
        waiting, _ = self._hit(schedule_id, position, time_ms, reason)
        self._store.store(schedule_id, waiting)

    def pause(self, schedule_id: str | None, position: Position, time_ms: int) -> bool:
        """Pause the message that repeats under an id, or all that repeat. Return False if it is
        refused, because too many pauses are kept.
        """
        pauses, _ = self._pauses(schedule_id, position, time_ms)
        return pauses.begin(time_ms)

    def resume(self, schedule_id: str | None, position: Position, time_ms: int) -> None:
        """End a pause."""
        pauses, next_due_ms = self._pauses(schedule_id, position, time_ms)
        pauses.end(time_ms)
        pauses.forget_before(next_due_ms)

    def advance(
        self,
        schedule_id: str,
        position: Position,
        rule: Repetition,
        cutoff_ms: int,
        most_passed: int = 0,
    ) -> Step:
        """Return what becomes of a message that repeats and is due.

        Args:
            most_passed: so many further occurrences may be passed in this step, if they are due and
                not delivered.
        """
        waiting = self._store.load_repeating(schedule_id)
        # The first one is due first.
        place, message = next(
            found for found in enumerate(waiting) if found[1].position == position
        )
        repeating = message.repeating
        assert repeating is not None
        current, passed = repeating.occurrence, 0
        coming = _in_order(occurrences(rule, schedule_id, repeating.start_ms, current), message)
        following = next(coming, None)
        missed = (
            current is not None and rule.catch_up != CatchUp.ALL and _is_late(current, cutoff_ms)
        )
        catch_up = rule.catch_up if missed else CatchUp.ALL
        is_delivered = current is not None and self._is_delivered(
            repeating, current, following, catch_up, cutoff_ms
        )
        if current is not None and not is_delivered:
            following, passed = self._pass(
                repeating, following, coming, catch_up, cutoff_ms, most_passed
            )
        if following is None or repeating.is_over(following):
            self.marked.take(position)
            if following is not None and repeating.ends_by is not None:
                self.marked.mark(position, repeating.ends_by)
            del waiting[place]
            self._store.rate -= repeating.rate
        else:
            repeating.pauses.forget_before(following.due_ms)
            later = replace(repeating, occurrence=following)
            waiting[place] = replace(message, deliver_ms=following.due_ms, repeating=later)
        self._store.store_repeating(schedule_id, waiting)
        next_ms = None if following is None else following.due_ms
        is_empty = current is None and following is None
        return Step(current if is_delivered else None, next_ms, is_empty, passed)

    def _pass(
        self,
        repeating: Repeating,
        following: Occurrence | None,
        coming: Iterator[Occurrence],
        catch_up: CatchUp,
        cutoff_ms: int,
        most: int,
    ) -> tuple[Occurrence | None, int]:
        """Return the first occurrence that is not passed, and how many were before it."""
        passed = 0
        while following is not None and repeating.has_due(following, cutoff_ms):
            # The occurrences of the last minute are few. The next step would take the first of them
            # for one that nothing delayed.
            goes_on = catch_up != CatchUp.ALL and not _is_late(following, cutoff_ms)
            if passed >= most and not goes_on:
                break
            after_it = next(coming, None)
            if self._is_delivered(repeating, following, after_it, catch_up, cutoff_ms):
                break
            following, passed = after_it, passed + 1
        return following, passed

    def _is_delivered(
        self,
        repeating: Repeating,
        occurrence: Occurrence,
        following: Occurrence | None,
        catch_up: CatchUp,
        cutoff_ms: int,
    ) -> bool:
        """Return whether an occurrence that is due was neither held back by a pause nor missed."""
        if self.pauses.holds_back(occurrence.due_ms) or repeating.pauses.holds_back(
            occurrence.due_ms
        ):
            return False
        if catch_up == CatchUp.ALL:
            return True
        is_newest = not repeating.has_due(following, cutoff_ms)
        return is_newest and (catch_up == CatchUp.LAST or not _is_late(occurrence, cutoff_ms))

    def repeats(self, position: Position) -> bool:
        """Return whether a message repeats, and was not hit."""
        return self.marked.has(position, REPEATING)

    def end_repetition(self, schedule_id: str, position: Position) -> None:
        """Forget a message whose rule can no longer be used."""
        self.marked.take(position)
        waiting = self._store.load_repeating(schedule_id)
        ended = [message for message in waiting if message.position == position]
        self._store.rate -= sum(map(_rate_of, ended), RepetitionRate())
        self._store.store_repeating(
            schedule_id, [message for message in waiting if message not in ended]
        )

    def release(
        self, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]
    ) -> dict[int, Reason]:
        """Forget messages that are due and do not repeat; return the numbers of those that are not
        to be delivered, each with the reason.
        """
        self.marked.discard(SCHEDULED, ledger_ids, entry_ids)
        withheld: dict[int, Reason] = {}
        for row in np.flatnonzero(self.marked.are_marked(ledger_ids, entry_ids, REASONS)).tolist():
            reason = self.marked.take(Position(int(ledger_ids[row]), int(entry_ids[row])))
            assert reason is not None
            withheld[row] = Reason(reason)
        return withheld

    def _hit(
        self, schedule_id: str, position: Position, time_ms: int, reason: Reason
    ) -> tuple[list[ScheduledMessage], int]:
        """Mark the messages of an id that are hit; return the others, and how many stand before."""
        waiting = self._store.load(schedule_id)
        count = _count_before(waiting, position, time_ms)
        for place in range(count - 1, -1, -1):
            message = waiting[place]
            if is_hit(message.deliver_ms, time_ms):
                del waiting[place]
                count -= 1
                self.marked.mark(message.position, reason)
                self._store.rate -= _rate_of(message)
            elif message.repeating is not None and _ends_before(time_ms, message.repeating):
                ended = replace(message.repeating, ends_ms=time_ms, ends_by=reason)
                waiting[place] = replace(message, repeating=ended)
            if message.time_ms <= time_ms:
                break
        return waiting, count

    def _pauses(
        self, schedule_id: str | None, position: Position, time_ms: int
    ) -> tuple[Pauses, int]:
        """Return the pauses that a message changes, and the time before which none of them is
        needed.
        """
        if schedule_id is None:
            return self.pauses, 0
        message = self._last_before(schedule_id, position, time_ms)
        if message is None or message.repeating is None:
            return Pauses(), 0
        return message.repeating.pauses, message.deliver_ms

    def _last_before(
        self, schedule_id: str, position: Position, time_ms: int
    ) -> ScheduledMessage | None:
        """Return the message of an id that waits when another one is stored."""
        waiting = self._store.load(schedule_id)
        count = _count_before(waiting, position, time_ms)
        return waiting[count - 1] if count else None


def _is_late(occurrence: Occurrence, cutoff_ms: int) -> bool:
    return cutoff_ms - occurrence.due_ms > MISSED_AFTER_MS


def _rate_of(message: ScheduledMessage) -> RepetitionRate:
    return RepetitionRate() if message.repeating is None else message.repeating.rate


def _ends_before(time_ms: int, repeating: Repeating) -> bool:
    """Return whether a hit that was stored at a time ends a message that repeats sooner than
    before.
    """
    return repeating.ends_ms is None or time_ms < repeating.ends_ms


def _count_before(waiting: list[ScheduledMessage], position: Position, time_ms: int) -> int:
    """Return how many messages of an id stand before one that comes: the first ones."""
    return bisect_left(
        waiting, True, key=lambda message: not message.stands_before(position, time_ms)
    )


def _in_order(following: Iterator[Occurrence], message: ScheduledMessage) -> Iterator[Occurrence]:
    """Yield the occurrences that follow that of a message: jitter does not change their order, and
    each has a time of its own.
    """
    assert message.repeating is not None
    earliest_ms = message.deliver_ms + (message.repeating.occurrence is not None)
    for occurrence in following:
        yield (in_order := replace(occurrence, due_ms=max(occurrence.due_ms, earliest_ms)))
        earliest_ms = in_order.due_ms + 1


def waiting_to_json(messages: list[ScheduledMessage]) -> str:
    """Write messages that repeat."""
    return json.dumps({"version": VERSION, "messages": messages}, default=fields_of)


def waiting_from_json(text: str) -> list[ScheduledMessage]:
    """Read messages that repeat.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "schedules", _from_fields, VERSION)


def _from_fields(fields: dict[str, Any]) -> list[ScheduledMessage]:
    (messages,) = exactly(fields, "messages")
    waiting: list[ScheduledMessage] = stored(list[ScheduledMessage], messages)
    return waiting
