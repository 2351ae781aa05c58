"""Replays of rejects without a broker: interruptions, changed configurations, and what stays as it
is.
"""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, count, product
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ledgerlake.client.cluster import Cluster
from ledgerlake.decode import schema
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import TopicPartition, decode_entries
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.errors import CheckpointError, OffsetError, SetupError, TableError
from ledgerlake.inspect.reject_counts import count_rejects
from ledgerlake.operators.partition_writer import misfit_rejects
from ledgerlake.options.config import Config, parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.components import make_components
from ledgerlake.pipeline.start import query_name
from ledgerlake.reasons import REASONS, Reason
from ledgerlake.replay import replay as module
from ledgerlake.replay import replay_messages, replay_rejects
from ledgerlake.replay.replay import REPLAYABLE, replay
from ledgerlake.replay.replay_parts import Parts
from ledgerlake.replay.replay_rejects import FoundReject, RejectsToReplay
from ledgerlake.stored.files import save_json
from ledgerlake.stored.offsets import PartitionOffset, to_json
from ledgerlake.table.batch_commit import BatchCommit, SeenBatch
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import existing_table
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.values.record_rows import Misfit
from ledgerlake.verify.key_comparison import Kind
from ledgerlake.wire.entry import encode_batch, encode_entry, parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL, MessageId, Position
from tests.chunks import chunk_entries
from tests.entries import batch, metadata, single
from tests.verify.test_topic_content import read

TOPIC = "persistent://public/default/orders"

# The number of the checkpoint, and the name of its query in the tables.
NUMBER = 7
QUERY = query_name("orders", "q")

# Makes a configuration whose table of some name a start refuses.
Fault = Callable[[Config, str, Table], None]


def config(folder: Path, *tables: dict[str, Any], **delta: Any) -> Config:
    settings = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["orders"]},
            "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
            "delta": {"rejects_path": str(folder / "rejects"), **delta},
            "tables": [{**table, "path": str(folder / table["path"])} for table in tables],
        }
    )
    checkpoint = Checkpoint(settings.checkpoint_place)
    checkpoint.save_stream("orders", NUMBER)
    checkpoint.save_start({})
    (folder / "checkpoint/metadata").write_text('{"id": "q"}')
    return settings


def by_lines(settings: Config) -> Config:
    """Let a function of the user's read the entries."""
    function = "tests.source.test_payload_processor:lines"
    return replace(settings, source=replace(settings.source, message_payload_processor=function))


def committed(settings: Config, start: PartitionOffset, end: PartitionOffset) -> None:
    """Let the stream have read the topic from one offset to another."""
    checkpoint = settings.checkpoint_place
    save_json(checkpoint / "ledgerlake" / "start.json", to_json({TOPIC: start}))
    for log, content in (("offsets", json.dumps(to_json({TOPIC: end}))), ("commits", "{}")):
        folder = Path(checkpoint.uri) / log
        folder.mkdir(exist_ok=True)
        (folder / "0").write_text(f"v1\n{{}}\n{content}")


def reject(
    settings: Config, *numbers: int, reason: str = "no_table", topic: str = TOPIC, **message: Any
) -> None:
    """Put messages with these entry ids and values into the table of rejects."""
    common = {
        "topic": topic,
        "partition": -1,
        "ledger_id": 1,
        "batch_index": -1,
        "is_null": False,
        "publish_time": 1000,
    }
    rows = [
        {**common, "entry_id": number, "value": b"%d" % number, "key": "a", **message}
        for number in numbers
    ]
    entries = single_entries(pa.RecordBatch.from_pylist(rows, schema=schema.MESSAGES))
    reject_entries(settings, dict(zip(numbers, entries, strict=True)), reason, topic)


def reject_entries(
    settings: Config,
    entries: dict[int, bytes],
    reason: str,
    topic: str = TOPIC,
    ledger_id: int = 1,
    batch_index: int = -1,
) -> None:
    """Put stored entries, by their entry ids, or messages of batches into the table of rejects."""
    table = Table(settings.rejects_place, schema.REJECTS)
    if existing_table(settings.rejects_place) is None:
        settings.rejects_place.make()
        table.create()
    place = {"topic": topic, "partition": -1, "ledger_id": ledger_id}
    rejected = [
        place
        | {
            "entry_id": number,
            "message_id": str(MessageId(ledger_id, number, batch_index)),
            "reason": reason,
            "detail": "d",
            "entry": entry,
        }
        for number, entry in entries.items()
    ]
    writer = BufferedWriter(
        data_folder(settings.rejects_place, schema.REJECTS, "part-00000007-00000")
    )
    writer.write(pa.Table.from_pylist(rejected, schema=schema.REJECTS))
    version = DeltaTable(table.path.uri).version()
    table._append(writer.finish(), {"test": len(entries)}, None, "test", version)


def reject_misfit(settings: Config, message: pa.RecordBatch, reason: str) -> None:
    """Put a message that did not fit its table into the table of rejects."""
    (misfit,) = misfit_rejects(message, [Misfit(0, Reason(reason), "d")])
    assert misfit.entry is not None
    place = misfit.position
    entries = {place.entry_id: bytes(misfit.entry)}
    reject_entries(settings, entries, reason, ledger_id=place.ledger_id)


def large(entries: list[bytes], first: int) -> pa.RecordBatch:
    """The row of a large message whose chunks have entry ids from one on."""
    positions = tuple(Position(1, first + number) for number in range(len(entries)))
    return decode_large(entries, positions, TopicPartition(TOPIC, -1), 1 << 20)


def put_large(
    settings: Config, form: str, first: int, value: bytes = b"large", uuid: str = "p-1"
) -> None:
    """Put a large message into the table of rejects, as one that did not fit, or as chunks."""
    entries = chunk_entries(value, 2, uuid, publish_time=1)
    if form == "misfit":
        reject_misfit(settings, large(entries, first), "no_table")
    elif form == "chunks":
        reject_entries(settings, dict(enumerate(entries, first)), "encrypted")
    else:
        reject_entries(settings, {first: entries[0]}, "chunk_expired")
        reject_entries(settings, {first + 1: entries[1]}, "chunk_orphan")


FORMS = ("misfit", "chunks", "orphan")


def values(folder: Path, name: str) -> list[bytes]:
    found: list[bytes] = DeltaTable(str(folder / name)).to_pyarrow_table()["value"].to_pylist()
    return sorted(found)


