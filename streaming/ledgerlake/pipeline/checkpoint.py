"""A pipeline's checkpoint: Ledgerlake's own files in it; for Spark's files see ``spark_log``.

    <checkpoint>/ledgerlake/start.json      the start of the pipeline: an offset (see ``stored.offsets``)
    <checkpoint>/ledgerlake/stream.json     the stream of the checkpoint, with a version; ``follows`` names by table the query that was the last
                                            to commit before the checkpoint began (see ``table.delta_table``), null if there was
                                            none; earlier releases wrote no ``follows``
    <checkpoint>/ledgerlake/settings.json   the settings that decide which rows a micro-batch gives (see ``row_settings``)
    <checkpoint>/ledgerlake/tables.json     by name the absolute places of the tables that its micro-batches are written to, with a
                                            version; written before the first micro-batch of a run that may write there
    <checkpoint>/ledgerlake/outbox.json     the name of its outbox, with a version (see ``publish.outbox``)
    <checkpoint>/ledgerlake/forgotten_topics.json   the topic partitions that left the configuration and whose subscriptions the
                                            user has removed (see ``left_topics``), with a version
    <checkpoint>/ledgerlake/forgotten.json  the user has chosen to start from the beginning (``ledgerlake forget``); removed when
                                            that has happened

If Spark restarts before the first micro-batch was committed, it asks the source for its first
offset again, and ``latest`` would then be another position. So the first start is resolved once,
recorded, and handed to the source as positions.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

from ledgerlake.errors import CheckpointError, refuse_newer
from ledgerlake.pipeline.row_settings import VERSION as SETTINGS_VERSION
from ledgerlake.pipeline.row_settings import RowSettings, read_settings
from ledgerlake.pipeline.spark_log import SparkLog, damaged, load_file, not_readable, not_writable
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.stored.offsets import Offset, from_json, to_json
from ledgerlake.stored.places import Place

_STREAM_VERSION = 1
_TABLES_VERSION = 1
_OUTBOX_VERSION = 1
_FORGOTTEN_TOPICS_VERSION = 1


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

    def save_start(self, start: Offset) -> None:
        """Record the start of a new pipeline.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("start"), to_json(start))
        except OSError as error:
            raise not_writable(self.folder, error) from None

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
        if record is not None and record["stream"] != stream:
            raise CheckpointError(
                f"the checkpoint {self.folder} belongs to the stream {record['stream']}, and the configuration names "
                f"{stream}; set [stream] name back to {record['stream']}, or give the new stream a checkpoint folder and "
                "tables of its own"
            )

    def save_stream(self, stream: str, previous_writers: dict[str, int | None] | None = None) -> None:
        """Record the stream of the checkpoint and, when it begins, the previous writers of the
        tables.
        """
        if previous_writers is not None:
            save_json(self._own("stream"), {"version": _STREAM_VERSION, "stream": stream, "follows": previous_writers})
        elif self._stream() is None:
            save_json(self._own("stream"), {"version": _STREAM_VERSION, "stream": stream})

    def previous_writers(self) -> dict[str, int | None] | None:
        """Return by table the number of the query that was the last to commit before this
        checkpoint began; None if an earlier release began it.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        record = self._stream() or {}
        try:
            writers: dict[str, int | None] | None = stored(dict[str, int | None] | None, record.get("follows"))
        except ValueError:
            raise damaged(self.folder, "ledgerlake/stream.json") from None
        return writers

    def _stream(self) -> dict[str, Any] | None:
        record = load_file(self.folder, "ledgerlake/stream.json")
        if record is None:
            return None
        if not isinstance(record, dict) or not isinstance(record.get("version"), int) or "stream" not in record:
            raise damaged(self.folder, "ledgerlake/stream.json")
        refuse_newer("the checkpoint", record["version"], _STREAM_VERSION, "stream record of version")
        return record

    def outbox(self) -> str | None:
        """Return the name of its outbox; None if none is recorded.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        try:
            return load_stored(self._own("outbox"), "outbox's name", _outbox_name, _OUTBOX_VERSION)
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def save_outbox(self, name: str) -> None:
        """Record the name of its outbox, which must exist.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("outbox"), {"version": _OUTBOX_VERSION, "name": name})
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def settings(self) -> RowSettings | None:
        """Return the settings under which the last run began; None if none are recorded.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        try:
            return load_stored(self._own("settings"), "row settings", read_settings, SETTINGS_VERSION)
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def save_settings(self, settings: RowSettings) -> None:
        """Record the settings of the micro-batches from here on.

        Raises:
            SetupError: the folder cannot be written.
        """
        if self.settings() == settings:
            return
        try:
            save_json(self._own("settings"), {"version": SETTINGS_VERSION, "settings": settings})
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def tables(self) -> dict[str, str]:
        """Return by name the places of the tables that the last run wrote to.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        try:
            return load_stored(self._own("tables"), "tables", _tables, _TABLES_VERSION) or {}
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def save_tables(self, tables: dict[str, str]) -> None:
        """Record the tables of the micro-batches from here on.

        Raises:
            SetupError: the folder cannot be written.
        """
        if self.tables() == tables:
            return
        try:
            save_json(self._own("tables"), {"version": _TABLES_VERSION, "tables": tables})
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def forgotten_topics(self) -> set[str]:
        """Return the topic partitions whose subscriptions the user has removed.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        try:
            found = load_stored(
                self._own("forgotten_topics"), "forgotten topics", _forgotten_topics, _FORGOTTEN_TOPICS_VERSION
            )
        except OSError as error:
            raise not_readable(self.folder, error) from None
        return found or set()

    def save_forgotten_topics(self, names: set[str]) -> None:
        """Record the topic partitions whose subscriptions the user has removed.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("forgotten_topics"), {"version": _FORGOTTEN_TOPICS_VERSION, "topics": sorted(names)})
        except OSError as error:
            raise not_writable(self.folder, error) from None

    @property
    def is_forgotten(self) -> bool:
        """Return whether the user has chosen to start from the beginning, and no query has begun
        since.
        """
        return load_file(self.folder, "ledgerlake/forgotten.json") is not None

    def check_gone(self) -> None:
        """Check that there is no checkpoint from which a pipeline would continue.

        Raises:
            CheckpointError: there is one.
        """
        if self.start() is not None:
            raise CheckpointError(
                f"the checkpoint {self.folder} is still there, and would go on without what the topic removes when its "
                "subscription goes; remove the checkpoint first, and with it the messages that wait in it"
            )

    def forget(self) -> None:
        """Record that the user has chosen to start from the beginning; valid until a new query has
        begun.
        """
        save_json(self._own("forgotten"), {"version": 1})

    def end_forgetting(self) -> None:
        """Record that a new query has begun, with an id that the tables do not know. If that fails,
        the next start does it.
        """
        if self.is_forgotten:
            file = self._own("forgotten")
            with contextlib.suppress(OSError):
                file.filesystem().delete_file(file.root)

    def _own(self, name: str) -> Place:
        return self.folder / "ledgerlake" / f"{name}.json"


def _outbox_name(data: dict[str, Any], _version: int) -> str:
    name: str = stored(str, data["name"])
    return name


def _tables(data: dict[str, Any], _version: int) -> dict[str, str]:
    tables: dict[str, str] = stored(dict[str, str], data["tables"])
    return tables


def _forgotten_topics(data: dict[str, Any], _version: int) -> set[str]:
    return set(stored(list[str], data["topics"]))


def as_option(start: Offset) -> str:
    """Return a start as the source's ``startingOffsets``."""
    return json.dumps(to_json(start))
