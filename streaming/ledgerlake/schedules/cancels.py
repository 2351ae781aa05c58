"""Cancels: a message with the property ``ledgerlake.cancel`` says that other messages are not to be
delivered after all.

    id=LEDGER:ENTRY[:BATCH]   the message that stands there (of a large one: its last chunk, or both
                              as ``first;last``); without ``BATCH`` all messages of a batch
    key=KEY                   every message with that key; of a binary key its base64 text
    schedule=ID               the message that waits under that id; ``schedules.schedules`` has its
                              rules, and no such cancel is kept

Rules kept here:
  - A cancel hits messages that are delayed when it is stored: messages before it that are due after
    it. So the result does not depend on how the stream was cut into micro-batches.
  - It is kept until all messages that were delayed then have left, so cancels do not pile up. If
    several have one target, those are kept that hit a message that the others do not; if the broker
    gives the time, that is the last one.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ledgerlake.errors import UsageError
from ledgerlake.schedules.schedules import MarkedPositions, Pauses, is_hit
from ledgerlake.stored.fields import exactly, fields_of, parse_stored, stored
from ledgerlake.wire.limits import MAX_SCHEDULE_CHARACTERS
from ledgerlake.wire.message_id import ChunkMessageId, MessageId, Position, parse_message_id
from ledgerlake.wire.schedules import CANCEL_PROPERTY, OCCURRENCE_PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

VERSION = 1

# Of one topic partition: the number of cancels, and the bytes of their targets.
MOST_CANCELS = 100_000
MOST_CANCEL_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request to cancel, stored at ``position`` at ``time_ms``; ``target`` is a message id's
    text, a key, or the id of a schedule.
    """

    by: Literal["id", "key", "schedule"]
    target: str
    position: Position
    time_ms: int
    until_ms: int = 0

    def hits(self, position: Position, deliver_ms: int) -> bool:
        return position < self.position and is_hit(deliver_ms, self.time_ms)


def cancel_of(properties: Mapping[str, str], position: Position, time_ms: int) -> Cancel | None:
    """Return the cancel that a message with some properties is; None if it is none, or is the copy
    of a message that was delivered.
    """
    if CANCEL_PROPERTY not in properties or OCCURRENCE_PROPERTY in properties:
        return None
    return parse_cancel(properties[CANCEL_PROPERTY], position, time_ms)


def parse_cancel(text: str, position: Position, time_ms: int) -> Cancel | None:
    """Return the cancel in a property's value; None if it names no target."""
    by, _, target = text.partition("=")
    if by == "key" and target:
        return Cancel("key", target, position, time_ms)
    if by == "schedule" and 1 <= len(target) <= MAX_SCHEDULE_CHARACTERS:
        return Cancel("schedule", target, position, time_ms)
    if by != "id":
        return None
    try:
        cancelled = _message_id(target)
    except UsageError:
        return None
    return (
        Cancel("id", str(cancelled), position, time_ms) if cancelled.position.is_storable else None
    )


def _message_id(text: str) -> MessageId:
    message_id = parse_message_id(text)
    return message_id.last if isinstance(message_id, ChunkMessageId) else message_id


