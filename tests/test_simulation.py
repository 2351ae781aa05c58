"""The pipeline in a simulated world: histories from seeds, and whether they find the faults that
are known.

``LEDGERLAKE_HISTORIES`` says how many histories are played, ``python -m tests.simulation --help``
plays many more.
"""

from __future__ import annotations

import io
import logging
import os
import random
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from ledgerlake.errors import DataLossError, LedgerlakeError
from ledgerlake.inspect.lag import find_lags
from ledgerlake.options import config as configs
from ledgerlake.pipeline import left_topics
from ledgerlake.pipeline.commit import BatchResult, DeltaSink
from ledgerlake.pipeline.components import make_components
from ledgerlake.pipeline.forget import forget_topic
from ledgerlake.table.batch_commit import number_of
from ledgerlake.wire.message_id import Position
from tests.simulation.by_hand import by_hand, put
from tests.simulation.driver import CHECKPOINT, MESSAGES, REJECTS, Edges, config
from tests.simulation.history import (
    DUE_TOPIC,
    TOPIC,
    Features,
    History,
    Script,
    Step,
    Verdict,
    write_script,
)
from tests.simulation.lake import Commit
from tests.simulation.many import play_many
from tests.simulation.mutations import MUTATIONS
from tests.simulation.spark import Query
from tests.simulation.world import Event, Killed, Lock, Trap, World

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.operators.results import PartitionResult
    from ledgerlake.options.config import Config
    from ledgerlake.table.batch_commit import BatchCommit
    from tests.simulation.broker import Topic

_IS_LONG = os.environ.get("LEDGERLAKE_CAMPAIGN") == "long"
_HISTORIES = int(os.environ.get("LEDGERLAKE_HISTORIES", "3000" if _IS_LONG else "60"))

# A history that finds each fault; ``make simulate-faults`` finds others.
_FOUND_BY = {
    "cursors-before-spark": (4, Features(has_index=False, keeps_ledgers=True)),
    "cut-for-the-cores-of-this-process": (4, Features(limits_cancels=True, keeps_ledgers=True)),
    "first-run-of-a-batch-is-sent": (82, Features(changes_keys=True, keeps_ledgers=True)),
    "latest-without-question": (
        3,
        Features(limits_cancels=True, changes_options=True, keeps_ledgers=True),
    ),
    "new-topics-at-latest": (101, Features(has_index=False)),
    "outbox-before-ownership": (14, Features(changes_keys=True)),
    "one-table-for-all": (6, Features(has_tables=True, has_index=False)),
    "replaced-is-delivered": (
        12,
        Features(has_schedules=True, changes_keys=True, keeps_ledgers=True),
    ),
    "repeats-after-a-cancel": (
        17,
        Features(has_schedules=True, changes_keys=True, keeps_ledgers=True),
    ),
    "latest-by-time": (57, Features(has_tables=True, has_latest=True)),
    "rest-waits-for-a-message": (6, Features()),
}


@pytest.fixture(scope="module")
def edges() -> Iterator[Edges]:
    with Edges() as entered:
        yield entered


def play(script: Script, edges: Edges) -> Verdict:
    return History(script, edges).play()


def rejects(history: History) -> list[dict[str, Any]]:
    """The rows of the table of rejects."""
    table = history.lake.tables.get(REJECTS)
    names = [name for commit in table.commits for name in commit.files] if table else []
    files = [history.disk.files[f"{REJECTS}/{name}"] for name in names]
    return [row for data in files for row in pq.read_table(io.BytesIO(data)).to_pylist()]


def only_reject(history: History) -> str:
    """Play a history; what its only reject says."""
    history.play()
    (row,) = rejects(history)
    return str(row["detail"])


@pytest.mark.slow
def test_no_history_loses_doubles_reorders_or_stops() -> None:
    verdicts = list(play_many(range(1, _HISTORIES + 1), os.cpu_count() or 1))
    failed = {
        verdict.script.seed: verdict.violations[0] for verdict in verdicts if verdict.violations
    }
    assert failed == {}
    assert sum(verdict.trimmed for verdict in verdicts) > len(verdicts)
    assert sum(verdict.messages for verdict in verdicts) > 10 * len(verdicts)


@pytest.mark.parametrize(
    ("seed", "features"),
    [
        (906, Features(has_schedules=True, limits_cancels=True)),
        (10044, Features(limits_cancels=True, changes_keys=True)),
        (10144, Features(has_schedules=True, changes_keys=True, keeps_ledgers=True)),
        (36586, Features()),
        (100061, Features(changes_keys=True, has_index=False, limits_cancels=True)),
        (110885, Features(changes_keys=True, has_index=False, changes_options=True)),
        (114963, Features()),
        (128830, Features()),
        (129265, Features(limits_cancels=True)),
        (146987, Features(has_tables=True, has_index=False)),
        (1043914, Features()),
        (2063878, Features()),
    ],
)
def test_a_history_that_failed_once_does_not_fail_again(
    seed: int, features: Features, edges: Edges
) -> None:
    assert play(write_script(seed, features), edges).violations == []


@pytest.mark.parametrize("seed", [10, 11, 12])
def test_the_latest_of_two_topic_partitions_is_known_without_times_of_the_broker(
    seed: int, edges: Edges
) -> None:
    script = write_script(seed, Features(has_tables=True, has_latest=True))
    assert play(replace(script, has_metadata=False), edges).violations == []


def test_a_batch_that_fails_while_the_pipeline_is_stopped_is_said(edges: Edges) -> None:
    commit = DeltaSink.commit
    history = History(by_hand(put(1.0), put(3.2), Step(5.0, "stop", {"back_s": 100.0})), edges)

    def slow(sink: DeltaSink, batch: BatchCommit, partitions: list[PartitionResult]) -> BatchResult:
        if batch.batch_id != 2:
            return commit(sink, batch, partitions)
        history.world.sleep(2.5)
        raise DataLossError("5 messages are lost")

    with edges.changed(lambda changed: changed.replace(DeltaSink, "commit", slow)):
        history.play()
    assert history.apps[0].ended == "DataLossError: 5 messages are lost"


class Reconfigured(History):
    """A history with a step that changes the configuration."""

    def _configure(self, args: dict[str, Any]) -> None:
        self.settings = config([TOPIC], None, starting=self.script.starting, **args)


@pytest.mark.parametrize("enabled", [True, False])
def test_delays_that_are_switched_before_a_batch_is_run_again_are_refused(
    enabled: bool, edges: Edges
) -> None:
    script = by_hand(
        put(1.0),
        Step(2.9, "kill", {"back_s": 2.0, "noticed_s": 0.0}, "committed messages"),
        put(3.0, "plain"),
        put(3.0, "delayed"),
        Step(3.8, "configure", {"delay": {"enabled": not enabled}}),
        put(12.0),
    )
    history = Reconfigured(script, edges)
    history.settings = config([TOPIC], None, starting="earliest", delay={"enabled": enabled})
    # Messages that are not held back come before they are due.
    history.oracle.complain = lambda words: None  # type: ignore[method-assign]
    history.play()
    assert any("is to be run again; set it back" in app.ended for app in history.apps)


