"""When the planner is told to plan a micro-batch although nothing new has come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun, last_run
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.wakeups import Wakeups
from ledgerlake.source.wakeup_files import (
    WakeupTimes,
    load_times_ms,
    load_wakeup_times,
    newest_wakeup_batch,
    save_wakeup_times,
)
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "persistent://public/default/orders"
SPANS = [DueSpan(9000, 1000, 1)]


def commit(folder: Path, batch_id: int, clock: dict[str, str] | None = None) -> None:
    offset = json.dumps(
        {"version": 1, "positions": {TOPIC: {"ledger": 4, "entry": 7, **(clock or {})}}}
    )
    for log, text in (("offsets", f"v2\n{{}}\n{offset}"), ("commits", "v2\n{}")):
        (folder / log).mkdir(parents=True, exist_ok=True)
        (folder / log / str(batch_id)).write_text(text)


def run(
    checkpoint: Checkpoint, batch_id: int, wakeups: Wakeups, wakeup_times_ms: dict[str, int | None]
) -> None:
    """What a micro-batch leaves beside the checkpoint."""
    wakeups.update(batch_id, wakeup_times_ms, {name: SPANS for name in wakeup_times_ms})
    BatchEnds(checkpoint).add(LastRun(batch_id, wakeups.batch_id), {}, {})


def times_ms(wakeups: Wakeups) -> dict[str, int]:
    """What the planner reads."""
    return load_times_ms(wakeups.folder)


def started(checkpoint: Checkpoint, expire_after_ms: int = 0) -> Wakeups:
    wakeups = Wakeups(checkpoint, expire_after_ms)
    wakeups.load(last_run(checkpoint))
    return wakeups


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two micro-batches; a message that waits came with the first."""
    new_checkpoint = Checkpoint(Place(str(tmp_path)))
    wakeups = started(new_checkpoint)
    for batch_id, wakeup_times_ms in ((3, {TOPIC: 9000}), (4, {})):
        run(new_checkpoint, batch_id, wakeups, wakeup_times_ms)  # type: ignore[arg-type]
        commit(tmp_path, batch_id)
    return new_checkpoint


def test_a_restart_knows_the_times(checkpoint: Checkpoint) -> None:
    wakeups = started(checkpoint)
    assert times_ms(wakeups) == {TOPIC: 9000}
    assert wakeups.batch_id == 3


