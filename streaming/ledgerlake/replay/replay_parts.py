"""Commits the parts of a replay, each to all of its tables or to none.

The files of a part are written first, then a record of it is put beside the checkpoint, then the
tables are committed, and ``rejects`` last. Each commit carries the number of the part, which is
random:

    ledgerlake.replay:<stream>    the last part that is in the table

So a part that was interrupted is finished by the next replay from its record, and nothing comes
twice. A part is given up if another replay has committed since it was begun, because that may have
added the same rows. The record tells by table the path, the number that it had before, and the
files:

    {"version": 1, "number": 4711, "topics": ["persistent://..."],
     "tables": {"messages": {"path": "lake/orders", "before": null, "files": [{"name": "part-...",
     ...}]}, "rejects": {...}}}
"""

from __future__ import annotations

import contextlib
import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.errors import CheckpointError, TableAccessError, TableError
from ledgerlake.options.config import REJECTS_TABLE
from ledgerlake.stored.fields import fields_of, reader_of
from ledgerlake.stored.files import load_stored
from ledgerlake.table.ordered_files import DataFile

if TYPE_CHECKING:
    from ledgerlake.pipeline.tables import Tables
    from ledgerlake.stored.places import Place

_VERSION = 1
_NUMBER = "ledgerlake.replay:"


@dataclass(frozen=True)
class ReplayTable:
    """What a part adds to a table: ``before`` is the number that the table had."""

    path: str
    before: int | None
    files: list[DataFile]


@dataclass(frozen=True)
class ReplayPart:
    """The record of a part whose files are written."""

    number: int
    topics: list[str]
    tables: dict[str, ReplayTable]


class Parts:
    """The parts of a stream's replays.

    Args:
        folder: where the record is.
    """

    def __init__(self, folder: Place, tables: Tables, stream: str) -> None:
        self._folder, self._record = folder, folder / "replay.json"
        self._tables = tables
        self._stream = stream
        self._name = _NUMBER + stream
        self._before: dict[str, int | None] = {}

    def unfinished(self) -> ReplayPart | None:
        """Return the part that a replay has recorded and not finished."""
        return load_stored(self._record, "record of a replay", _read_part, _VERSION)

    def begin(self) -> None:
        """Begin a part. What the tables have by now is to be looked at after this.

        Raises:
            TableError: a table cannot be read.
        """
        there = {
            name: table for name, table in self._tables.by_name.items() if self._tables.exists(name)
        }
        self._before = {name: table.number(self._name) for name, table in there.items()}

    def add(self, topics: list[str], files: dict[str, list[DataFile]]) -> None:
        """Record the part that was begun and commit it.

        Args:
            files: by the table's name, also for ``rejects``.

        Raises:
            CheckpointError: another part is recorded.
            TableError: a commit did not land.
        """
        by_name = self._tables.by_name
        tables = {
            name: ReplayTable(str(by_name[name].path), self._before[name], of_table)
            for name, of_table in files.items()
            if of_table
        }
        part = ReplayPart(secrets.randbits(62), topics, tables)
        content = json.dumps({"version": _VERSION, **fields_of(part)}, default=fields_of).encode()
        self._folder.make()
        if not self._record.create_file(content):
            raise CheckpointError(
                f"another replay of the stream {self._stream} is at work, or was interrupted; end "
                "it, and replay again"
            )
        self.commit(part)

    def commit(self, part: ReplayPart) -> None:
        """Commit a part, whatever an earlier attempt has committed of it.

        Raises:
            CheckpointError: the part was written for other tables.
            TableError: a commit did not land.
        """
        by_name = self._tables.by_name
        for name, of_table in part.tables.items():
            if name not in by_name or str(by_name[name].path) != of_table.path:
                raise CheckpointError(
                    f"an interrupted replay has messages for the table at {of_table.path}, which "
                    "the configuration does not name any more; put it back, and replay again, or "
                    f"remove {self._record} to leave them as rejects"
                )
        if self._may_land(part):
            for name, of_table in sorted(
                part.tables.items(), key=lambda item: item[0] == REJECTS_TABLE
            ):
                by_name[name].append_once(self._name, part.number, of_table.before, of_table.files)
        self._delete_record(part)

    def _may_land(self, part: ReplayPart) -> bool:
        """Return whether a part can be committed, or finished. If not, nothing of it is in a table,
        so its rejects are still to be replayed.

        Raises:
            TableError: another replay has committed, or files are missing of a part that is in a
                table already.
        """
        numbers = {name: self._tables.by_name[name].number(self._name) for name in part.tables}
        landed = [name for name, number in numbers.items() if number == part.number]
        if not landed and any(
            numbers[name] != of_table.before for name, of_table in part.tables.items()
        ):
            self._delete_record(part)
            raise TableAccessError(
                f"another replay of the stream {self._stream} has committed meanwhile; replay again"
            )
        return self._is_whole(part, landed)

    def _is_whole(self, part: ReplayPart, landed: list[str]) -> bool:
        """Return whether the files of a part are there.

        Raises:
            TableError: some are not, and the part is in a table already.
        """
        missing = [
            file
            for name, of_table in part.tables.items()
            if name not in landed
            for file in self._tables.by_name[name].missing(of_table.files)
        ]
        if missing and landed:
            raise TableError(
                f"an interrupted replay cannot be finished, because {missing[0]} is gone, and the "
                f"table at {part.tables[landed[0]].path} has "
                f"its part already; remove {self._record}, and replay again"
            )
        return not missing

    def _delete_record(self, part: ReplayPart) -> None:
        recorded = self.unfinished()
        # Another replay may have finished the part, and recorded one of its own.
        if recorded is not None and recorded.number == part.number:
            with contextlib.suppress(FileNotFoundError):
                self._record.filesystem().delete_file(self._record.root)


_read_part = reader_of(ReplayPart)