OTHER_PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "another path": (
        {"delta": {"path": MESSAGES, "rejects_path": REJECTS, "writer": "arrow"}},
        {"delta": {"path": "/sim/elsewhere", "rejects_path": REJECTS, "writer": "arrow"}},
    ),
    "another of the tables": (
        {"delta": {"rejects_path": REJECTS}, "tables": [{"path": MESSAGES}]},
        {"delta": {"rejects_path": REJECTS}, "tables": [{"path": "/sim/elsewhere"}]},
    ),
    "a table for each topic": (
        {
            "delta": {"path": "/sim/rest", "writer": "arrow"},
            "tables": [{"path": "/sim/messages/{topic}"}],
        },
        {
            "delta": {"path": "/sim/rest", "writer": "arrow"},
            "tables": [{"path": "/sim/elsewhere/{topic}"}],
        },
    ),
    "a table that is taken away": (
        {"delta": {"path": "/sim/rest", "writer": "arrow"}, "tables": [{"path": MESSAGES}]},
        {"delta": {"path": "/sim/rest", "writer": "arrow"}},
    ),
}


def moved(
    edges: Edges, before: dict[str, Any], now: dict[str, Any], *disturbance: Step
) -> Reconfigured:
    """A history whose tables have other places while a batch is to be run again."""
    script = by_hand(put(1.0), *disturbance, put(3.0), Step(3.8, "configure", now), put(12.0))
    history = Reconfigured(script, edges)
    history.settings = config([TOPIC], None, starting="earliest", **before)
    return history


