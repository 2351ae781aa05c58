"""Reads entries up to and including a position, at which there may be none."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import DeadlineError
from ledgerlake.source.last_entry import last_position

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.wire.connection import EntryReceived, Received
    from ledgerlake.wire.message_id import Position

# How long to wait for an entry before asking whether there is one.
_IDLE_FIRST_S = 0.2
_IDLE_MOST_S = 2.0


def next_until(reader: EntryReader, end: Position) -> EntryReceived | None:
    """Return the next entry up to and including ``end``; None if there is no more.

    The entry at ``end`` itself may never come: it can be a marker, a hole, or trimmed. So if
    nothing arrives, the broker is asked for its last entry. If that was read already, the range is
    complete.

    Raises:
        DeadlineError: the broker has more entries and does not send them.
    """
    return cast("EntryReceived | None", _next_until(reader, end, EntryReader.next))


def next_together_until(reader: EntryReader, end: Position) -> Received | None:
    """Return the next entries that came together, up to and including ``end``; None if there are no
    more.

    Raises:
        As ``next_until``.
    """
    return _next_until(reader, end, EntryReader.next_together)


def _next_until(
    reader: EntryReader, end: Position, take: Callable[[EntryReader, float], Received | None]
) -> Received | None:
    waited_s, pause_s = 0.0, _IDLE_FIRST_S
    while reader.after < end:
        received = take(reader, pause_s)
        if received is not None:
            return received.until(end)
        last = last_position(reader, end)
        if last is None or last <= reader.after:
            return None
        waited_s += pause_s
        if waited_s > reader.cluster.settings.poll_timeout_s:
            raise DeadlineError(
                f"the broker has entries of {reader.topic_partition} up to {last} and sends none; check its log"
            )
        reader.wake()
        pause_s = min(pause_s * 2, _IDLE_MOST_S)
    return None
