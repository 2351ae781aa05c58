"""Settings that decide which rows a micro-batch gives stay while a micro-batch is to be run again,
or while messages wait.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.errors import CheckpointError, OffsetError
from ledgerlake.options.config import SECTION_CLASSES, TableConfig, parse_config
from ledgerlake.options.declared import declared
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.row_settings import changed, delivery_of, row_settings, selected_now
from ledgerlake.pipeline.start import Start, query_name
from ledgerlake.source.wakeup_files import WakeupTimes, save_wakeup_times
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.open_table import existing_table
from ledgerlake.wire.message_id import Position
from tests.pipeline.test_moved_state import write_metadata
from tests.pipeline_tables import opened_tables

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.tables import Tables


def config(folder: Path, **delay: Any) -> Config:
    return parse_config(
        {
            "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
            "stream": {"name": "s", "checkpoint": str(folder)},
            "delta": {"path": str(folder.parent / "messages")},
            "delay": delay,
        }
    )


def delivering(folder: Path, deliver: dict[str, Any] | None) -> Config:
    data = {
        "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
        "stream": {"name": "s", "checkpoint": str(folder)},
        "delta": {"path": str(folder.parent / "messages")},
    }
    return parse_config(data if deliver is None else {**data, "deliver": deliver})


# A valid value of each option that decides the rows of a micro-batch, other than its default.
DECISIVE: dict[str, Any] = {
    "source.read_compacted": True,
    "source.max_uncompressed_bytes": 1000,
    "source.message_payload_processor": "os:getcwd",
    "source.crypto_key_folder": "keys",
    "source.crypto_key_reader": "os:getcwd",
    "source.crypto_failure_action": "pass",
    "chunks.max_pending": 7,
    "chunks.max_pending_bytes": 7000,
    "chunks.max_message_bytes": 7000,
    "chunks.expire_after": "7 minutes",
    "delay.enabled": False,
    "delay.storage": "delayed",
    "delay.payloads": "reread",
    "delay.max_repetitions_per_second": 0,
    "delay.max_repeated_bytes_per_second": 0,
    "deliver.topic": "public/default/due",
    "delta.shape": "record",
    "delta.json_fields": {"page": "string"},
    "delta.sql": "select 1 as one from messages",
    "delta.function": "os:getcwd",
    "delta.partition_by": ["topic"],
    "delta.mode": "latest",
    "tables.topics_pattern": "public/default/a.*",
    "tables.schema": "Order",
    "tables.where": "entry_id > 7",
    "tables.shape": "record",
    "tables.json_fields": {"page": "string"},
    "tables.sql": "select 1 as one from messages",
    "tables.function": "os:getcwd",
    "tables.partition_by": ["topic"],
    "tables.mode": "latest",
}

# Why the other options change no row of a micro-batch that is run again.
OTHERS: dict[str, str] = {
    "its range is in the offsets, whatever is selected or limited": """
        source.topics source.topics_pattern source.starting source.ending source.max_rows_per_trigger
        source.max_bytes_per_trigger source.min_rows_per_trigger source.max_trigger_delay
        source.payload_to_message_id_converter stream.trigger""",
    "no cut into tasks and buckets changes what comes": """
        source.min_partitions delay.min_indexes_per_bucket delay.ledger_step_per_bucket delay.time_step_per_segment
        delay.max_indexes_per_segment delay.max_buckets""",
    "it ends with an error, or gives what it gave": """
        source.fail_on_data_loss source.require_broker_metadata delta.on_mismatch delta.fail_on_second_stream""",
    "the checkpoint has the stream, and the former tables are asked": """
        stream.name stream.checkpoint delta.path delta.table delta.rejects_path delta.rejects_table tables.path""",
    "the checkpoint has the beginning of the delivery": "deliver.starting",
    "the same rows are laid out or copied otherwise": """
        delta.cluster_by delta.iceberg_table delta.writer tables.cluster_by tables.iceberg_table upkeep.enabled
        upkeep.interval upkeep.busy_percent upkeep.retention iceberg.catalog iceberg.settings iceberg.interval
        iceberg.retention""",
    "the same broker and stores are reached otherwise": """
        source.service_url source.retry_timeout_s auth.method auth.token auth.user auth.password auth.issuer_url
        auth.private_key auth.audience auth.scope tls.ca_file tls.cert_file tls.key_file tls.checks_hostname
        tls.proxy_url storage.endpoint_url storage.region storage.access_key_id storage.secret_access_key
        storage.session_token storage.account_key""",
    "it is of the process alone": """
        spark.master spark.memory spark.packages spark.bundle spark.settings metrics.port metrics.address
        metrics.token""",
}

# What an option needs beside it.
_NEEDS: dict[str, dict[str, Any]] = {
    name: {"shape": "record"} for name in ("json_fields", "sql", "function")
}


def with_option(folder: Path, name: str, value: Any = None) -> Config:
    """A configuration with an option at a value, or without it."""
    section, key = name.split(".")
    data: dict[str, Any] = {
        "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
        "stream": {"name": "s", "checkpoint": str(folder)},
        "delta": {"path": str(folder.parent / "messages")},
    }
    entries = (
        data.setdefault(section, {})
        if section != "tables"
        else {"path": str(folder.parent / "some")}
    )
    entries.update(_NEEDS.get(key, {}))
    entries.update({} if value is None else {key: value})
    if not entries:
        del data[section]
    return parse_config(data if section != "tables" else {**data, "tables": [entries]})


def test_each_option_decides_rows_or_has_a_reason_why_not() -> None:
    all_options = [
        f"{option.section}.{option.key}"
        for kind in SECTION_CLASSES
        for _, option in declared(kind)
        if option.key
    ]
    classified = [*DECISIVE, *(name for names in OTHERS.values() for name in names.split())]
    assert sorted(classified) == sorted(all_options)


@pytest.mark.parametrize("name", DECISIVE)
def test_an_option_that_decides_rows_stays_until_a_batch_that_a_table_has_was_run_again(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "checkpoint"
    before, now = with_option(folder, name), with_option(folder, name, DECISIVE[name])
    for first, second in ((before, now), (now, before)):
        assert changed(row_settings(first), row_settings(second)) != []
    checkpoint = checkpoint_of(folder, before, planned=4, committed=3)
    compare(checkpoint, before, table_batch=4)
    with pytest.raises(CheckpointError, match="that batch is to be run again; set it back"):
        compare(checkpoint, now, table_batch=4)


def checkpoint_of(folder: Path, before: Config, planned: int, committed: int) -> Checkpoint:
    """A checkpoint whose last run had those settings."""
    for log, last in (("offsets", planned), ("commits", committed)):
        (folder / log).mkdir(parents=True)
        for number in range(last + 1):
            (folder / log / str(number)).write_text("v2\n{}")
    (folder / "metadata").write_text('{"id": "q"}')
    checkpoint = Checkpoint(Place(str(folder)))
    checkpoint.save_settings(row_settings(before))
    return checkpoint


def save_wakeups(checkpoint: Checkpoint, batch_id: int, wakeup_times_ms: dict[str, int]) -> None:
    """Leave what a micro-batch leaves beside the checkpoint."""
    wakeups = WakeupTimes(wakeup_times_ms, {name: [] for name in wakeup_times_ms})
    save_wakeup_times(Place(f"{checkpoint.folder}/ledgerlake/wakes"), batch_id, wakeups)
    BatchEnds(checkpoint).add(LastRun(batch_id, batch_id), {}, {})


def compare(checkpoint: Checkpoint, now: Config, table_batch: int | None = None) -> None:
    recorded = None if table_batch is None else SimpleNamespace(batch_id=table_batch)
    table: Any = SimpleNamespace(path=Place("lake/messages"), recorded=lambda _query: recorded)
    start: Any = Start.__new__(Start)
    start._config, start._checkpoint = now, checkpoint
    start._tables = SimpleNamespace(by_name={"messages": table})
    start._cursors = BatchEnds(checkpoint)
    start.compare_settings([table])


@pytest.fixture
def killed(tmp_path: Path) -> Tables:
    """The tables of a run that was killed between their commits of batch 4 and Spark's."""
    tables = opened_tables(tmp_path)
    tables.create()
    checkpoint = checkpoint_of(tmp_path / "checkpoint", tables._config, planned=4, committed=3)
    checkpoint.save_tables(tables.places)
    for table in tables.by_name.values():
        record = BatchCommit("orders", query_name("orders", "q"), 4, 7)
        assert not table.contains(record)
        table.commit(record, [], {})
    return tables