@pytest.mark.parametrize("places", OTHER_PLACES.values(), ids=OTHER_PLACES)
def test_a_batch_is_run_again_for_the_tables_that_have_it(
    edges: Edges, places: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    before, now = places
    kind = "orders" if "{topic}" in str(now) else "messages"
    killed = Step(2.9, "kill", {"back_s": 2.0, "noticed_s": 0.0}, f"committed {kind}")
    history = moved(edges, before, now, killed, Step(14.0, "configure", before))
    assert history.play().violations == []
    assert any(
        "which the configuration no longer names, and that batch is to be run" in app.ended
        for app in history.apps
    )


@pytest.mark.parametrize("access", ["commit messages", "committed messages"])
def test_a_batch_that_a_former_table_lacks_is_run_for_the_new_one(
    edges: Edges, access: str
) -> None:
    before, now = OTHER_PLACES["another path"]
    ended = "kill" if access == "commit messages" else "stop"
    disturbance = Step(2.9, ended, {"back_s": 2.0, "noticed_s": 0.0}, access)
    history = moved(edges, before, now, disturbance)
    assert history.play().violations == []
    assert len(history.lake.tables["/sim/elsewhere"].commits) > 1


class TwoStreams(History):
    """From some moment on, processes are started with the configuration of another stream."""

    def _other_stream(self, args: dict[str, Any]) -> None:
        stream = {
            "name": args.pop("name", "other"),
            "checkpoint": args.pop("checkpoint", "/sim/other"),
        }
        sections = {"stream": stream | {"trigger": "1 second"}, **args}
        topics, pattern = sections.pop("topics", [TOPIC]), sections.pop("pattern", None)
        self.settings = config(topics, pattern, **{"starting": self.script.starting, **sections})

    def _add(self, args: dict[str, Any]) -> None:
        topic = self.brokers.topics.get(args["topic"])
        if topic is None:
            self.brokers.add_topic(args["topic"])
            topic = self.brokers.topics[args["topic"]]
        for _ in range(args["count"]):
            self._send_plain(topic)

    def _write_by_another(self, args: dict[str, Any]) -> None:
        """A topic comes, and the table gets its messages from another stream."""
        self.brokers.add_topic(args["topic"])
        claim = {f"ledgerlake.writer:{args['topic']}": number_of("another")}
        self.lake.tables[MESSAGES].commits.append(Commit((), claim, self.world.now_s))
        for number in range(args["count"]):
            self._store(
                self.brokers.topics[args["topic"]], self._metadata(), b"another's %d" % number
            )

    def refusals(self) -> list[str]:
        return [app.ended for app in self.apps if "would write them a second time" in app.ended]


OTHER_STREAMS: dict[str, dict[str, Any]] = {
    "renamed": {},
    "from the latest message": {"starting": "latest"},
    "with other tables": {"tables": [{"path": "/sim/more", "where": "entry_id < 0"}]},
    "with other rejects": {
        "delta": {"path": MESSAGES, "rejects_path": "/sim/others", "writer": "arrow"}
    },
    "with the same rejects": {
        "delta": {"path": "/sim/others", "rejects_path": REJECTS, "writer": "arrow"}
    },
}


@pytest.mark.parametrize("ends", ["stop", "lose", "kill"])
@pytest.mark.parametrize("other", OTHER_STREAMS.values(), ids=OTHER_STREAMS)
def test_a_stream_whose_topic_the_tables_have_from_another_one_is_refused_before_it_changes_anything(
    edges: Edges, ends: str, other: dict[str, Any]
) -> None:
    back = {"name": "sim", "checkpoint": CHECKPOINT}
    script = by_hand(
        put(1.0, count=2),
        put(1.2, "reminder"),
        Step(4.0, ends, {"back_s": 3.0, "noticed_s": 0.0}),
        Step(4.5, "other_stream", dict(other)),
        put(6.0),
        Step(
            12.0, "other_stream", {**back, "starting": "cursor" if ends == "lose" else "earliest"}
        ),
        put(16.0),
    )
    history = TwoStreams(script, edges)
    verdict = history.play()
    # What waited is lost with a checkpoint.
    assert [one for one in verdict.violations if ends != "lose" or one.startswith("once")] == []
    assert history.refusals()
    assert all("/sim/other" not in path for path in history.disk.files)
    assert not any("ledgerlake-other" in topic.cursors for topic in history.topics)


def test_a_stream_may_take_a_topic_over_and_the_former_one_is_refused_from_then_on(
    edges: Edges,
) -> None:
    allowed = {
        "path": MESSAGES,
        "rejects_path": REJECTS,
        "writer": "arrow",
        "fail_on_second_stream": False,
    }
    script = by_hand(
        put(1.0, count=2),
        Step(4.0, "stop", {"back_s": 1.0}),
        Step(4.2, "other_stream", {"delta": allowed, "starting": "latest"}),
        put(8.0, count=2),
        Step(10.0, "stop", {"back_s": 1.0}),
        Step(10.2, "other_stream", {"name": "sim", "checkpoint": CHECKPOINT}),
        Step(14.0, "other_stream", {}),
        put(18.0),
    )
    history = TwoStreams(script, edges)
    # The former stream's cursor stays.
    assert [
        one for one in history.play().violations if "backlog of ledgerlake-sim" not in one
    ] == []
    assert {refusal.partition(" writes")[0] for refusal in history.refusals()} == {
        "CheckpointError: the stream other"
    }


def test_two_streams_write_different_topics_into_one_table(edges: Edges) -> None:
    second = f"{TOPIC}-second"
    script = by_hand(
        put(1.0, count=2),
        Step(2.0, "add", {"topic": second, "count": 3}),
        Step(4.0, "stop", {"back_s": 1.0}),
        Step(4.2, "other_stream", {"topics": [second]}),
        Step(6.0, "add", {"topic": second, "count": 2}),
        Step(10.0, "stop", {"back_s": 1.0}),
        Step(10.2, "other_stream", {"name": "sim", "checkpoint": CHECKPOINT}),
        put(14.0),
    )
    history = TwoStreams(script, edges)
    history.brokers.add_topic(second)
    verdict = history.play()
    assert [one for one in verdict.violations if "backlog" not in one] == []
    assert history.refusals() == []


@pytest.mark.parametrize("count", [0, 3])
@pytest.mark.parametrize("max_rows", [0, 1])
def test_a_topic_of_another_stream_that_a_pattern_comes_to_match_ends_the_stream_before_its_first_message(
    edges: Edges, count: int, max_rows: int
) -> None:
    later, own = f"{TOPIC}-later", {"name": "sim", "checkpoint": CHECKPOINT}
    script = by_hand(
        Step(0.0, "other_stream", {**own, "pattern": f"{TOPIC}.*"}),
        put(1.0, count=2),
        put(1.2, "reminder"),
        Step(5.0, "write_by_another", {"topic": later, "count": count}),
        put(5.0, count=3),
        Step(20.0, "other_stream", {**own, "pattern": f"{TOPIC}(-new.*)?"}),
        put(24.0, count=2),
    )
    history = TwoStreams(replace(script, max_rows=max_rows), edges)
    # The cursor stays until it is forgotten. A message of that topic would be one that no producer
    # had confirmed.
    assert [
        one for one in history.play().violations if "backlog of ledgerlake-sim" not in one
    ] == []
    assert history.refusals()
    assert len(history.apps) > 2


@pytest.mark.parametrize("fault", sorted(_FOUND_BY))
def test_a_known_fault_is_found(fault: str, edges: Edges) -> None:
    script = write_script(*_FOUND_BY[fault])
    assert play(script, edges).violations == []
    with edges.changed(MUTATIONS[fault]):
        assert play(script, edges).violations


@pytest.mark.parametrize(
    ("commits", "refusal"),
    [
        (1, "has batch 2: it is an older copy; restore the newest one"),
        (2, "has batch 1: it is an older copy; restore the newest one"),
        (50, "there is none at /sim/messages: it was removed; restore it"),
    ],
)
def test_a_table_that_is_older_than_its_checkpoint_is_refused(
    edges: Edges, commits: int, refusal: str
) -> None:
    restored = Step(8.0, "restore_table", {"table": MESSAGES, "commits": commits, "back_s": 1.0})
    verdict = play(by_hand(put(1.0), put(3.0), put(5.0), restored, put(11.0)), edges)
    assert verdict.violations == []
    assert refusal in verdict.refused


@pytest.mark.parametrize("kind", ["plain", "reminder"])
def test_an_older_checkpoint_is_refused_though_what_came_since_only_waits(
    edges: Edges, kind: str
) -> None:
    def script(*disturbance: Step) -> Script:
        unload = Step(10.0, "unload", {"partition": 0, "away_s": 0.0})
        return by_hand(
            put(1.0, count=3),
            *disturbance,
            put(6.0, kind, 2),
            unload,
            put(16.0),
            has_metadata=False,
        )

    copied, restored = Step(4.0, "backup", {"takes_s": 0.0}), Step(12.0, "restore", {"back_s": 1.0})
    verdict = play(script(copied, restored), edges)
    assert verdict.violations == []
    assert "it is an older copy; restore the newest one" in verdict.refused
    verdict = play(script(copied, Step(12.0, "kill", {"back_s": 1.0, "noticed_s": 0.0})), edges)
    assert (verdict.violations, verdict.refused) == ([], "")


@pytest.mark.parametrize("first_s", [1.5, 8.0])
def test_a_checkpoint_that_another_one_has_followed_is_refused(
    edges: Edges, first_s: float
) -> None:
    def script(*disturbance: Step) -> Script:
        return by_hand(put(first_s, count=2), *disturbance, put(16.0), starting="cursor")

    copied, lost = Step(4.0, "backup", {"takes_s": 0.0}), Step(6.0, "lose", {"back_s": 1.0})
    verdict = play(script(copied, lost, put(9.0), Step(12.0, "restore", {"back_s": 1.0})), edges)
    assert verdict.violations == []
    assert "it is an older copy; restore the newest one" in verdict.refused
    verdict = play(
        script(copied, lost, put(9.0), Step(12.0, "kill", {"back_s": 1.0, "noticed_s": 0.0})), edges
    )
    assert (verdict.violations, verdict.refused) == ([], "")


@pytest.mark.parametrize("access", ["commit messages", "committed messages"])
def test_a_loss_that_only_the_repeat_of_a_batch_finds_is_a_reject(
    edges: Edges, access: str
) -> None:
    script = by_hand(
        put(1.0),
        Step(4.0, "kill", {"back_s": 4.0, "noticed_s": 0.0}, access),
        put(4.2, "reminder", 14),
        Step(7.0, "skip", {}),
        put(12.0),
    )
    history = History(replace(script, goes_on=True), edges)
    assert history.play().violations == [
        "nothing missing: message 2 at orders 4:1 is rejected: data_loss"
    ]
    (row,) = rejects(history)
    assert row["detail"].startswith("at most 7 messages after 4:0 and before 5:0 are lost")


def test_a_copy_of_a_forgotten_stream_s_first_moments_is_refused(edges: Edges) -> None:
    script = by_hand(
        put(1.5, count=2),
        Step(4.0, "lose", {"back_s": 6.0}),
        Step(6.0, "forget"),
        Step(7.0, "backup", {"takes_s": 0.0}, "written /sim/checkpoint/ledgerlake/start"),
        put(14.0, count=2),
        Step(17.0, "restore", {"back_s": 1.0}),
        put(19.0),
        starting="latest",
    )
    verdict = play(script, edges)
    assert verdict.violations == []
    assert "it is an older copy; restore the newest one" in verdict.refused


def test_a_message_of_a_topic_made_anew_is_a_reject_if_its_id_waits_already(edges: Edges) -> None:
    history = History(
        scripted(
            put(1.0, count=2),
            put(2.0, "reminder", 2),
            put(3.0, count=2),
            Step(6.0, "anew"),
            put(8.0, count=12),
            put(15.0, count=2),
            put(18.0, "reminder", 2),
            put(20.0, count=2),
            goes_on=True,
            duration_s=30.0,
        ),
        edges,
    )
    # Ids come twice, since the cluster was made anew.
    complaints: list[str] = []
    history.oracle.complain = complaints.append  # type: ignore[assignment, method-assign]
    history.play()
    rejected = [
        complaint for complaint in complaints if complaint.endswith("is rejected: delayed_known")
    ]
    assert [
        any(f"message {number} at" in complaint for complaint in rejected) for number in (21, 22)
    ] == [True, True]


def test_a_history_does_not_depend_on_those_played_before_it(edges: Edges) -> None:
    def trace(seed: int) -> list[str]:
        return History(write_script(seed), edges, traces=True).play().trace

    first = {seed: trace(seed) for seed in (6, 12, 18)}
    assert {seed: trace(seed) for seed in (18, 12, 6)} == first


class Elsewhere(History):
    """From some moment on, processes are started with another checkpoint, as on another machine."""

    def _elsewhere(self, _args: dict[str, Any]) -> None:
        stream = {"name": "sim", "checkpoint": "/sim/other", "trigger": "1 second"}
        self.settings = config([TOPIC], None, starting="cursor", stream=stream)
        self.was_restored = True


@pytest.mark.parametrize("access", [1, 2, 3, 4])
def test_a_process_that_is_suspended_while_it_starts_commits_nothing_beside_another_checkpoint(
    edges: Edges, access: int
) -> None:
    script = by_hand(
        put(1.5, count=2),
        Step(3.0, "stop", {"back_s": 0.5}),
        put(3.2),
        Step(3.4, "suspend", {"for_s": 12.0, "noticed_s": 0.2}, "load messages", access),
        Step(4.2, "elsewhere", {}),
        put(8.0, count=2),
        Step(11.0, "stop", {"back_s": 30.0}),
        put(18.0),
        starting="cursor",
    )
    history = Elsewhere(script, edges)
    assert [
        violation for violation in history.play().violations if violation.startswith("once")
    ] == []
    assert "Error: " in history.apps[1].ended


@pytest.mark.parametrize(
    "name", ["first_ends", "settings", "selected", "start", "stream", "tables", "ends"]
)
def test_a_process_that_records_its_first_start_late_changes_nothing_of_its_successor(
    edges: Edges, name: str
) -> None:
    script = by_hand(
        put(1.5, count=2),
        Step(
            0.0,
            "suspend",
            {"for_s": 12.0, "noticed_s": 0.2},
            f"write {CHECKPOINT}/ledgerlake/{name}",
            1,
        ),
        put(8.0, count=2),
        Step(16.0, "stop", {"back_s": 2.0}),
        put(19.0),
        starting="latest",
    )
    history = History(script, edges)
    assert history.play().violations == []
    assert len(history.apps) > 1


class Unsubscribed(History):
    """The checkpoint and the cursors are lost."""

    def _unsubscribe(self, args: dict[str, Any]) -> None:
        self._lose(args)
        for topic in self.topics:
            topic.cursors.clear()


def test_a_start_at_a_cursor_that_is_gone_is_refused_if_the_table_has_rows(edges: Edges) -> None:
    script = by_hand(
        put(1.0, count=2), Step(4.0, "unsubscribe", {"back_s": 2.0}), put(8.0), starting="cursor"
    )
    history = Unsubscribed(script, edges)
    assert not any(violation.startswith("once") for violation in history.play().violations)
    assert "no topic has the subscription ledgerlake-sim any more" in history.apps[-1].ended


class Abandoned(History):
    """A checkpoint is removed while the process that uses it is suspended."""

    def _abandon(self, _args: dict[str, Any]) -> None:
        self.disk.replace(CHECKPOINT, {})
        self.was_restored = True


def test_a_suspended_process_commits_nothing_once_another_checkpoint_has(edges: Edges) -> None:
    script = by_hand(
        put(1.5, count=2),
        put(5.0),
        Step(4.0, "suspend", {"for_s": 9.0, "noticed_s": 0.2}, "task done state"),
        Step(5.4, "abandon", {}),
        put(8.0),
        Step(11.0, "stop", {"back_s": 8.0}),
        put(16.0),
        starting="cursor",
    )
    history = Abandoned(script, edges)
    verdict = history.play()
    assert verdict.violations == []
    assert history.apps[0].ended.startswith("OwnershipError: another checkpoint of the stream sim")


def test_only_a_batch_that_reads_is_recorded_without_rows(edges: Edges) -> None:
    history = History(by_hand(put(3.0, "reminder")), edges)
    verdict = history.play()
    assert verdict.violations == []
    # The table is made, the stream begins, the message waits; then it comes.
    assert [len(commit.files) for commit in history.lake.tables[MESSAGES].commits] == [0, 0, 0, 1]
    assert verdict.batches >= 2


def test_nothing_is_forgotten_while_the_checkpoint_is_there(edges: Edges) -> None:
    killed = Step(4.0, "kill", {"back_s": 5.0, "noticed_s": 0.0})
    verdict = play(
        by_hand(put(1.0, count=3), killed, put(5.0, count=20), Step(6.0, "forget"), put(12.0)),
        edges,
    )
    assert verdict.violations == []
    assert any("is still there" in line for line in verdict.trace)


class TopicsChange(History):
    """A stream of two topics, and steps that change which it reads or forget one of them."""

    OTHER = f"{TOPIC}-other"

    def __init__(self, script: Script, edges: Edges) -> None:
        super().__init__(script, edges)
        self.brokers.add_topic(self.OTHER)
        self._read({"topics": [TOPIC, self.OTHER]})

    def _read(self, args: dict[str, Any]) -> None:
        self.settings = config(args["topics"], None, starting=self.script.starting)

    def _other(self, args: dict[str, Any]) -> None:
        for _ in range(args["count"]):
            self._send_plain(self.brokers.topics[self.OTHER])

    def _forget_topic(self, args: dict[str, Any]) -> None:
        def run() -> None:
            try:
                forget_topic(self.settings, args["topic"])
            except LedgerlakeError as error:
                self.world.say(f"forget: {error}")

        self.world.spawn(self.world.process("forget"), "forget", run)

    @property
    def has_cursor(self) -> bool:
        return bool(self.brokers.topics[self.OTHER].cursors)


@pytest.mark.parametrize("access", ["commit messages", "committed messages"])
def test_a_batch_that_is_run_again_reads_a_topic_that_has_left_the_configuration_meanwhile(
    edges: Edges, access: str
) -> None:
    script = by_hand(
        put(1.0),
        Step(3.0, "other", {"count": 3}),
        Step(3.0, "kill", {"back_s": 2.0, "noticed_s": 0.0}, access),
        Step(4.0, "read", {"topics": [TOPIC]}),
        Step(6.0, "other", {"count": 2}),
        put(6.0),
        Step(12.0, "stop", {"back_s": 1.0}),
        Step(12.5, "read", {"topics": [TOPIC, TopicsChange.OTHER]}),
        put(16.0),
    )
    assert TopicsChange(script, edges).play().violations == []


class Watched(History):
    """A history with steps that ask, as the commands do; ``found`` has the answers."""

    def __init__(self, script: Script, edges: Edges) -> None:
        super().__init__(script, edges)
        self.found: list[Any] = []

    def _ask(self, args: dict[str, Any]) -> None:
        def run() -> None:
            try:
                self.found.append(args["about"](self.settings))
            except LedgerlakeError as error:
                self.found.append(error)

        self.world.spawn(self.world.process("command"), "command", run)


def messages_behind(settings: Config) -> list[int | None]:
    return [lag.messages for lag in find_lags(settings)]


@pytest.mark.parametrize("starting", ["latest", "cursor"])
def test_the_lag_of_a_topic_that_came_since_the_last_run_counts_from_its_beginning(
    edges: Edges, starting: str
) -> None:
    script = scripted(
        produced(1.0, 1),
        Step(4.0, "stop", {"back_s": 6.0}),
        Step(5.0, "topic", {"count": 3}),
        Step(7.0, "ask", {"about": messages_behind}),
        starting=starting,
        by_pattern=True,
    )
    history = Watched(script, edges)
    assert history.play().violations == []
    assert history.found == [[0, 3]]


def test_a_stream_that_is_to_begin_at_the_latest_message_passes_the_check_before_its_first_run(
    edges: Edges,
) -> None:
    def examine(settings: Config) -> str:
        components = make_components(settings)
        components.start.examine(
            components.cluster.all_partitions(settings.source.topics), [], None
        )
        return "passes"

    killed = Step(0.0, "kill", {"back_s": 6.0, "noticed_s": 0.0}, "send SUBSCRIBE")
    script = scripted(
        killed, produced(0.5, 2), Step(2.0, "ask", {"about": examine}), starting="latest"
    )
    history = Watched(script, edges)
    history.play()
    assert history.found == ["passes"]


class WithOlder(TopicsChange):
    """The other topic has messages from before the pipeline starts at the latest one."""

    def __init__(self, script: Script, edges: Edges) -> None:
        super().__init__(script, edges)
        self._other({"count": 3})
        for sent in list(self.oracle.sent.values()):
            self.oracle.excuse(sent.topic, sent.positions[0])


@pytest.mark.parametrize("access", ["written /sim/checkpoint/offsets/0", "created messages"])
def test_a_topic_that_leaves_the_configuration_before_the_first_commit_keeps_its_start(
    edges: Edges, access: str
) -> None:
    script = by_hand(
        Step(0.0, "kill", {"back_s": 2.0, "noticed_s": 0.0}, access),
        Step(1.5, "read", {"topics": [TOPIC]}),
        put(5.0),
        Step(7.0, "stop", {"back_s": 1.0}),
        Step(7.5, "read", {"topics": [TOPIC, TopicsChange.OTHER]}),
        starting="latest",
    )
    history = WithOlder(script, edges)
    assert history.play().violations == []


def test_a_topic_that_leaves_the_configuration_keeps_its_subscription_and_that_is_said(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    stop = Step(4.0, "stop", {"back_s": 1.0})
    return_steps = [
        Step(10.0, "stop", {"back_s": 1.0}),
        Step(10.5, "read", {"topics": [TOPIC, TopicsChange.OTHER]}),
    ]
    script = by_hand(
        put(1.0),
        Step(1.0, "other", {"count": 2}),
        stop,
        Step(4.5, "read", {"topics": [TOPIC]}),
        put(7.0),
        Step(8.0, "other", {"count": 9}),
        *return_steps,
    )
    caplog.set_level(logging.WARNING, left_topics.__name__)
    history = TopicsChange(script, edges)
    assert history.play().violations == []
    (warning,) = [
        record.getMessage() for record in caplog.records if "no longer reads" in record.getMessage()
    ]
    assert (
        f"the stream sim no longer reads {history.OTHER}, and its subscription ledgerlake-sim stays"
        in warning
    )
    assert warning.endswith(f"ledgerlake forget CONFIG --topic {history.OTHER}")


def test_a_topic_that_left_the_configuration_can_be_forgotten_while_the_checkpoint_is_there(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    stop, stop_again = (Step(at_s, "stop", {"back_s": 1.0}) for at_s in (4.0, 9.0))
    forgets = Step(7.0, "forget_topic", {"topic": TopicsChange.OTHER})
    script = by_hand(
        put(1.0),
        Step(1.0, "other", {"count": 2}),
        stop,
        Step(4.5, "read", {"topics": [TOPIC]}),
        forgets,
        stop_again,
        put(12.0),
    )
    caplog.set_level(logging.WARNING, left_topics.__name__)
    history = TopicsChange(script, edges)
    assert history.play().violations == []
    assert not history.has_cursor
    assert sum("no longer reads" in record.getMessage() for record in caplog.records) == 1
    assert history.settings.source.topics.names == (TOPIC,)


def test_a_topic_that_comes_back_after_it_was_forgotten_is_said(
    edges: Edges, caplog: pytest.LogCaptureFixture
) -> None:
    stop, stop_again = (Step(at_s, "stop", {"back_s": 1.0}) for at_s in (4.0, 9.0))
    script = by_hand(
        put(1.0),
        Step(1.0, "other", {"count": 2}),
        stop,
        Step(4.5, "read", {"topics": [TOPIC]}),
        Step(7.0, "forget_topic", {"topic": TopicsChange.OTHER}),
        stop_again,
        Step(9.5, "read", {"topics": [TOPIC, TopicsChange.OTHER]}),
        Step(13.0, "other", {"count": 2}),
    )
    caplog.set_level(logging.WARNING, left_topics.__name__)
    history = TopicsChange(script, edges)
    assert history.play().violations == []
    assert history.has_cursor
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "was removed by ledgerlake forget" in record.getMessage()
    ]
    assert f"the subscription ledgerlake-sim of {history.OTHER} was removed" in warning


@pytest.mark.parametrize(
    ("topic", "refusal"),
    [
        (TOPIC, f"still reads {TOPIC}, .* out of the configuration first"),
        ("due", "has not read .*/due, by the checkpoint"),
    ],
)
def test_only_a_topic_that_left_the_configuration_is_forgotten_while_the_checkpoint_is_there(
    edges: Edges, topic: str, refusal: str
) -> None:
    history = TopicsChange(by_hand(put(1.0), Step(4.0, "forget_topic", {"topic": topic})), edges)
    history.brokers.add_topic(DUE_TOPIC)
    verdict = history.play()
    assert verdict.violations == []
    assert any(re.search(refusal, line) for line in verdict.trace)


def test_a_stream_that_was_forgotten_begins_anew_and_once(edges: Edges) -> None:
    lost = Step(4.0, "lose", {"back_s": 5.0})
    script = by_hand(put(3.0, count=3), lost, Step(6.0, "forget"), put(14.0), starting="latest")
    history = History(script, edges)
    verdict = history.play()
    assert verdict.violations == []
    assert {app.ended for app in history.apps[1:]} == {"ended"}
    assert not any(path.endswith("forgotten.json") for path in history.disk.files)


def scripted(*steps: Step, **more: Any) -> Script:
    fields: dict[str, Any] = {
        "seed": 1,
        "partitions": 0,
        "brokers": 1,
        "entries_per_ledger": 4,
        "has_metadata": True,
        "starting": "earliest",
        "max_rows": 0,
        "min_partitions": 0,
        "by_pattern": False,
        "delivers": False,
        "duration_s": 16.0,
        "cores": (1,),
    }
    return Script(**{**fields, **more}, steps=steps)


def produced(
    at_s: float, count: int, kind: str = "plain", partition: int = 0, label: str = ""
) -> Step:
    return Step(at_s, "produce", {"kind": kind, "count": count, "partition": partition}, label)


def test_a_topic_that_was_read_whole_goes_on_where_brokers_without_metadata_take_over(
    edges: Edges,
) -> None:
    verdict = play(scripted(produced(1.0, 3), Step(6.0, "bare"), produced(8.0, 2)), edges)
    assert (verdict.violations, verdict.trimmed) == ([], 1)


@pytest.mark.parametrize("has_metadata", [False, True])
def test_a_cursor_that_somebody_moves_while_a_batch_is_in_work_is_loss_that_is_said(
    edges: Edges, has_metadata: bool
) -> None:
    label = "committed messages"
    moved = [produced(3.0, 14, label=label), Step(3.0, "skip", {}, label)]
    script = scripted(produced(0.5, 3), produced(3.0, 1), *moved, has_metadata=has_metadata)
    (violation,) = play(script, edges).violations
    assert "DataLossError" in violation
    # Spark may run the batch once more, whose range begins behind 4:2.
    assert re.search("after 4:[23] and before 8:0 are lost", violation)


def with_trigger(
    script: Script, edges: Edges, trigger: str, kind: type[History] = History
) -> History:
    history = kind(script, edges)
    stream = {"name": "sim", "checkpoint": CHECKPOINT, "trigger": trigger}
    history.settings = config([TOPIC], f"{TOPIC}.*", stream=stream)
    return history


class ManyToOne(History):
    """A history with a step that sends many messages to a topic that came later."""

    def _fill(self, args: dict[str, Any]) -> None:
        for _ in range(args["count"]):
            self._send_plain(self.topics[1])


@pytest.mark.parametrize("has_metadata", [False, True])
@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_what_was_skipped_before_the_first_read_of_an_empty_topic_is_named(
    edges: Edges, has_metadata: bool, starting: str
) -> None:
    stop = Step(3.0, "stop", {"back_s": 6.0})
    script = by_hand(
        stop, put(5.0, count=20), Step(7.0, "skip", {}), put(12.0), has_metadata=has_metadata
    )
    (violation, *_) = play(replace(script, starting=starting), edges).violations
    assert "DataLossError" in violation
    assert "after 4:-1 and before 6:0 are lost" in violation


class SkipsOne(ManyToOne):
    """A history with a step that skips what a topic that came later holds, but for its last
    entry.
    """

    def _skip_one(self, _args: dict[str, Any]) -> None:
        topic = self.topics[1]
        for cursor in topic.cursors.values():
            cursor.mark_delete = topic.last.before
        for ledger in topic.ledgers[:-1]:
            for number in range(len(ledger.entries)):
                self.oracle.excuse(topic.name, Position(ledger.ledger_id, number))
        self.brokers.trim(topic)


@pytest.mark.parametrize("has_metadata", [False, True])
def test_what_was_skipped_before_the_first_read_of_a_topic_that_came_later_is_named(
    edges: Edges, has_metadata: bool
) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(3.0, "topic", {"count": 0}),
        Step(7.0, "stop", {"back_s": 6.0}),
        Step(9.0, "fill", {"count": 20}),
        Step(10.0, "skip_one"),
        by_pattern=True,
        has_metadata=has_metadata,
    )
    (violation, *_) = SkipsOne(script, edges).play().violations
    assert "DataLossError" in violation
    assert "messages after 5:-1 and before" in violation


def test_a_topic_that_is_made_again_before_its_first_read_lost_what_was_planned(
    edges: Edges,
) -> None:
    script = scripted(
        Step(0.0, "topic", {"count": 3}, "created"),
        Step(0.0, "kill", {"back_s": 4.0, "noticed_s": 0.0}, "written /sim/checkpoint/offsets/1"),
        Step(2.5, "delete", {"partition": 1}),
        Step(3.0, "topic", {"count": 2}),
        by_pattern=True,
        goes_on=True,
    )
    assert "messages after 5:-1 and before 5:3 are lost" in only_reject(History(script, edges))


@pytest.mark.parametrize(("at_s", "comes_at"), [(0.0, "created"), (3.0, "")])
def test_what_was_skipped_of_a_topic_that_came_with_messages_is_named(
    edges: Edges, at_s: float, comes_at: str
) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(at_s, "topic", {"count": 1}, comes_at),
        Step(at_s, "fill", {"count": 19}, "written /sim/checkpoint/offsets"),
        Step(at_s, "skip_one", {}, "batch "),
        by_pattern=True,
        goes_on=True,
    )
    history = SkipsOne(script, edges)
    assert history.play().violations == []
    # The topic had one message when the first range was planned.
    assert [row["detail"].partition(" are lost")[0] for row in rejects(history)] == [
        "at most 1 messages after 5:-1 and before 5:1",
        "at most 15 messages after 5:0 and before 9:0",
    ]