def interrupted(monkeypatch: pytest.MonkeyPatch, settings: Config, commits: int = 0) -> None:
    """Replay until so many commits have landed."""
    append = Table.append_once
    landed: list[str] = []

    def end(table: Table, *arguments: Any) -> None:
        if len(landed) == commits:
            raise KeyboardInterrupt
        append(table, *arguments)
        landed.append(str(table.path))

    with monkeypatch.context() as changed:
        changed.setattr(Table, "append_once", end)
        with pytest.raises(KeyboardInterrupt):
            replay(settings)


def test_a_new_table_of_rejects_loses_nothing(tmp_path: Path) -> None:
    first = config(tmp_path, {"path": "t"})
    reject(first, 1, 2)
    assert replay(first).replayed == {"no_table": 2}
    second = config(tmp_path, {"path": "t"}, rejects_path=str(tmp_path / "others"))
    reject(second, 3, 4)
    assert replay(second).replayed == {"no_table": 2}
    assert values(tmp_path, "t") == [b"1", b"2", b"3", b"4"]


def test_a_second_replay_beside_one_at_work_changes_nothing_that_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1, 2)
    reject(settings, 3, 4, reason="schema_mismatch")
    commit = Parts.commit
    met: list[Any] = []

    def second(own: Any, part: Any) -> None:
        if not met:
            met.append(None)
            replay(settings, ["schema_mismatch"])
        commit(own, part)

    with monkeypatch.context() as changed:
        changed.setattr(Parts, "commit", second)
        with pytest.raises(TableError, match="has committed meanwhile"):
            replay(settings, ["no_table"])
    replay(settings)
    assert values(tmp_path, "t") == [b"1", b"2", b"3", b"4"]


def test_entries_are_decoded_together_up_to_a_size_and_those_of_one_place_always(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay_messages, "_PLAIN_BYTES", 2_000_000)
    claimed = encode_entry(metadata(compression=pb.ZSTD, uncompressed_size=1_000_000), b"x")
    entries = [*((number, claimed) for number in (5, 1, 2, 3, 1, 1)), (4, b"no entry")]
    rejects = [{"ledger_id": 1, "entry_id": number, "entry": entry} for number, entry in entries]
    parts = [
        [reject["entry_id"] for reject in part] for part in replay_messages.by_plain_size(rejects)
    ]
    assert parts == [[1, 1, 1], [2, 3], [4, 5]]


def test_a_second_replay_that_ends_before_the_first_commits_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1, 2)
    add = Parts.add
    met: list[Any] = []

    def second(own: Any, *arguments: Any) -> None:
        if not met:
            met.append(None)
            assert replay(settings).replayed == {"no_table": 2}
        add(own, *arguments)

    with monkeypatch.context() as changed:
        changed.setattr(Parts, "add", second)
        with pytest.raises(
            TableError,
            match="another replay of the stream orders has committed meanwhile; replay again",
        ):
            replay(settings)
    assert replay(settings).replayed == {}
    assert values(tmp_path, "t") == [b"1", b"2"]
    reject(settings, 3)
    assert replay(settings).replayed == {"no_table": 1}
    assert values(tmp_path, "t") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("commits", [0, 1])
def test_an_interrupted_replay_into_tables_by_topic_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commits: int
) -> None:
    settings = config(tmp_path, {"path": "raw/{topic}"}, path=str(tmp_path / "rest"))
    reject(settings, 1, 2)
    interrupted(monkeypatch, settings, commits)
    replay(settings)
    assert values(tmp_path, "raw/orders") == [b"1", b"2"]
    assert replay(settings).replayed == {}


def test_a_part_whose_files_are_gone_is_replayed_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1, 2)
    interrupted(monkeypatch, settings)
    for file in (tmp_path / "t").glob("*.parquet"):
        file.unlink()
    assert replay(settings).replayed == {"no_table": 2}
    assert values(tmp_path, "t") == [b"1", b"2"]


def test_an_interrupted_replay_is_not_finished_into_another_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, path=str(tmp_path / "t"))
    reject(settings, 1)
    interrupted(monkeypatch, settings)
    with pytest.raises(
        CheckpointError,
        match=r"for the table at .*t, which the configuration does not name any more",
    ):
        replay(config(tmp_path, path=str(tmp_path / "other")))
    replay(settings)
    assert values(tmp_path, "t") == [b"1"]


def test_a_record_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1)
    record = tmp_path / "checkpoint" / "ledgerlake" / "replay.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text('{"version": 2}')
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        replay(settings)
    record.write_text('{"version": 1, "number": "x"}')
    with pytest.raises(OffsetError, match="damaged record of a replay"):
        replay(settings)


GOLDEN = (
    '{"version": 1, "number": 5, "topics": ["persistent://public/default/orders"], "tables": '
    '{"messages": {"path": "PATH", "before": null, '
    '"files": [{"name": "gone.parquet", "size_bytes": 1, "rows": 1, "stats": "{}", "first": [1, 1, '
    '1, -1], "last": [1, 1, 1, -1], '
    '"partition_values": {}}]}}}'
)


def test_a_golden_record_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, path=str(tmp_path / "t"))
    reject(settings, 1)
    record = tmp_path / "checkpoint" / "ledgerlake" / "replay.json"
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(GOLDEN.replace("PATH", str(tmp_path / "t")))
    Table(settings.messages_place, schema.MESSAGES).create()
    interrupted(monkeypatch, settings)
    written = json.loads(record.read_text())
    (file,) = written["tables"]["messages"]["files"]
    golden = json.loads(GOLDEN.replace("PATH", str(tmp_path / "t")))
    (golden_file,) = golden["tables"]["messages"]["files"]
    del written["tables"]["rejects"]
    assert list(golden_file) == list(file)
    golden["number"] = written["number"]
    golden_file |= file
    assert written == golden
    replay(settings)
    assert values(tmp_path, "t") == [b"1"]
    assert not record.exists()


def test_rejects_of_a_micro_batch_that_is_not_finished_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1)
    offsets = tmp_path / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "7").write_text(f"v1\n{{}}\n{json.dumps(to_json({}))}")
    monkeypatch.setattr(module, "_BATCH_S", 0.5)
    monkeypatch.setattr(module, "_TOLD_S", 0.1)
    with pytest.raises(CheckpointError, match="batch 7 of the stream orders is not finished"):
        replay(settings)
    assert sum("is waited for" in message for message in caplog.messages) == 1
    (tmp_path / "checkpoint" / "commits").mkdir()
    (tmp_path / "checkpoint" / "commits" / "7").write_text("v1\n{}")
    assert replay(settings).replayed == {"no_table": 1}


