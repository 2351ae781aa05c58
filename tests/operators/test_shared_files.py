"""Files that topic partitions share: a task with several quiet ones writes one, and each topic
partition's messages are in it once, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import join_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.split import split_bundle
from ledgerlake.operators.ingest import write_ranges
from ledgerlake.operators.outcome_files import OutcomeFiles
from ledgerlake.operators.results import (
    BatchSettings,
    PartitionResult,
    TaskSettings,
    results_from_json,
)
from ledgerlake.operators.stage_rows import RowKind
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.pieces import Piece
from ledgerlake.source.planning import EntryRange
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import bundle
from tests.operators.stage import Stage
from tests.pipeline_tables import messages_table

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TIME_MS = 1_700_000_000_000
OPTIONS = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})


def entry(
    value: bytes, time_ms: int = TIME_MS, deliver_ms: int = 0, key: str | None = None
) -> bytes:
    message = pb.MessageMetadata(
        producer_name="p",
        sequence_id=1,
        publish_time=time_ms,
        deliver_at_time=deliver_ms,
        partition_key=key,
    )
    return encode_entry(message, value, pb.BrokerEntryMetadata(broker_timestamp=time_ms))


@dataclass
class Batch:
    """One task over several topics, then the stateful stage; then what they wrote."""

    folder: Path
    delay: DelayOptions
    mode: str = "append"

    def run(
        self,
        topics: dict[str, list[bytes]],
        with_state: list[str] | None,
        *,
        is_sole_reader: bool = True,
    ) -> dict[str, PartitionResult]:
        """The results by topic."""
        settings = self._settings()
        batch = BatchSettings(3, {}, with_state)
        ranges = [
            (
                EntryRange(topic, Position(7, -1), Position(7, len(entries) - 1)),
                [
                    Piece(kind, view, broker_ms=time_ms)
                    for kind, view, time_ms in split_bundle(bundle(entries))
                ],
            )
            for topic, entries in topics.items()
        ]
        rows = list(write_ranges(ranges, settings, batch, is_sole_reader=is_sole_reader))
        by_topic: dict[str, list[pa.RecordBatch]] = {}
        for row in rows:
            by_topic.setdefault(row["topic"][0].as_py(), []).append(row)
        results = [
            result
            for name, of_topic in by_topic.items()
            for row in Stage(
                Limits(), self.delay, output=lambda source: OutcomeFiles(source, settings, batch)
            ).run(of_topic, topic_partition=TopicPartition(name, -1))
            for result in results_from_json(row.result)
        ]
        return {result.topic_partition: result for result in results}

    def run_batches(self, topic: str, batches: list[list[bytes]]) -> list[PartitionResult]:
        """The results of one topic's micro-batches, whose state goes from each to the next."""
        settings, states, results = self._settings(), Stage(Limits(), self.delay), []
        for number, entries in enumerate(batches):
            batch = BatchSettings(number)
            pieces = [
                Piece(kind, view, broker_ms=time_ms)
                for kind, view, time_ms in split_bundle(bundle(entries, ledger_id=7 + number))
            ]
            span = EntryRange(
                topic, Position(7 + number, -1), Position(7 + number, len(entries) - 1)
            )
            states.output = partial(OutcomeFiles, settings=settings, batch=batch)
            rows = list(write_ranges([(span, pieces)], settings, batch))
            (row,) = states.run(rows, topic_partition=TopicPartition(topic, -1))
            results += results_from_json(row.result)
        return results

    def _settings(self) -> TaskSettings:
        table = replace(messages_table(self.folder), mode=self.mode)
        return TaskSettings(
            Limits(), self.delay, OPTIONS, (table,), Place(str(self.folder / "rejects"))
        )

    def values_of(self, result: PartitionResult) -> list[bytes]:
        """The values in the files that are to be committed, file after file."""
        names = [file.name for file in result.written.tables["messages"].files]
        tables = [pq.read_table(self.folder / name, columns=["value"]) for name in names]
        return [value for table in tables for value in table["value"].to_pylist()]

    def files_of(self, results: dict[str, PartitionResult]) -> list[list[tuple[str, bytes]]]:
        """The topic and value of each row, by file that is to be committed."""
        names = [
            file.name
            for result in results.values()
            for file in result.written.tables["messages"].files
        ]
        tables = [pq.read_table(self.folder / name, columns=["topic", "value"]) for name in names]
        return sorted(
            list(zip(*(table[name].to_pylist() for name in ("topic", "value")), strict=True))
            for table in tables
        )


def batch_in(folder: Path, *, is_delay_enabled: bool = False, mode: str = "append") -> Batch:
    (folder / "rejects").mkdir()
    return Batch(folder, DelayOptions(enabled=is_delay_enabled), mode)


def topic(name: str) -> str:
    return join_partition(f"persistent://public/default/{name}", -1)


A, B, C = topic("a"), topic("b"), topic("c")