def test_a_topic_that_comes_while_the_trigger_is_awaited_is_kept_at_once(edges: Edges) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(3.0, "topic", {"count": 1}),
        Step(6.0, "fill", {"count": 19}),
        produced(150.0, 1),
        by_pattern=True,
        duration_s=160.0,
    )
    verdict = with_trigger(script, edges, "2 minutes", SkipsOne).play()
    assert verdict.violations == []
    (made,) = (line for line in verdict.trace if "orders-1: the cursor is made at" in line)
    assert float(made.split()[0]) < 5.0


def test_topics_that_keep_coming_do_not_void_the_trigger(
    edges: Edges, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_batch = Query._run_batch

    def slowly(query: Query) -> None:
        query._world.sleep(2.5)
        run_batch(query)

    monkeypatch.setattr(Query, "_run_batch", slowly)
    comes = [Step(3.0 + 2 * number, "topic", {"count": 1}) for number in range(50)]
    script = scripted(produced(0.5, 1), *comes, by_pattern=True, duration_s=130.0)
    verdict = with_trigger(script, edges, "1 minute").play()
    assert verdict.violations == []
    planned = [line for line in verdict.trace if ": batch" in line and "once more" not in line]
    assert sum(float(line.split()[0]) < 125.0 for line in planned) < 7


def test_a_broker_that_is_away_between_two_triggers_ends_nothing(edges: Edges) -> None:
    away = Step(30.0, "restart", {"broker": 0, "away_s": 200.0, "loses_marks": False})
    script = scripted(produced(0.5, 1), produced(20.0, 1), away, by_pattern=True, duration_s=500.0)
    history = with_trigger(script, edges, "5 minutes")
    assert history.play().violations == []
    assert len(history.apps) == 1


class Shrinking(ManyToOne):
    """All that a topic holds goes, as by message TTL."""

    def _gone(self, _args: dict[str, Any]) -> None:
        topic = self.topics[1]
        self.brokers.roll(topic)
        for cursor in topic.cursors.values():
            cursor.mark_delete = topic.last
        self.brokers.trim(topic)


@pytest.mark.parametrize("access", [4, 5])
def test_what_goes_while_the_beginning_of_a_topic_is_asked_for_is_a_loss(
    edges: Edges, access: int
) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(3.0, "topic", {"count": 3}),
        Step(3.0, "gone", {}, "send SUBSCRIBE", access),
        Step(9.0, "fill", {"count": 2}),
        by_pattern=True,
        goes_on=True,
    )
    history = Shrinking(script, edges)
    history.play()
    assert (
        "messages after the topic's beginning and before 5:3 are lost"
        in rejects(history)[0]["detail"]
    )