@pytest.mark.parametrize("is_of_a_function", [False, True])
def test_of_an_entry_that_the_stream_has_read_in_part_a_replay_brings_that_part(
    tmp_path: Path, is_of_a_function: bool
) -> None:
    """The next read of the topic begins behind the end, and brings the rest."""
    payloads = [b"0", b"1", b"2", b"3"]
    entry = batch(payloads)
    if is_of_a_function:
        entry = single(b"lines:" + b" ".join(b"k=" + value for value in payloads))
    before, first = Position(1, 4), PartitionOffset(Position(1, 4))
    cuts = [PartitionOffset(before, index) for index in (0, 1, 2)]
    last, behind = PartitionOffset(Position(1, 5)), PartitionOffset(Position(1, 7), 1)
    offsets = [PartitionOffset(BEFORE_ALL), first, *cuts, last, behind]
    for number, (start, end) in enumerate(combinations(offsets, 2)):
        if end == first or start == last:
            continue
        folder = tmp_path / str(number)
        settings = config(folder, {"path": "t"})
        if is_of_a_function:
            settings = by_lines(settings)
        committed(settings, start, end)
        reject_entries(settings, {5: entry}, "encrypted")
        assert replay(settings).replayed == {"encrypted": 1}
        first_index = 0 if start.batch_index is None else start.batch_index + 1
        end_index = len(payloads)
        if end in cuts and end.batch_index is not None:
            end_index = end.batch_index + 1
        assert values(folder, "t") == payloads[first_index:end_index], (start, end)


def test_a_message_that_was_rejected_twice_comes_once(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1)
    reject(settings, 1, 2, reason="schema_mismatch")
    assert replay(settings).replayed == {"no_table": 1, "schema_mismatch": 2}
    assert values(tmp_path, "t") == [b"1", b"2"]
    assert replay(settings).replayed == {}


@pytest.mark.parametrize("enabled", [True, False])
def test_occurrences_of_a_message_that_repeats_stay(tmp_path: Path, enabled: bool) -> None:
    """They have one position, by which a replay knows what a table has. What waits goes on
    repeating if the delay is disabled.
    """
    settings = config(tmp_path, {"path": "t"})
    settings = replace(settings, delay=replace(settings.delay, enabled=enabled))
    for number, name in ((1, "every"), (2, "cron")):
        for occurrence in ("1", "2"):
            properties = [(f"ledgerlake.{name}", "PT1S"), ("ledgerlake.occurrence", occurrence)]
            reject(settings, number, deliver_at=1_700_000_000_000_000, properties=properties)
    reject(settings, 3, deliver_at=1_700_000_000_000_000, properties=[("ledgerlake.schedule", "a")])
    reject(settings, 4, properties=[("ledgerlake.every", "PT1S"), ("ledgerlake.occurrence", "1")])
    result = replay(settings)
    assert (result.replayed, result.left) == ({"no_table": 2}, {"no_table": 4})
    assert "repeats" in result.why["no_table"]
    assert values(tmp_path, "t") == [b"3", b"4"]


def bad(**said: str) -> list[pb.KeyValue]:
    return [pb.KeyValue(key=f"ledgerlake.{name}", value=text) for name, text in said.items()]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("due", [{}, {"deliver_at_time": 1_700_000_000_000}])
def test_messages_with_bad_schedules_become_no_rows_if_messages_are_delayed(
    enabled: bool, copies: int, due: dict[str, Any], tmp_path: Path
) -> None:
    """A delayed message with a property of schedules is sent alone, and pauses nothing."""
    settings = config(tmp_path, {"path": "t"})
    settings = replace(settings, delay=replace(settings.delay, enabled=enabled))
    of_batch = [
        (pb.SingleMessageMetadata(payload_size=0, properties=own), b"%d" % number)
        for number, own in enumerate([[], bad(pause="everything"), bad(schedule="a"), []])
    ]
    payload = encode_batch(of_batch)
    entries = {
        1: single(b"no start", properties=bad(schedule="a", cron="0 9 * * *"), **due),
        2: encode_entry(
            metadata(num_messages_in_batch=len(of_batch), uncompressed_size=len(payload), **due),
            payload,
        ),
        3: single(b"paused", properties=bad(pause="all"), **due),
        4: single(b"nobody", properties=bad(pause="everything"), **due),
    } | dict(
        enumerate(chunk_entries(b"large", 2, "p-1", properties=bad(expires="never"), **due), 5)
    )
    for _ in range(copies):
        reject_entries(settings, entries, "encrypted")
    replay(settings)
    if_at_once = [b"2", b"paused"]
    refused = [b"1", b"large", b"no start", b"nobody", *(if_at_once if due else [])]
    fitting = [b"0", b"3", *([] if due else if_at_once)]
    assert values(tmp_path, "t") == sorted(fitting + ([] if enabled else refused))
    rows = DeltaTable(str(tmp_path / "rejects")).to_pyarrow_table().to_pylist()
    own = [(row["message_id"], row["detail"]) for row in rows if row["reason"] == "bad_schedule"]
    if not enabled:
        assert own == []
    elif due:
        ((message_id, detail),) = own
        assert (message_id, detail[:27]) == ("1:2", "messages 1, 2 of the batch:")
        assert "must be sent alone" in detail
    else:
        ((message_id, detail),) = own
        assert message_id == "1:2:1"
        assert "neither schedule=ID nor all" in detail


@pytest.mark.parametrize("enabled", [True, False])
def test_a_message_of_a_delayed_batch_is_judged_as_one_also_if_it_is_a_reject_of_its_own(
    enabled: bool, tmp_path: Path
) -> None:
    settings = config(tmp_path, {"path": "t"})
    settings = replace(settings, delay=replace(settings.delay, enabled=enabled))
    for index, properties in enumerate([[], bad(schedule="a")]):
        entry = single(b"%d" % index, deliver_at_time=1_700_000_000_000, properties=properties)
        reject_entries(settings, {1: entry}, "no_table", batch_index=index)
    replay(settings)
    assert values(tmp_path, "t") == ([b"0"] if enabled else [b"0", b"1"])


