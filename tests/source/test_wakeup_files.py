"""When an idle topic partition wants a batch: what is written is read, what is damaged says
nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.source.wakeup_files import WakeupTimes, load_wakeup_times, save_wakeup_times
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = str(tmp_path / "deep" / "wakes")
    assert load_wakeup_times(Place(folder)) is None
    save_wakeup_times(Place(folder), 9, WakeupTimes({"a": 1, "b": 2}))
    written = WakeupTimes(
        {"a": 5, "b": 7}, {"a": [DueSpan(5, 1000, 3), DueSpan(60_001, 60_000, 4, is_estimate=True)], "b": []}
    )
    save_wakeup_times(Place(folder), 10, written)
    assert load_wakeup_times(Place(folder)) == written


def test_an_older_micro_batch_replaces_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "wakes")
    save_wakeup_times(Place(folder), 100, WakeupTimes({"a": 5}))
    save_wakeup_times(Place(folder), 99, WakeupTimes({"b": 7}))
    assert load_wakeup_times(Place(folder)) == WakeupTimes({"a": 5})


def test_files_of_older_micro_batches_go(tmp_path: Path) -> None:
    for batch_id in range(5):
        save_wakeup_times(Place(str(tmp_path)), batch_id, WakeupTimes({"a": batch_id}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000003.json", "0000000004.json"]


def test_a_file_has_the_counts_of_those_that_it_extends_for_topic_partitions_that_still_wait(tmp_path: Path) -> None:
    folder, spans = Place(str(tmp_path)), {name: [DueSpan(5, 1000, count)] for name, count in (("a", 1), ("b", 2))}
    save_wakeup_times(folder, 1, WakeupTimes({"a": 5, "b": 5, "c": 5}, spans | {"c": []}))
    save_wakeup_times(folder, 2, WakeupTimes({"a": 5, "b": 5}, {"a": []}), extends=1)
    save_wakeup_times(folder, 4, WakeupTimes({"b": 5, "d": 6}, {"d": []}), extends=2)
    assert load_wakeup_times(folder) == WakeupTimes({"b": 5, "d": 6}, {"b": spans["b"], "d": []})


def test_a_file_that_extends_none_removes_those_before_it_and_not_those_of_a_successor(tmp_path: Path) -> None:
    folder = Place(str(tmp_path))
    for batch_id, extends in ((1, None), (2, 1), (3, 2), (7, None), (8, 7)):
        save_wakeup_times(folder, batch_id, WakeupTimes({"a": batch_id}, {"a": []}), extends)
    assert [int(path.stem) for path in sorted(tmp_path.iterdir())] == [3, 7, 8]
    save_wakeup_times(folder, 4, WakeupTimes({"a": 4}, {"a": []}))
    assert load_wakeup_times(folder) == WakeupTimes({"a": 8}, {"a": []})


def test_a_file_without_counts_of_an_earlier_build_is_read_and_they_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "0000000007.json").write_text('{"version": 1, "wakes": {"a": 1}}')
    wakeups = load_wakeup_times(Place(str(tmp_path)))
    assert wakeups == WakeupTimes({"a": 1})
    assert not wakeups.counts_are_known
    assert WakeupTimes({"a": 1}, {"a": []}).counts_are_known
    assert WakeupTimes().counts_are_known


def test_one_file_for_all_of_an_earlier_build_is_read(tmp_path: Path) -> None:
    (tmp_path / "wakes.json").write_text('{"version": 1, "wakes": {"a": 1}}')
    assert load_wakeup_times(Place(str(tmp_path / "wakes"))) == WakeupTimes({"a": 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 3, "wakes": {"a": 1}, "extends": null}',
        '{"version": 2, "wakes": {"a": 1}}',
        '{"version": 2, "wakes": {"a": 1}, "extends": "6"}',
        '{"version": 2, "wakes": {"a": 1}, "extends": 6}',
        '{"version": 2, "wakes": {"a": 1}, "extends": 7}',
        '{"version": 1, "wakes": {"a": "x"}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": [[1, 0, 1, 0]]}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": [[1, 1000]]}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": [[-1, 1000, 1, 0]]}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": [[9000000000000000, 1000, 1, 0]]}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": [1]}}',
    ],
)
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "0000000007.json").write_text(text)
    assert load_wakeup_times(Place(str(tmp_path))) is None
