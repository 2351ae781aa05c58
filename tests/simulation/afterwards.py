"""What ``ledgerlake verify`` and ``ledgerlake replay`` say and do when a history is over, judged by
what stands in the tables and on the topics.

verify    says that nothing is wrong, and counts the rows and rejects that are there
damage    if a file of a table is gone, or is there twice, verify counts its rows as missing, or as
          duplicate; a key of a lost row is missing or undecided
replay    with all keys there, and time for all chunks, each encrypted message that is in rejects gets
          a row, once, and so does each large one whose chunks came too late, if the topic has them;
          a second replay does nothing
"""

from __future__ import annotations

import contextlib
import io
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ledgerlake.errors import LedgerlakeError
from ledgerlake.replay.replay import replay
from ledgerlake.verify.verify import verify
from ledgerlake.wire.message_id import Position
from tests.simulation.driver import COPY, LATEST, MESSAGES, REJECTS, ROUTED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.verify.verify import Verdict
    from tests.simulation.history import History
    from tests.simulation.lake import StoredTable
    from tests.simulation.oracle import Sent

Result = TypeVar("Result")

_PATIENCE_S = 200.0

# Topic partition, ledger, entry and batch index; the occurrence if the message repeats.
_Place = tuple[str, int, int, int, int]


class Afterwards:
    """The commands at the end of a history."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._oracle, self._lake = history.oracle, history.lake
        self._rng = random.Random(history.script.seed)

    def check(self) -> None:
        self._check_verdict("verify")
        self._check_loss()
        self._check_repeat()
        self._check_loss_of_latest()
        features = self._history.script.features
        if features.changes_keys or features.has_lost_chunks:
            self._check_replay()

    def _check_verdict(self, when: str) -> None:
        verdict = self._run(when, lambda: verify(self._history.settings))
        if verdict is None:
            return
        places = [place for path in self._tables() for place in self._places(path)]
        rows, last_gone = len(places), [place for place in places if not self._has(place, -1)]
        # A large message whose last chunk is there counts once.
        partly = {place for place in places if not self._is_stored(place)} - set(last_gone)
        gone = len(last_gone) + len(partly)
        # Whether an occurrence will come, or all of them were paused, is not known to it.
        waiting = sum(
            one.repeats
            and not (one.delivered or one.is_rejected)
            and self._is_kept(one.topic, one.positions[-1])
            for one in self._oracle.sent.values()
        )
        self._compare(when, verdict, not_due=waiting, left_out=0, incomplete_chunks=0)
        if self._knows_the_latest():
            self._compare(when, verdict, clean=True)
        if not self._history.was_restored:
            latest = self._latest_rows()
            self._compare(when, verdict, messages=rows + latest, rejects=self._rejects())
            if not self._oracle.is_replayed and not latest:
                # A replay may leave chunks over, so its large messages cannot be told; and whether
                # a row of the latest messages can be compared depends on its key.
                self._compare(when, verdict, not_checked=gone)

    def _check_loss(self) -> None:
        """A file of a table with all messages is gone."""
        path = COPY if self._history.script.features.has_tables else MESSAGES
        commit, name = self._some_file(path)
        if not name:
            return
        lost = {
            place
            for place in self._places_in(f"{path}/{name}")
            if self._is_stored(place) and not self._is_accounted(place)
        }
        with self._changed(path, commit, lambda files: tuple(one for one in files if one != name)):
            verdict = self._run("verify of a loss", lambda: verify(self._history.settings))
        if verdict is None or self._history.was_restored:
            return
        self._compare("verify of a loss", verdict, duplicate=0)
        waiting = sum(map(self._may_seem_to_wait, lost))
        if not len(lost) - waiting <= verdict.missing <= len(lost):
            self._compare("verify of a loss", verdict, missing=len(lost))

    def _check_loss_of_latest(self) -> None:
        """A file of the table with the latest messages is gone, and so are the keys in it."""
        stored = self._lake.tables.get(LATEST)
        newest = -1 if stored is None else len(stored.commits) - 1
        if stored is None or not stored.files(newest) or not self._knows_the_latest():
            return
        name = self._rng.choice(sorted(stored.files(newest)))
        gone = stored.deleted(newest).get(name, ())
        lost = [
            place
            for number, place in enumerate(self._places_in(f"{LATEST}/{name}"))
            if number not in gone and self._is_stored(place)
        ]
        before = stored.commits[-1]
        stored.commits[-1] = replace(
            before,
            files=tuple(one for one in before.files if one != name),
            removed=before.removed | {name},
        )
        verdict = self._run("verify of lost keys", lambda: verify(self._history.settings))
        stored.commits[-1] = before
        if verdict is not None and verdict.missing + verdict.undecided < len(lost):
            self._oracle.complain(
                f"verify of lost keys: {verdict.missing} are missing and {verdict.undecided} "
                f"undecided of {len(lost)}"
            )

    def _knows_the_latest(self) -> bool:
        """Return whether the configuration of today says which messages were delayed: the latest
        message of a key depends on it.
        """
        features = self._history.script.features
        return not (features.has_latest and features.turns_off)

    def _check_repeat(self) -> None:
        """A file of a table is there twice."""
        path = self._rng.choice(self._tables())
        commit, name = self._some_file(path)
        if not name:
            return
        copy = f"{name.removesuffix('.parquet')}-again.parquet"
        self._history.disk.files[f"{path}/{copy}"] = self._history.disk.files[f"{path}/{name}"]
        with self._changed(path, commit, lambda files: (*files, copy)):
            verdict = self._run("verify of a repeat", lambda: verify(self._history.settings))
        if verdict is not None and not self._history.was_restored:
            count = len(self._places_in(f"{path}/{name}"))
            self._compare("verify of a repeat", verdict, missing=0, duplicate=count)

    def _check_replay(self) -> None:
        """The keys are there, chunks may take their time, and what lacked that gets its rows."""
        history = self._history
        history.edges.has_keys = self._oracle.is_replayed = True
        settings = history.configured({"chunks": {"expire_after": "1 day"}})
        before = self._rejects()
        owed = {
            one.payload
            for one in self._oracle.sent.values()
            if one.is_encrypted and one.is_rejected and not one.delivered
        }
        if history.script.features.keeps_ledgers:
            owed |= {
                one.payload
                for one in self._oracle.sent.values()
                if one.may_expire and one.rejected >= set(one.positions) and not one.is_excused
            }
        result = self._run("replay", lambda: replay(settings))
        left = [payload for payload in owed if not self._oracle.sent[payload].delivered]
        if left:
            self._oracle.complain(
                f"replay: {len(left)} of {len(owed)} messages got no row: {left[0]!r}: {result}"
            )
        self._check_verdict("verify after a replay")
        again = self._run("replay again", lambda: replay(settings))
        if again is not None and again.replayed:
            self._oracle.complain(f"replay again: {again} after {result}, {before} rejects")

    def _run(self, name: str, work: Callable[[], Result]) -> Result | None:
        """Run a command as a process of its own; a failure is a violation."""
        found: list[Result] = []
        world = self._history.world

        def run() -> None:
            try:
                found.append(work())
            except LedgerlakeError as error:
                self._oracle.complain(f"{name}: {type(error).__name__}: {error}")

        world.say(name)
        thread = world.spawn(world.process(name), name, run)
        world.pause(world.now_s + _PATIENCE_S, lambda: thread.done)
        if not found and not self._oracle.violations:
            self._oracle.complain(f"{name}: {thread.error!r}" if thread.done else f"{name}: no end")
        return found[0] if found else None

    def _compare(self, when: str, verdict: Verdict, **expected: Any) -> None:
        for name, value in expected.items():
            found = getattr(verdict, name)
            if found != value:
                self._oracle.complain(
                    f"{when}: {name} is {found}, not {value}: {verdict.sentence()}"
                )

    # The tables

    def _tables(self) -> list[str]:
        paths = [*ROUTED, COPY] if self._history.script.features.has_tables else [MESSAGES]
        return [path for path in paths if path in self._lake.tables]

    def _latest_rows(self) -> int:
        stored = self._lake.tables.get(LATEST)
        if stored is None:
            return 0
        newest = len(stored.commits) - 1
        rows = sum(len(self._places_in(f"{LATEST}/{name}")) for name in stored.files(newest))
        return rows - sum(map(len, stored.deleted(newest).values()))

    def _some_file(self, path: str) -> tuple[int, str]:
        """Return the number of a commit and the name of one of its files; 0 and an empty name if the
        table has no files.
        """
        stored = self._lake.tables.get(path)
        found = [
            (number, name)
            for number, commit in enumerate(stored.commits if stored else ())
            for name in commit.files
        ]
        return self._rng.choice(found) if found else (0, "")

    @contextlib.contextmanager
    def _changed(
        self, path: str, number: int, change: Callable[[tuple[str, ...]], tuple[str, ...]]
    ) -> Iterator[None]:
        """Change the files of a commit for a while."""
        commits = self._lake.tables[path].commits
        before = commits[number]
        commits[number] = replace(before, files=change(before.files))
        try:
            yield
        finally:
            commits[number] = before

    def _places(self, path: str) -> list[_Place]:
        return [
            place
            for commit in self._lake.tables[path].commits
            for name in commit.files
            for place in self._places_in(f"{path}/{name}")
        ]

    def _places_in(self, path: str) -> list[_Place]:
        rows = self._read(
            path, ["topic", "partition", "ledger_id", "entry_id", "batch_index", "properties"]
        )
        return [
            (
                row["topic"]
                if row["partition"] < 0
                else f"{row['topic']}-partition-{row['partition']}",
                row["ledger_id"],
                row["entry_id"],
                -1 if row["batch_index"] is None else row["batch_index"],
                int(dict(row["properties"] or ()).get("ledgerlake.occurrence", 0)),
            )
            for row in rows.to_pylist()
        ]

    def _read(self, path: str, columns: list[str]) -> pa.Table:
        data = self._history.disk.files[path]
        return pq.ParquetFile(io.BytesIO(data)).read(columns, use_threads=False)

    def _rejects(self) -> int:
        """How many rejects there are that were not replayed."""
        stored: StoredTable | None = self._lake.tables.get(REJECTS)
        reasons = [
            reason
            for commit in (stored.commits if stored else ())
            for name in commit.files
            for reason in self._read(f"{REJECTS}/{name}", ["reason"])["reason"].to_pylist()
        ]
        return len(reasons) - 2 * reasons.count("replayed")

    def _is_kept(self, topic: str, position: Position) -> bool:
        ledgers = self._history.brokers.topics[topic].ledgers
        return any(ledger.ledger_id == position.ledger_id for ledger in ledgers)

    def _is_stored(self, place: _Place) -> bool:
        """Whether the topic has all entries of a message."""
        return all(
            self._has(place, number) for number in range(len(self._message(place).positions))
        )

    def _is_accounted(self, place: _Place) -> bool:
        """Whether a message is not missed: one occurrence stands for all, and a reject beside the
        row for the message.
        """
        message = self._message(place)
        return message.repeats or message.is_rejected

    def _may_seem_to_wait(self, place: _Place) -> bool:
        """Whether a message may have come before it was due."""
        return self._oracle.may_come_at_once and self._message(place).deliver_ms > 0

    def _has(self, place: _Place, number: int) -> bool:
        """Whether the topic has an entry of a message."""
        return self._is_kept(place[0], self._message(place).positions[number])

    def _message(self, place: _Place) -> Sent:
        topic, ledger_id, entry_id, *_ = place
        return next(
            one
            for one in self._oracle.sent.values()
            if one.topic == topic and one.positions[-1] == Position(ledger_id, entry_id)
        )