def test_a_delayed_message_that_has_expired_stays(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    due_us = 1_700_000_000_000_000
    for number, expires_ms in ((1, 1_700_000_000_001), (2, 4_000_000_000_000)):
        properties = [("ledgerlake.schedule", "a"), ("ledgerlake.expires", str(expires_ms))]
        reject(settings, number, reason="undecryptable", deliver_at=due_us, properties=properties)
    reject(
        settings, 3, reason="undecryptable", properties=[("ledgerlake.expires", "1700000000001")]
    )
    result = replay(settings)
    assert (result.replayed, result.left) == ({"undecryptable": 2}, {"undecryptable": 1})
    assert values(tmp_path, "t") == [b"2", b"3"]


def test_a_large_delayed_message_that_has_expired_stays_with_its_chunks(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    for first, expires_ms in ((10, 1_700_000_000_001), (20, 4_000_000_000_000)):
        expires = [pb.KeyValue(key="ledgerlake.expires", value=str(expires_ms))]
        chunks = chunk_entries(
            b"%d" % first, 2, f"p-{first}", deliver_at_time=1_700_000_000_000, properties=expires
        )
        reject_entries(settings, dict(enumerate(chunks, first)), "undecryptable")
    result = replay(settings)
    assert (result.replayed, result.left) == ({"undecryptable": 2}, {"undecryptable": 2})
    assert values(tmp_path, "t") == [b"20"]


@pytest.mark.parametrize("reason", REPLAYABLE)
def test_a_delayed_message_that_may_have_been_rejected_before_it_was_due_stays(
    tmp_path: Path, reason: str
) -> None:
    """It did not wait, so no cancel and no replacement of it is known."""
    settings = config(tmp_path, {"path": "t"})
    if reason == "payload_processor":
        settings = by_lines(settings)
    due_ms = 1_700_000_000_000
    scheduled = [pb.KeyValue(key="ledgerlake.schedule", value="a")]
    is_withheld = reason in (
        "too_large",
        "payload_processor",
        "chunk_orphan",
        "chunk_expired",
        "chunk_evicted",
    )
    delay: dict[str, Any] = {"sequence_id": 2, "deliver_at_time": due_ms, "properties": scheduled}
    late = chunk_entries(b"large delayed", 2, "p-2", **delay)
    count = 1 if REASONS[Reason(reason)].is_of_a_table else 2
    for first, chunks in ((10, chunk_entries(b"large at once", 2, "p-1")), (20, late)):
        if count == 1:
            reject_misfit(settings, large(chunks, first), reason)
        else:
            reject_entries(settings, dict(enumerate(chunks, first)), reason)
    reject_entries(
        settings, {1: single(b"at once"), 2: single(b"delayed", deliver_at_time=due_ms)}, reason
    )
    result = replay(settings)
    half = {reason: 1 + count}
    assert (result.replayed, result.left) == (
        (half, half) if is_withheld else ({reason: 2 + 2 * count}, {})
    )
    if is_withheld:
        assert "before it was due" in result.why[reason]
    delayed = [] if is_withheld else [b"delayed", b"large delayed"]
    assert values(tmp_path, "t") == sorted([b"at once", b"large at once", *delayed])


def test_chunks_that_were_rejected_when_and_before_they_were_due_make_no_delayed_message(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, {"path": "t"})
    first, second = chunk_entries(b"large", 2, deliver_at_time=1_700_000_000_000)
    reject_entries(settings, {1: first}, "encrypted")
    reject_entries(settings, {2: second}, "chunk_orphan")
    assert replay(settings).left == {"encrypted": 1, "chunk_orphan": 1}


@pytest.mark.parametrize("reasons", [(), ("chunk_expired",)])
def test_chunks_that_came_after_their_message_was_given_up_are_replayed_with_the_others(
    tmp_path: Path, reasons: tuple[str, ...]
) -> None:
    settings = config(tmp_path, {"path": "t"})
    first, second, third = chunk_entries(b"whole", 3, "p-1")
    reject_entries(settings, {1: first, 2: second}, "chunk_expired")
    reject_entries(settings, {9: third, 20: chunk_entries(b"cut", 2, "p-2")[1]}, "chunk_orphan")
    result = replay(settings, reasons)
    assert (result.replayed, result.left) == (
        {"chunk_expired": 2, "chunk_orphan": 1},
        {"chunk_orphan": 1},
    )
    assert values(tmp_path, "t") == [b"whole"]


def test_large_messages_whose_uuid_came_again_are_told_apart_by_their_publish_time(
    tmp_path: Path,
) -> None:
    settings = config(tmp_path, {"path": "t"})
    monday, tuesday, friday = (
        chunk_entries(value, 2, publish_time=time_ms)
        for value, time_ms in ((b"monday", 1000), (b"tuesday", 2000), (b"friday", 3000))
    )
    reject_entries(settings, dict(enumerate([*monday, *tuesday, friday[1]], 1)), "undecryptable")
    result = replay(settings)
    assert (result.replayed, result.left) == ({"undecryptable": 4}, {"undecryptable": 1})
    assert values(tmp_path, "t") == [b"monday", b"tuesday"]


def test_a_chunk_that_is_twice_in_rejects_keeps_its_message_from_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    first, second = chunk_entries(b"whole", 2)
    reject_entries(settings, {1: first, 2: second}, "encrypted")
    reject_entries(settings, {1: first, 2: second, 3: second}, "chunk_orphan")
    result = replay(settings)
    assert (result.replayed, result.left) == ({"encrypted": 2, "chunk_orphan": 3}, {})
    assert values(tmp_path, "t") == [b"whole"]
    assert replay(settings).replayed == {}


def test_rejects_of_topics_that_are_not_read_stay(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1)
    reject(settings, 2, topic="persistent://public/default/payments")
    result = replay(settings)
    assert (result.replayed, result.left_out) == ({"no_table": 1}, 1)
    assert values(tmp_path, "t") == [b"1"]


@pytest.mark.parametrize("lacks", ["topic", "partition", "message_id"])
def test_rows_of_no_message_that_somebody_has_added_are_passed_over(
    tmp_path: Path, lacks: str
) -> None:
    settings = config(tmp_path, {"path": "t"})
    reject(settings, 1)
    own = {
        "topic": TOPIC,
        "partition": -1,
        "ledger_id": 1,
        "entry_id": 7,
        "message_id": "1:7",
        "entry": b"x",
    }
    row = pa.Table.from_pylist([own | {"reason": "no_table", lacks: None}], schema=schema.REJECTS)
    write_deltalake(str(tmp_path / "rejects"), row, mode="append")
    assert replay(settings).replayed == {"no_table": 1}
    assert values(tmp_path, "t") == [b"1"]


def test_a_message_that_no_table_gets_anew_stays_a_reject(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "all"}, {"path": "latest", "mode": "latest"})
    reject(settings, 1)
    assert replay(settings).replayed == {"no_table": 1}
    reject(settings, 1, reason="transform_failed")
    assert replay(settings).left == {"transform_failed": 1}
    assert values(tmp_path, "all") == [b"1"]


@pytest.mark.parametrize("form", ["small", *FORMS])
def test_a_message_that_fits_one_table_and_not_another_is_in_the_one_alone_or_with_others(
    tmp_path: Path, form: str
) -> None:
    strict = {"path": "b", "where": "cast(decode(value) as int) < 2"}
    settings = config(tmp_path, {"path": "a"}, strict)
    reject(settings, 1)
    if form == "small":
        reject(settings, 2, value=b"x")
    else:
        put_large(settings, form, 2, b"x")
    result = replay(settings)
    assert result.replayed
    assert result.left == {}
    assert (values(tmp_path, "a"), values(tmp_path, "b")) == ([b"1", b"x"], [b"1"])
    assert [left.reason for left in count_rejects(settings)] == ["transform_failed"]
    lenient = strict | {"where": "coalesce(try_cast(decode(value) as int), 0) < 2"}
    result = replay(config(tmp_path, {"path": "a"}, lenient))
    assert (result.replayed, result.left) == ({"transform_failed": 1}, {})
    assert (values(tmp_path, "a"), values(tmp_path, "b")) == ([b"1", b"x"], [b"1", b"x"])


@pytest.mark.parametrize("chunks", [1, 3])
def test_the_row_of_a_message_that_did_not_fit_lacks_nothing(tmp_path: Path, chunks: int) -> None:
    settings = config(tmp_path, {"path": "t"})
    fields: dict[str, Any] = {
        "publish_time": 5,
        "event_time": 6,
        "deliver_at_time": 7,
        "partition_key": "k",
        "ordering_key": b"o",
        "schema_version": b"v",
        "properties": [pb.KeyValue(key="a", value="b")],
    }
    broker = pb.BrokerEntryMetadata(broker_timestamp=8, index=9)
    source = TopicPartition(TOPIC, -1)
    if chunks > 1:
        parts = [parse_entry(entry) for entry in chunk_entries(b"value", chunks, **fields)]
        entries = [encode_entry(part.metadata, bytes(part.payload), broker) for part in parts]
        message = large(entries, 1)
    else:
        raw = pa.array([encode_entry(metadata(**fields), b"value", broker)], pa.binary())
        (part,) = decode_entries(raw, np.array([1]), np.array([1]), source)
        message = part.messages.select(schema.MESSAGES.names)
    (expected,) = message.to_pylist()
    reject_misfit(settings, message, "no_table")
    assert replay(settings).replayed == {"no_table": 1}
    (row,) = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().to_pylist()
    of_the_replay = ("late", "delivered_at")
    assert {name: row[name] for name in expected if name not in of_the_replay} == {
        name: value for name, value in expected.items() if name not in of_the_replay
    }
    lacking = {name for name, value in row.items() if value is None}
    assert lacking == {"key_bytes"} | ({"chunk_count", "first_chunk_id"} if chunks == 1 else set())


@pytest.mark.parametrize("forms", [*product(FORMS, repeat=2)])
@pytest.mark.parametrize("uuid", ["p-1", "p-1-again"])
@pytest.mark.parametrize("replays", [1, 2])
def test_a_large_message_comes_once_in_whatever_forms_it_was_rejected(
    tmp_path: Path, forms: tuple[str, str], uuid: str, replays: int
) -> None:
    """Its producer has sent it several times."""
    settings = config(tmp_path, {"path": "t"})
    put_large(settings, forms[0], 10)
    if replays == 2:
        assert replay(settings).replayed
    put_large(settings, forms[1], 20, uuid=uuid)
    replay(settings)
    replay(settings)
    assert values(tmp_path, "t") == [b"large"]


def test_a_message_that_is_rejected_again_for_the_same_reason_is_replayed_again(
    tmp_path: Path,
) -> None:
    strict = {"where": "cast(decode(value) as int) > 0"}
    lenient = {"where": "try_cast(decode(value) as int) is null"}
    settings = config(tmp_path, {"path": "a", **strict}, {"path": "b", **strict})
    reject(settings, 1, reason="transform_failed", value=b"x")
    half = config(tmp_path, {"path": "a", **lenient}, {"path": "b", **strict})
    assert replay(half).replayed == {"transform_failed": 1}
    assert [(count.reason, count.rejects) for count in count_rejects(half)] == [
        ("transform_failed", 1)
    ]
    assert replay(half).left == {"transform_failed": 1}
    whole = config(tmp_path, {"path": "a", **lenient}, {"path": "b", **lenient})
    assert replay(whole).replayed == {"transform_failed": 1}
    assert replay(whole).replayed == {}
    assert count_rejects(whole) == []
    assert (values(tmp_path, "a"), values(tmp_path, "b")) == ([b"x"], [b"x"])


@pytest.mark.parametrize("shape", ["messages", "record"])
@pytest.mark.parametrize("first_entry_id", [10, 30])
@pytest.mark.parametrize(
    "other", [{}, {"publish_time": 2}, {"sequence_id": 2}, {"producer_name": "q"}]
)
@pytest.mark.usefixtures("no_schemas")
def test_chunks_that_were_given_up_and_an_orphan_are_no_message_that_the_table_has(
    tmp_path: Path, shape: str, first_entry_id: int, other: dict[str, Any]
) -> None:
    """The producer has sent it again, as a whole, and then its last chunk alone."""
    table = {"path": "t", "shape": shape}
    settings = config(
        tmp_path, table | ({"json_fields": {"a": "int"}} if shape == "record" else {})
    )
    value = b'{"a": 12345}'
    sent = chunk_entries(value, 3, **{"publish_time": 1} | other)
    reject_entries(settings, dict(enumerate(sent, first_entry_id)), "encrypted")
    assert replay(settings).replayed == {"encrypted": 3}
    first, second, last = chunk_entries(value, 3, publish_time=1)
    reject_entries(settings, {21: first, 22: second}, "chunk_expired")
    reject_entries(settings, {40: last}, "chunk_orphan")
    result = replay(settings)
    chunks = {"chunk_expired": 2, "chunk_orphan": 1}
    assert (result.replayed, result.left) == ((chunks, {}) if other else ({}, chunks))
    rows = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().num_rows
    assert rows == (2 if other else 1)


@pytest.mark.parametrize("beyond", [{"sequence_id": 2**63}, {"publish_time": 2**62}])
def test_a_large_message_with_a_number_that_no_column_can_hold_comes_once(
    tmp_path: Path, beyond: dict[str, Any]
) -> None:
    settings = config(tmp_path, {"path": "t"})
    entries = chunk_entries(b"large", 2, **{"publish_time": 1} | beyond)
    for first in (1, 11):
        reject_entries(settings, dict(enumerate(entries, first)), "encrypted")
        replay(settings)
    assert values(tmp_path, "t") == [b"large"]


def test_chunks_in_any_order_are_the_messages_that_a_comparison_with_the_topic_expects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left over of them is missed nowhere."""
    settings = config(tmp_path, {"path": "t"})
    entries: list[bytes] = []
    for number, order in enumerate(product(range(3), repeat=4)):
        chunks = chunk_entries(b"large", 3, f"p-{number}", sequence_id=number)
        entries += [chunks[chunk_id] for chunk_id in order]
    reject_entries(settings, dict(enumerate(entries)), "chunk_orphan", ledger_id=7)
    result = replay(settings)
    assert result.left
    rows = DeltaTable(str(tmp_path / "t")).to_pyarrow_table()["entry_id"].to_pylist()
    were_rejects = np.array([[7, number] for number in range(len(entries))])
    _, records = read(monkeypatch, entries, chunks=were_rejects)
    assert records
    assert {kind for kind, _, _ in records} == {Kind.ENTRY}
    assert {entry_id for _, entry_id, _ in records} <= set(rows)


def test_an_orphan_brings_its_message_into_the_table_that_lacks_it_alone(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "a"})
    first, last = chunk_entries(b"large", 2)
    reject_entries(settings, {1: first, 2: last}, "encrypted")
    assert replay(settings).replayed == {"encrypted": 2}
    settings = config(tmp_path, {"path": "a"}, {"path": "b"})
    reject_entries(settings, {3: first}, "chunk_expired")
    reject_entries(settings, {4: last}, "chunk_orphan")
    assert replay(settings).replayed == {"chunk_expired": 1, "chunk_orphan": 1}
    assert (values(tmp_path, "a"), values(tmp_path, "b")) == ([b"large"], [b"large"])


LARGE_AMOUNTS = {
    "path": "t",
    "shape": "record",
    "json_fields": {"amount": "int"},
    "sql": "select amount from messages where amount > 10",
}


@pytest.fixture
def no_schemas(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry without schemas."""
    monkeypatch.setattr(Cluster, "schemas", lambda _, asked: [None for _ in asked])


@pytest.mark.usefixtures("no_schemas")
def test_a_message_that_the_query_leaves_out_stays_a_reject_until_a_table_gets_a_row_of_it(
    tmp_path: Path,
) -> None:
    narrow = config(tmp_path, LARGE_AMOUNTS)
    reject(narrow, 1, reason="transform_failed", value=b'{"amount": 5}')
    reject(narrow, 2, reason="transform_failed", value=b'{"amount": 50}')
    result = replay(narrow)
    assert (result.replayed, result.left) == ({"transform_failed": 1}, {"transform_failed": 1})
    assert "leaves this message out" in result.why["transform_failed"]
    (left,) = count_rejects(narrow)
    assert (left.rejects, left.message_id) == (1, "1:1")
    wide = config(tmp_path, LARGE_AMOUNTS | {"sql": "select amount from messages"})
    assert replay(wide).replayed == {"transform_failed": 1}
    assert sorted(DeltaTable(str(tmp_path / "t")).to_pyarrow_table()["amount"].to_pylist()) == [
        5,
        50,
    ]


@pytest.mark.usefixtures("no_schemas")
@pytest.mark.parametrize("seed", range(10))
def test_what_becomes_of_a_batch_is_what_a_run_makes_of_it_if_a_table_gets_a_row(
    seed: int, tmp_path: Path
) -> None:
    """The query leaves out some messages, the condition of the table others, and some do not
    fit.
    """
    rng = random.Random(seed)
    settings = config(tmp_path, LARGE_AMOUNTS | {"where": "amount <> 7"})
    amounts = [rng.choice(["5", "7", "50", '"text"']) for _ in range(rng.randint(1, 4))]
    payload = encode_batch(
        [(pb.SingleMessageMetadata(), b'{"amount": %s}' % amount.encode()) for amount in amounts]
    )
    entry = encode_entry(
        metadata(num_messages_in_batch=len(amounts), uncompressed_size=len(payload)), payload
    )
    reject_entries(settings, {1: entry}, "bad_compression")
    result, gets_row = replay(settings), "50" in amounts
    assert (result.replayed, result.left) == (
        ({"bad_compression": 1}, {}) if gets_row else ({}, {"bad_compression": 1})
    )
    of_run = {"7": "no_table", '"text"': "schema_mismatch"}
    rejects = DeltaTable(str(tmp_path / "rejects")).to_pyarrow_table().to_pylist()
    own = [row["reason"] for row in rejects if row["reason"] in of_run.values()]
    expected = [of_run[amount] for amount in amounts if amount in of_run]
    assert sorted(own) == (sorted(expected) if gets_row else [])


@pytest.mark.usefixtures("no_schemas")
def test_a_replay_refuses_what_a_start_refuses_and_changes_no_table(tmp_path: Path) -> None:
    table = {"path": "t", "shape": "record"}
    first = config(
        tmp_path, {**table, "json_fields": {"ms": "int"}, "sql": "select ms from messages"}
    )
    reject(first, 1, reason="schema_mismatch", value=b'{"ms": 5}')
    assert replay(first).replayed == {"schema_mismatch": 1}
    reject(first, 2, reason="schema_mismatch", value=b'{"ms": 29000000000}')
    query = "select try_cast(ms as int) as ms, ms as ms_long from messages"
    with pytest.raises(SetupError, match="set the type back"):
        replay(config(tmp_path, {**table, "json_fields": {"ms": "long"}, "sql": query}))
    assert "ms_long" not in pa.schema(DeltaTable(str(tmp_path / "t")).schema()).names


def test_the_chunks_of_a_large_message_are_in_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_rejects, "_PART_ROWS", 4)

    def found(
        entry_id: int, large: str = "", chunk: tuple[int, int] = (0, 0), size_bytes: int = 1
    ) -> FoundReject:
        message = ("p", large, 1) if large else None
        return FoundReject(
            TOPIC, -1, (1, entry_id, -1), "f", 0, entry_id, size_bytes, message, *chunk
        )

    of_u = [found(3, "u", (0, 3)), found(5, "u", (1, 3)), found(7, "u", (2, 3))]
    rejects = [found(0), found(1), found(2), *of_u, found(4), found(6, "v", (1, 3))]
    parts = [[reject.place[1] for reject in part] for part in replay_rejects._parts(rejects, 100)]
    assert parts == [[0, 1, 2], [3, 5, 7, 4], [6]]
    monkeypatch.setattr(replay_rejects, "_PART_BYTES", 10)
    of_u = [found(1, "u", (0, 2), 20), found(2, "u", (1, 2), 20)]
    large = [found(0, size_bytes=9), *of_u, found(3, size_bytes=5)]
    assert [[reject.place[1] for reject in part] for part in replay_rejects._parts(large, 100)] == [
        [0],
        [1, 2],
        [3],
    ]