def start_with(folder: Path, **delta: Any) -> None:
    """Compare the settings of a start whose tables are elsewhere."""
    tables = opened_tables(folder, **delta)
    start: Any = Start.__new__(Start)
    start._config, start._checkpoint, start._tables = (
        tables._config,
        Checkpoint(Place(str(folder / "checkpoint"))),
        tables,
    )
    start.compare_settings(
        [table for table in tables.by_name.values() if existing_table(table.path)]
    )


@pytest.mark.parametrize("key", ["path", "rejects_path"])
def test_a_batch_is_run_again_for_the_tables_that_have_it(
    tmp_path: Path, killed: Tables, key: str
) -> None:
    former = killed.main.table if key == "path" else killed.rejects
    with pytest.raises(CheckpointError) as refused:
        start_with(tmp_path, **{key: str(tmp_path / "elsewhere")})
    assert refused.value.message == (
        f"batch 4 of the stream orders was written to the table at {former.path}, which the "
        "configuration no longer names, "
        "and that batch is to be run again; set the path back, run once with --once, then change it"
    )
    start_with(tmp_path)


def test_a_table_that_was_moved_with_the_batch_is_the_same_one(
    tmp_path: Path, killed: Tables
) -> None:
    copied, moved = tmp_path / "copied", tmp_path / "moved"
    shutil.copytree(killed.main.table.path.root, copied)
    start_with(tmp_path, path=str(copied))
    os.rename(killed.main.table.path.root, moved)
    start_with(tmp_path, path=str(moved))