def test_an_empty_topic_that_is_deleted_before_its_first_batch_is_no_loss(edges: Edges) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(3.0, "topic", {"count": 0}),
        Step(3.0, "delete", {"partition": 1}, "batch "),
        produced(9.0, 1),
        by_pattern=True,
    )
    history = History(script, edges)
    assert history.play().violations == []
    assert len(history.apps) == 1


def test_a_start_at_the_cursor_without_any_topic_waits_for_one(edges: Edges) -> None:
    script = scripted(
        produced(0.5, 2),
        Step(4.0, "lose", {"back_s": 3.0}),
        Step(5.0, "delete", {"partition": 0}),
        Step(12.0, "topic", {"count": 2}),
        starting="cursor",
        by_pattern=True,
        duration_s=20.0,
    )
    history = History(script, edges)
    assert history.play().violations == []
    assert [app.ended for app in history.apps if "Error" in app.ended] == []


class Reloaded(History):
    """A topic that came later has an empty ledger, and the broker replaces it."""

    def _reload(self, _args: dict[str, Any]) -> None:
        topic = self.topics[1]
        self.brokers.unload(topic, 0.0)
        topic.ledgers = [self.brokers._new_ledger()]
        for cursor in topic.cursors.values():
            cursor.mark_delete = cursor.stored = topic.first


