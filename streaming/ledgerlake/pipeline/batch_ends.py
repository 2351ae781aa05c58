"""The ends of micro-batches that are not acknowledged yet, in
``<checkpoint>/ledgerlake/ends.json``.

The file also has the last micro-batch seen in each table, so that a restart notices a table that is
older:

    {"version": 1, "batches": {"17": {"persistent://public/default/orders": [12, 345]}},
     "tables": {"messages": {"path": "/srv/lake/orders", "batch_id": 17}},
     "last_run": {"batch_id": 17, "wakes_batch": 15}}

``last_run`` is the last micro-batch that was run, and the micro-batch whose file of wake-up times
was in use then (see ``pipeline.wakeups``). The file is written when a micro-batch is added, and
never for an acknowledgement: a restart acknowledges once more.
"""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ledgerlake.stored.fields import exactly, stored
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.table.batch_commit import SeenBatch
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from ledgerlake.pipeline.checkpoint import Checkpoint
    from ledgerlake.stored.places import Place

_VERSION = 1

# By topic partition the last entry that is in the tables.
Ends = dict[str, Position]


@dataclass(frozen=True)
class LastRun:
    """The last micro-batch that was run, and the one whose file of wake-up times was in use
    then.
    """

    batch_id: int
    wakes_batch: int | None


@dataclass(frozen=True)
class _StoredEnds:
    """The content of ``ends.json``."""

    pending: dict[int, Ends] = field(default_factory=dict)
    tables: dict[str, SeenBatch] = field(default_factory=dict)
    last_run: LastRun | None = None


class BatchEnds:
    """The ends of a running pipeline. Micro-batches are added by one thread and acknowledged by
    another.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._pending: dict[int, Ends] = {}
        self._tables: dict[str, SeenBatch] = {}
        self._lock = threading.Lock()

    def load(self, topic_partitions: Container[str]) -> None:
        """Load what an earlier run has left, for some topic partitions.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        found = _load(self._checkpoint)
        self._tables = found.tables
        self._pending = {
            batch_id: {
                name: position for name, position in ends.items() if name in topic_partitions
            }
            for batch_id, ends in found.pending.items()
        }

    def add(self, last_run: LastRun, ends: Ends, tables: dict[str, SeenBatch]) -> None:
        """Record the ends of a micro-batch whose files are in the table, and the tables that have
        it.
        """
        with self._lock:
            self._pending[last_run.batch_id] = dict(ends)
            self._tables |= tables
            _save(self._checkpoint, _StoredEnds(self._pending, self._tables, last_run))

    def pending(self) -> list[tuple[int, Ends]]:
        """Return the micro-batches that are not acknowledged yet, in order."""
        with self._lock:
            return sorted(self._pending.items())

    def remove(self, done: Iterable[tuple[int, Ends]], left: Ends) -> None:
        """Forget micro-batches that ``pending`` returned and that are acknowledged, but for the
        ends that are ``left``.
        """
        with self._lock:
            for batch_id, ends in done:
                # A repeat of the micro-batch may have replaced it.
                if self._pending.get(batch_id) is ends:
                    del self._pending[batch_id]
            if left:
                # With the last micro-batch that is done, so that the next start knows it too.
                self._pending[max(batch_id for batch_id, _ in done)] = dict(left)


def seen_tables(checkpoint: Checkpoint) -> dict[str, SeenBatch]:
    """Return the last batch that a run saw in each table, as far as the checkpoint says.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return _load(checkpoint).tables


def save_seen_tables(checkpoint: Checkpoint, tables: dict[str, SeenBatch]) -> None:
    """Record the batches that earlier runs saw in tables; for the start.

    Raises:
        OffsetError: as ``seen_tables``.
    """
    ends = _load(checkpoint)
    if ends.tables != tables:
        _save(checkpoint, replace(ends, tables=tables))


def last_run(checkpoint: Checkpoint) -> LastRun | None:
    """Return the last micro-batch that was run; None if the checkpoint does not say it.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return _load(checkpoint).last_run


def _path(checkpoint: Checkpoint) -> Place:
    return checkpoint.folder / "ledgerlake" / "ends.json"


def _load(checkpoint: Checkpoint) -> _StoredEnds:
    return load_stored(_path(checkpoint), "cursor ends", _read, _VERSION) or _StoredEnds()


def _save(checkpoint: Checkpoint, ends: _StoredEnds) -> None:
    batches = {
        str(batch_id): {
            name: [position.ledger_id, position.entry_id] for name, position in positions.items()
        }
        for batch_id, positions in ends.pending.items()
    }
    tables = {name: asdict(seen) for name, seen in ends.tables.items()}
    assert ends.last_run is not None
    content = {
        "version": _VERSION,
        "batches": batches,
        "tables": tables,
        "last_run": asdict(ends.last_run),
    }
    save_json(_path(checkpoint), content)


def _read(data: dict[str, Any]) -> _StoredEnds:
    written, tables, last_run = exactly(data, "batches", "tables", "last_run")
    batches = stored(dict[str, dict[str, list[int]]], written)
    pending = {
        int(batch_id): {name: _position(*ids) for name, ids in ends.items()}
        for batch_id, ends in batches.items()
    }
    return _StoredEnds(pending, stored(dict[str, SeenBatch], tables), stored(LastRun, last_run))


def _position(ledger_id: int, entry_id: int) -> Position:
    return Position(ledger_id, entry_id)