def test_a_table_that_was_removed_with_the_batch_has_it_no_more(
    tmp_path: Path, killed: Tables
) -> None:
    shutil.rmtree(killed.main.table.path.root)
    start_with(tmp_path, path=str(tmp_path / "elsewhere"))


def test_a_place_may_change_when_every_batch_is_committed(tmp_path: Path, killed: Tables) -> None:
    (tmp_path / "checkpoint" / "commits" / "4").write_text("v2\n{}")
    start_with(tmp_path, path=str(tmp_path / "elsewhere"))


def test_tables_in_a_checkpoint_that_are_damaged_or_of_a_newer_release_are_refused(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint(Place(str(tmp_path)))
    assert checkpoint.tables() == {}
    checkpoint.save_tables({"messages": "/lake/orders"})
    assert checkpoint.tables() == {"messages": "/lake/orders"}
    for text in (
        '{"version": 2, "tables": {}}',
        '{"version": 1}',
        '{"version": 1, "tables": {"a": 1}}',
        "x",
    ):
        (tmp_path / "ledgerlake" / "tables.json").write_text(text)
        with pytest.raises(OffsetError):
            checkpoint.tables()


def test_a_start_with_other_tables_records_up_to_where_the_former_ones_were_read_for(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    first = config(folder)
    second = replace(first, tables=(TableConfig(path="/lake/large", where="size > 5"),))
    read = {"t": PartitionOffset(Position(7, 3))}
    checkpoint = Checkpoint(Place(str(folder)))
    checkpoint.save_selected(selected_now(checkpoint.selected(), first, {}))
    assert selected_now(checkpoint.selected(), first, read).earlier_ends == {}
    checkpoint.save_selected(selected_now(checkpoint.selected(), second, read))
    later = {"t": PartitionOffset(Position(9, 9))}
    assert selected_now(checkpoint.selected(), second, later).earlier_ends == {"t": Position(7, 3)}
    assert selected_now(checkpoint.selected(), first, later).earlier_ends == {"t": Position(9, 9)}


def test_a_batch_that_was_cut_when_the_tables_changed_may_be_in_the_former_ones(
    tmp_path: Path,
) -> None:
    first = config(tmp_path)
    second = replace(first, tables=(TableConfig(path="/lake/large", where="size > 5"),))
    cut = {"t": PartitionOffset(Position(7, 3), batch_index=1)}
    before = selected_now(None, first, {})
    assert selected_now(before, second, cut).earlier_ends == {"t": Position(7, 4)}


@pytest.mark.parametrize(
    "change",
    [
        {"delta": {"path": "/lake/other"}},
        {"delta": {"path": "/lake/m", "rejects_path": "/lake/other"}},
        {"tables": [{"path": "/lake/a", "where": "size > 5"}]},
        {"tables": [{"path": "/lake/a", "topics_pattern": "a"}]},
        {"delta": {"path": "/lake/m", "shape": "record", "sql": "select 1 one from messages"}},
    ],
)
def test_what_decides_which_tables_have_to_have_a_message_is_a_change(change: Any) -> None:
    data = {
        "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
        "stream": {"name": "s", "checkpoint": "/lake/checkpoint"},
        "delta": {"path": "/lake/m"},
    }
    before = selected_now(None, parse_config(data), {})
    changed_data = parse_config(data | change)
    assert selected_now(before, changed_data, {}).settings != before.settings


def test_the_order_of_tables_and_the_folder_of_a_project_decide_nothing() -> None:
    tables = [{"path": "a", "where": "size > 5"}, {"path": "b", "where": "size <= 5"}]

    def of(folder: str, *tables: dict[str, str]) -> Config:
        return parse_config(
            {
                "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
                "stream": {"name": "s", "checkpoint": "checkpoints/s"},
                "delta": {"rejects_path": "rejects"},
                "tables": list(tables),
            },
            folder,
        )

    read = {"t": PartitionOffset(Position(7, 3))}
    before = selected_now(None, of("/srv", *tables), {})
    for now in (of("/srv", *reversed(tables)), of("/moved", *tables)):
        selected = selected_now(before, now, read)
        assert selected.earlier_ends == {}
        # The places that a later change is compared with.
        assert selected.settings == selected_now(None, now, {}).settings
    # A change that comes with the move is one.
    other_place = [tables[0], tables[1] | {"path": "c"}]
    for changed_tables in (tables[:1], other_place):
        selected = selected_now(before, of("/moved", *changed_tables), read)
        assert selected.earlier_ends == {"t": Position(7, 3)}


def test_tables_that_stay_while_the_checkpoint_is_moved_are_the_same(tmp_path: Path) -> None:
    first = config(tmp_path / "checkpoint")
    moved = replace(first, stream=replace(first.stream, checkpoint="/moved/checkpoint"))
    read = {"t": PartitionOffset(Position(7, 3))}
    assert selected_now(selected_now(None, first, {}), moved, read).earlier_ends == {}


def test_a_batch_that_the_table_has_is_run_again_under_the_settings_that_it_was_written_with(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=3)
    with pytest.raises(CheckpointError) as refused:
        compare(checkpoint, config(folder, enabled=False), table_batch=4)
    assert refused.value.message == (
        "[delay] enabled was true when batch 4 was written to the table at lake/messages, and that "
        "batch is to be run again; set it back, run once with --once, then change it"
    )
    compare(checkpoint, config(folder), table_batch=4)


def test_a_batch_that_no_table_has_may_be_run_under_other_settings(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=3)
    compare(checkpoint, config(folder, enabled=False), table_batch=3)
    compare(checkpoint, config(folder, enabled=False))


def test_a_setting_may_change_when_every_batch_is_committed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=4)
    compare(checkpoint, config(folder, enabled=False), table_batch=4)


@pytest.mark.parametrize(
    ("before", "now", "named"),
    [
        ({}, {"storage": "elsewhere"}, '[delay] storage was "state"'),
        ({"storage": "/here"}, {}, '[delay] storage was "/here"'),
        ({"payloads": "reread"}, {}, '[delay] payloads was "reread"'),
    ],
)
def test_where_messages_wait_stays_until_none_waits(
    tmp_path: Path, before: dict[str, Any], now: dict[str, Any], named: str
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder, **before), planned=4, committed=4)
    save_wakeups(checkpoint, 4, {"t": 1000})
    with pytest.raises(
        CheckpointError, match="delayed messages need it; set it back until ledgerlake state"
    ) as refused:
        compare(checkpoint, config(folder, **now), table_batch=4)
    assert refused.value.message.startswith(named)
    save_wakeups(checkpoint, 5, {})
    compare(checkpoint, config(folder, **now), table_batch=4)