def test_what_is_kept_of_a_reject_until_its_part_is_read_is_small(tmp_path: Path) -> None:
    settings, count = config(tmp_path, {"path": "t"}), 3000
    reject_entries(settings, dict.fromkeys(range(count), bytes(single(b"x"))), "bad_compression")
    RejectsToReplay(settings.rejects_place, ["bad_compression"], lambda *_: True, 500)
    tracemalloc.start()
    try:
        rejects = RejectsToReplay(settings.rejects_place, ["bad_compression"], lambda *_: True, 500)
        kept_bytes, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rejects.sources == [(TOPIC, -1)]
    assert kept_bytes < 300 * count
    # The columns of the row group in work are plain Python too.
    assert peak_bytes < 700 * count


def test_of_chunks_in_rejects_only_the_entries_of_whole_messages_within_the_limits_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_rejects, "_PART_ROWS", 4)
    settings = config(tmp_path, {"path": "t"})
    settings = replace(settings, chunks=replace(settings.chunks, max_message_bytes=500))
    first, second = chunk_entries(b"whole", 2)
    orphan = chunk_entries(b"x" * 30, 3, "p-2")[1]
    too_large = chunk_entries(b"y" * 1100, 2, "p-3")
    reject_entries(
        settings,
        dict(enumerate([second, *[orphan] * 9, *too_large, first, *[second] * 9])),
        "chunk_orphan",
    )
    rejects = RejectsToReplay(settings.rejects_place, ["chunk_orphan"], lambda *_: True, 500)
    parts = [[row["entry"] for row in part] for part in rejects.parts()]
    assert [entry for part in parts for entry in part if entry is not None] == [first, second]
    assert max(map(len, parts)) == 6
    replayed = replay(settings)
    assert (replayed.replayed, replayed.left) == ({"chunk_orphan": 11}, {"chunk_orphan": 11})
    assert values(tmp_path, "t") == [b"whole"]


