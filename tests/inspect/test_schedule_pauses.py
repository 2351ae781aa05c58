"""Which messages that wait under an id are paused."""

from __future__ import annotations

from ledgerlake.inspect.schedule_pauses import paused_messages
from ledgerlake.schedules.schedules import Pauses, Repeating, ScheduledMessage
from ledgerlake.wire.message_id import Position


def test_of_the_messages_of_an_id_those_that_repeat_are_paused_each_by_its_own_pause() -> None:
    """One that was replaced waits until its last occurrence has left."""
    replaced = ScheduledMessage(Position(1, 1), 1, 5, Repeating(1, pauses=Pauses(70)))
    repeats = ScheduledMessage(Position(1, 2), 2, 6, Repeating(2))
    once = ScheduledMessage(Position(1, 3), 3, 9)
    messages = [replaced, repeats, once]
    assert paused_messages(messages, None) == {Position(1, 1): 70}
    assert paused_messages(messages, 80) == {Position(1, 1): 70, Position(1, 2): 80}