_DELIVERIES = [
    None,
    *(
        {"topic": f"public/default/{topic}", "starting": starting}
        for topic in "ab"
        for starting in ("earliest", "latest")
    ),
]


def run_with(checkpoint: Checkpoint, config: Config) -> None:
    """Record the settings of another run."""
    checkpoint.save_settings(row_settings(config, checkpoint.settings()))


@pytest.mark.parametrize("now", _DELIVERIES)
@pytest.mark.parametrize("between", [0, 1, 2])
@pytest.mark.parametrize("before", _DELIVERIES)
def test_what_waited_when_delivery_began_at_latest_is_promised_to_no_other_topic(
    tmp_path: Path, before: dict[str, Any] | None, between: int, now: dict[str, Any] | None
) -> None:
    """Also not after runs without ``[deliver]``."""
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, delivering(folder, before), planned=4, committed=4)
    for _ in range(between):
        run_with(checkpoint, delivering(folder, None))
    save_wakeups(checkpoint, 4, {"t": 1000})
    starts = [None if deliver is None else deliver["starting"] for deliver in (before, now)]
    if starts == ["latest", "earliest"]:
        with pytest.raises(
            CheckpointError, match="set it back until ledgerlake state CONFIG counts no"
        ) as refused:
            compare(checkpoint, delivering(folder, now), table_batch=4)
        assert refused.value.message.startswith('[deliver] starting was "latest"')
        save_wakeups(checkpoint, 5, {})
    compare(checkpoint, delivering(folder, now), table_batch=4)
    run_with(checkpoint, delivering(folder, now))
    begins = starts[1] if starts[0] != "earliest" and starts[1] else starts[0]
    assert delivery_of(checkpoint.settings() or {}) == begins