def test_entries_in_a_format_of_the_users_are_read_by_its_function_and_their_messages_are_not_again(
    tmp_path: Path,
) -> None:
    settings = by_lines(config(tmp_path, {"path": "t"}))
    entries = {1: single(b"lines:a=1 b=2"), 2: single(b"lines:"), 3: single(b"lines:bad=x")}
    reject_entries(settings, entries, "payload_processor")
    reject(settings, 4, value=b"lines:c=3")
    replayed = replay(settings)
    assert (replayed.replayed, replayed.left) == (
        {"payload_processor": 1, "no_table": 1},
        {"payload_processor": 2},
    )
    assert values(tmp_path, "t") == [b"1", b"2", b"lines:c=3"]


def test_what_a_function_could_not_read_stays_until_there_is_one_that_can(tmp_path: Path) -> None:
    """No table gets the bytes of a format that nothing has read."""
    settings = config(tmp_path, {"path": "t"})
    reject_entries(settings, {1: single(b"lines:a=1"), 2: single(b"plain")}, "payload_processor")
    result = replay(settings)
    assert (result.replayed, result.left) == ({}, {"payload_processor": 2})
    assert "message_payload_processor" in result.why["payload_processor"]
    assert replay(by_lines(settings)).replayed == {"payload_processor": 2}
    assert values(tmp_path, "t") == [b"1", b"plain"]


