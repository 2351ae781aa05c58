"""When the planner is told to plan a micro-batch although nothing new has come."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.cursors import CursorKeeper, LastRun
from ledgerlake.pipeline.wake_ups import WakeUps
from ledgerlake.source.wake_ups import load_wakes, save_wakes
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path

TOPIC = "persistent://public/default/orders"


def commit(folder: Path, batch_id: int, clock: dict[str, str] | None = None) -> None:
    offset = json.dumps({"version": 2, "positions": {TOPIC: {"ledger": 4, "entry": 7, **(clock or {})}}})
    for log, text in (("offsets", f"v2\n{{}}\n{offset}"), ("commits", "v2\n{}")):
        (folder / log).mkdir(parents=True, exist_ok=True)
        (folder / log / str(batch_id)).write_text(text)


def run(checkpoint: Checkpoint, batch_id: int, wake_ups: WakeUps, wakes_ms: dict[str, int | None]) -> None:
    """What a micro-batch leaves beside the checkpoint."""
    wake_ups.note(batch_id, wakes_ms)
    keeper(checkpoint).add(LastRun(batch_id, wake_ups.batch_id), {})


def keeper(checkpoint: Checkpoint) -> CursorKeeper:
    return CursorKeeper(None, "s", checkpoint)  # type: ignore[arg-type]


def started(checkpoint: Checkpoint) -> WakeUps:
    wake_ups = WakeUps(checkpoint)
    wake_ups.load(keeper(checkpoint).last_run())
    return wake_ups


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Two micro-batches; a message that waits came with the first."""
    found = Checkpoint(Place(str(tmp_path)))
    wake_ups = started(found)
    for batch_id, wakes_ms in ((3, {TOPIC: 9000}), (4, {})):
        run(found, batch_id, wake_ups, wakes_ms)  # type: ignore[arg-type]
        commit(tmp_path, batch_id)
    return found


def test_a_restart_knows_the_times(checkpoint: Checkpoint) -> None:
    wake_ups = started(checkpoint)
    assert load_wakes(wake_ups.folder) == {TOPIC: 9000}
    assert wake_ups.batch_id == 3


def test_times_that_were_copied_before_the_commit_log_wake_everything(checkpoint: Checkpoint, tmp_path: Path) -> None:
    commit(tmp_path, 5)
    wake_ups = started(checkpoint)
    assert (load_wakes(wake_ups.folder) or {}).get(TOPIC, 0) > 9000


def test_a_time_that_wakes_everything_is_beyond_the_clock_of_the_last_micro_batch(tmp_path: Path) -> None:
    commit(tmp_path, 3, {"clock": "2096-10-02T07:06:40.000Z"})
    assert load_wakes(started(Checkpoint(Place(str(tmp_path)))).folder) == {TOPIC: 4_000_000_000_001}


def test_a_note_is_read_although_a_file_of_a_later_micro_batch_was_left(checkpoint: Checkpoint, tmp_path: Path) -> None:
    save_wakes(Place(f"{tmp_path}/ledgerlake/wakes"), 13, {TOPIC: 7})
    wake_ups = started(checkpoint)
    wake_ups.note(5, {TOPIC: 9000})
    assert load_wakes(wake_ups.folder) == {TOPIC: 9000}


@pytest.mark.parametrize("counted", [2, 4, None])
def test_times_that_were_copied_before_or_after_what_is_beside_them_wake_everything(
    checkpoint: Checkpoint, counted: int | None
) -> None:
    keeper(checkpoint).add(LastRun(4, counted), {})
    assert (load_wakes(started(checkpoint).folder) or {}).get(TOPIC, 0) > 9000


def test_a_checkpoint_of_an_earlier_release_wakes_everything_once(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "ledgerlake" / "ends.json").write_text('{"version": 1, "batches": {}, "tables": {}}')
    wake_ups = started(checkpoint)
    assert (load_wakes(wake_ups.folder) or {}).get(TOPIC, 0) > 9000
    run(checkpoint, 5, wake_ups, {TOPIC: None})
    commit(tmp_path, 5)
    assert load_wakes(started(checkpoint).folder) == {}
