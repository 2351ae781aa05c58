"""Which row of a key is right, missing or outdated, by the messages that the topic has."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from ledgerlake.verify import latest_rule
from ledgerlake.verify.latest_rule import MESSAGE, REPEATS_US, Finding, LatestMessages, Span, judge

SPANS = {0: Span((1, 10), (1, 99)), 1: Span((2, 0), (2, 99))}


def message(key: str, entry: int, **fields: Any) -> Any:
    """A message at an entry of the first topic partition, stored at the time of that number."""
    values = {
        "key": key.encode(),
        "ledger_id": 1,
        "entry_id": entry,
        "batch_index": -1,
        "time_us": entry,
        **fields,
    }
    made = np.zeros(1, dtype=MESSAGE)
    for name, value in values.items():
        made[name] = value
    return made


def elsewhere(key: str, entry: int, **fields: Any) -> Any:
    """A message of the second topic partition."""
    return message(key, entry, **{"partition": 1, "ledger_id": 2, **fields})


def found(messages: list[Any], rows: list[Any]) -> list[str]:
    """The findings of keys whose messages were read in this order."""
    kept = []
    for partition in (0, 1):
        latest = LatestMessages()
        for part in messages:
            latest.add(part[part["partition"] == partition])
        kept.append(latest.last_of_each())
    none = np.empty(0, dtype=MESSAGE)
    findings = judge(np.concatenate(kept), np.concatenate([none, *rows]), SPANS)
    return sorted(finding.value for finding, count in findings.items() for _ in range(count))


def test_the_last_message_by_position_is_right_and_an_earlier_one_is_outdated() -> None:
    sent = [message("a", 10), message("a", 12, time_us=1), message("b", 11)]
    assert found(sent, [message("a", 12), message("b", 11)]) == ["right", "right"]
    assert found(sent, [message("a", 10), message("b", 11)]) == ["outdated", "right"]


def test_of_a_batch_the_last_message_counts() -> None:
    sent = [message("a", 10, batch_index=0), message("a", 10, batch_index=1)]
    assert found(sent, [message("a", 10, batch_index=1)]) == ["right"]
    assert found(sent, [message("a", 10, batch_index=0)]) == ["outdated"]


def test_a_key_without_a_row_is_missing_unless_it_was_deleted() -> None:
    deletion = message("a", 12, is_deletion=True)
    assert found([message("a", 10)], []) == ["missing"]
    assert found([message("a", 10), deletion], []) == ["right"]
    assert found([message("a", 10), deletion, message("a", 13)], []) == ["missing"]


def test_a_deleted_key_that_is_still_there_is_outdated() -> None:
    deletion = message("a", 12, is_deletion=True)
    assert found([message("a", 10), deletion], [message("a", 10)]) == ["outdated"]
    assert found([deletion], [message("a", 5)]) == ["outdated"]


def test_a_row_of_no_message_is_outdated() -> None:
    assert found([message("a", 10)], [message("a", 11)]) == ["outdated"]
    assert found([], [message("a", 11)]) == ["outdated"]


def test_a_row_whose_message_is_trimmed_must_not_be_older_than_what_the_topic_has() -> None:
    assert found([], [message("a", 5)]) == ["trimmed"]
    assert found([message("a", 10)], [message("a", 5)]) == ["outdated"]
    assert found([message("b", 10)], [message("a", 5), message("b", 10)]) == ["right", "trimmed"]


def test_a_topic_partition_that_was_not_read_says_nothing() -> None:
    assert found([message("a", 10)], [message("a", 50, partition=7)]) == ["trimmed"]


def test_a_row_beyond_what_was_read_is_undecided() -> None:
    assert found([message("a", 10)], [message("a", 100)]) == ["undecided"]


def test_a_delayed_message_counts_from_its_delivery() -> None:
    delayed = message("a", 10, time_us=30, was_delayed=True)
    assert found([delayed, message("a", 40)], [message("a", 40)]) == ["right"]
    assert found([delayed, message("a", 20)], [message("a", 10)]) == ["right"]
    # A clock of the planner may have delivered it before the other one was read.
    assert found([delayed, message("a", 20)], [message("a", 20)]) == ["undecided"]
    assert found([delayed, message("a", 20), message("a", 25)], [message("a", 20)]) == ["outdated"]
    assert found([message("a", 30), message("a", 40)], [message("a", 30)]) == ["outdated"]


def test_a_delayed_message_that_left_with_a_later_micro_batch_than_a_plain_one_that_came_after_it_was_due_is_undecided() -> (
    None
):
    delayed = message("a", 10, time_us=30, was_delayed=True)
    assert found([delayed, message("a", 40)], [message("a", 10)]) == ["undecided"]


def test_of_two_delayed_messages_the_one_that_is_due_later_counts() -> None:
    late, soon = (
        message("a", entry, time_us=due, was_delayed=True) for entry, due in ((10, 60), (11, 50))
    )
    assert found([late, soon], [message("a", 10)]) == ["right"]
    assert found([late, soon], [message("a", 11)]) == ["outdated"]


def test_a_trimmed_message_that_was_delivered_late_is_not_older_than_a_plain_one() -> None:
    row = message("a", 5, time_us=30, was_delayed=True)
    assert found([message("a", 20)], [row]) == ["trimmed"]
    assert found([message("a", 40)], [row]) == ["trimmed"]


def test_between_topic_partitions_the_time_decides_unless_micro_batches_did() -> None:
    sent = [message("a", 10), message("a", 20), elsewhere("a", 30), elsewhere("a", 40)]
    assert found(sent, [elsewhere("a", 40)]) == ["right"]
    assert found(sent, [message("a", 20)]) == ["undecided"]
    assert found(sent, [message("a", 10)]) == ["outdated"]
    assert found(sent, [elsewhere("a", 30)]) == ["outdated"]
    assert found(sent, []) == ["missing"]
    assert found([*sent, elsewhere("a", 50, is_deletion=True)], []) == ["right"]
    assert found([*sent, message("a", 21, is_deletion=True)], []) == ["undecided"]


def test_a_message_that_may_not_count_leaves_its_key_undecided_until_a_later_one() -> None:
    unsure = message("a", 11, is_uncertain=True)
    for row in (message("a", 10), message("a", 11)):
        assert found([message("a", 10), unsure], [row]) == ["undecided"]
    assert found([message("a", 10), unsure, message("a", 12)], [message("a", 10)]) == ["outdated"]


def test_many_messages_of_few_keys_are_compared_as_plain_python_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latest_rule, "_LEAST_MESSAGES", 7)
    random = np.random.default_rng(3)
    expected: dict[int, Any] = {}
    latest = LatestMessages()
    for entry in range(10, 90):
        key = int(random.integers(12))
        sent = message(f"k{key}", entry, is_deletion=random.random() < 0.2)
        expected[key] = sent
        latest.add(sent)
    rows = [sent for sent in expected.values() if not sent["is_deletion"][0]]
    kept = latest.last_of_each()
    assert len(kept) == len(expected)
    assert judge(kept, np.concatenate(rows), SPANS) == Counter({Finding.RIGHT: len(expected)})


def test_of_a_key_with_a_message_that_repeats_nothing_is_known() -> None:
    repeats = message("a", 10, was_delayed=True, is_uncertain=True, time_us=REPEATS_US)
    for sent in (
        [repeats],
        [repeats, message("a", 20)],
        [repeats, message("a", 20, was_delayed=True)],
    ):
        for rows in ([], [message("a", 10, time_us=30)], [message("a", 20)]):
            assert found([*sent, message("b", 11)], [*rows, message("b", 11)]) == [
                "right",
                "undecided",
            ]
