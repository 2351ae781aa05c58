"""Reads entries up to and including a position, at which there may be none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import DeadlineError
from ledgerlake.source.topic_end import last_position

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.wire.connection import EntryReceived, Received
    from ledgerlake.wire.message_id import Position

# How long to wait for an entry before asking whether there is one, and in all before beginning
# again.
_IDLE_FIRST_S = 0.2
_BEGIN_AGAIN_S = 0.5

_log = logging.getLogger(__name__)


def next_until(
    reader: EntryReader, end: Position, patience_s: float | None = None
) -> EntryReceived | None:
    """Return the next entry up to and including ``end``; None if there is no more.

    The entry at ``end`` itself may never come: it can be a marker, a hole, or trimmed. So if
    nothing arrives, the broker is asked for its last entry. If that was read already, the range is
    complete. If it was not, the broker's count of messages may be wrong, and the reader begins
    again with a new consumer. If the broker passes over the rest for two of these, one after the
    other, as it does with markers, the range is complete too, and the reader is behind its end. An
    entry that the broker names, and sends to none of the consumers, never comes either:
    ``reader.is_passed_over`` says so.

    Args:
        patience_s: how long to wait for an entry that the broker names; None for
            ``poll_timeout_s``.

    Raises:
        DeadlineError: the broker sends nothing, and cannot return its last entry either.
    """
    return cast("EntryReceived | None", _next_until(reader, end, EntryReader.next, patience_s))


def next_together_until(reader: EntryReader, end: Position) -> Received | None:
    """Return the next entries that came together, up to and including ``end``; None if there are no
    more.

    Raises:
        As ``next_until``.
    """
    return _next_until(reader, end, EntryReader.next_together, None)


def _next_until(
    reader: EntryReader,
    end: Position,
    take: Callable[[EntryReader, float], Received | None],
    patience_s: float | None,
) -> Received | None:
    most_s = reader.cluster.settings.poll_timeout_s if patience_s is None else patience_s
    waited_s, pause_s, is_alone, is_new, has_passed = 0.0, _IDLE_FIRST_S, True, False, False
    while reader.after < end:
        received = take(reader, pause_s)
        if received is not None:
            return received.until(end)
        last = last_position(reader, end)
        if last is None or last <= reader.after:
            return None
        had_passed, has_passed = has_passed, is_new and _has_passed(reader, last)
        if had_passed and has_passed:
            reader.after = last
            return None
        waited_s += pause_s
        if waited_s >= most_s:
            _pass_over(reader, last)
            return None
        # A broker that reads slowly gets more time by each consumer; a next one that shows the same
        # needs no more.
        pause_s = pause_s if has_passed else min(pause_s * 2, max(most_s - waited_s, _IDLE_FIRST_S))
        if waited_s >= _BEGIN_AGAIN_S:
            # One that gets the last entry again acknowledges nothing behind it.
            reader.begin_again(is_alone or has_passed)
            is_alone, is_new = not (is_alone or has_passed), True
    return None


def _has_passed(reader: EntryReader, last: Position) -> bool:
    """Return whether the broker has passed over all entries up to ``last`` for the consumer that
    the reader has just opened. It acknowledges what it does not send, such as markers, and the
    reader acknowledges nothing. Message expiry (TTL) acknowledges too, but not twice so soon: it
    takes two consumers, one after the other, to know.
    """
    if reader.read_compacted:
        return False
    passed = reader.mark_delete_position()
    return passed is not None and passed >= last and reader.is_fresh


def _pass_over(reader: EntryReader, last: Position) -> None:
    """Pass over what the broker named and did not send, if it can still read its last entry.

    Raises:
        DeadlineError: it cannot.
    """
    if reader.last_message() is None:
        raise DeadlineError(
            f"the broker has entries of {reader.topic_partition} up to {last} and sends none; "
            "check its log"
        )
    _log.warning(
        "the broker names %s as the last entry of %s, and does not send it",
        last,
        reader.topic_partition,
    )
    reader.is_passed_over = True
