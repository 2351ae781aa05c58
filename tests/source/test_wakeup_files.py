"""When an idle topic partition wants a batch: written times are read, damaged files say nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import OffsetError
from ledgerlake.source.wakeup_files import (
    WakeupTimes,
    load_wakeup_times,
    read_wakeup_times,
    save_wakeup_times,
)
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    folder = str(tmp_path / "deep" / "wakes")
    assert load_wakeup_times(Place(folder)) is None
    save_wakeup_times(Place(folder), 9, WakeupTimes({"a": 1, "b": 2}))
    written = WakeupTimes(
        {"a": 5, "b": 7},
        {"a": [DueSpan(5, 1000, 3), DueSpan(60_001, 60_000, 4, is_estimate=True)], "b": []},
    )
    save_wakeup_times(Place(folder), 10, written)
    assert load_wakeup_times(Place(folder)) == written


def test_golden_files_are_read_and_written(tmp_path: Path) -> None:
    whole = (
        '{"version": 1, "extends": null, "expire_after_ms": 3600, "wakes": {"a": 5, "b": 7}, '
        '"due": {"a": [[5, 1000, 3, 0], [60001, 60000, 4, 1]], "b": []}}'
    )
    changed = (
        '{"version": 1, "extends": 9, "expire_after_ms": 3600, "wakes": {"a": 5, "b": 8}, '
        '"due": {"b": [[8, 1000, 1, 0]]}}'
    )
    golden, written = tmp_path / "golden", tmp_path / "written"
    golden.mkdir()
    (golden / "0000000009.json").write_text(whole)
    (golden / "0000000010.json").write_text(changed)
    spans = {
        "a": [DueSpan(5, 1000, 3), DueSpan(60_001, 60_000, 4, is_estimate=True)],
        "b": [DueSpan(8, 1000, 1)],
    }
    assert load_wakeup_times(Place(str(golden))) == WakeupTimes({"a": 5, "b": 8}, spans, 3600)
    for batch_id, wakeups, extends in (
        (9, WakeupTimes({"a": 5, "b": 7}, {"a": spans["a"], "b": []}, 3600), None),
        (10, WakeupTimes({"a": 5, "b": 8}, {"b": spans["b"]}, 3600), 9),
    ):
        save_wakeup_times(Place(str(written)), batch_id, wakeups, extends)
    for name, text in (("0000000009.json", whole), ("0000000010.json", changed)):
        assert json.loads((written / name).read_text()) == json.loads(text)


def test_newer_files_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "0000000007.json").write_text(
        '{"version": 2, "wakes": {"a": 1}, "extends": null, "due": {"a": []}}'
    )
    with pytest.raises(
        OffsetError, match=r"newer Ledgerlake \(wake-up times of version 2.*upgrade"
    ):
        read_wakeup_times(Place(str(tmp_path)))


def test_an_older_micro_batch_replaces_nothing(tmp_path: Path) -> None:
    folder = str(tmp_path / "wakes")
    save_wakeup_times(Place(folder), 100, WakeupTimes({"a": 5}, {"a": []}))
    save_wakeup_times(Place(folder), 99, WakeupTimes({"b": 7}, {"b": []}))
    assert load_wakeup_times(Place(folder)) == WakeupTimes({"a": 5}, {"a": []})


def test_files_of_older_micro_batches_go(tmp_path: Path) -> None:
    for batch_id in range(5):
        save_wakeup_times(Place(str(tmp_path)), batch_id, WakeupTimes({"a": batch_id}))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000003.json",
        "0000000004.json",
    ]


def test_a_file_has_the_counts_of_those_that_it_extends_for_topic_partitions_that_still_wait(
    tmp_path: Path,
) -> None:
    folder, spans = (
        Place(str(tmp_path)),
        {name: [DueSpan(5, 1000, count)] for name, count in (("a", 1), ("b", 2))},
    )
    save_wakeup_times(folder, 1, WakeupTimes({"a": 5, "b": 5, "c": 5}, spans | {"c": []}))
    save_wakeup_times(folder, 2, WakeupTimes({"a": 5, "b": 5}, {"a": []}), extends=1)
    save_wakeup_times(folder, 4, WakeupTimes({"b": 5, "d": 6}, {"d": []}), extends=2)
    assert load_wakeup_times(folder) == WakeupTimes({"b": 5, "d": 6}, {"b": spans["b"], "d": []})


def test_a_file_that_extends_none_removes_those_before_it_and_not_those_of_a_successor(
    tmp_path: Path,
) -> None:
    folder = Place(str(tmp_path))
    for batch_id, extends in ((1, None), (2, 1), (3, 2), (7, None), (8, 7)):
        save_wakeup_times(folder, batch_id, WakeupTimes({"a": batch_id}, {"a": []}), extends)
    assert [int(path.stem) for path in sorted(tmp_path.iterdir())] == [3, 7, 8]
    save_wakeup_times(folder, 4, WakeupTimes({"a": 4}, {"a": []}))
    assert load_wakeup_times(folder) == WakeupTimes({"a": 8}, {"a": []})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"version": 2, "wakes": {"a": 1}, "extends": null, "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": "6", "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": 6, "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": 7, "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {}}',
        '{"version": 1, "wakes": {"a": "x"}, "extends": null, "due": {"a": []}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {"a": [[1, 0, 1, 0]]}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {"a": [[1, 1000]]}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {"a": [[-1, 1000, 1, 0]]}}',
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {"a": [[9000000000000000, 1000, '
        "1, 0]]}}",
        '{"version": 1, "wakes": {"a": 1}, "extends": null, "due": {"a": [1]}}',
    ],
)
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "0000000007.json").write_text(text)
    assert load_wakeup_times(Place(str(tmp_path))) is None
