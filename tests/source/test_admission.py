"""When a micro-batch waits for more messages."""

from __future__ import annotations

from ledgerlake.source.admission import Patience


def test_the_first_batch_is_never_held_back() -> None:
    assert not Patience(100, 1000).holds(1, 50)


def test_a_batch_of_too_few_messages_waits_until_there_are_enough() -> None:
    patience = Patience(100, 1000)
    patience.holds(1, 50)
    assert patience.holds(99, 60)
    assert not patience.holds(100, 70)


def test_it_waits_no_longer_than_the_delay_since_the_last_batch_that_was_let_go() -> None:
    patience = Patience(100, 1000)
    patience.holds(1, 50)
    assert patience.holds(1, 1049)
    assert not patience.holds(1, 1050)
    assert patience.holds(1, 1060)