class Cancels:
    """The cancels of one topic partition."""

    def __init__(self, cancels: Iterable[Cancel] = ()) -> None:
        self._by_target: dict[tuple[str, str], list[Cancel]] = {}
        self._reaches: dict[tuple[str, str], _Reach] = {}
        self._count = 0
        for cancel in cancels:
            self.add(cancel)

    def __len__(self) -> int:
        """Return how many cancels there are; counted once, as it is asked for often."""
        return self._count

    @property
    def target_bytes(self) -> int:
        """Return the bytes of the cancels' targets."""
        return sum(
            len(target.encode()) * len(cancels) for (_, target), cancels in self._by_target.items()
        )

    @property
    def all(self) -> list[Cancel]:
        return [cancel for cancels in self._by_target.values() for cancel in cancels]

    @cached_property
    def keys(self) -> frozenset[str]:
        """Return the keys whose messages are cancelled; computed once, as it is asked for often."""
        return frozenset(target for by, target in self._by_target if by == "key")

    @cached_property
    def _by_entry(self) -> dict[Position | None, _Reach]:
        """Return what the cancels by id reach together at each entry, and under None what those by
        key reach.
        """
        together: dict[Position | None, list[Cancel]] = {}
        for (by, target), cancels in self._by_target.items():
            together.setdefault(_message_id(target).position if by == "id" else None, []).extend(
                cancels
            )
        return {entry: _Reach(cancels) for entry, cancels in together.items()}

    @cached_property
    def ledger_ids(self) -> frozenset[str]:
        """Return the ledgers of the messages that are cancelled by id; computed once likewise. They
        are texts, since Python's hash of numbers has no secret.
        """
        return frozenset(target.partition(":")[0] for by, target in self._by_target if by == "id")

    def add(self, cancel: Cancel) -> None:
        target = cancel.by, cancel.target
        self._by_target.setdefault(target, []).append(cancel)
        self._count += 1
        self._reaches.pop(target, None)
        for computed in ("keys", "ledger_ids", "_by_entry"):
            vars(self).pop(computed, None)

    def is_cancelled(
        self,
        position: Position,
        batch_index: int,
        key: str | None,
        deliver_ms: int,
        stands_at: Position | None = None,
    ) -> bool:
        """Return whether a message was cancelled; ``batch_index`` is -1 for one that was not
        batched.

        Args:
            stands_at: the position of the marker that completed it, if one did.
        """
        message_id = MessageId(position.ledger_id, position.entry_id, batch_index)
        targets = {("id", str(position)), ("id", str(message_id))} | (
            {("key", key)} if key is not None else set()
        )
        return any(
            self._reach(target).hits(stands_at or position, deliver_ms)
            for target in targets
            if target in self._by_target
        )

    def may_hit(
        self, position: Position, deliver_ms: int, stands_at: Position | None = None
    ) -> bool:
        """Return whether some message of an entry may be cancelled, whatever its key and its place
        in a batch. ``stands_at`` is as in ``is_cancelled``.
        """
        reaches = (self._by_entry.get(entry) for entry in (None, position))
        return any(
            reach.hits(stands_at or position, deliver_ms) for reach in reaches if reach is not None
        )

    def _reach(self, target: tuple[str, str]) -> _Reach:
        if target not in self._reaches:
            self._reaches[target] = _Reach(self._by_target[target])
        return self._reaches[target]

    def needed_after(self, now_ms: int) -> list[Cancel]:
        """Return the cancels that are still needed when all messages due by now have left."""
        needed = [
            cancel for cancels in self._by_target.values() for cancel in _needed(cancels, now_ms)
        ]
        return [cancel for cancel in needed if cancel.until_ms > now_ms]


class _Reach:
    """What the cancels of one target hit, found in logarithmic time: a key may have 100,000 of
    them, and as many messages.

    Those are kept that are earlier in time than all cancels behind them by position. So their
    positions and their times both rise.
    """

    def __init__(self, cancels: Iterable[Cancel]) -> None:
        kept: list[Cancel] = []
        for cancel in sorted(cancels, key=lambda cancel: cancel.position, reverse=True):
            if not kept or cancel.time_ms < kept[-1].time_ms:
                kept.append(cancel)
        kept.reverse()
        self._positions = [cancel.position for cancel in kept]
        self._times_ms = [cancel.time_ms for cancel in kept]

    def hits(self, position: Position, deliver_ms: int) -> bool:
        """Return whether one of the cancels hits a message (see ``Cancel.hits``)."""
        first_behind = bisect_right(self._positions, position)
        return first_behind < len(self._positions) and deliver_ms > self._times_ms[first_behind]


def _needed(cancels: list[Cancel], now_ms: int) -> list[Cancel]:
    """Return the cancels of one target without which a message would be delivered, the last first.

    A later cancel hits more positions. It makes an earlier one superfluous, unless its sender's
    clock is ahead, so that it misses messages that are due sooner.
    """
    needed: list[Cancel] = []
    for cancel in sorted(cancels, key=lambda cancel: cancel.position, reverse=True):
        if not needed or max(cancel.time_ms, now_ms) < max(needed[-1].time_ms, now_ms):
            needed.append(cancel)
        else:
            needed[-1] = replace(needed[-1], until_ms=max(needed[-1].until_ms, cancel.until_ms))
    return needed


def cancels_to_json(
    cancels: Iterable[Cancel], marked: MarkedPositions | None = None, pauses: Pauses | None = None
) -> str:
    marks = {} if marked is None else marked.to_fields()
    data = {
        "version": VERSION,
        "cancels": list(cancels),
        "marked": marks,
        "pauses": pauses or Pauses(),
    }
    return json.dumps(data, default=fields_of)


def cancels_from_json(text: str) -> tuple[Cancels, MarkedPositions, Pauses]:
    """Read the cancels, and the marked positions and the pauses of all schedules that are stored
    with them.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return parse_stored(text, "cancels", _from_fields, VERSION)


def _from_fields(fields: dict[str, Any]) -> tuple[Cancels, MarkedPositions, Pauses]:
    cancels, marked, pauses = exactly(fields, "cancels", "marked", "pauses")
    return (
        Cancels(stored(list[Cancel], cancels)),
        MarkedPositions.from_fields(marked),
        stored(Pauses, pauses),
    )