def test_quiet_topics_share_a_file_in_which_each_is_in_order(tmp_path: Path) -> None:
    batch = batch_in(tmp_path)
    results = batch.run(
        {
            A: [entry(b"2", TIME_MS + 5), entry(b"1")],
            B: [entry(b"3")],
            C: [entry(b"4"), entry(b"5")],
        },
        with_state=[],
    )
    assert batch.files_of(results) == [[(A, b"1"), (A, b"2"), (B, b"3"), (C, b"4"), (C, b"5")]]
    assert {
        name: result.written.tables["messages"].max_effective_us for name, result in results.items()
    } == {
        A: (TIME_MS + 5) * 1000,
        B: TIME_MS * 1000,
        C: TIME_MS * 1000,
    }
    assert all(not result.replaced for result in results.values())


def test_a_topic_that_may_have_state_has_files_of_its_own(tmp_path: Path) -> None:
    batch = batch_in(tmp_path)
    topics = {name: [entry(b"1")] for name in (A, B, C)}
    assert batch.files_of(batch.run(topics, with_state=[B])) == [
        [(A, b"1"), (C, b"1")],
        [(B, b"1")],
    ]
    assert len(batch.files_of(batch.run(topics, with_state=None))) == 3
    assert len(batch.files_of(batch.run(topics, with_state=[], is_sole_reader=False))) == 3


def test_a_topic_whose_messages_go_into_state_has_files_of_its_own(tmp_path: Path) -> None:
    batch = batch_in(tmp_path, is_delay_enabled=True)
    delayed = entry(b"later", deliver_ms=TIME_MS + 10)
    (chunk, _) = chunk_entries(b"large message", 2, publish_time=TIME_MS)
    results = batch.run(
        {
            A: [entry(b"1"), entry(b"2")],
            B: [entry(b"0"), delayed, entry(b"3", TIME_MS + 20)],
            C: [entry(b"4"), chunk],
        },
        with_state=[],
    )
    # The delayed message is due within the micro-batch, and comes before the later one.
    assert batch.files_of(results) == [
        [(A, b"1"), (A, b"2")],
        [(B, b"0"), (B, b"later"), (B, b"3")],
        [(C, b"4")],
    ]
    assert results[B].replaced["messages"]


def test_rejects_share_a_file_too(tmp_path: Path) -> None:
    batch = batch_in(tmp_path)
    results = batch.run({A: [b"damaged", entry(b"1")], B: [b"damaged too"]}, with_state=[])
    (name,) = {file.name for result in results.values() for file in result.written.rejects}
    assert pq.read_table(tmp_path / "rejects" / name)["topic"].to_pylist() == [A, B]
    assert batch.files_of(results) == [[(A, b"1")]]


def test_events_are_reported_before_the_next_range_is_read(tmp_path: Path) -> None:
    """So a task keeps the events of one range in memory, however many ranges it reads."""
    (tmp_path / "rejects").mkdir()
    read: list[str] = []

    def ranges() -> Iterator[tuple[EntryRange, list[Piece]]]:
        (chunk, _) = chunk_entries(b"large message", 2, publish_time=TIME_MS)
        for name in (A, B):
            read.append(name)
            pieces = [Piece(kind, view) for kind, view, _ in split_bundle(bundle([chunk]))]
            yield EntryRange(name, Position(7, -1), Position(7, 0)), pieces

    settings = TaskSettings(
        Limits(),
        DelayOptions(),
        OPTIONS,
        (messages_table(tmp_path),),
        Place(str(tmp_path / "rejects")),
    )
    rows = write_ranges(ranges(), settings, BatchSettings(3, {}, []), is_sole_reader=True)
    for row in rows:
        if row["kind"][0].as_py() == RowKind.REPORT:
            assert read == [A]
            break


def test_topics_without_messages_write_nothing(tmp_path: Path) -> None:
    batch = batch_in(tmp_path)
    results = batch.run({A: [], B: []}, with_state=[])
    assert batch.files_of(results) == []
    assert len(results) == 2


@pytest.mark.parametrize("is_sole_reader", [True, False])
def test_a_table_of_the_latest_messages_has_no_times(is_sole_reader: bool, tmp_path: Path) -> None:
    batch = batch_in(tmp_path, mode="latest")
    (result,) = batch.run(
        {A: [entry(b"1", key="k")]}, with_state=[], is_sole_reader=is_sole_reader
    ).values()
    written = result.written.tables["messages"]
    assert ([file.rows for file in written.files], written.max_effective_us) == ([1], None)


def test_many_large_messages_that_began_before_stand_between_the_others_in_order(
    tmp_path: Path,
) -> None:
    """More than the places at which a task closes its file."""
    count, batch = 20, batch_in(tmp_path)
    chunks = [
        chunk_entries(
            b"large %d" % number, 2, uuid=f"p-{number}", publish_time=TIME_MS + 2 * number + 1
        )
        for number in range(count)
    ]
    plain = [entry(b"plain %d" % number, TIME_MS + 2 * number) for number in range(count)]
    second = [each for number in range(count) for each in (plain[number], chunks[number][1])]

    _, result = batch.run_batches(A, [[first for first, _ in chunks], second])

    expected = [
        each for number in range(count) for each in (b"plain %d" % number, b"large %d" % number)
    ]
    assert batch.values_of(result) == expected
