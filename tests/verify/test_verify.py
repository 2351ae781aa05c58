"""The verdict is the same however few messages and rows are in memory."""

from __future__ import annotations

import errno
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import AddAction

from ledgerlake.cli import main
from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.split import split_bundle
from ledgerlake.errors import TransportError
from ledgerlake.inspect.reject_counts import count_rejects
from ledgerlake.options.config import TableConfig, parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.row_settings import selected_now
from ledgerlake.source.pieces import Piece
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.table.latest_table import LatestRecordTable, LatestTable
from ledgerlake.verify import hashed_parts, latest_rows, latest_rule, table_rows, topic_content
from ledgerlake.verify import verify as verify_module
from ledgerlake.verify.verify import Verdict, verify
from ledgerlake.wire import commands
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import BROKER_TIME_MS, bundle, single

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ledgerlake.options.config import Config

MESSAGES = 60
NAMES = [f"persistent://public/default/t-partition-{number}" for number in range(2)]
FRAMES = [
    commands.message(1, 7, number, single(b"%d" % number, number, partition_key=f"k{number % 20}"))
    for number in range(MESSAGES)
]


class NoCluster:
    """A cluster whose topics have no schema."""

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    def schemas(self, topics: list[Any]) -> list[None]:
        return [None] * len(topics)

    def close(self) -> None:
        pass


def pieces(*_: Any) -> Iterator[Piece]:
    for begin in range(0, MESSAGES, 7):
        for kind, piece, broker_ms in split_bundle(b"".join(FRAMES[begin : begin + 7])):
            yield Piece(kind, piece, broker_ms=broker_ms)


