"""A pipeline's checkpoint: what Ledgerlake keeps in it beside what Spark keeps (see ``spark_log``).

    <checkpoint>/ledgerlake/start.json      where the pipeline began: an offset (see ``stored.offsets``)
    <checkpoint>/ledgerlake/stream.json     whose checkpoint it is, with a version; ``follows`` says by table which query had committed last
                                            before it began (see ``table.delta_table``), null if none had; earlier releases
                                            wrote no ``follows``
    <checkpoint>/ledgerlake/settings.json   the settings that decide which rows a micro-batch gives (see ``row_settings``)
    <checkpoint>/ledgerlake/outbox.json     the name of its outbox, with a version (see ``publish.outbox``)
    <checkpoint>/ledgerlake/forgotten_topics.json   the topic partitions that left the configuration and whose subscriptions the
                                            user has removed (see ``left_topics``), with a version
    <checkpoint>/ledgerlake/forgotten.json  the user has chosen to begin anew (``ledgerlake forget``); it goes when that
                                            has happened

Spark asks a source for its first offset again when it restarts before the first micro-batch was
committed, and ``latest`` would then mean another place. So the first start is resolved once,
written down, and handed to the source as positions.
"""

from __future__ import annotations

import contextlib
import json
import uuid
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
_OUTBOX_VERSION = 1
_FORGOTTEN_TOPICS_VERSION = 1


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint in ``folder``, which need not be there yet."""

    folder: Place

    @property
    def log(self) -> SparkLog:
        """What Spark keeps in it."""
        return SparkLog(self.folder)

    def start(self) -> Offset | None:
        """Return the recorded start, or None if the pipeline never ran.

        Raises:
            OffsetError: it was written by a newer release or is damaged.
        """
        found = load_file(self.folder, "ledgerlake/start.json")
        return None if found is None else from_json(found)

    def save_start(self, start: Offset) -> None:
        """Record the start; with it a new pipeline has begun.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("start"), to_json(start))
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def check_writable(self) -> None:
        """Try to write into the folder, and leave nothing.

        Raises:
            SetupError: the folder cannot be written.
        """
        folder = self.folder / "ledgerlake"
        filesystem, probe = folder.filesystem(), f"{folder.root}/probe-{uuid.uuid4().hex}"
        try:
            folder.make()
            with filesystem.open_output_stream(probe):
                pass
            filesystem.delete_file(probe)
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def check_stream(self, stream: str) -> None:
        """Check whose checkpoint it is.

        Raises:
            CheckpointError: it belongs to a stream of another name.
            OffsetError: a newer release wrote it.
        """
        found = self._stream()
        if found is not None and found["stream"] != stream:
            raise CheckpointError(
                f"the checkpoint {self.folder} belongs to the stream {found['stream']}, and the configuration names "
                f"{stream}; set [stream] name back to {found['stream']}, or choose another checkpoint folder"
            )

    def save_stream(self, stream: str, follows: dict[str, int | None] | None = None) -> None:
        """Record whose checkpoint it is, and at its beginning whom it follows in the tables."""
        if follows is not None:
            save_json(self._own("stream"), {"version": _STREAM_VERSION, "stream": stream, "follows": follows})
        elif self._stream() is None:
            save_json(self._own("stream"), {"version": _STREAM_VERSION, "stream": stream})

    def follows(self) -> dict[str, int | None] | None:
        """Return by table the number of the query that had committed last when this checkpoint
        began; None if an earlier release began it.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        found = self._stream()
        try:
            follows: dict[str, int | None] | None = stored(dict[str, int | None] | None, (found or {}).get("follows"))
        except ValueError:
            raise damaged(self.folder, "ledgerlake/stream.json") from None
        return follows

    def _stream(self) -> dict[str, Any] | None:
        found = load_file(self.folder, "ledgerlake/stream.json")
        if found is None:
            return None
        if not isinstance(found, dict) or not isinstance(found.get("version"), int) or "stream" not in found:
            raise damaged(self.folder, "ledgerlake/stream.json")
        refuse_newer("the checkpoint", found["version"], _STREAM_VERSION, "stream record of version")
        return found

    def outbox(self) -> str | None:
        """Return the name of the outbox that belongs to it; None if none was begun since there is
        such a record.

        Raises:
            OffsetError: a newer release wrote it, or it is damaged.
        """
        try:
            return load_stored(self._own("outbox"), "outbox's name", _outbox_name, _OUTBOX_VERSION)
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def save_outbox(self, name: str) -> None:
        """Record the name of its outbox, once that is there.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("outbox"), {"version": _OUTBOX_VERSION, "name": name})
        except OSError as error:
            raise not_writable(self.folder, error) from None

    def settings(self) -> RowSettings | None:
        """Return the settings under which the last run began; None if none were noted.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        try:
            return load_stored(self._own("settings"), "row settings", read_settings, SETTINGS_VERSION)
        except OSError as error:
            raise not_readable(self.folder, error) from None

    def save_settings(self, settings: RowSettings) -> None:
        """Note the settings under which micro-batches are run from here on.

        Raises:
            SetupError: the folder cannot be written.
        """
        if self.settings() == settings:
            return
        try:
            save_json(self._own("settings"), {"version": SETTINGS_VERSION, "settings": settings})
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
        """Return whether the user has chosen to begin anew, and nothing has begun since."""
        return load_file(self.folder, "ledgerlake/forgotten.json") is not None

    def check_gone(self) -> None:
        """Check that nothing is left of a checkpoint that would go on where it was.

        Raises:
            CheckpointError: there is a start.
        """
        if self.start() is not None:
            raise CheckpointError(
                f"the checkpoint {self.folder} is still there, and would go on without what the topic removes when its "
                "subscription goes; remove the checkpoint first, and with it the messages that wait in it"
            )

    def forget(self) -> None:
        """Record that the user has chosen to begin anew; it counts until a new query has begun."""
        save_json(self._own("forgotten"), {"version": 1})

    def end_forgetting(self) -> None:
        """A query has begun, with an id of its own, which the tables do not know; if it cannot be
        recorded, the next start does it.
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


def _forgotten_topics(data: dict[str, Any], _version: int) -> set[str]:
    return set(stored(list[str], data["topics"]))


def as_option(start: Offset) -> str:
    """Return a start as the source's ``startingOffsets``."""
    return json.dumps(to_json(start))
