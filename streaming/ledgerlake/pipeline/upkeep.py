"""Upkeep of a pipeline's tables: small files are merged (see ``table.compaction``), and files that no
table has used for long are removed (see ``table.vacuum``).

While a pipeline runs, a thread of the driver does it, and rests so long after each merge that it
takes no more than its share of a core. It never ends the pipeline: a failure is logged, and the
next round tries again. It commits to the tables' logs as any other writer does, so several
processes may do it at once.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.decode import schema
from ledgerlake.errors import LedgerlakeError
from ledgerlake.runtime.memory import give_back
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.vacuum import vacuum

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.config import Config

_log = logging.getLogger(__name__)

# A vacuum lists the whole folder of a table.
_FIRST_VACUUM_S = 60 * 60.0
_VACUUM_INTERVAL_S = 24 * 60 * 60.0

# How long to wait at the end for a merge.
_STOP_S = 10.0


@dataclass(frozen=True)
class Kept:
    """What upkeep did to a table: how many files it merged, and how many unused ones it removed.

    ``obstacles`` has the features of the table for which no file was merged.
    """

    table: str
    merged: int
    removed: int
    obstacles: list[str]


def keep_up(config: Config) -> list[Kept]:
    """Merge all small files of a configuration's tables, and remove unused ones.

    Raises:
        TableError: a table cannot be read or written.
    """
    compactions = _compactions(config)
    merged = [compaction.run() for compaction in compactions]
    removed = vacuum(config, config.upkeep.retention_hours)
    return [
        Kept(table.table, count, len(table.files), compaction.obstacles)
        for compaction, count, table in zip(compactions, merged, removed, strict=True)
    ]


class Upkeep:
    """The thread of a running pipeline."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._began_cpu_s = 0.0
        self._failures: dict[str, str] = {}

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="ledgerlake-upkeep", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the merge that is in work; it is given up if it takes long."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        compactions = _compactions(self._config, self._rest)
        vacuum_at_s = time.monotonic() + _FIRST_VACUUM_S
        while not self._stopping.wait(self._config.upkeep.interval_ms / 1000):
            for compaction in compactions:
                self._began_cpu_s = time.thread_time()
                self._attempt(str(compaction.path), compaction.run)
                self._report_obstacles(compaction)
            if time.monotonic() >= vacuum_at_s:
                vacuum_at_s = time.monotonic() + _VACUUM_INTERVAL_S
                self._attempt("unused files", lambda: vacuum(self._config, self._config.upkeep.retention_hours))

    def _rest(self) -> bool:
        """Rest after a merge; return whether to end."""
        give_back()
        taken_s = time.thread_time() - self._began_cpu_s
        is_stopped = self._stopping.wait(taken_s * (100 / self._config.upkeep.cpu_percent - 1))
        self._began_cpu_s = time.thread_time()
        return is_stopped

    def _report_obstacles(self, compaction: Compaction) -> None:
        reason = ", ".join(compaction.obstacles)
        if reason and self._failures.get("obstacles") != reason:
            _log.warning(
                "small files of the table at %s are not merged, because it has %s; run Delta's OPTIMIZE",
                compaction.path,
                reason,
            )
        self._failures["obstacles"] = reason

    def _attempt(self, what: str, work: Callable[[], object]) -> None:
        """Do a part of the upkeep, and log a failure unless the last attempt failed alike."""
        try:
            work()
        # A failure in a library's native part may be no Exception.
        except BaseException as error:
            reason = error.message if isinstance(error, LedgerlakeError) else repr(error)
            if self._failures.get(what) != reason:
                _log.warning("upkeep failed, and will be tried again: %s", reason)
            self._failures[what] = reason
        else:
            self._failures.pop(what, None)


def _compactions(config: Config, pause: Callable[[], bool] = lambda: False) -> list[Compaction]:
    return [
        Compaction(config.messages_place, None if config.delta.shape == "record" else schema.MESSAGES, pause),
        Compaction(config.rejects_place, schema.REJECTS, pause),
    ]