@pytest.fixture(autouse=True)
def topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two topic partitions with the same entries, read to their ends."""

    end = PartitionOffset(
        Position(7, MESSAGES - 1), None, BROKER_TIME_MS + MESSAGES - 1, MESSAGES - 1
    )
    monkeypatch.setattr(verify_module, "Cluster", NoCluster)
    monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, dict.fromkeys(NAMES, end)))
    monkeypatch.setattr(topic_content, "read_pieces", pieces)


@pytest.fixture(params=[False, True], ids=["in memory", "in small parts"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param:
        monkeypatch.setattr(hashed_parts, "_BUFFER_RECORDS", 10)
        monkeypatch.setattr(hashed_parts, "_PART_SIZE", 5)
        monkeypatch.setattr(latest_rows, "_MOST_KEPT", 4)
        monkeypatch.setattr(latest_rule, "_LEAST_MESSAGES", 3)
        monkeypatch.setattr(table_rows, "_BATCH_ROWS", 4)


def configured(folder: Path, topics: Sequence[str] = ("t",), **delta: Any) -> Config:
    write_deltalake(str(folder / "rejects"), pa.Table.from_pylist([], schema=schema.REJECTS))
    return parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": list(topics)},
            "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
            "delta": {
                "path": str(folder / "messages"),
                "rejects_path": str(folder / "rejects"),
                **delta,
            },
        }
    )


def messages(name: str) -> pa.Table:
    decoded = decode_bundle(b"".join(FRAMES), TopicPartition(*split_partition(name)))
    rows = pa.Table.from_batches([part.messages for part in decoded]).select(schema.MESSAGES.names)
    return rows.set_column(
        rows.schema.get_field_index("late"), "late", pa.repeat(False, rows.num_rows)
    )


def write(folder: Path, *files: pa.Table) -> None:
    """Commit rows as Ledgerlake does: each table becomes a file, with a name of ours."""
    path = folder / "messages"
    for file in files:
        name = f"part-00000000-00000-000-{uuid4()}.zstd.parquet"
        write_deltalake(str(path), file.slice(0, 0), mode="append")
        pq.write_table(file, path / name)
        size = (path / name).stat().st_size
        added = AddAction(name, size, {}, 0, True, json.dumps({"numRecords": file.num_rows}))
        table = DeltaTable(str(path))
        table.create_write_transaction([added], "append", table.schema(), [])


def write_as_another(folder: Path, *files: pa.Table) -> None:
    for file in files:
        # Of several batches the order in the file would be by chance.
        write_deltalake(str(folder / "messages"), file.combine_chunks(), mode="append")


_OWN_ROWS: list[dict[str, Any]] = [
    {},
    {"key": "mine", "value": b"x"},
    {"topic": "persistent://public/default/t", "key": "mine"},
    {"topic": "persistent://public/default/t", "partition": 0, "key": "mine"},
]


@pytest.mark.parametrize("mode", ["append", "latest"])
@pytest.mark.parametrize("own", _OWN_ROWS)
def test_rows_of_no_message_that_somebody_has_added_are_passed_over(
    own: dict[str, Any], mode: str, tmp_path: Path
) -> None:
    config = configured(tmp_path, mode=mode)
    if mode == "latest":
        table = LatestTable(Place(str(tmp_path / "messages")), schema.MESSAGES)
        table.check(None)
        table.create()
    write(tmp_path, messages(NAMES[0]).slice(40))
    before = verify(config)
    write(tmp_path, pa.Table.from_pylist([own], schema=schema.MESSAGES))
    assert verify(config) == before


def test_tables_that_take_no_topic_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(tmp_path)
    tables = tuple(
        TableConfig(path=str(tmp_path / name), topics_pattern=f"public/default/{name}")
        for name in ("typo", "other")
    )
    config = replace(config, delta=replace(config.delta, path=""), tables=tables)
    warnings = verify(config).warnings
    assert [warning.partition(":")[0] for warning in warnings[:2]] == [
        f"[[tables]] {tmp_path}/{name} gets no message" for name in ("typo", "other")
    ]
    assert warnings[2].startswith("no table takes messages of persistent://public/default/t, so")
    monkeypatch.setattr("ledgerlake.cli.verify.load_config_with_paths", lambda _: config)
    monkeypatch.setattr("ledgerlake.pipeline.start.check_reachable", lambda _: None)
    main(["verify", "orders.toml"])
    assert capsys.readouterr().err.splitlines() == [*warnings]
    monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, {}))
    assert verify(config) == Verdict(
        warnings=("no topic partition was read yet, so nothing was compared",)
    )


def test_a_configuration_without_the_topics_that_were_read_is_told(tmp_path: Path) -> None:
    config = configured(tmp_path, topics=["other"])
    write(tmp_path, messages(NAMES[0]))
    why = "the configuration selects none of the topics that the stream has read"
    assert verify(config) == Verdict(warnings=(f"{why}, so nothing was compared",))


@pytest.mark.usefixtures("sizes")
def test_what_is_missing_twice_and_in_another_order_is_counted(tmp_path: Path) -> None:
    first, second = map(messages, NAMES)
    config = configured(tmp_path)
    write(tmp_path, pa.concat_tables([first.slice(0, 50), second.slice(0, 10), second.slice(30)]))
    assert verify(config) == Verdict(messages=90, missing=30)
    write(tmp_path, pa.concat_tables([first.slice(50, 9), second.slice(10, 20)]))
    assert verify(config) == Verdict(messages=119, missing=1, out_of_order=20)
    write(tmp_path, first.slice(58, 1))
    assert verify(config) == Verdict(messages=120, missing=1, duplicate=1, out_of_order=20)


def test_files_that_another_writer_made_of_ours_have_no_order(tmp_path: Path) -> None:
    first, second = map(messages, NAMES)
    config = configured(tmp_path)
    # As after an OPTIMIZE, a file has later rows first, and its range overlaps other ranges.
    write_as_another(tmp_path, pa.concat_tables([first.slice(30, 20), first.slice(0, 20), second]))
    write(tmp_path, first.slice(20, 10), first.slice(50))
    path = config.table_options[0].place
    assert verify(config) == Verdict(
        messages=120,
        warnings=(
            f"the order of rows was not checked in 1 file of the table at {path}, which another "
            "writer made",
        ),
    )


def test_a_topic_that_has_left_the_configuration_is_not_compared(tmp_path: Path) -> None:
    config = configured(tmp_path, topics=["t-partition-0"])
    write(tmp_path, messages(NAMES[0]).slice(1))
    assert verify(config) == Verdict(messages=59, missing=1)


def begin_with_other_tables(config: Config) -> Callable[[int], None]:
    """A checkpoint whose stream had another table until now, and what makes it have the tables of
    the configuration behind an entry.
    """
    checkpoint = Checkpoint(config.checkpoint_place)
    other = replace(config, tables=(TableConfig(path="/lake/large", where="size > 5"),))
    before = selected_now(None, other, {})
    checkpoint.save_selected(before)

    def read_on(entry_id: int) -> None:
        read = dict.fromkeys(NAMES, PartitionOffset(Position(7, entry_id)))
        checkpoint.save_selected(selected_now(before, config, read))

    return read_on


def test_a_message_that_was_read_for_other_tables_is_not_missing(tmp_path: Path) -> None:
    config = configured(tmp_path)
    read_on = begin_with_other_tables(config)
    write(tmp_path, messages(NAMES[0]).slice(0, 50), messages(NAMES[1]))
    assert verify(config) == Verdict(messages=110, for_other_tables=10)
    read_on(54)
    assert verify(config) == Verdict(messages=110, missing=5, for_other_tables=5)


def test_a_key_whose_messages_were_read_for_other_tables_is_not_missing(tmp_path: Path) -> None:
    config = configured(tmp_path, mode="latest")
    read_on = begin_with_other_tables(config)
    table = LatestTable(Place(str(tmp_path / "messages")), schema.MESSAGES)
    table.check(None)
    table.create()
    first = messages(NAMES[0])
    # The rows of the keys k0 to k9 are not of their latest messages.
    write(tmp_path, first.slice(20, 10), first.slice(50, 5), first.slice(56))
    assert verify(config) == Verdict(messages=19, for_other_tables=20)
    read_on(49)
    assert verify(config) == Verdict(messages=19, missing=1, for_other_tables=10)


_QUERY = {"shape": "record", "sql": "select 1 as one from messages"}
_TABLES: list[list[dict[str, Any]]] = [
    [{"where": "key = 'a'"}],
    [{"mode": "latest"}],
    [_QUERY],
    [{"where": "key = 'a'"}, {"mode": "latest"}, _QUERY],
]


@pytest.mark.parametrize("has_default", [True, False], ids=["with a default table", "without"])
@pytest.mark.parametrize("tables", _TABLES)
def test_messages_that_are_not_due_wait_whatever_tables_they_are_for(
    tables: list[dict[str, Any]],
    has_default: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    soon, later = BROKER_TIME_MS + 10, BROKER_TIME_MS + MESSAGES + 10
    entries = [single(b"v", 0, partition_key="a", deliver_at_time=soon)]
    entries += [single(b"v", number, deliver_at_time=later + number) for number in range(1, 4)]
    found = [Piece(kind, view) for kind, view, _ in split_bundle(bundle(entries))]
    monkeypatch.setattr(topic_content, "read_pieces", lambda *_: found)
    configured(tmp_path)
    delta = {"path": str(tmp_path / "messages")} if has_default else {}
    config = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["t"]},
            "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"rejects_path": str(tmp_path / "rejects"), **delta},
            "tables": [
                {"path": f"{tmp_path}/t{number}", **table} for number, table in enumerate(tables)
            ],
        }
    )
    assert verify(config).not_due == 3 * len(NAMES)


def test_a_replay_beside_it_makes_no_message_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    first = messages(NAMES[0])
    write(tmp_path, pa.concat_tables([first.slice(1), messages(NAMES[1])]))
    reject = {"topic": split_partition(NAMES[0])[0], "partition": 0, "message_id": "7:0"}
    rejects = str(config.rejects_place)

    def mark(**row: str) -> None:
        write_deltalake(
            rejects, pa.Table.from_pylist([reject | row], schema=schema.REJECTS), mode="append"
        )

    mark(reason="no_table", detail="d")
    open_rows = table_rows.TableRows.__init__
    opened: list[str] = []

    def replays_in_between(self: Any, place: Place, *more: Any) -> None:
        open_rows(self, place, *more)
        opened.append(str(place))
        if len(opened) == 1:
            write(tmp_path, first.slice(0, 1))
            mark(reason="replayed", detail="no_table")

    monkeypatch.setattr(table_rows.TableRows, "__init__", replays_in_between)
    assert verify(config).missing == 0
    assert len(opened) == 2


@pytest.mark.usefixtures("sizes")
def test_the_latest_message_of_each_key_is_found(tmp_path: Path) -> None:
    config = configured(tmp_path, mode="latest")
    table = LatestTable(Place(str(tmp_path / "messages")), schema.MESSAGES)
    table.check(None)
    table.create()
    # The last message of a key is among the last twenty, and of the second topic partition it may
    # be the latest too.
    latest = messages(NAMES[0]).slice(40)
    write(tmp_path, latest.slice(0, 15), latest.slice(16))
    assert verify(config) == Verdict(messages=19, missing=1)
    write(tmp_path, latest.slice(15, 1), latest.slice(0, 2))
    assert verify(config) == Verdict(messages=22, duplicate=2)
    unknown = latest.slice(3, 1).set_column(
        latest.schema.get_field_index("key"), "key", pa.array(["unknown"])
    )
    write(tmp_path, unknown)
    assert verify(config) == Verdict(messages=23, duplicate=2, outdated=1)


def test_a_table_with_the_latest_messages_of_one_topic_is_compared_with_that_topic_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = [f"persistent://public/default/{name}" for name in "ab"]
    end = PartitionOffset(
        Position(7, MESSAGES - 1), None, BROKER_TIME_MS + MESSAGES - 1, MESSAGES - 1
    )
    monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, dict.fromkeys(topics, end)))
    configured(tmp_path)
    config = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": topics},
            "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"path": str(tmp_path / "rest"), "rejects_path": str(tmp_path / "rejects")},
            "tables": [{"path": f"{tmp_path}/lake/{{topic}}", "mode": "latest"}],
        }
    )
    for topic in topics:
        place = Place(f"{tmp_path}/lake/{topic[-1]}")
        table = LatestTable(place, schema.MESSAGES)
        table.check(None)
        table.create()
        write_deltalake(place.uri, messages(topic).slice(40).combine_chunks(), mode="append")
    assert verify(config) == Verdict(messages=40)


@pytest.mark.parametrize("shape", ["messages", "record"])
def test_a_verification_needs_no_right_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    config = configured(tmp_path, mode="latest", shape=shape)
    place = Place(str(tmp_path / "messages"))
    table = LatestTable(place, schema.MESSAGES) if shape == "messages" else LatestRecordTable(place)
    table.check(None)
    table.create()

    def refuses(_: Place) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Place, "check_writable", refuses)
    monkeypatch.setattr(Place, "make", refuses)
    assert verify(config).messages == 0


@pytest.mark.usefixtures("sizes")
def test_nothing_is_left_in_the_temporary_folder_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    write(tmp_path, messages(NAMES[0]))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    def ending(*_: Any) -> Iterator[Piece]:
        yield from pieces()
        raise TransportError("the broker is gone")

    monkeypatch.setattr(topic_content, "read_pieces", ending)
    with pytest.raises(TransportError):
        verify(config)
    assert list((tmp_path / "temporary").iterdir()) == []


def reject(number: int, reason: str, batch_index: str = "") -> dict[str, Any]:
    topic, partition = split_partition(NAMES[0])
    place = {"topic": topic, "partition": partition, "ledger_id": 7, "entry_id": number}
    detail = "no_table" if reason == "replayed" else ""
    return {**place, "message_id": f"7:{number}{batch_index}", "reason": reason, "detail": detail}


def test_a_chunk_that_a_replay_has_left_over_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    first, last = chunk_entries(b"large", 2)
    entries = [
        Piece(kind, view) for kind, view, _ in split_bundle(bundle([first, last, last, last]))
    ]
    monkeypatch.setattr(topic_content, "read_pieces", lambda *_: entries)
    end = {NAMES[0]: PartitionOffset(Position(7, 3))}
    monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, end))
    write(tmp_path, messages(NAMES[0]).slice(1, 1))
    reasons = ["chunk_expired", *["chunk_orphan"] * 3]
    rejects = [reject(number, reason) for number, reason in enumerate(reasons)]
    marks = [{**reject(number, "replayed"), "detail": reasons[number]} for number in range(3)]
    write_deltalake(
        str(tmp_path / "rejects"),
        pa.Table.from_pylist([*rejects, *marks], schema=schema.REJECTS),
        mode="append",
    )
    assert verify(config) == Verdict(messages=1, rejects=1)


@pytest.mark.parametrize("is_rejected", [True, False])
def test_a_chunk_in_rejects_is_of_no_incomplete_message(
    is_rejected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path)
    entries = [
        Piece(kind, view) for kind, view, _ in split_bundle(bundle(chunk_entries(b"large", 3)[:2]))
    ]
    monkeypatch.setattr(topic_content, "read_pieces", lambda *_: entries)
    end = {NAMES[0]: PartitionOffset(Position(7, 1))}
    monkeypatch.setattr(Checkpoint, "committed_range", lambda _: ({}, end))
    rejects = [reject(number, "chunk_expired") for number in range(2 * is_rejected)]
    write_deltalake(
        str(tmp_path / "rejects"),
        pa.Table.from_pylist(rejects, schema=schema.REJECTS),
        mode="append",
    )
    incomplete = 0 if is_rejected else 2
    assert verify(config) == Verdict(rejects=len(rejects), incomplete_chunks=incomplete)


def test_what_was_replayed_has_to_be_in_the_table(tmp_path: Path) -> None:
    config = configured(tmp_path)
    first, second = map(messages, NAMES)
    write(tmp_path, first.slice(5), second)
    rejects = [
        reject(0, "no_table"),
        reject(1, "no_table"),
        reject(1, "replayed"),
        reject(2, "no_table", ":0"),
    ]
    # One that another table did not take either.
    rejects += [reject(3, "no_table"), reject(3, "replayed"), reject(3, "schema_mismatch")]
    rejects += [reject(4, "no_table"), reject(4, "replayed"), reject(4, "no_table")]
    write_deltalake(
        str(tmp_path / "rejects"),
        pa.Table.from_pylist(rejects, schema=schema.REJECTS),
        mode="append",
    )
    # Entry 2 is no batch, so nothing is known of it.
    assert verify(config) == Verdict(messages=115, missing=2, rejects=4)
    # The command for rejects counts as many.
    assert sum(count.rejects for count in count_rejects(config)) == 4