@pytest.mark.parametrize(
    "reason",
    ["encrypted", "undecryptable", "payload_processor", "unknown_codec", "bad_compression"],
)
def test_a_delayed_entry_in_a_format_of_the_users_stays(tmp_path: Path, reason: str) -> None:
    """It was rejected when it arrived, so no cancel and no replacement of it is known."""
    settings = by_lines(config(tmp_path, {"path": "t"}))
    delayed = single(b"lines:a=1", deliver_at_time=1_700_000_000_000)
    reject_entries(settings, {1: delayed, 2: single(b"lines:a=2")}, reason)
    replayed = replay(settings)
    assert (replayed.replayed, replayed.left) == ({reason: 1}, {reason: 1})
    assert values(tmp_path, "t") == [b"2"]


def test_an_expired_message_in_a_format_of_the_users_stays(tmp_path: Path) -> None:
    settings = by_lines(config(tmp_path, {"path": "t"}))
    expires = [pb.KeyValue(key="ledgerlake.expires", value="1700000000001")]
    entry = single(b"lines:a=1", deliver_at_time=1_700_000_000_000, properties=expires)
    reject_entries(settings, {1: entry}, "encrypted")
    replayed = replay(settings)
    assert (replayed.replayed, replayed.left) == ({}, {"encrypted": 1})


def test_what_only_a_table_with_the_latest_messages_takes_is_left(tmp_path: Path) -> None:
    settings = config(tmp_path, {"path": "latest", "mode": "latest"}, path=str(tmp_path / "others"))
    reject(settings, 1, reason="transform_failed")
    replayed = replay(settings)
    assert (replayed.replayed, replayed.left) == ({}, {"transform_failed": 1})
    assert "only tables with the latest messages take it" in replayed.why["transform_failed"]
    assert values(tmp_path, "others") == []