def test_a_checkpoint_of_a_release_that_recorded_no_more_than_the_option_goes_on(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    for starting in ("latest", None):
        now = delivering(folder, {"topic": "public/default/a", "starting": "latest"})
        older = {
            name: value for name, value in row_settings(now).items() if name != "[deliver]"
        } | {"[deliver] starting": starting}
        assert changed(older, row_settings(now, older)) == ["[deliver] starting"] * (not starting)
        assert delivery_of(row_settings(now, older)) == "latest"


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("s3://lake/delayed", "s3a://lake/delayed/"),
        ("delayed", "{cwd}/delayed"),
        ("delayed", "file://{cwd}/checkpoints/../delayed"),
        ("file://{cwd}/a%20b/", "a b"),
        ("./state", "{cwd}/state"),
    ],
)
def test_another_spelling_of_the_place_where_messages_wait_is_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, now: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "checkpoint"
    spelled = [{"storage": text.format(cwd=tmp_path)} for text in (before, now)]
    checkpoint = checkpoint_of(folder, config(folder, **spelled[0]), planned=4, committed=4)
    save_wakeups(checkpoint, 4, {"t": 1000})
    compare(checkpoint, config(folder, **spelled[1]), table_batch=4)
    compare(checkpoint, config(folder, **spelled[0]), table_batch=4)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("state", "./state"),
        ("s3://lake/delayed", "s3://lake/later"),
        ("/lake/delayed", "s3://lake/delayed"),
    ],
)
def test_another_place_is_one(tmp_path: Path, before: str, now: str) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder, storage=before), planned=4, committed=4)
    save_wakeups(checkpoint, 4, {"t": 1000})
    with pytest.raises(CheckpointError, match=f'storage was "{before}", and delayed messages need'):
        compare(checkpoint, config(folder, storage=now), table_batch=4)


def test_a_checkpoint_goes_on_after_it_was_moved_with_the_messages_that_wait_in_it(
    tmp_path: Path,
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    checkpoint = checkpoint_of(
        old, config(old, storage=str(old / "delayed")), planned=4, committed=4
    )
    save_wakeups(checkpoint, 4, {"t": 1000})
    old.rename(new)
    moved = Checkpoint(Place(str(new)))
    compare(moved, config(new, storage=str(new / "delayed")), table_batch=4)
    # A folder that was not moved with it is still at its old place.
    compare(moved, config(new, storage=str(old / "delayed")), table_batch=4)
    with pytest.raises(CheckpointError, match="delayed messages need it"):
        compare(moved, config(new, storage=str(new / "others")), table_batch=4)


def test_a_project_that_is_moved_after_a_kill_goes_on(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def with_keys(project: Path, keys: Path) -> Config:
        return with_option(project / "checkpoint", "source.crypto_key_folder", str(keys))

    checkpoint_of(old / "checkpoint", with_keys(old, old / "keys"), planned=4, committed=3)
    write_metadata(old / "checkpoint", f"file:{old}/checkpoint")
    old.rename(new)
    moved = Checkpoint(Place(str(new / "checkpoint")))
    for keys in (new / "keys", old / "keys"):
        compare(moved, with_keys(new, keys), table_batch=4)
    with pytest.raises(CheckpointError, match="that batch is to be run again; set it back"):
        compare(moved, with_keys(new, new / "others"), table_batch=4)


def test_messages_may_be_kept_from_here_on_if_nothing_is_known_to_wait_by_position(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=4)
    save_wakeups(checkpoint, 4, {"t": 1000})
    compare(checkpoint, config(folder, payloads="reread"), table_batch=4)


def test_without_recorded_settings_none_is_compared_and_newer_ones_are_refused(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=3)
    file = folder / "ledgerlake" / "settings.json"
    file.unlink()
    compare(checkpoint, config(folder, enabled=False), table_batch=4)
    for text in (
        '{"version": 2, "settings": {}}',
        '{"version": 1}',
        '{"version": 1, "settings": {"a": []}}',
        "x",
    ):
        file.write_text(text)
        with pytest.raises(OffsetError):
            checkpoint.settings()


def test_a_setting_that_a_release_does_not_know_is_not_compared(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    checkpoint = checkpoint_of(folder, config(folder), planned=4, committed=3)
    checkpoint.save_settings({"[delay] later": 5, "[delay] enabled": True})
    compare(checkpoint, config(folder), table_batch=4)