def test_another_time_to_expire_wakes_those_with_messages_in_state(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    shorter = started(checkpoint, expire_after_ms=500)
    assert times_ms(shorter) == {TOPIC: 1}
    assert shorter.due_spans == {TOPIC: SPANS}
    # The start may be ended before its first micro-batch.
    assert times_ms(started(checkpoint, expire_after_ms=500)) == {TOPIC: 1}
    run(checkpoint, 5, shorter, {TOPIC: 9000})
    commit(tmp_path, 5)
    assert times_ms(started(checkpoint, expire_after_ms=500)) == {TOPIC: 9000}


def test_times_that_were_copied_before_the_commit_log_wake_everything(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    commit(tmp_path, 5)
    wakeups = started(checkpoint)
    assert times_ms(wakeups) == {TOPIC: 1}


def test_a_time_that_wakes_everything_is_beyond_the_clock_of_the_last_micro_batch(
    tmp_path: Path,
) -> None:
    commit(tmp_path, 3, {"clock": "2096-10-02T07:06:40.000Z"})
    assert times_ms(started(Checkpoint(Place(str(tmp_path))))) == {TOPIC: 4_000_000_000_001}


def test_a_note_is_read_although_a_file_of_a_later_micro_batch_was_left(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    save_wakeup_times(Place(f"{tmp_path}/ledgerlake/wakes"), 13, WakeupTimes({TOPIC: 7}))
    wakeups = started(checkpoint)
    wakeups.update(5, {TOPIC: 9000}, {TOPIC: SPANS})
    assert times_ms(wakeups) == {TOPIC: 9000}


@pytest.mark.parametrize("counted", [2, 4, None])
def test_times_that_were_copied_before_or_after_what_is_beside_them_wake_everything(
    checkpoint: Checkpoint, counted: int | None
) -> None:
    BatchEnds(checkpoint).add(LastRun(4, counted), {}, {})
    assert times_ms(started(checkpoint)) == {TOPIC: 1}


def test_a_checkpoint_that_does_not_say_what_ran_last_wakes_everything_once(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "ledgerlake" / "ends.json").unlink()
    wakeups = started(checkpoint)
    assert times_ms(wakeups) == {TOPIC: 1}
    run(checkpoint, 5, wakeups, {TOPIC: None})
    commit(tmp_path, 5)
    assert times_ms(started(checkpoint)) == {}


def test_times_that_another_process_replaced_are_written_again_though_they_have_not_changed(
    checkpoint: Checkpoint,
) -> None:
    wakeups = started(checkpoint)
    wakeups.update(3, {TOPIC: 9000}, {TOPIC: SPANS})
    save_wakeup_times(wakeups.folder, 3, WakeupTimes({TOPIC: 5000}))
    wakeups.update(4, {TOPIC: 9000}, {TOPIC: SPANS})
    assert times_ms(wakeups) == {TOPIC: 9000}


def test_times_without_counts_wake_everything_until_each_topic_partition_was_counted(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    save_wakeup_times(
        Place(f"{tmp_path}/ledgerlake/wakes"), 3, WakeupTimes({TOPIC: 9000, "other": 9000})
    )
    wakeups = started(checkpoint)
    assert times_ms(wakeups) == {TOPIC: 1}
    run(checkpoint, 5, wakeups, {TOPIC: 9000})
    commit(tmp_path, 5)
    assert times_ms(started(checkpoint)) == {TOPIC: 9000}


def test_counts_change_with_the_micro_batches_of_their_topic_partition_and_go_with_its_messages(
    checkpoint: Checkpoint,
) -> None:
    wakeups = started(checkpoint)
    wakeups.update(5, {"other": 7000}, {"other": []})
    assert load_wakeup_times(wakeups.folder) == WakeupTimes(
        {TOPIC: 9000, "other": 7000}, {TOPIC: SPANS, "other": []}
    )
    fewer = [DueSpan(9500, 1000, 1)]
    wakeups.update(6, {TOPIC: 9000, "other": None}, {TOPIC: fewer, "other": []})
    assert load_wakeup_times(wakeups.folder) == WakeupTimes({TOPIC: 9000}, {TOPIC: fewer})


def test_a_restart_knows_what_many_micro_batches_with_few_changes_have_left(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Each changes one topic partition of many, and the files of some extend others."""
    expected = {f"t-{number}": [DueSpan(9000, 1000, number + 1)] for number in range(50)}
    wakeups = started(checkpoint)
    wakeups.update(5, dict.fromkeys(expected, 9000), dict(expected))
    expected[TOPIC] = SPANS
    extending = 0
    for batch_id in range(6, 206):
        name = f"t-{batch_id * 7 % 50}"
        if batch_id % 3:
            expected[name] = [DueSpan(9000, 1000, batch_id)]
            wakeups.update(batch_id, {name: 9000}, {name: expected[name]})
        else:
            expected.pop(name, None)
            wakeups.update(batch_id, {name: None}, {name: []})
        file = tmp_path / "ledgerlake" / "wakes" / f"{wakeups.batch_id:010d}.json"
        extending += json.loads(file.read_text())["extends"] is not None
        BatchEnds(checkpoint).add(LastRun(batch_id, wakeups.batch_id), {}, {})
        commit(tmp_path, batch_id)
        again = started(checkpoint)
        assert again.due_spans == wakeups.due_spans == expected
    assert extending > 100


def test_counts_whose_earlier_file_is_missing_wake_everything(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    wakeups = started(checkpoint)
    many = {f"t-{number}": SPANS for number in range(5)}
    run(checkpoint, 5, wakeups, dict.fromkeys(many, 9000))
    run(checkpoint, 6, wakeups, {TOPIC: 9500, "t-1": 9500})
    commit(tmp_path, 6)
    (tmp_path / "ledgerlake" / "wakes" / "0000000005.json").unlink()
    assert newest_wakeup_batch(wakeups.folder) == 6
    assert times_ms(started(checkpoint)) == {TOPIC: 1}


def test_a_file_that_another_process_replaced_is_not_extended(checkpoint: Checkpoint) -> None:
    wakeups = started(checkpoint)
    wakeups.update(
        5,
        {f"t-{number}": 9000 for number in range(9)},
        {f"t-{number}": SPANS for number in range(9)},
    )
    known = wakeups.due_spans
    save_wakeup_times(wakeups.folder, 5, WakeupTimes({TOPIC: 5000}))
    wakeups.update(6, {TOPIC: 9000}, {TOPIC: []})
    assert load_wakeup_times(wakeups.folder) == WakeupTimes(
        {name: 9000 for name in known}, known | {TOPIC: []}
    )
