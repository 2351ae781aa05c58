"""Upkeep of a pipeline's tables: small files are merged (see ``table.compaction``), and files that
no table has used for long are removed (see ``pipeline.unused_files``).

While a pipeline runs, a thread of the driver does it, and rests after each piece of work, so that
it is at work for its share of the time at most. It never ends the pipeline: a failure is logged,
and tried again after a while that gets longer, while the other tables keep their turns. It commits
to the tables' logs as any other writer does, so several processes may do it at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.pipeline.attempts import Attempts
from ledgerlake.pipeline.known_tables import known_tables
from ledgerlake.pipeline.unused_files import UnusedFiles
from ledgerlake.runtime.memory import trim_heap
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.open_table import size_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.config import Config
    from ledgerlake.stored.places import Place
    from ledgerlake.table.open_table import TableSize

_log = logging.getLogger(__name__)

# A vacuum lists the whole folder of a table.
_FIRST_VACUUM_S = 10 * 60.0
_VACUUM_INTERVAL_S = 24 * 60 * 60.0

_LONGEST_PAUSE_S = 60 * 60.0


@dataclass(frozen=True)
class Kept:
    """What upkeep did to a table: how many files it merged, and how many unused ones it removed.

    ``obstacles`` says why no file was merged.
    """

    table: str
    merged: int
    obstacles: list[str]
    removed: int


@dataclass(frozen=True)
class TableUpkeep:
    """What the thread has done to a table since its start, and the table's size when it was last
    looked at.
    """

    table: str
    path: str
    size: TableSize | None = None
    merged_files: int = 0
    removed_files: int = 0
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class UpkeepReport:
    """What the thread has done since its start. ``last_round_ms`` is when it last went through all
    tables without a failure.
    """

    tables: list[TableUpkeep] = field(default_factory=list)
    failed_attempts: int = 0
    last_round_ms: int | None = None


@dataclass(frozen=True)
class _Pause:
    """For how many rounds a part that failed is left out, and how many of them are still to
    come.
    """

    rounds: int
    rounds_left: int


def keep_up(config: Config) -> list[Kept]:
    """Merge all small files of a configuration's tables, and remove unused ones.

    Raises:
        SetupError: there are Iceberg tables, and ``pyiceberg`` is missing.
        TableError: a table cannot be read or written.
    """
    unused_files = UnusedFiles(config)
    compactions = _Compactions(config)
    compactions.find()
    merged = {
        str(compaction.path): (compaction.run(), compaction.obstacles)
        for compaction in compactions.by_name.values()
    }
    # A table with the latest messages has none.
    return [
        Kept(table.table, *merged.get(table.table, (0, [])), removed=len(table.files))
        for table in map(unused_files.remove, compactions.places)
    ]


class Upkeep:
    """The thread of a running pipeline."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._unused_files = UnusedFiles(config, is_stopped=self._stopping.is_set)
        self._thread: threading.Thread | None = None
        self._began_s = 0.0
        self._attempts = Attempts("upkeep")
        self._obstacles: dict[str, list[str]] = {}
        self._tables: dict[str, TableUpkeep] = {}
        # By part of a round.
        self._pauses: dict[str, _Pause] = {}
        # By path of a table; the others have their first one at once.
        self._vacuum_at_s: dict[str, float] = {}
        self._first_vacuum_s = 0.0
        self._known: set[str] = set()
        self._last_round_ms: int | None = None

    @property
    def report(self) -> UpkeepReport:
        """Return what the thread has done."""
        return UpkeepReport(
            list(self._tables.values()), self._attempts.failed_attempts, self._last_round_ms
        )

    def start(self) -> None:
        """Start the thread. Python waits for it at its end: a library's native code must not run on
        then.
        """
        self._thread = threading.Thread(target=self._run, name="ledgerlake-upkeep")
        self._thread.start()

    def end(self) -> None:
        """Begin nothing any more, and give up the merge in work."""
        self._stopping.set()

    def wait(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        compactions = _Compactions(self._config, self._rest, self._stopping.is_set)
        self._first_vacuum_s = time.monotonic() + _FIRST_VACUUM_S
        while not self._stopping.wait(self._config.upkeep.interval_ms / 1000):
            self._attempt("tables", compactions.find)
            self._forget_others(compactions.places)
            for name, compaction in compactions.by_name.items():
                self._began_s = time.monotonic()
                self._attempt(str(compaction.path), partial(self._merge, name, compaction))
                self._report_obstacles(compaction)
                self._rest()
            for name, place in compactions.latest.items():
                self._began_s = time.monotonic()
                self._attempt(str(place), partial(self._measure, name, place))
                self._rest()
            self._remove_unused(compactions.places)
            if not self._attempts.has_failed:
                self._last_round_ms = int(time.time() * 1000)

    def _attempt(self, part: str, work: Callable[[], object]) -> bool:
        """Do a part of a round, unless it has failed and has to pause, so that no other part waits
        for it; return whether it succeeded. Its pause doubles with each failure.
        """
        pause = self._pauses.get(part)
        if pause is not None and pause.rounds_left:
            self._pauses[part] = replace(pause, rounds_left=pause.rounds_left - 1)
            return False
        if self._attempts.attempt(part, work):
            self._pauses.pop(part, None)
            return True
        most = int(_LONGEST_PAUSE_S * 1000 / self._config.upkeep.interval_ms)
        rounds = 0 if pause is None else min(2 * pause.rounds + 1, most)
        self._pauses[part] = _Pause(rounds, rounds)
        return False

    def _forget_others(self, places: list[Place]) -> None:
        """Forget all other tables: they were removed."""
        paths = {str(place) for place in places}
        for path in self._known - paths:
            for part in (path, _unused(path)):
                self._attempts.forget(part)
                self._pauses.pop(part, None)
            self._obstacles.pop(path, None)
            self._vacuum_at_s.pop(path, None)
        self._tables = {name: table for name, table in self._tables.items() if table.path in paths}
        self._known = paths

    def _merge(self, name: str, compaction: Compaction) -> None:
        before = self._tables.get(name) or TableUpkeep(name, str(compaction.path))
        merged_files = before.merged_files + compaction.run()
        self._tables[name] = replace(
            before,
            size=compaction.size,
            merged_files=merged_files,
            obstacles=tuple(compaction.obstacles),
        )

    def _measure(self, name: str, place: Place) -> None:
        before = self._tables.get(name) or TableUpkeep(name, str(place))
        self._tables[name] = replace(before, size=size_of(place))

    def _remove_unused(self, places: list[Place]) -> None:
        """Remove the unused files of the tables whose time for that has come."""
        for place in places:
            path = str(place)
            is_due = time.monotonic() >= self._vacuum_at_s.get(path, self._first_vacuum_s)
            if is_due and self._attempt(_unused(path), partial(self._vacuum, place)):
                self._vacuum_at_s[path] = time.monotonic() + _VACUUM_INTERVAL_S

    def _vacuum(self, place: Place) -> None:
        removed = self._unused_files.remove(place)
        for name, table in self._tables.items():
            if table.path == removed.table:
                self._tables[name] = replace(
                    table, removed_files=table.removed_files + len(removed.files)
                )

    def _rest(self) -> None:
        """Rest after a piece of work."""
        trim_heap()
        taken_s = time.monotonic() - self._began_s
        self._stopping.wait(taken_s * (100 / self._config.upkeep.busy_percent - 1))
        self._began_s = time.monotonic()

    def _report_obstacles(self, compaction: Compaction) -> None:
        path, obstacles = str(compaction.path), compaction.obstacles
        if obstacles and self._obstacles.get(path) != obstacles:
            _log.warning(
                "small files of the table at %s are not merged, because it has %s; run Delta's "
                "OPTIMIZE",
                path,
                ", ".join(obstacles),
            )
        self._obstacles[path] = obstacles


def _unused(path: str) -> str:
    return f"unused files of {path}"


class _Compactions:
    """The compactions of a configuration's tables by name; there may be more later. ``latest`` has
    the places of the tables that need no compaction, ``places`` the places of all tables.
    """

    def __init__(
        self,
        config: Config,
        rest: Callable[[], object] = lambda: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._config = config
        self._rest = rest
        self._is_stopped = is_stopped
        self.by_name: dict[str, Compaction] = {}
        self.latest: dict[str, Place] = {}
        self.places: list[Place] = []

    def find(self) -> None:
        """Find the tables that there are now.

        Raises:
            OffsetError, TableError: they cannot be found.
        """
        tables = known_tables(self._config)
        self.places = [table.place for table in tables]
        names = {table.name for table in tables}
        self.by_name = {name: known for name, known in self.by_name.items() if name in names}
        self.latest = {name: place for name, place in self.latest.items() if name in names}
        for table in tables:
            if table.keeps_latest:
                self.latest[table.name] = table.place
            elif table.name not in self.by_name:
                self.by_name[table.name] = Compaction(
                    table.place, table.schema, self._rest, self._is_stopped
                )
