"""How many delayed messages are due when, from the checkpoint of a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import OffsetError, SetupError
from ledgerlake.inspect.due_counts import due_counts
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.wakeups import Wakeups, wakeup_folder
from ledgerlake.source.wakeup_files import WakeupTimes, save_wakeup_times

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.options.config import Config

_HOUR_MS = 3_600_000


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return parse_config(
        {
            "source": {"service_url": "pulsar://127.0.0.1:1", "topics": ["t"]},
            "stream": {"name": "s", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"path": str(tmp_path / "t"), "rejects_path": str(tmp_path / "r")},
        }
    )


def test_the_counts_of_all_topic_partitions_are_added(config: Config) -> None:
    checkpoint = Checkpoint(config.checkpoint_place)
    wakeups = Wakeups(checkpoint, 0)
    spans = {
        "a": [DueSpan(1000, 1000, 2), DueSpan(_HOUR_MS, _HOUR_MS, 3)],
        "b": [DueSpan(5000, 1000, 4)],
    }
    wakeups.update(7, {"a": 1000, "b": 5000}, spans)
    keeper = BatchEnds(checkpoint)
    keeper.add(LastRun(7, wakeups.batch_id), {}, {})
    assert due_counts(config, _HOUR_MS) == [
        DueSpan(1000, _HOUR_MS, 6),
        DueSpan(_HOUR_MS, _HOUR_MS, 3),
    ]
    # The pipeline is, or was ended, between its two files.
    wakeups.update(8, {"b": 5000}, {"b": [DueSpan(5000, 1000, 5)]})
    assert due_counts(config, _HOUR_MS)[0] == DueSpan(1000, _HOUR_MS, 7)
    keeper.add(LastRun(8, wakeups.batch_id), {}, {})
    assert due_counts(config, _HOUR_MS)[0] == DueSpan(1000, _HOUR_MS, 7)


def test_counts_that_are_older_than_what_is_beside_them_are_an_error(config: Config) -> None:
    checkpoint = Checkpoint(config.checkpoint_place)
    wakeups = Wakeups(checkpoint, 0)
    wakeups.update(7, {"a": 1000}, {"a": [DueSpan(1000, 1000, 2)]})
    keeper = BatchEnds(checkpoint)
    keeper.add(LastRun(9, 8), {}, {})
    with pytest.raises(SetupError, match="does not say when its delayed messages are due"):
        due_counts(config, _HOUR_MS)


def test_a_start_that_counts_again_and_was_ended_before_that_says_so(config: Config) -> None:
    checkpoint = Checkpoint(config.checkpoint_place)
    BatchEnds(checkpoint).add(LastRun(7, 7), {}, {})
    save_wakeup_times(wakeup_folder(checkpoint), 7, WakeupTimes({"a": 1}))
    with pytest.raises(
        OffsetError, match=r"does not say when the delayed messages of a are due; run the pipeline"
    ):
        due_counts(config, _HOUR_MS)


def test_counts_that_a_newer_release_wrote_are_refused_by_name(
    config: Config, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(config.checkpoint_place)
    wakeups = Wakeups(checkpoint, 0)
    wakeups.update(7, {"a": 1000}, {"a": [DueSpan(1000, 1000, 2)]})
    BatchEnds(checkpoint).add(LastRun(7, 7), {}, {})
    (file,) = (tmp_path / "checkpoint" / "ledgerlake" / "wakes").iterdir()
    file.write_text('{"version": 99, "wakes": {}}')
    with pytest.raises(OffsetError, match="wake-up times of version 99"):
        due_counts(config, _HOUR_MS)


def test_a_pipeline_that_has_not_run_is_an_error(config: Config) -> None:
    with pytest.raises(SetupError, match="holds no state; run the pipeline first"):
        due_counts(config, _HOUR_MS)