def test_a_topic_whose_empty_ledger_is_replaced_before_its_first_read_was_committed_starts_again(
    edges: Edges,
) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(3.0, "topic", {"count": 0}),
        Step(3.0, "kill", {"back_s": 3.0, "noticed_s": 0.0}, "batch "),
        Step(5.0, "reload"),
        produced(8.0, 2, partition=1),
        by_pattern=True,
    )
    assert Reloaded(script, edges).play().violations == []


@pytest.mark.parametrize("kill", [(), (Step(5.0, "kill", {"back_s": 2.0, "noticed_s": 0.0}),)])
def test_a_cluster_that_is_made_anew_is_an_error(edges: Edges, kill: tuple[Step, ...]) -> None:
    script = scripted(produced(1.0, 3), *kill, Step(6.0, "anew"), produced(8.0, 3))
    (violation,) = play(script, edges).violations
    assert "read up to 4:2, and the topic ends before that, at 1:2" in violation


def test_or_its_topics_are_read_from_their_beginning(edges: Edges) -> None:
    script = scripted(produced(1.0, 3), Step(6.0, "anew"), produced(8.0, 3), goes_on=True)
    verdict = play(script, edges)
    assert verdict.violations == []
    assert any("the cursor moves to 1:2" in line for line in verdict.trace)


