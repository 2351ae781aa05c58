"""A pipeline's checkpoint: what Spark keeps in it, and what Ledgerlake keeps beside that.

    <checkpoint>/metadata               Spark's id of the query
    <checkpoint>/offsets/<batch>        where a planned micro-batch ends; its last line is the source's offset
    <checkpoint>/commits/<batch>        written when the micro-batch is done: it is never run again. Its first line, v1 or v2, is
                                        the version of the state's files
    <checkpoint>/ledgerlake/start.json      where the pipeline began: an offset (see ``stored.offsets``)
    <checkpoint>/ledgerlake/stream.json     whose checkpoint it is, with a version; ``follows`` says by table which query had committed last
                                            before it began (see ``table.delta_table``), null if none had; earlier releases
                                            wrote no ``follows``
    <checkpoint>/ledgerlake/settings.json   the settings that decide which rows a micro-batch gives (see ``row_settings``)
    <checkpoint>/ledgerlake/outbox.json     the name of its outbox, with a version (see ``publish.outbox``)
    <checkpoint>/ledgerlake/forgotten.json  the user has chosen to begin anew (``ledgerlake forget``); it goes when that
                                            has happened

Spark asks a source for its first offset again when it restarts before the first micro-batch was
committed, and ``latest`` would then mean another place. So the first start is resolved once,
written down, and handed to the source as positions.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from dataclasses import dataclass
from typing import Any

from pyarrow import fs

from ledgerlake.errors import CheckpointError, SetupError, refuse_newer
from ledgerlake.pipeline.row_settings import VERSION as SETTINGS_VERSION
from ledgerlake.pipeline.row_settings import RowSettings, read_settings
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_json, load_stored, resolve, save_json
from ledgerlake.stored.offsets import Offset, from_json, to_json
from ledgerlake.table.batch_record import BatchRecord

_STREAM_VERSION = 1
_OUTBOX_VERSION = 1

# In version 2 each run of a micro-batch writes state files of its own, and the commit names those
# that count. So a process that was suspended in the middle of a batch cannot overwrite the state of
# its successor.
STATE_VERSION = 2


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint in ``folder``, which need not be there yet."""

    folder: str

    def start(self) -> Offset | None:
        """Return the recorded start, or None if the pipeline never ran.

        Raises:
            OffsetError: it was written by a newer release or is damaged.
        """
        found = self._load("ledgerlake/start.json")
        return None if found is None else from_json(found)

    def save_start(self, start: Offset) -> None:
        """Record the start; with it a new pipeline has begun.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("start"), to_json(start))
        except OSError as error:
            raise self._not_writable(error) from None

    def check_writable(self) -> None:
        """Try to write into the folder, and leave nothing.

        Raises:
            SetupError: the folder cannot be written.
        """
        filesystem, root = resolve(f"{self.folder}/ledgerlake")
        probe = f"{root}/probe-{uuid.uuid4().hex}"
        try:
            filesystem.create_dir(root, recursive=True)
            with filesystem.open_output_stream(probe):
                pass
            filesystem.delete_file(probe)
        except OSError as error:
            raise self._not_writable(error) from None

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
            raise self._damaged("ledgerlake/stream.json") from None
        return follows

    def _stream(self) -> dict[str, Any] | None:
        found = self._load("ledgerlake/stream.json")
        if found is None:
            return None
        if not isinstance(found, dict) or not isinstance(found.get("version"), int) or "stream" not in found:
            raise self._damaged("ledgerlake/stream.json")
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
            raise self._not_readable(error) from None

    def save_outbox(self, name: str) -> None:
        """Record the name of its outbox, once that is there.

        Raises:
            SetupError: the folder cannot be written.
        """
        try:
            save_json(self._own("outbox"), {"version": _OUTBOX_VERSION, "name": name})
        except OSError as error:
            raise self._not_writable(error) from None

    def settings(self) -> RowSettings | None:
        """Return the settings under which the last run began; None if none were noted.

        Raises:
            OffsetError: a newer release wrote them, or they are damaged.
        """
        try:
            return load_stored(self._own("settings"), "row settings", read_settings, SETTINGS_VERSION)
        except OSError as error:
            raise self._not_readable(error) from None

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
            raise self._not_writable(error) from None

    @property
    def is_forgotten(self) -> bool:
        """Return whether the user has chosen to begin anew, and nothing has begun since."""
        return self._load("ledgerlake/forgotten.json") is not None

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
            filesystem, name = resolve(self._own("forgotten"))
            with contextlib.suppress(OSError):
                filesystem.delete_file(name)

    def query_id(self) -> str | None:
        """Return Spark's id of the query, or None before its first start."""
        found = self._load("metadata")
        if found is None:
            return None
        if not isinstance(found, dict) or "id" not in found:
            raise self._damaged("metadata")
        return str(found["id"])

    def last_planned(self) -> int | None:
        """Return the number of the newest micro-batch that was planned."""
        return max(self._numbers("offsets"), default=None)

    def keeps(self, batch_id: int) -> bool:
        """Return whether Spark's log still reaches back to where a micro-batch began, so that
        ``record`` can describe it.
        """
        return max(batch_id - 1, 0) >= min(self._numbers("offsets"), default=0)

    def last_committed(self) -> int | None:
        """Return the number of the newest micro-batch that is done."""
        return max(self._numbers("commits"), default=None)

    def has_committed(self, batch_id: int) -> bool:
        """Return whether no run of a micro-batch can be asked for again."""
        last = self.last_committed()
        return last is not None and last >= batch_id

    def state_version(self) -> int:
        """Return the version in which the query keeps the files of its state; Spark cannot change
        it.

        Raises:
            CheckpointError: the newest commit does not tell it.
        """
        last = self.last_committed()
        if last is None:
            return STATE_VERSION
        name = f"commits/{last}"
        try:
            return {"v1": 1, "v2": 2}[self._lines(name)[0]]
        except (OSError, IndexError, KeyError, UnicodeDecodeError):
            raise self._damaged(name) from None

    def offset(self, batch_id: int) -> Offset:
        """Return where a planned micro-batch ends.

        Raises:
            CheckpointError: there is no such micro-batch.
            OffsetError: a newer release wrote it, or Ledgerlake did not write it.
        """
        return from_json(self._offset_json(batch_id))

    def committed_offset(self) -> Offset | None:
        """Return where the last committed micro-batch ended; None before the first.

        Raises:
            As ``offset``.
        """
        last = self.last_committed()
        return None if last is None else self.offset(last)

    def record(self, stream: str, query: str, batch_id: int) -> BatchRecord:
        """Describe a planned micro-batch for the table.

        Raises:
            As ``offset``.
        """
        before, after = self._before(batch_id), self._offset_json(batch_id)
        digest = hashlib.sha256(json.dumps([before, after], sort_keys=True).encode()).digest()
        return BatchRecord(stream, query, batch_id, int.from_bytes(digest[:8], "big") >> 1, _ranges(before, after))

    def _before(self, batch_id: int) -> Any:
        """The source's offset before a micro-batch, as JSON."""
        if batch_id > 0:
            return self._offset_json(batch_id - 1)
        return self._load("ledgerlake/start.json") or to_json({})

    def _offset_json(self, batch_id: int) -> Any:
        try:
            found = json.loads(self._offset_text(batch_id))
        except ValueError:
            raise self._damaged(f"offsets/{batch_id}") from None
        from_json(found)
        return found

    def _offset_text(self, batch_id: int) -> str:
        try:
            # Spark writes a version, its own metadata, and then what the source said.
            return self._lines(f"offsets/{batch_id}")[-1]
        except (OSError, IndexError, UnicodeDecodeError):
            raise CheckpointError(
                f"the checkpoint {self.folder} lacks the offsets of batch {batch_id}; restore it from a complete copy"
            ) from None

    def _lines(self, name: str) -> list[str]:
        filesystem, root = resolve(self.folder)
        with filesystem.open_input_stream(f"{root}/{name}") as stream:
            return bytes(stream.read()).decode().splitlines()

    def _numbers(self, log: str) -> list[int]:
        filesystem, root = resolve(self.folder)
        found = filesystem.get_file_info(fs.FileSelector(f"{root}/{log}", allow_not_found=True))
        return [int(file.base_name) for file in found if file.base_name.isdigit()]

    def _load(self, name: str) -> Any:
        """A JSON file of the checkpoint, None if it is missing."""
        try:
            return load_json(f"{self.folder}/{name}")
        except ValueError:
            raise self._damaged(name) from None
        except OSError as error:
            raise self._not_readable(error) from None

    def _damaged(self, name: str) -> CheckpointError:
        return CheckpointError(f"the file {name} of the checkpoint {self.folder} is damaged; restore it from a copy")

    def _own(self, name: str) -> str:
        return f"{self.folder}/ledgerlake/{name}.json"

    def _not_readable(self, error: OSError) -> SetupError:
        return SetupError(
            f"the checkpoint folder {self.folder} cannot be read ({error.strerror or error}); choose another path"
        )

    def _not_writable(self, error: OSError) -> SetupError:
        return SetupError(
            f"the checkpoint folder {self.folder} cannot be written ({error.strerror or error}); choose another path"
        )


def _outbox_name(data: dict[str, Any], _version: int) -> str:
    name: str = stored(str, data["name"])
    return name


def as_option(start: Offset) -> str:
    """Return a start as the source's ``startingOffsets``."""
    return json.dumps(to_json(start))


def _ranges(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """The topic partitions that a micro-batch reads, with both ends as the checkpoint has them."""
    starts, ends = before["positions"], after["positions"]
    return {
        name: {"start": starts.get(name), "end": end} for name, end in sorted(ends.items()) if starts.get(name) != end
    }
