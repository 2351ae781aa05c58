"""A pipeline's checkpoint: Ledgerlake's own files in it; for Spark's files see ``spark_log``.

    <checkpoint>/ledgerlake/start.json      the start of the pipeline: an offset (see
                                            ``stored.offsets``)
    <checkpoint>/ledgerlake/first_ends.json  the ends of the topic partitions before a first start
                                             at ``latest`` made cursors,
                                            with a version; removed when the start is recorded
    <checkpoint>/ledgerlake/stream.json     the stream of the checkpoint, with a version, and the
                                            number of the checkpoint, which each commit to a table
                                            has (see ``table.delta_table``)
    <checkpoint>/ledgerlake/settings.json   the settings that decide which rows a micro-batch gives
                                            (see ``row_settings``)
    <checkpoint>/ledgerlake/selected.json   what decides which tables have to have a message, and up
                                            to where it was otherwise (see ``row_settings``);
                                            written when the tables have the first micro-batch of a
                                            run
    <checkpoint>/ledgerlake/tables.json     by name the absolute places of the tables that its
                                            micro-batches are written to, with a version; written
                                            before the first micro-batch of a run that may write
                                            there
    <checkpoint>/ledgerlake/outbox.json     the name of its outbox, with a version (see
                                            ``publish.outbox``)
    <checkpoint>/ledgerlake/forgotten_topics.json   the topic partitions that left the configuration
                                                    and whose subscriptions the
                                            user has removed (see ``left_topics``), with a version
    <checkpoint>/ledgerlake/forgotten.json  the user has chosen to start from the beginning
                                            (``ledgerlake forget``); removed when that has happened

If Spark restarts before the first micro-batch was committed, it asks the source for its first
offset again, and ``latest`` would then be another position. So the first start is resolved once,
recorded, and handed to the source as positions. The record of the stream, and then that of the
start, is created and never replaced: a process that was suspended takes its successor's.

A checkpoint that began later has a greater number than an earlier one of its stream. So any table,
also one that comes years later, tells whether a later checkpoint has written to it. The number is
the time in microseconds, or one more than the greatest number in the tables that exist, if that is
later: only tables that did not exist at the start need a right clock.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ledgerlake.errors import CheckpointError, SetupError
from ledgerlake.pipeline.row_settings import VERSION as SETTINGS_VERSION
from ledgerlake.pipeline.row_settings import RowSettings, Selected, read_selected, read_settings
from ledgerlake.pipeline.spark_log import SparkLog, damaged, load_file, not_readable, not_writable
from ledgerlake.stored.fields import exactly, reader_of, stored
from ledgerlake.stored.files import create_json, load_stored, save_json
from ledgerlake.stored.offsets import Offset, from_json, to_json
from ledgerlake.stored.places import Place
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_FIRST_ENDS_VERSION = 1
_STREAM_VERSION = 1
_TABLES_VERSION = 1
_OUTBOX_VERSION = 1
_FORGOTTEN_TOPICS_VERSION = 1
_FORGOTTEN_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint in ``folder``, which need not be there yet."""

    folder: Place

    @property
    def log(self) -> SparkLog:
        """Return Spark's files in it."""
        return SparkLog(self.folder)

    def start(self) -> Offset | None:
        """Return the recorded start, or None if the pipeline never ran.

        Raises:
            OffsetError: it was written by a newer release or is damaged.
        """
        start = load_file(self.folder, "ledgerlake/start.json")
        return None if start is None else from_json(start)

    def existing_start(self) -> Offset:
        """Return the recorded start, for a command that tells what the pipeline has done: of a
        checkpoint that is not there, nothing is known.

        Raises:
            SetupError: the pipeline never ran.
            OffsetError: as ``start``.
        """
        start = self.start()
        if start is None:
            raise SetupError(f"there is no checkpoint at {self.folder}; run the pipeline first")
        return start

    def committed_range(self) -> tuple[Offset, Offset]:
        """Return the query's first offset and that of its last committed micro-batch.

        Raises:
            As ``existing_start`` and ``SparkLog.offset``.
        """
        start = self.existing_start()
        return start, self.log.committed_offset() or start

    def save_start(self, start: Offset) -> Offset:
        """Record the start of a new pipeline, unless another process has; return the record.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._create("start", to_json(start))
        self.remove_first_ends()
        return self.existing_start()

    def first_ends(self) -> dict[str, Position]:
        """Return the ends that a first start at the latest message has recorded and not finished.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        return (
            self._load("first_ends", "ends of a first start", _first_ends, _FIRST_ENDS_VERSION)
            or {}
        )

    def save_first_ends(self, ends: dict[str, Position]) -> None:
        """Record the ends of the topic partitions before a first start at the latest message makes
        cursors.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._save(
            "first_ends",
            {
                "version": _FIRST_ENDS_VERSION,
                "ends": {name: asdict(position) for name, position in ends.items()},
            },
        )

    def remove_first_ends(self) -> None:
        self._remove("first_ends")

    def check_writable(self) -> None:
        """Check that files can be written into the folder; the file of the check is removed.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            (self.folder / "ledgerlake").check_writable()
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def check_stream(self, stream: str) -> None:
        """Check that it is the checkpoint of a stream.

        Raises:
            CheckpointError: it belongs to a stream of another name.
            OffsetError: a newer release wrote it.
        """
        record = self._stream()
        if record is not None and record.stream != stream:
            raise CheckpointError(
                f"the checkpoint {self.folder} belongs to the stream {record.stream}, and the "
                f"configuration names {stream}; set [stream] name back to {record.stream}, or give "
                "the new stream a checkpoint folder and tables of its own"
            )

    def save_stream(self, stream: str, number: int) -> int:
        """Record the stream of a checkpoint that begins, and the number of the checkpoint, unless
        another process has; return the number in the record.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._create("stream", {"version": _STREAM_VERSION, **asdict(_Stream(stream, number))})
        return self.number()

    def number(self) -> int:
        """Return the number of the checkpoint, which has begun.

        Raises:
            CheckpointError: the record of the stream is missing or damaged.
            OffsetError: a newer release wrote it.
        """
        record = self._stream()
        if record is None:
            raise damaged(self.folder, "ledgerlake/stream.json")
        return record.number

    def _stream(self) -> _Stream | None:
        return self._load("stream", "record of the stream", _stream, _STREAM_VERSION)

    def outbox(self) -> str | None:
        """Return the name of its outbox; None if none is recorded.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        return self._load("outbox", "outbox's name", _outbox_name, _OUTBOX_VERSION)

    def save_outbox(self, name: str) -> None:
        """Record the name of its outbox, which must exist.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._save("outbox", {"version": _OUTBOX_VERSION, "name": name})

    def settings(self) -> RowSettings | None:
        """Return the settings under which the last run began; None if none are recorded.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        return self._load("settings", "row settings", read_settings, SETTINGS_VERSION)

    def save_settings(self, settings: RowSettings) -> None:
        """Record the settings of the micro-batches from here on.

        Raises:
            SetupError: the folder cannot be written.
        """
        if self.settings() == settings:
            return
        self._save("settings", {"version": SETTINGS_VERSION, "settings": settings})

    def selected(self) -> Selected | None:
        """Return what decided under the last run which tables have to have a message; None if it is
        not recorded.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        return self._load("selected", "selection of tables", read_selected, SETTINGS_VERSION)

    def save_selected(self, selected: Selected) -> None:
        """Record what decides from here on which tables have to have a message.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._save("selected", selected.to_json())

    def tables(self) -> dict[str, str]:
        """Return by name the places of the tables that the last run wrote to.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        return self._load("tables", "tables", _tables, _TABLES_VERSION) or {}

    def save_tables(self, tables: dict[str, str]) -> None:
        """Record the tables of the micro-batches from here on.

        Raises:
            SetupError: the folder cannot be written.
        """
        if self.tables() == tables:
            return
        self._save("tables", {"version": _TABLES_VERSION, "tables": tables})

    def forgotten_topics(self) -> set[str]:
        """Return the topic partitions whose subscriptions the user has removed.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        found = self._load(
            "forgotten_topics", "forgotten topics", _forgotten_topics, _FORGOTTEN_TOPICS_VERSION
        )
        return found or set()

    def save_forgotten_topics(self, names: set[str]) -> None:
        """Record the topic partitions whose subscriptions the user has removed.

        Raises:
            SetupError: the folder cannot be written.
        """
        self._save(
            "forgotten_topics", {"version": _FORGOTTEN_TOPICS_VERSION, "topics": sorted(names)}
        )

    @property
    def is_forgotten(self) -> bool:
        """Return whether the user has chosen to start from the beginning, and no query has begun
        since.
        """
        return (
            self._load(
                "forgotten", "record of a stream that was forgotten", _forgotten, _FORGOTTEN_VERSION
            )
            is not None
        )

    def check_gone(self) -> None:
        """Check that there is no checkpoint from which a pipeline would continue.

        Raises:
            CheckpointError: there is one.
        """
        if self.start() is not None:
            raise CheckpointError(
                f"the checkpoint {self.folder} is still there, and would go on without what the "
                "topic removes when its subscription goes; remove the checkpoint first, and with "
                "it its delayed and its incomplete large messages"
            )

    def forget(self) -> None:
        """Record that the user has chosen to start from the beginning; valid until a new query has
        begun.
        """
        save_json(self._own("forgotten"), {"version": _FORGOTTEN_VERSION})

    def end_forgetting(self) -> None:
        """Record that a new query has begun, with an id that the tables do not know. If that fails,
        the next start does it.
        """
        if self.is_forgotten:
            self._remove("forgotten")

    def _remove(self, name: str) -> None:
        file = self._own(name)
        with contextlib.suppress(OSError):
            file.filesystem().delete_file(file.root)

    def _save(self, name: str, content: dict[str, Any]) -> None:
        try:
            save_json(self._own(name), content)
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def _create(self, name: str, content: dict[str, Any]) -> None:
        try:
            create_json(self._own(name), content)
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def _load(
        self, name: str, written: str, read: Callable[[dict[str, Any]], T], version: int
    ) -> T | None:
        try:
            return load_stored(self._own(name), written, read, version)
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def _own(self, name: str) -> Place:
        return self.folder / "ledgerlake" / f"{name}.json"


@dataclass(frozen=True)
class _Stream:
    stream: str
    number: int


_stream = reader_of(_Stream)


def _first_ends(data: dict[str, Any]) -> dict[str, Position]:
    (found,) = exactly(data, "ends")
    ends: dict[str, Position] = stored(dict[str, Position], found)
    return ends


def _outbox_name(data: dict[str, Any]) -> str:
    (found,) = exactly(data, "name")
    name: str = stored(str, found)
    return name


def _tables(data: dict[str, Any]) -> dict[str, str]:
    (found,) = exactly(data, "tables")
    tables: dict[str, str] = stored(dict[str, str], found)
    return tables


def _forgotten_topics(data: dict[str, Any]) -> set[str]:
    (topics,) = exactly(data, "topics")
    return set(stored(list[str], topics))


def _forgotten(data: dict[str, Any]) -> bool:
    exactly(data)
    return True


def as_option(start: Offset) -> str:
    """Return a start as the source's ``startingOffsets``."""
    return json.dumps(to_json(start))