def test_a_topic_that_is_deleted_while_something_waits_and_made_again_is_a_new_one(
    edges: Edges,
) -> None:
    script = scripted(
        Step(0.2, "topic", {"count": 2}),
        produced(2.0, 3, "delayed", partition=1),
        Step(4.0, "delete", {"partition": 1}),
        Step(7.0, "topic", {"count": 2}),
        by_pattern=True,
    )
    assert play(script, edges).violations == []


@pytest.mark.parametrize("ends", ["kill", "stop"])
@pytest.mark.parametrize("deleted_s", [4.0, 6.0])
def test_a_partition_that_is_deleted_and_named_by_the_metadata_stops_no_start(
    edges: Edges, ends: str, deleted_s: float
) -> None:
    script = scripted(
        produced(0.5, 3),
        produced(0.6, 3, partition=1),
        Step(deleted_s, "delete", {"partition": 1}),
        Step(5.0, ends, {"back_s": 2.0, "noticed_s": 0.0}),
        produced(8.0, 2),
        Step(12.0, "topic", {"count": 2}),
        partitions=2,
        duration_s=20.0,
    )
    history = History(script, edges)
    assert history.play().violations == []
    assert [app.ended for app in history.apps if "Error" in app.ended] == []
    assert len(history.apps) > 1


def test_a_topic_that_is_made_again_is_kept_from_its_first_entry_on(edges: Edges) -> None:
    script = scripted(
        produced(0.5, 1),
        Step(0.0, "topic", {"count": 2}),
        Step(4.0, "delete", {"partition": 1}),
        Step(7.0, "topic", {"count": 2}),
        Step(6.9, "fill", {"count": 14}, "batch "),
        Step(6.9, "roll", {"partition": 1}, "batch "),
        produced(14.0, 1),
        entries_per_ledger=8,
        max_rows=3,
        by_pattern=True,
        duration_s=20.0,
    )
    history = ManyToOne(script, edges)
    assert history.play().violations == []


