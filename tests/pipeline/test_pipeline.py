"""Progress, starts and verdicts, without Spark."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark.errors import StreamingQueryException

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.topics import TopicSelection
from ledgerlake.decode import schema
from ledgerlake.errors import (
    BrokerError,
    CheckpointError,
    ConsumerBusyError,
    OffsetError,
    OwnershipError,
    ProcessLostError,
    SetupError,
    TopicNotFoundError,
    TransportError,
)
from ledgerlake.monitor.progress import Details, Progress, Reading, Totals, behind, progress_line
from ledgerlake.monitor.progress_screen import ProgressScreen
from ledgerlake.options.config import TableConfig, parse_config
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline import cursors
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun, last_run, seen_tables
from ledgerlake.pipeline.checkpoint import Checkpoint, as_option
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.failures import cause_of
from ledgerlake.pipeline.left_topics import is_gone
from ledgerlake.pipeline.moved_state import former_place
from ledgerlake.pipeline.pipeline import Pipeline
from ledgerlake.pipeline.start import Start, check_reachable
from ledgerlake.source import topic_list
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit, SeenBatch
from ledgerlake.verify.verify import Verdict
from ledgerlake.wire.lookup import refused
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import single
from tests.peer import TOPIC, Peer
from tests.pipeline.test_moved_state import write_metadata
from tests.table.rows import rows
from tests.table_rows import out_of_order
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ledgerlake.table.delta_table import Table

START = {
    "persistent://public/default/a": PartitionOffset(Position(3, 4)),
    "persistent://public/default/b": PartitionOffset(Position(3, 4), 2),
    "persistent://public/default/c": PartitionOffset(BEFORE_ALL),
}


def test_a_start_is_kept_beside_the_checkpoint(tmp_path: Path) -> None:
    assert Checkpoint(Place(str(tmp_path))).start() is None
    Checkpoint(Place(str(tmp_path))).save_start(START)
    assert Checkpoint(Place(str(tmp_path))).start() == START


def test_the_choice_to_begin_anew_needs_a_checkpoint_that_is_gone_and_counts_until_then(
    tmp_path: Path,
) -> None:
    checkpoint = Checkpoint(Place(str(tmp_path)))
    checkpoint.check_gone()
    checkpoint.end_forgetting()
    checkpoint.forget()
    assert checkpoint.is_forgotten
    checkpoint.check_gone()
    checkpoint.save_start(START)
    assert checkpoint.is_forgotten, "the tables still know the stream that there was"
    checkpoint.end_forgetting()
    assert not checkpoint.is_forgotten
    with pytest.raises(CheckpointError, match=r"is still there, .*; remove the checkpoint first"):
        checkpoint.check_gone()


def test_topics_that_were_forgotten_are_kept_in_the_checkpoint(tmp_path: Path) -> None:
    checkpoint, names = Checkpoint(Place(str(tmp_path))), {"persistent://public/default/a"}
    assert checkpoint.forgotten_topics() == set()
    checkpoint.save_forgotten_topics(names)
    file = tmp_path / "ledgerlake" / "forgotten_topics.json"
    assert json.loads(file.read_text()) == {"version": 1, "topics": sorted(names)}
    assert checkpoint.forgotten_topics() == names
    file.write_text('{"version": 2, "topics": []}')
    with pytest.raises(OffsetError, match="forgotten topics of version 2"):
        checkpoint.forgotten_topics()
    file.write_text('{"version": 1, "topics": 3}')
    with pytest.raises(OffsetError, match="damaged forgotten topics"):
        checkpoint.forgotten_topics()


def test_a_cursor_that_this_run_does_not_hold_is_not_moved_for_an_earlier_one(
    tmp_path: Path,
) -> None:
    (tmp_path / "ledgerlake").mkdir()
    (tmp_path / "ledgerlake" / "ends.json").write_text(
        json.dumps(
            {
                "version": 1,
                "batches": {"0": {TOPIC: [7, 0]}},
                "tables": {},
                "last_run": {"batch_id": 0, "wakes_batch": None},
            }
        )
    )
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "0").write_text("v1\n{}")
    with Peer() as peer:
        peer.add(single(b"a"))
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        keeper.begin(TopicSelection((TOPIC,)), lambda _error: None)
        keeper.finish(10.0)
        keeper.close()
        cluster.close()
        assert "CommandSubscribe" not in peer.requests


def test_a_topic_that_comes_while_a_micro_batch_runs_gets_a_cursor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "_TOPICS_S", 0.0)
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    with Peer(topics=[]) as peer:
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        keeper.begin(
            TopicSelection(pattern="persistent://public/default/pe+r"), lambda _error: None
        )
        assert peer.subscriptions == {}
        peer.topics = [TOPIC]
        wait_until(lambda: "s" in peer.subscriptions)
        keeper.close()
        cluster.close()


def test_a_start_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledgerlake").mkdir()
    (tmp_path / "ledgerlake" / "start.json").write_text('{"version": 99}')
    with pytest.raises(OffsetError, match="newer"):
        Checkpoint(Place(str(tmp_path))).start()


def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        Checkpoint(Place(str(tmp_path / "file" / "checkpoint"))).save_start(START)


@pytest.mark.parametrize(
    ("commits", "version"), [({}, 2), ({"0": "v1\n{}"}, 1), ({"9": "v1\n{}", "10": "v2\n{}"}, 2)]
)
def test_the_newest_commit_tells_the_version_of_the_states_files(
    tmp_path: Path, commits: dict[str, str], version: int
) -> None:
    (tmp_path / "commits").mkdir()
    for name, text in commits.items():
        (tmp_path / "commits" / name).write_text(text)
    assert Checkpoint(Place(str(tmp_path))).log.state_version() == version


@pytest.mark.parametrize("text", [b"", b"v3\n{}", b"\xff\xfe"])
def test_a_commit_that_does_not_tell_the_version_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "commits").mkdir()
    (tmp_path / "commits" / "4").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"commits/4 .* is damaged"):
        Checkpoint(Place(str(tmp_path))).log.state_version()


_LAST_RUN = '{"batch_id": 7, "wakes_batch": null}'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        '{"version": 1}',
        *(
            f'{{"version": 1, "batches": {batches}, "tables": {tables}, "last_run": {last_run}}}'
            for batches, tables, last_run in (
                ("{}", '{"messages": 7}', _LAST_RUN),
                ("{}", '{"messages": {"path": "lake", "batch_id": "7"}}', _LAST_RUN),
                ('{"x": {}}', "{}", _LAST_RUN),
                ('{"1": {"t": [7]}}', "{}", _LAST_RUN),
                ("{}", "{}", "null"),
            )
        ),
    ],
)
def test_damaged_cursor_ends_are_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "ledgerlake").mkdir()
    (tmp_path / "ledgerlake" / "ends.json").write_text(text)
    keeper = CursorKeeper(None, "s", Checkpoint(Place(str(tmp_path))))  # type: ignore[arg-type]
    with pytest.raises(OffsetError, match=r"damaged cursor ends .*restore the checkpoint"):
        keeper.begin(TopicSelection((TOPIC,)), lambda _error: None)
    with pytest.raises(OffsetError, match=r"damaged cursor ends"):
        seen_tables(Checkpoint(Place(str(tmp_path))))


def test_what_the_tables_held_is_kept_with_the_ends(tmp_path: Path) -> None:
    checkpoint = Checkpoint(Place(str(tmp_path)))
    ends = BatchEnds(checkpoint)
    assert seen_tables(checkpoint) == {}
    ends.add(
        LastRun(3, None),
        {},
        {"messages": SeenBatch("lake/m", 3), "rejects": SeenBatch("lake/r", 3)},
    )
    ends.add(LastRun(4, None), {"t": Position(1, 2)}, {"messages": SeenBatch("lake/m", 4)})
    ends.add(LastRun(5, None), {}, {})
    tables = {"messages": SeenBatch("lake/m", 4), "rejects": SeenBatch("lake/r", 3)}
    assert seen_tables(checkpoint) == tables


def test_golden_ends_are_read_and_written_and_those_of_a_newer_release_are_refused(
    tmp_path: Path,
) -> None:
    golden = (
        '{"version": 1, "batches": {"17": {"t": [12, 345]}}, "tables": {"messages": {"path": '
        '"lake/m", "batch_id": 17}},'
        ' "last_run": {"batch_id": 17, "wakes_batch": 15}}'
    )
    file = tmp_path / "ledgerlake" / "ends.json"
    file.parent.mkdir()
    file.write_text(golden)
    checkpoint = Checkpoint(Place(str(tmp_path)))
    tables = {"messages": SeenBatch("lake/m", 17)}
    assert (seen_tables(checkpoint), last_run(checkpoint)) == (tables, LastRun(17, 15))
    file.unlink()
    BatchEnds(checkpoint).add(LastRun(17, 15), {"t": Position(12, 345)}, tables)
    assert json.loads(file.read_text()) == json.loads(golden)
    file.write_text('{"version": 2, "batches": {}}')
    with pytest.raises(OffsetError, match="newer"):
        seen_tables(checkpoint)


def test_a_start_is_handed_to_the_source_as_it_is() -> None:
    options = parse_options(
        {
            "service.url": "pulsar://localhost",
            "topics": "a,b,c",
            "startingOffsets": as_option(START),
        }
    )
    assert {name: options.starting_of(name, "latest") for name in START} == START


def test_progress_shows_lag_in_messages() -> None:
    taken = {
        "t-partition-0": PartitionOffset(Position(1, 1), None, 3_600_000, 10),
        "t-partition-1": PartitionOffset(Position(1, 9), None, 0, 5),
    }
    latest = {
        "t-partition-0": PartitionOffset(Position(1, 5), None, 3_700_000, 1510),
        "t-partition-1": taken["t-partition-1"],
        "t-partition-2": PartitionOffset(Position(1, 5)),
    }
    lags = {name: behind(taken.get(name), offset) for name, offset in latest.items()}
    line = progress_line(Progress("orders", Totals(1234, 5, 1), Details(), [99.6], taken, lags, 0))
    assert (
        line
        == "1,234 messages  100/s  broker time 01:00:00  lag t-p0:1,500 t-p1:0 t-p2:?  rejects 5"
    )


def test_a_micro_batch_that_runs_for_long_is_told_of_with_what_it_reads() -> None:
    span = {
        "start": {"ledger": 1, "entry": 4, "index": 9},
        "end": {"ledger": 1, "entry": 800, "index": 2_009},
    }
    first = {"start": None, "end": {"ledger": 1, "entry": 8, "index": 99}}
    reading = Reading(BatchCommit("s", "q", 0, 1, {"a": span, "b": first}), 100.0)
    assert reading.messages == 2_100
    assert reading.text(102.0) == ""
    progress = Progress("orders", Totals(), Details(), [], {}, {}, 0, reading.text(112.4))
    assert progress_line(progress).endswith(
        "rejects 0  a micro-batch of 2,100 new messages has been running for 12 s"
    )
    unknown = {"start": None, "end": {"ledger": 1, "entry": 8}}
    of_unknown = Reading(BatchCommit("s", "q", 0, 1, {"a": span, "b": unknown}), 100.0)
    assert of_unknown.text(105.0) == "a micro-batch has been running for 5 s"
    of_nothing = Reading(BatchCommit("s", "q", 0, 1, {}), 100.0)
    assert of_nothing.text(105.0) == "a micro-batch has been running for 5 s"


def test_a_repeated_batch_is_not_counted_twice() -> None:
    screen = ProgressScreen(io.StringIO())
    screen.totals.add(BatchResult(0, messages=5, rejects=1))
    screen.totals.add(BatchResult(0, messages=5, rejects=1, repeated=True))
    assert (screen.totals.messages, screen.totals.rejects) == (5, 1)


def table(*parts: pa.RecordBatch) -> pa.Table:
    return pa.Table.from_batches(parts)


def test_order_is_checked_inside_files_and_between_them() -> None:
    assert out_of_order([table(rows([1, 2, 3])), table(rows([3, 4], first_entry=3))]) == 0
    assert out_of_order([table(rows([1, 3, 2]))]) == 1
    assert out_of_order([table(rows([1, 5])), table(rows([3, 6], first_entry=2))]) == 1
    assert out_of_order([table(rows([3, 4], first_entry=3)), table(rows([1, 2]))]) == 0


def test_rows_marked_late_are_not_held_against_the_order() -> None:
    assert out_of_order([table(rows([5, 6])), table(rows([1], first_entry=2, late=True))]) == 0


def test_a_verdict_says_why_rows_are_not_compared_and_nothing_if_all_are() -> None:
    assert (
        Verdict(messages=5, not_checked=3)
        .sentence()
        .endswith("3 not compared: removed from the topic, or before the start of this checkpoint)")
    )
    assert "not compared" not in Verdict(messages=5).sentence()
    assert (
        Verdict(messages=5, for_other_tables=2)
        .sentence()
        .endswith(", 2 lost or in other tables: read before the tables were changed)")
    )


def test_a_verdict_is_clean_when_nothing_is_wrong() -> None:
    assert Verdict(messages=5, rejects=1, late=2).clean
    assert not Verdict(missing=1).clean
    assert not Verdict(duplicate=1).clean
    assert not Verdict(out_of_order=1).clean


def test_our_error_is_found_inside_sparks() -> None:
    text = (
        "STREAM_FAILED: Traceback ...\n  File x\nledgerlake.errors.TopicNotFoundError: the "
        "broker says no\n\n\tat org.apache"
    )
    cause = cause_of(RuntimeError(text))
    assert isinstance(cause, TopicNotFoundError)
    assert cause.message == "the broker says no"
    assert (
        cause_of(RuntimeError("Java heap space\nmore")).message
        == "the query failed: Java heap space"
    )


@pytest.mark.parametrize(("code", "exit_code"), [("AuthorizationError", 2), ("ServiceNotReady", 3)])
def test_what_the_broker_says_in_a_task_decides_whether_a_start_again_may_help(
    code: str, exit_code: int
) -> None:
    refusal = refused(
        "let us connect at pulsar://127.0.0.1:6650",
        pb.ServerError.Value(code),
        "no: MetadataError: words",
    )
    text = (
        f"STREAM_FAILED: Traceback ...\nledgerlake.errors.BrokerError: {refusal}\n\n\tat org.apache"
    )
    cause = cause_of(RuntimeError(text))
    assert isinstance(cause, BrokerError)
    assert (cause.code, cause.exit_code, cause.message) == (code, exit_code, refusal.message)


def test_an_error_of_python_in_a_task_is_told_by_its_own_sentence() -> None:
    text = (
        "An error occurred while calling o1.save.\n: org.apache.spark.SparkException: Job "
        "aborted\nCaused by: org.apache.spark.api.python.PythonException: Traceback (most recent "
        "call last):\n"
        '  File "ordered_files.py", line 3, in write\n'
        "OSError: AWS Error ACCESS_DENIED during PutObject\n"
        "\n\tat org.apache.spark.api.python.BasePythonRunner.handle(PythonRunner.scala:1)\n"
    )
    assert (
        cause_of(RuntimeError(text)).message
        == "the query failed: OSError: AWS Error ACCESS_DENIED during PutObject"
    )


def test_a_full_disk_is_told_with_what_to_do() -> None:
    text = (
        "Traceback (most recent call last):\n  File x\nOSError: [Errno 28] No space left on "
        "device: '/lake/part'"
    )
    message = cause_of(RuntimeError(text)).message
    assert "[Errno 28] No space left on device" in message
    assert "make room on the disks" in message


class EndedQuery:
    """A query that has ended, with or without an error; to stop it makes it fail anew."""

    isActive = False

    def __init__(self, error: str | None) -> None:
        self.error = error

    def exception(self) -> Exception | None:
        return None if self.error is None else StreamingQueryException(self.error)

    def stop(self) -> None:
        self.error = self.error or "java.lang.InterruptedException"

    def awaitTermination(self, timeout: float | None = None) -> bool:
        if self.error is not None:
            raise StreamingQueryException(self.error)
        return True


def with_query(folder: Path, query: EndedQuery) -> Pipeline:
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["a"]},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages")},
    }
    pipeline = Pipeline(SimpleNamespace(), parse_config(data))
    pipeline.query = query
    return pipeline


def test_a_query_that_failed_before_the_stop_is_an_error_of_the_stop_and_of_the_wait_after_it(
    tmp_path: Path,
) -> None:
    full = "[STREAM_FAILED] OSError: [Errno 28] No space left on device"
    with closing(with_query(tmp_path, EndedQuery(full))) as pipeline:
        for end in (pipeline.stop, pipeline.wait, pipeline.stop):
            with pytest.raises(SetupError, match="No space left on device; make room"):
                end()


@pytest.mark.parametrize(
    "error", [None, "PythonException: ledgerlake.pipeline.batches._StoppedError"]
)
def test_what_fails_by_the_stop_is_no_error(tmp_path: Path, error: str | None) -> None:
    with closing(with_query(tmp_path, EndedQuery(error))) as pipeline:
        pipeline.stop()
        assert pipeline.wait()


@pytest.mark.parametrize(
    "closed",
    [
        "java.io.IOException: Broken pipe",
        "java.net.SocketException: Connection reset",
        "java.io.EOFException",
    ],
)
def test_a_planner_that_was_ended_from_outside_is_started_again(closed: str) -> None:
    error: Any = RuntimeError("[STREAM_FAILED] terminated with exception")
    error._stackTrace = (
        f"{closed}\n\tat "
        "org.apache.spark.sql.execution.datasources.v2.python.PythonStreamingSourceRunner.latestOffset"
    )
    cause = cause_of(error)
    assert isinstance(cause, ProcessLostError)
    assert (cause.retryable, cause.exit_code) == (True, 3)


@pytest.mark.parametrize(
    "error",
    [
        Py4JNetworkError(
            "An error occurred while trying to connect to the Java server (127.0.0.1:1)"
        ),
        Py4JError("An error occurred while calling o56.awaitTermination"),
    ],
)
def test_after_a_java_process_that_was_ended_from_outside_a_start_may_help(
    error: Exception,
) -> None:
    cause = cause_of(error)
    assert isinstance(cause, ProcessLostError)
    assert (cause.exit_code, "Java" in cause.message) == (3, True)


def test_an_error_that_java_names_is_none_of_a_lost_process() -> None:
    error = Py4JError(
        "An error occurred while calling o56.foo. Trace:\npy4j.Py4JException: Method foo does not "
        "exist"
    )
    assert isinstance(cause_of(error), SetupError)


def test_a_broker_that_is_not_there_is_found_out_before_anything_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_pause(_seconds: float) -> None:
        raise AssertionError("it waits")

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=no_pause)
    monkeypatch.setattr("ledgerlake.client.backoff.time", clock)
    data = {
        "source": {"service_url": "pulsar://127.0.0.1:1", "topics": ["t"]},
        "stream": {"name": "n"},
        "delta": {"path": "p"},
    }
    with pytest.raises(TransportError, match="no broker listens"):
        check_reachable(parse_config(data))


@pytest.mark.parametrize(
    ("planned", "batch_id", "is_compared"),
    [
        (range(90, 101), 60, False),
        (range(90, 101), 90, False),
        (range(90, 101), 91, True),
        (range(3), 0, True),
    ],
)
def test_a_batch_is_compared_as_long_as_sparks_log_reaches_back_to_it(
    tmp_path: Path, planned: range, batch_id: int, is_compared: bool
) -> None:
    pipeline, table = with_a_table(
        tmp_path, planned, BatchCommit("s", "ledgerlake:s:q", batch_id, 111)
    )
    assert pipeline._components.checkpoint.log.keeps(batch_id) == is_compared
    if not is_compared:
        return pipeline._components.start.compare_with_tables([table])
    with pytest.raises(CheckpointError, match="has another batch"):
        pipeline._components.start.compare_with_tables([table])
    return None


@pytest.mark.parametrize(
    ("checkpoint", "is_begun", "is_refused"),
    [(6, True, False), (8, True, True), (6, False, False), (7, False, True), (8, False, True)],
)
def test_a_start_is_refused_if_a_later_checkpoint_has_written_to_a_table_or_its_own_batches_are_lost(
    tmp_path: Path, checkpoint: int, is_begun: bool, is_refused: bool
) -> None:
    record = BatchCommit("s", "ledgerlake:s:other", 40, 111, checkpoint=checkpoint)
    pipeline, table = with_a_table(tmp_path, range(3), record)
    if not is_begun:
        pipeline._components.checkpoint.save_start(START)
        shutil.rmtree(tmp_path / "checkpoint/offsets")
        (tmp_path / "checkpoint/metadata").unlink()
    if not is_refused:
        return pipeline._components.start.compare_with_tables([table])
    with pytest.raises(
        CheckpointError,
        match=r"has rows by a later checkpoint .* is an older copy; restore the newest",
    ):
        pipeline._components.start.compare_with_tables([table])
    return None


def test_a_hole_in_sparks_log_is_an_incomplete_copy(tmp_path: Path) -> None:
    planned = [*range(3), *range(90, 101)]
    pipeline, table = with_a_table(tmp_path, planned, BatchCommit("s", "ledgerlake:s:q", 60, 111))
    with pytest.raises(
        CheckpointError, match="lacks the offsets of batch 59; restore it from a complete copy"
    ):
        pipeline._components.start.compare_with_tables([table])


@pytest.mark.parametrize(
    ("path", "held_batch_id", "is_there", "message"),
    [
        ("messages", 4, True, None),
        ("messages", 5, True, "has batch 4: it is an older copy"),
        ("messages", 4, False, "there is none at .*messages: it was removed; restore it"),
        ("elsewhere", 4, True, None),
        ("elsewhere", 5, True, "has batch 4: it is an older copy"),
        ("elsewhere", 5, False, None),
    ],
)
def test_a_table_holds_what_the_checkpoint_saw_in_it_or_is_a_new_one(
    tmp_path: Path, path: str, held_batch_id: int, is_there: bool, message: str | None
) -> None:
    pipeline, table = with_a_table(tmp_path, range(6), BatchCommit("s", "ledgerlake:s:q", 4, 111))
    pipeline._components.cursors.add(
        LastRun(held_batch_id, None),
        {},
        {"messages": SeenBatch(str(tmp_path / path), held_batch_id)},
    )
    tables = [table] if is_there else []
    if message is None:
        assert pipeline._components.start.check_tables_are_newest(tables) == []
        return
    with pytest.raises(CheckpointError, match=message):
        pipeline._components.start.check_tables_are_newest(tables)


@pytest.mark.parametrize("former", ["another folder", "no table"])
@pytest.mark.parametrize(("had", "is_refused"), [(4, False), (5, True)])
def test_a_table_has_to_have_what_another_section_had_in_its_folder_and_no_more(
    tmp_path: Path, former: str, had: int, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, table = with_a_table(tmp_path, range(9), BatchCommit("s", "ledgerlake:s:q", 4, 111))
    seen = {"some": SeenBatch(str(tmp_path / "messages"), had)}
    if former == "another folder":
        seen["messages"] = SeenBatch(str(tmp_path / "rest"), 8)
    pipeline._components.cursors.add(LastRun(8, None), {}, seen)
    if is_refused:
        with pytest.raises(
            CheckpointError, match=r"\S*messages had batch 5 .* has batch 4: it is an older copy"
        ):
            pipeline._components.start.check_tables_are_newest([table])
    else:
        assert pipeline._components.start.check_tables_are_newest([table]) == []
    assert ("its rows so far are in the one at" in caplog.text) == (former == "another folder")


PREFIX = "persistent://public/default/dev-"


def with_tables_by_topic(folder: Path, url: str, pattern: str = "dev-.*") -> Pipeline:
    """A pipeline whose checkpoint has seen a micro-batch in the tables of the topics a and b."""
    data = {
        "source": {"service_url": url, "topics_pattern": pattern},
        "stream": {"name": "s", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "rest"), "rejects_path": str(folder / "rejects")},
        "tables": [{"path": f"{folder}/lake/{{topic}}"}],
    }
    pipeline = Pipeline(None, parse_config(data))
    checkpoint, tables = pipeline._components.checkpoint, pipeline._components.tables
    tables.add_for_topics([PREFIX + name for name in "ab"])
    tables.check(None)
    if checkpoint.start() is not None:
        return pipeline
    for name in ("offsets", "commits"):
        (folder / "checkpoint" / name).mkdir(parents=True)
    positions = {PREFIX + name: {"ledger": 1, "entry": 5} for name in "ab"}
    (folder / "checkpoint/metadata").write_text('{"id": "q"}')
    (folder / "checkpoint/offsets/0").write_text(
        "v1\n{}\n" + json.dumps({"version": 1, "positions": positions})
    )
    (folder / "checkpoint/commits/0").write_text("v1\n{}")
    checkpoint.save_stream("s", 7)
    checkpoint.save_start({PREFIX + name: PartitionOffset(Position(1, 0)) for name in "ab"})
    tables.create()
    seen = {name: SeenBatch(str(table.path), 0) for name, table in tables.by_name.items()}
    batch = checkpoint.log.record("s", "ledgerlake:s:q", 0, 7)
    for table in tables.by_name.values():
        assert not table.contains(batch)
        table.commit(batch, [], {})
    pipeline._components.cursors.add(LastRun(0, None), {}, seen)
    return pipeline


@pytest.mark.parametrize("state", ["there", "left", "deleted", "forgotten", "moved"])
def test_a_removed_table_of_a_topic_stops_the_stream_only_if_the_topic_is_still_there(
    tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture
) -> None:
    is_gone = state in ("deleted", "forgotten", "moved")
    is_deleted = state in ("deleted", "moved")
    with Peer(missing_topics={PREFIX + "b"} if is_deleted else set()) as peer:
        if state == "moved":
            old = tmp_path.with_name("old")
            with_tables_by_topic(old, peer.url)
            write_metadata(old / "checkpoint", f"file:{old}/checkpoint")
            tmp_path.rmdir()
            old.rename(tmp_path)
        with_tables_by_topic(tmp_path, peer.url)
        shutil.rmtree(tmp_path / "lake/dev-b")
        pipeline = with_tables_by_topic(
            tmp_path, peer.url, "dev-.*" if state == "there" else "dev-a"
        )
        components = pipeline._components
        if state == "forgotten":
            components.checkpoint.save_forgotten_topics({PREFIX + "b"})
        existing = components.tables.check(None)
        if not is_gone:
            with pytest.raises(
                CheckpointError, match=r"it was removed; restore it, .*CONFIG --topic \S*dev-b"
            ):
                components.start.acquire([PREFIX + "a"], existing)
            components.cursors.close()
            components.cluster.close()
            return
        components.start.acquire([PREFIX + "a"], existing)
        assert f"dev-b was removed, and its topic {PREFIX}b was deleted or forgotten" in caplog.text
        components.tables.leave_out_missing([PREFIX + "a"])
        components.tables.create()
        components.cursors.close()
        components.cluster.close()
        assert not (tmp_path / "lake/dev-b/_delta_log").exists()
        caplog.clear()
        again = with_tables_by_topic(tmp_path, peer.url, "dev-a")._components
        again.start.acquire([PREFIX + "a"], again.tables.check(None))
        again.cursors.close()
        again.cluster.close()
        assert "was removed" not in caplog.text
        # The topic comes again, and has a table again.
        again.tables.add_for_topics([PREFIX + "b"])
        again.tables.create()
        assert (tmp_path / "lake/dev-b/_delta_log").exists()


@pytest.mark.parametrize("left_behind", ["", "a", "b"])
def test_a_project_that_is_moved_has_its_tables_with_it(
    tmp_path: Path, left_behind: str, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    with Peer() as peer:
        with_tables_by_topic(old, peer.url)
        write_metadata(old / "checkpoint", f"file:{old}/checkpoint")
        old.rename(new)
        if left_behind:
            shutil.move(new / f"lake/dev-{left_behind}", old / f"lake/dev-{left_behind}")
        components = with_tables_by_topic(new, peer.url)._components
        with closing(components.cluster), closing(components.cursors):
            existing = components.tables.check(None)
            if left_behind:
                table = f"lake/dev-{left_behind}"
                sentence = rf"table at {old}/{table} had .* none at {new}/{table}: it was at {old}/"
                with pytest.raises(CheckpointError, match=sentence):
                    components.start.acquire([PREFIX + "a"], existing)
                return
            components.start.acquire([PREFIX + "a"], existing)
        assert former_place(components.checkpoint.folder) is None
        paths = {seen.path for seen in seen_tables(components.checkpoint).values()}
        assert paths == {str(table.path) for table in components.tables.by_name.values()}
        assert "its rows so far" not in caplog.text


def test_a_start_alone_with_other_tables_leaves_all_messages_compared(tmp_path: Path) -> None:
    def started(path: str) -> Start:
        components = with_tables_by_topic(tmp_path, peer.url)._components
        config = replace(components.start._config, tables=(TableConfig(path=path),))
        components.start._config = config
        components.start.acquire([PREFIX + "a"], components.tables.check(None))
        components.cursors.close()
        components.cluster.close()
        return components.start

    with Peer() as peer:
        checkpoint = Checkpoint(Place(str(tmp_path / "checkpoint")))
        started("/lake/right").save_selected()
        before = checkpoint.selected()
        assert before is not None
        assert before.earlier_ends == {}
        changed = started("/lake/typo")
        assert checkpoint.selected() == before
        started("/lake/right").save_selected()
        assert checkpoint.selected() == before
        changed.save_selected()
        selected = checkpoint.selected()
        assert selected is not None
        assert selected.earlier_ends[PREFIX + "a"] == Position(1, 5)


@pytest.mark.parametrize("looks", [False, True], ids=["a start", "a look at a start"])
def test_a_record_of_tables_of_a_newer_release_is_refused_before_a_micro_batch(
    tmp_path: Path, *, looks: bool
) -> None:
    with Peer() as peer:
        components = with_tables_by_topic(tmp_path, peer.url)._components
        checkpoint = tmp_path / "checkpoint"
        (checkpoint / "ledgerlake/selected.json").write_text('{"version": 2}')
        before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
        start, existing = components.start, components.tables.check(None)
        begin = partial(start.examine, outbox=None) if looks else start.acquire
        with (
            closing(components.cluster),
            closing(components.cursors),
            pytest.raises(OffsetError, match="selection of tables of version 2"),
        ):
            begin([PREFIX + "a"], existing)
    assert before == {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}


def test_a_topic_is_forgotten_if_all_partitions_that_were_read_are(tmp_path: Path) -> None:
    partitions = [f"{PREFIX}b-partition-{number}" for number in range(2)]
    with Peer() as peer, closing(Cluster(ClientSettings(peer.url))) as cluster:
        checkpoint = Checkpoint(Place(str(tmp_path)))
        checkpoint.save_stream("s", 7)
        checkpoint.save_start({name: PartitionOffset(Position(1, 0)) for name in partitions})
        are_gone = []
        for count in range(3):
            checkpoint.save_forgotten_topics(set(partitions[:count]))
            are_gone.append(is_gone(cluster, checkpoint, f"{PREFIX}b"))
    assert are_gone == [False, False, True]


def test_a_path_that_is_changed_back_is_refused_with_the_path_that_has_the_rows(
    tmp_path: Path,
) -> None:
    pipeline, table = with_a_table(tmp_path, range(6), BatchCommit("s", "ledgerlake:s:q", 4, 111))
    pipeline._components.cursors.add(
        LastRun(5, None), {}, {"messages": SeenBatch(str(tmp_path / "second"), 5)}
    )
    with pytest.raises(
        CheckpointError, match=r"lacks what came since; set the path to \S*second again"
    ):
        pipeline._components.start.check_tables_are_newest([table])


def with_a_table(
    folder: Path, planned: Iterable[int], record: BatchCommit
) -> tuple[Pipeline, Table]:
    """A pipeline with a checkpoint that has planned those batches, and a table that holds one."""
    data = {
        "source": {"service_url": "pulsar://h:1", "topics": ["t"]},
        "stream": {"name": "s", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages"), "writer": "arrow"},
    }
    (folder / "checkpoint" / "offsets").mkdir(parents=True)
    (folder / "checkpoint" / "metadata").write_text('{"id": "q"}')
    Checkpoint(Place(str(folder / "checkpoint"))).save_stream("s", 7)
    for number in planned:
        offset = {"version": 1, "positions": {"t": {"ledger": 1, "entry": number}}}
        (folder / "checkpoint" / "offsets" / str(number)).write_text(
            "v1\n{}\n" + json.dumps(offset)
        )
    write_deltalake(str(folder / "messages"), schema.MESSAGES.empty_table())
    pipeline = Pipeline(None, parse_config(data))
    table = pipeline._components.tables.main.table
    table.commit(record, [], {})
    return pipeline, table


_NEVER = cursors._Unopened(0.0, 0.0, ConsumerBusyError("held"))


def test_a_new_topic_whose_subscription_another_process_holds_stops_nothing_unless_it_holds_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cursors, "_TOPICS_S", 0.0)
    monkeypatch.setattr(cursors, "_TRY_AGAIN_S", 0.1)
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    (tmp_path / "commits").mkdir()
    for number in range(2):
        (tmp_path / "commits" / str(number)).write_text("v1\n{}")
    lost: list[OwnershipError] = []
    with Peer(topics=[TOPIC]) as peer:
        peer.add(single(b"a"), single(b"b"))
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        keeper.acquire([TOPIC], from_earliest=True)
        peer.subscriptions["s"] = True
        peer.topics = [TOPIC, f"{TOPIC}-new"]
        keeper.begin(TopicSelection(pattern="persistent://public/default/.*"), lost.append)
        keeper.add(LastRun(0, 0), {f"{TOPIC}-new": Position(7, -1), TOPIC: Position(7, 0)})
        wait_until(lambda: peer.acknowledged == Position(7, 0))
        keeper.add(LastRun(1, 0), {f"{TOPIC}-new": Position(7, 0), TOPIC: Position(7, 1)})
        wait_until(lambda: peer.acknowledged == Position(7, 1))
        assert not lost
        assert keeper.is_owner
        monkeypatch.setattr(cursors, "_HELD_FOR_S", 0.0)
        before = keeper._unopened[f"{TOPIC}-new"].again_s
        wait_until(lambda: keeper._unopened.get(f"{TOPIC}-new", _NEVER).again_s > before)
        assert not lost
        with keeper._at_broker:
            keeper._cursors.pop(TOPIC).close()
        wait_until(lambda: bool(lost))
        assert f"holds the subscription s of {TOPIC}" in lost[0].message
        keeper.close()
        cluster.close()


def test_a_start_leaves_a_topic_out_that_was_never_read_and_that_the_broker_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = f"{TOPIC}-new"
    with Peer() as peer:
        peer.refuse_topics = {new: (pb.AuthorizationError, "not authorized")}
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        for unread in ([], [new]):
            keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
            with pytest.raises(BrokerError) if new not in unread else contextlib.nullcontext():
                keeper.acquire([TOPIC, new], from_earliest=True, unread=unread)
            keeper.close()
        assert f"the subscription s of {new} cannot be opened yet" in caplog.text
        cluster.close()


def test_a_look_at_a_start_tells_a_topic_that_another_consumer_holds(tmp_path: Path) -> None:
    new = f"{TOPIC}-new"
    with Peer(subscriptions={"s": False}, refuse_topics={new: (pb.ConsumerBusy, "held")}) as peer:
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        with closing(cluster), closing(keeper):
            left_out = keeper.acquire_existing([TOPIC, new], unread=[new])
            assert keeper.is_owner
    assert left_out.keys() == {new}
    assert "another consumer holds" in left_out[new].message


def test_a_start_of_which_the_broker_refuses_all_topics_owns_nothing(tmp_path: Path) -> None:
    """Without a subscription, a second process could run the stream too."""
    with Peer() as peer:
        peer.refuse_topics = {TOPIC: (pb.AuthorizationError, "not authorized")}
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        with pytest.raises(BrokerError, match="not authorized"):
            keeper.acquire([TOPIC], from_earliest=True, unread=[TOPIC])
        assert not keeper.is_owner
        keeper.close()
        cluster.close()


def test_a_start_of_which_another_process_holds_all_subscriptions_owns_nothing(
    tmp_path: Path,
) -> None:
    with Peer() as peer:
        peer.subscriptions["s"] = True
        cluster = Cluster(ClientSettings(peer.url, give_up_after_s=2))
        keeper = CursorKeeper(cluster, "s", Checkpoint(Place(str(tmp_path))))
        with pytest.raises(ConsumerBusyError):
            keeper.acquire([TOPIC], from_earliest=True, busy_for_s=0.0, unread=[TOPIC])
        keeper.close()
        cluster.close()


def test_neither_a_failure_nor_a_kill_drops_an_end_that_waits_for_its_subscription(
    tmp_path: Path,
) -> None:
    def fail(_position: Position) -> None:
        raise BrokerError("the test says no")

    (tmp_path / "commits").mkdir()
    keeper = CursorKeeper(None, "s", Checkpoint(Place(str(tmp_path))))  # type: ignore[arg-type]
    keeper._open_new = lambda name: False  # type: ignore[method-assign]

    def commit(batch_id: int, ends: dict[str, Position]) -> None:
        keeper.add(LastRun(batch_id, 0), ends)
        (tmp_path / "commits" / str(batch_id)).write_text("v1\n{}")

    commit(0, {"a": Position(7, 0), "b": Position(7, 1)})
    assert not keeper.step()
    keeper._cursors["a"] = SimpleNamespace(advance=fail, is_open=True)  # type: ignore[assignment]
    commit(1, {"c": Position(7, 2)})
    with pytest.raises(BrokerError):
        keeper.step()
    del keeper._cursors["a"]
    # A kill: the next start has all of them from the checkpoint.
    commit(2, {})
    keeper = CursorKeeper(None, "s", Checkpoint(Place(str(tmp_path))))  # type: ignore[arg-type]
    advanced: list[Position] = []
    keeper._cursors |= dict.fromkeys("abc", SimpleNamespace(advance=advanced.append, is_open=True))  # type: ignore[arg-type]
    keeper._ends.load("abc")
    assert not keeper.step()
    assert sorted(advanced) == [Position(7, 0), Position(7, 1), Position(7, 2)]
    assert keeper._ends.pending() == []
