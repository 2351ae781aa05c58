"""Upkeep beside a running pipeline: its share of CPU, and its failures."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.errors import TableAccessError, UsageError
from ledgerlake.options.config import parse_config
from ledgerlake.options.table_options import table_name
from ledgerlake.pipeline import upkeep
from ledgerlake.pipeline.upkeep import Upkeep, UpkeepReport, keep_up
from ledgerlake.stored.places import Place
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import TableSize, open_delta
from ledgerlake.table.vacuum import Vacuumed
from tests.table.test_compaction import Writer, files_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.options.config import Config


def config_of(folder: Path, **settings: Any) -> Config:
    return parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
            "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
            "delta": {"path": str(folder / "messages")},
            "upkeep": {"interval": "100 ms", "busy_percent": 100, **settings},
        }
    )


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    writer = Writer(Place(str(tmp_path / "messages")))
    for _ in range(4):
        writer.commit()
    return writer


def with_rejects(config: Config) -> Config:
    from ledgerlake.decode import schema

    table = Table(config.rejects_place, schema.REJECTS)
    table.path.make()
    table.create(config.upkeep.table_properties)
    return config


def test_small_files_are_merged_while_the_thread_runs_and_stay_merged_after_its_end(
    tmp_path: Path, writer: Writer
) -> None:
    running = Upkeep(with_rejects(config_of(tmp_path)))
    running.start()
    wait_until(lambda: len(files_of(writer.table.path)) == 1)
    running.end()
    running.wait()
    assert not [thread for thread in threading.enumerate() if thread.name == "ledgerlake-upkeep"]


def test_the_report_has_the_size_of_each_table_and_what_was_done(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Upkeep(with_rejects(config_of(tmp_path)))
    assert running.report == UpkeepReport()
    running.start()
    wait_until(lambda: running.report.last_round_ms is not None)
    running.end()
    running.wait()
    (merged,) = files_of(writer.table.path)
    messages, rejects = running.report.tables
    assert (messages.table, messages.path, messages.merged_files) == (
        "messages",
        str(tmp_path / "messages"),
        12,
    )
    assert messages.size == TableSize(1, (tmp_path / "messages" / merged).stat().st_size)
    assert (rejects.table, rejects.size, rejects.merged_files) == ("rejects", TableSize(0, 0), 0)
    assert running.report.failed_attempts == 0


def test_a_table_of_the_latest_messages_is_measured_and_not_merged(
    tmp_path: Path, writer: Writer
) -> None:
    config = with_rejects(config_of(tmp_path))
    before = files_of(writer.table.path)
    running = Upkeep(replace(config, delta=replace(config.delta, mode="latest")))
    running.start()
    wait_until(lambda: running.report.last_round_ms is not None)
    running.end()
    running.wait()
    (messages,) = (table for table in running.report.tables if table.table == "messages")
    size_bytes = sum((tmp_path / "messages" / name).stat().st_size for name in before)
    assert (messages.size, messages.merged_files) == (TableSize(len(before), size_bytes), 0)
    assert files_of(writer.table.path) == before


def test_a_failure_is_logged_once_and_the_next_round_tries_again(
    tmp_path: Path,
    writer: Writer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attempts: list[float] = []
    config = with_rejects(config_of(tmp_path))
    open_table = Compaction.run

    def fail_at_first(compaction: Any) -> int:
        attempts.append(time.monotonic())
        if len(attempts) < 6:
            raise OSError("the store does not answer")
        return int(open_table(compaction))

    monkeypatch.setattr(Compaction, "run", fail_at_first)
    running = Upkeep(config)
    with caplog.at_level(logging.WARNING):
        running.start()
        wait_until(lambda: len(files_of(writer.table.path)) == 1)
        running.end()
        running.wait()
    warnings = [record.message for record in caplog.records if "upkeep" in record.message]
    # Once for each of the two tables.
    assert len(warnings) == 2
    assert "the store does not answer" in warnings[0]


def test_a_vacuum_that_failed_is_tried_again_in_the_next_round(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[Place] = []

    def fail_once(self: Upkeep, place: Place) -> None:
        attempts.append(place)
        if len(attempts) == 1:
            raise OSError("the store does not answer")

    monkeypatch.setattr("ledgerlake.pipeline.upkeep._FIRST_VACUUM_S", 0.0)
    monkeypatch.setattr(Upkeep, "_vacuum", fail_once)
    running = Upkeep(with_rejects(config_of(tmp_path)))
    running.start()
    wait_until(lambda: running.report.last_round_ms is not None)
    running.end()
    running.wait()
    assert [place.uri.rpartition("/")[2] for place in attempts] == [
        "messages",
        "messages_rejects",
        "messages",
    ]
    assert running.report.failed_attempts == 1


def test_work_is_followed_by_a_rest_after_which_the_share_of_time_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Upkeep(config_of(tmp_path, busy_percent=20))
    rests_s: list[float] = []
    monkeypatch.setattr(running._stopping, "wait", rests_s.append)
    monkeypatch.setattr(upkeep, "time", SimpleNamespace(monotonic=lambda: 3.0))
    running._began_s = 1.0
    running._rest()
    assert rests_s == [pytest.approx(8.0)]


def rounds_of(
    running: Upkeep, monkeypatch: pytest.MonkeyPatch, *works: Callable[[], object]
) -> None:
    """Run one round behind each of some works."""
    left = [*works]

    def is_end(_pause_s: float) -> bool:
        if not left:
            return True
        left.pop(0)()
        return False

    monkeypatch.setattr(running._stopping, "wait", is_end)
    monkeypatch.setattr(running, "_rest", lambda: None)
    running._run()


def test_pauses_of_a_table_get_longer_while_it_fails_and_other_tables_keep_their_turns(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_rejects(config_of(tmp_path))
    run, rounds, turns = Compaction.run, [0], list[tuple[str, int]]()

    def noted(compaction: Compaction) -> int:
        turns.append((compaction.path.uri.rpartition("/")[2], rounds[0]))
        if compaction.path == config.messages_place and rounds[0] < 20:
            raise OSError("the store does not answer")
        return run(compaction)

    def count() -> None:
        rounds[0] += 1

    monkeypatch.setattr(Compaction, "run", noted)
    running = Upkeep(config)
    rounds_of(running, monkeypatch, *[count] * 36)
    assert [number for table, number in turns if table == "messages_rejects"] == [*range(1, 37)]
    assert [number for table, number in turns if table == "messages"] == [
        1,
        2,
        4,
        8,
        16,
        32,
        33,
        34,
        35,
        36,
    ]


def test_a_table_that_was_removed_is_forgotten_and_holds_up_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_config(
        {
            "source": {
                "service_url": "pulsar://nowhere:1",
                "topics_pattern": "persistent://public/default/.*",
            },
            "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"rejects_path": str(tmp_path / "rejects")},
            "tables": [
                {
                    "path": str(tmp_path / "main"),
                    "topics_pattern": "persistent://public/default/main",
                },
                {"path": str(tmp_path / "by/{topic}")},
            ],
            "upkeep": {"interval": "100 ms"},
        }
    )
    with_rejects(config)
    paths = [tmp_path / "by" / name for name in "ab"]
    for path in paths:
        Writer(Place(str(path))).commit()
    seen = {table_name(str(path)): {"path": str(path), "batch_id": 0} for path in paths}
    (tmp_path / "checkpoint/ledgerlake").mkdir(parents=True)
    ends = {
        "version": 1,
        "batches": {},
        "tables": seen,
        "last_run": {"batch_id": 0, "wakes_batch": None},
    }
    (tmp_path / "checkpoint/ledgerlake/ends.json").write_text(json.dumps(ends))
    running = Upkeep(config)
    sizes: list[int] = []

    def remove() -> None:
        sizes.append(len(running.report.tables))
        shutil.rmtree(paths[1])

    rounds_of(running, monkeypatch, lambda: None, remove)
    assert sizes == [3]
    assert [table.path for table in running.report.tables] == [
        str(paths[0]),
        str(tmp_path / "rejects"),
    ]
    assert running.report.failed_attempts == 0
    assert running.report.last_round_ms is not None


def test_an_obstacle_of_one_table_is_said_once(
    tmp_path: Path,
    writer: Writer,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[Compaction] = []
    merge = Compaction.run

    def counted(compaction: Compaction) -> int:
        rounds.append(compaction)
        return merge(compaction)

    monkeypatch.setattr(Compaction, "run", counted)
    config = with_rejects(config_of(tmp_path))
    DeltaTable(writer.table.path.uri).alter.add_constraint({"has_entry": "entry_id >= 0"})
    running = Upkeep(config)
    with caplog.at_level(logging.WARNING):
        running.start()
        wait_until(lambda: len(rounds) > 6)
        running.end()
        running.wait()
    warnings = [
        record.getMessage() for record in caplog.records if "not merged" in record.getMessage()
    ]
    assert len(warnings) == 1
    assert "because it has checkConstraints" in warnings[0]


def test_unused_files_stay_as_long_as_the_tables_own_property_says(
    tmp_path: Path, writer: Writer
) -> None:
    config = with_rejects(config_of(tmp_path))
    DeltaTable(writer.table.path.uri).alter.set_table_properties(
        {"delta.deletedFileRetentionDuration": "interval 365 days"}
    )
    assert keep_up(config)[0].merged == 12
    long_ago_s = time.time() - 10 * 24 * 3600
    for name in tmp_path.joinpath("messages").glob("*.parquet"):
        os.utime(name, (long_ago_s, long_ago_s))
    before = sorted(tmp_path.joinpath("messages").glob("*.parquet"))
    assert keep_up(config)[0].removed == 0
    assert sorted(tmp_path.joinpath("messages").glob("*.parquet")) == before


def test_by_hand_everything_is_merged_and_counted(tmp_path: Path, writer: Writer) -> None:
    config = with_rejects(config_of(tmp_path))
    messages, rejects = keep_up(config)
    assert (messages.table, messages.merged, messages.obstacles) == (
        str(tmp_path / "messages"),
        12,
        [],
    )
    assert rejects.merged == 0
    assert len(files_of(writer.table.path)) == 1


def test_a_new_table_keeps_its_log_as_long_as_its_unused_files(tmp_path: Path) -> None:
    config = with_rejects(config_of(tmp_path, retention="3 days"))
    properties = open_delta(config.rejects_place).metadata().configuration
    retentions = {
        name: value for name, value in properties.items() if name.endswith("RetentionDuration")
    }
    assert retentions == {
        "delta.logRetentionDuration": "interval 72 hours",
        "delta.deletedFileRetentionDuration": "interval 72 hours",
    }


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"retention": "59 minutes"}, r"\[upkeep\] retention is less than an hour"),
        ({"busy_percent": 101}, r"\[upkeep\] busy_percent is above 100"),
        ({"interval": "0 s"}, r"\[upkeep\] interval is less than 100 milliseconds"),
        ({"interval": "2 days"}, r"\[upkeep\] interval is .* more than a day"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        config_of(tmp_path, **settings)


def test_a_table_that_cannot_be_vacuumed_keeps_no_other_one_from_it(
    tmp_path: Path, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_rejects(config_of(tmp_path))
    asked: list[Place] = []

    def of_one_table(place: Place, *_: Any, **__: Any) -> Vacuumed:
        asked.append(place)
        if place == config.messages_place:
            raise TableAccessError("its checkpoint is of a kind that is not known")
        return Vacuumed(str(place), [])

    monkeypatch.setattr("ledgerlake.pipeline.unused_files.vacuum", of_one_table)
    running = Upkeep(config)
    running._remove_unused([config.messages_place, config.rejects_place])
    assert asked == [config.messages_place, config.rejects_place]
    assert running.report.failed_attempts == 1