@pytest.mark.parametrize("by_pattern", [True, False])
@pytest.mark.parametrize("access", ["plan", "created", "send SUBSCRIBE"])
def test_an_empty_topic_partition_that_comes_while_the_pipeline_starts_holds_nothing_up(
    access: str, by_pattern: bool, edges: Edges
) -> None:
    topic = Step(0.0, "topic", {"count": 0}, access)
    script = replace(
        by_hand(topic, put(1.0), put(3.0)), by_pattern=by_pattern, partitions=1 if by_pattern else 2
    )
    assert History(script, edges).play().violations == []


def test_topics_that_share_files_keep_the_order_of_what_comes_out_of_state(edges: Edges) -> None:
    plain = [produced(number / 16, 1, partition=number) for number in range(192)]
    # Two of four topic partitions have messages in state now and then.
    waiting = [
        produced(number / 2, 1, kind, partition=number % 2)
        for number in range(2, 20)
        for kind in ("delayed", "chunked")
    ]
    history = History(scripted(*plain, *waiting, partitions=4, entries_per_ledger=100), edges)
    assert history.play().violations == []
    files = [
        file for path, file in history.disk.below(MESSAGES).items() if path.endswith(".parquet")
    ]
    partitions = [set(pq.read_table(io.BytesIO(file))["partition"].to_pylist()) for file in files]
    assert sum(len(of_file) > 1 for of_file in partitions) > 3


def test_a_seed_is_one_history(edges: Edges) -> None:
    for seed in (2, 11):
        first, second = (play(write_script(seed), edges) for _ in range(2))
        assert first.trace == second.trace
        assert len(first.trace) > 20


_TRACES = """
from tests.simulation.driver import Edges
from tests.simulation.history import History, write_script

with Edges() as edges:
    for seed in range(501, 509):
        print(*History(write_script(seed), edges, traces=True).play().trace, sep="\\n")
"""


def test_a_history_does_not_depend_on_the_hashes_of_texts() -> None:
    # The order of a set depends on them, and a process that runs a batch again has others.
    played = [
        subprocess.Popen(
            [sys.executable, "-c", _TRACES],
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0].splitlines() for process in played)
    assert first == second
    assert len(first) > 1000


def world_with_two() -> tuple[World, list[str]]:
    return World(random.Random(1)), []


def test_a_killed_process_does_nothing_more_and_its_threads_end() -> None:
    world, done = world_with_two()
    process = world.process("victim")

    def work() -> None:
        try:
            world.access("one")
            done.append("one")
            world.access("two")
            done.append("two")
        finally:
            with pytest.raises(Killed):
                world.access("cleaning up")

    world.traps.append(Trap("two", 1, lambda: world.kill(process)))
    world.spawn(process, "thread", work)
    world.pause(1.0)
    assert done == ["one"]
    assert [thread.name for thread in world.threads] == ["test"]


def _sleep(world: World, done: list[str], seconds: float, word: str | None) -> None:
    world.sleep(seconds)
    done.append(word or f"{world.now_s}")


def test_time_goes_to_the_next_moment_at_which_something_can_run() -> None:
    world, done = world_with_two()
    world.at(5.0, lambda: done.append("event"))
    world.spawn(world.process("sleeper"), "thread", partial(_sleep, world, done, 1000.0, "woken"))
    world.pause(2000.0, lambda: "woken" in done)
    assert (done, world.now_s) == (["event", "woken"], 1000.0)


def test_a_suspended_process_goes_on_where_it_was() -> None:
    world, done = world_with_two()
    process = world.process("sleeper")
    world.spawn(process, "thread", partial(_sleep, world, done, 1.0, None))
    world.sleep(0.5)
    process.suspended = True
    world.at(10.0, lambda: setattr(process, "suspended", False))
    world.pause(20.0)
    assert done == ["10.0"]


def test_locks_and_events_keep_threads_waiting() -> None:
    world, done = world_with_two()
    lock, event = Lock(world), Event(world)

    def wait() -> None:
        with lock:
            done.append("has the lock")
        done.append(f"event: {event.wait(3.0)}")

    lock.acquire()
    world.spawn(world.process("other"), "thread", wait)
    world.sleep(1.0)
    assert done == []
    lock.release()
    world.sleep(1.0)
    event.set()
    world.sleep(1.0)
    assert done == ["has the lock", "event: True"]


class DueSoon(History):
    def _send_soon(self, topic: Topic) -> None:
        self._send_due_in(topic, 300)


@pytest.mark.parametrize("kind", ["plain", "soon"])
def test_what_was_trimmed_of_a_micro_batch_that_is_run_again_stops_nothing(
    edges: Edges, kind: str
) -> None:
    script = scripted(
        produced(1.0, 1),
        Step(3.0, "stop", {"back_s": 5.0}),
        put(4.0, kind, 3),
        put(4.5, "plain", 12),
        Step(5.0, "kill", {"back_s": 4.0, "noticed_s": 0.0}, "committed messages"),
        Step(10.0, "skip", {}),
        produced(18.0, 1),
        goes_on=True,
        duration_s=30.0,
    )
    # What a first run has not released yet is lost, and named.
    with edges.changed(lambda changed: changed.replace(configs, "MOST_DUE", 50_000)):
        history = DueSoon(script, edges)
        history.oracle.complain = lambda words: None  # type: ignore[method-assign]
        history.play()
    assert {app.ended for app in history.apps} == {"ended", ""}
    table_payloads = [payload for payload, _ in history.oracle._in_table]
    assert len(table_payloads) == len(set(table_payloads)) == 17


class Delivering(DueSoon):
    """A history with steps that set ``[deliver]`` or remove it."""

    def _deliver(self, args: dict[str, Any]) -> None:
        sections = {"deliver": {"topic": DUE_TOPIC, **args}} if args else {}
        self.settings = config([TOPIC], None, starting="earliest", **sections)


@pytest.mark.parametrize("meanwhile", ["soon", "reminder"])
@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_a_delivery_that_is_removed_for_a_run_goes_on_where_it_was(
    starting: str, meanwhile: str, edges: Edges
) -> None:
    stop = {"back_s": 1.0}
    script = scripted(
        put(1.0, "reminder"),
        Step(2.5, "stop", stop),
        Step(2.7, "deliver", {"starting": starting}),
        put(5.0, "reminder"),
        put(5.5, "soon"),
        Step(9.0, "stop", stop),
        Step(9.2, "deliver", {}),
        put(12.0, meanwhile),
        Step(16.0, "stop", stop),
        Step(16.2, "deliver", {"starting": starting}),
        put(19.0, "soon"),
        put(19.5, "reminder"),
        duration_s=90.0,
    )
    history = Delivering(script, edges)
    assert history.play().violations == []
    sent = sorted(history.oracle.sent.values(), key=lambda one: one.positions[0])
    published = {payload for payload, _ in history.oracle._published}
    kept = [one.payload in published for one in sent]
    assert kept == [starting == "earliest", True, True, meanwhile != "soon", True, True]
