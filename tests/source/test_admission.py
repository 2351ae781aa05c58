"""When a micro-batch waits for more messages."""

from __future__ import annotations

from ledgerlake.source.admission import BatchAdmission


def test_the_first_batch_is_never_held_back() -> None:
    assert not BatchAdmission(100, 1000).should_defer(1, 50)


def test_a_batch_of_too_few_messages_waits_until_there_are_enough() -> None:
    admission = BatchAdmission(100, 1000)
    admission.should_defer(1, 50)
    assert admission.should_defer(99, 60)
    assert not admission.should_defer(100, 70)


def test_it_waits_no_longer_than_the_delay_since_the_last_batch_that_was_let_go() -> None:
    admission = BatchAdmission(100, 1000)
    admission.should_defer(1, 50)
    assert admission.should_defer(1, 1049)
    assert not admission.should_defer(1, 1050)
    assert admission.should_defer(1, 1060)