def test_of_a_batch_what_only_a_table_with_the_latest_messages_takes_stays_a_reject(
    tmp_path: Path,
) -> None:
    settings = config(
        tmp_path,
        {"path": "t", "where": "key = 'a'"},
        {"path": "latest", "where": "key = 'b'", "mode": "latest"},
    )
    singles = [(pb.SingleMessageMetadata(partition_key=key), key.encode()) for key in "ab"]
    payload = encode_batch(singles)
    entry = encode_entry(metadata(num_messages_in_batch=2, uncompressed_size=len(payload)), payload)
    reject_entries(settings, {1: entry}, "bad_compression")
    assert replay(settings).replayed == {"bad_compression": 1}
    assert values(tmp_path, "t") == [b"a"]
    (left,) = count_rejects(settings)
    assert (left.reason, left.message_id) == ("no_table", "1:1:1")
    again = replay(settings)
    assert (again.replayed, again.left) == ({}, {"no_table": 1})


@pytest.mark.usefixtures("no_schemas")
def test_a_table_that_is_not_made_yet_holds_up_no_replay_into_others(tmp_path: Path) -> None:
    waits = {
        "path": "waits",
        "shape": "record",
        "partition_by": ["country"],
        "topics_pattern": ".*other",
    }
    settings = config(tmp_path, waits, path=str(tmp_path / "others"))
    reject(settings, 1)
    assert replay(settings).replayed == {"no_table": 1}
    assert values(tmp_path, "others") == [b"1"]
    assert not (tmp_path / "waits/_delta_log").exists()


def plan_batch(settings: Config, number: int) -> BatchCommit:
    """Let the running stream plan a micro-batch."""
    checkpoint = Checkpoint(settings.checkpoint_place)
    offset = json.dumps(to_json({TOPIC: PartitionOffset(Position(1, number))}))
    offsets = Path(checkpoint.folder.uri) / "offsets"
    offsets.mkdir(exist_ok=True)
    (offsets / f"{number}").write_text(f"v1\n{{}}\n{offset}")
    return checkpoint.log.record("orders", QUERY, number, NUMBER)


def finish_batch(settings: Config, number: int) -> None:
    commits = Path(settings.checkpoint_place.uri) / "commits"
    commits.mkdir(exist_ok=True)
    (commits / f"{number}").write_text("v1\n{}")


def see(settings: Config, name: str, path: str, batch_id: int) -> None:
    seen = {name: SeenBatch(path, batch_id)}
    BatchEnds(Checkpoint(settings.checkpoint_place)).add(LastRun(batch_id, None), {}, seen)


def of_another_stream(settings: Config, _name: str, _table: Table) -> None:
    record = settings.checkpoint_place / "ledgerlake" / "stream.json"
    save_json(record, {"version": 1, "stream": "other", "number": NUMBER})


def written_by_another_stream(_settings: Config, _name: str, table: Table) -> None:
    table.begin_stream("other", [TOPIC])


def written_by_a_later_checkpoint(_settings: Config, _name: str, table: Table) -> None:
    table.commit(BatchCommit("orders", "later", 0, 1, checkpoint=NUMBER + 1), [], {})


def newer_than_the_checkpoint(_settings: Config, _name: str, table: Table) -> None:
    table.commit(BatchCommit("orders", QUERY, 0, 1, checkpoint=NUMBER), [], {})


def with_another_batch(settings: Config, _name: str, table: Table) -> None:
    plan_batch(settings, 0)
    finish_batch(settings, 0)
    table.commit(BatchCommit("orders", QUERY, 0, 1, checkpoint=NUMBER), [], {})


def older_than_the_checkpoint(settings: Config, name: str, table: Table) -> None:
    table.commit(plan_batch(settings, 0), [], {})
    finish_batch(settings, 0)
    see(settings, name, str(table.path), 1)


def unknown_to_the_table(settings: Config, name: str, table: Table) -> None:
    see(settings, name, str(table.path), 0)


def an_older_copy_at_another_path(settings: Config, name: str, table: Table) -> None:
    older_than_the_checkpoint(settings, name, table)
    see(settings, name, f"{table.path}-moved", 1)


def removed(settings: Config, name: str, table: Table) -> None:
    see(settings, name, str(table.path), 0)
    rmtree(table.path.uri)


FAULTS: list[Fault] = [
    of_another_stream,
    written_by_another_stream,
    written_by_a_later_checkpoint,
    newer_than_the_checkpoint,
    with_another_batch,
    older_than_the_checkpoint,
    unknown_to_the_table,
    an_older_copy_at_another_path,
]


# Without a table of rejects there is nothing to replay.
@pytest.mark.parametrize(
    ("fault", "name"), [*product(FAULTS, ["messages", "rejects"]), (removed, "messages")]
)
def test_a_replay_refuses_the_tables_that_a_start_refuses(
    tmp_path: Path, fault: Fault, name: str
) -> None:
    settings = config(tmp_path, path=str(tmp_path / "messages"))
    reject(settings, 1)
    assert replay(settings).replayed
    reject(settings, 2)
    fault(settings, name, make_components(settings).tables.by_name[name])
    with pytest.raises(CheckpointError):
        replay(settings)
    if fault is removed:
        assert not (tmp_path / "messages/_delta_log").exists()
    else:
        assert values(tmp_path, "messages") == [b"1"]
    assert [left.rejects for left in count_rejects(settings)] == [1]


def test_a_stream_that_goes_on_beside_a_replay_is_no_reason_to_refuse_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path, path=str(tmp_path / "messages"))
    reject(settings, 1)
    assert replay(settings).replayed
    reject(settings, 2)
    recorded, batches = Table.recorded, count()

    def after_another_batch(table: Table, query: str) -> Any:
        number = next(batches)
        batch = plan_batch(settings, number)
        for known in make_components(settings).tables.by_name.values():
            known.commit(batch, [], {})
            see(settings, "messages", str(settings.messages_place), number)
        finish_batch(settings, number)
        return recorded(table, query)

    monkeypatch.setattr(Table, "recorded", after_another_batch)
    assert replay(settings).replayed == {"no_table": 1}
    assert next(batches) > 1
    assert values(tmp_path, "messages") == [b"1", b"2"]
