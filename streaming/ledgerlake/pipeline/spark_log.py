"""Reads Spark's own files in a checkpoint.

    <checkpoint>/metadata               Spark's id of the query
    <checkpoint>/offsets/<batch>        where a planned micro-batch ends; its last line is the
                                        source's offset
    <checkpoint>/commits/<batch>        written when the micro-batch is done: it is never run again.
                                        Its first line, v1 or v2, is the version of the state's
                                        files

Spark keeps about a hundred of each, and numbers them from 0.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

from pyarrow import fs

from ledgerlake.errors import CheckpointError, SetupError
from ledgerlake.source.planning import ranges
from ledgerlake.stored.files import load_json
from ledgerlake.stored.offsets import Offset, from_json, to_json
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit

# In version 2 each run of a micro-batch writes state files of its own, and the commit names those
# that count. So a process that was suspended in the middle of a batch cannot overwrite the state of
# its successor.
STATE_VERSION = 2


class _Planned(NamedTuple):
    """An offset of the source, as JSON and parsed."""

    json: Any
    offset: Offset


@dataclass(frozen=True)
class SparkLog:
    """Spark's files in the checkpoint ``folder``, which need not be there yet."""

    folder: Place

    def query_id(self) -> str | None:
        """Return Spark's id of the query, or None before its first start."""
        metadata = load_file(self.folder, "metadata")
        if metadata is None:
            return None
        if not isinstance(metadata, dict) or "id" not in metadata:
            raise damaged(self.folder, "metadata")
        return str(metadata["id"])

    def last_planned(self) -> int | None:
        """Return the number of the newest micro-batch that was planned."""
        return max(self._numbers("offsets"), default=None)

    def keeps(self, batch_id: int) -> bool:
        """Return whether Spark's log still has the start of a micro-batch, so that ``record`` can
        describe it.
        """
        return max(batch_id - 1, 0) >= min(self._numbers("offsets"), default=0)

    def last_committed(self) -> int | None:
        """Return the number of the newest micro-batch that is done."""
        return max(self._numbers("commits"), default=None)

    def has_committed(self, batch_id: int) -> bool:
        """Return whether a micro-batch is committed, so that Spark does not run it again."""
        last = self.last_committed()
        return last is not None and last >= batch_id

    def state_version(self) -> int:
        """Return the version of the query's state files; Spark cannot change it.

        Raises:
            CheckpointError: the newest commit does not name it.
        """
        last = self.last_committed()
        if last is None:
            return STATE_VERSION
        name = f"commits/{last}"
        try:
            return {"v1": 1, "v2": 2}[self._lines(name)[0]]
        except (OSError, IndexError, KeyError, UnicodeDecodeError):
            raise damaged(self.folder, name) from None

    def offset(self, batch_id: int) -> Offset:
        """Return the end of a planned micro-batch.

        Raises:
            CheckpointError: there is no such micro-batch.
            OffsetError: a newer release wrote it, or Ledgerlake did not write it.
        """
        return self._planned(batch_id).offset

    def committed_offset(self) -> Offset | None:
        """Return the end of the last committed micro-batch; None before the first.

        Raises:
            As ``offset``.
        """
        last = self.last_committed()
        return None if last is None else self.offset(last)

    def record(self, stream: str, query: str, batch_id: int, checkpoint: int) -> BatchCommit:
        """Describe a planned micro-batch for the table.

        Args:
            checkpoint: the number of the checkpoint.

        Raises:
            As ``offset``.
        """
        before, after = self._before(batch_id), self._planned(batch_id)
        digest = hashlib.sha256(
            json.dumps([before.json, after.json], sort_keys=True).encode()
        ).digest()
        number = int.from_bytes(digest[:8], "big") >> 1
        reporting = frozenset(span.topic_partition for span in ranges(before.offset, after.offset))
        spans = _ranges(before.json, after.json)
        return BatchCommit(stream, query, batch_id, number, spans, reporting, checkpoint=checkpoint)

    def _before(self, batch_id: int) -> _Planned:
        """Return the source's offset before a micro-batch."""
        if batch_id > 0:
            return self._planned(batch_id - 1)
        data = load_file(self.folder, "ledgerlake/start.json") or to_json({})
        return _Planned(data, from_json(data))

    def _planned(self, batch_id: int) -> _Planned:
        try:
            data = json.loads(self._offset_text(batch_id))
        except ValueError:
            raise damaged(self.folder, f"offsets/{batch_id}") from None
        return _Planned(data, from_json(data))

    def _offset_text(self, batch_id: int) -> str:
        try:
            # Spark writes a version, its own metadata, and then the offset of the source.
            return self._lines(f"offsets/{batch_id}")[-1]
        except (OSError, IndexError, UnicodeDecodeError):
            raise CheckpointError(
                f"the checkpoint {self.folder} lacks the offsets of batch {batch_id}; restore it "
                "from a complete copy"
            ) from None

    def _lines(self, name: str) -> list[str]:
        file = self.folder / name
        with file.filesystem().open_input_stream(file.root) as stream:
            return bytes(stream.read()).decode().splitlines()

    def _numbers(self, log: str) -> list[int]:
        folder = self.folder / log
        try:
            files = folder.filesystem().get_file_info(
                fs.FileSelector(folder.root, allow_not_found=True)
            )
            if not files:
                folder.check_bucket()
        except OSError as error:
            raise not_readable(self.folder, error) from None
        return [int(file.base_name) for file in files if file.base_name.isdigit()]


def load_file(folder: Place, name: str) -> Any:
    """Return the content of a JSON file of a checkpoint; None if it is missing.

    Raises:
        CheckpointError: it is damaged.
        SetupError: it cannot be read.
    """
    try:
        return load_json(folder / name)
    except ValueError:
        raise damaged(folder, name) from None
    except OSError as error:
        raise not_readable(folder, error) from None


def damaged(folder: Place, name: str) -> CheckpointError:
    """Return the error for a damaged file of a checkpoint."""
    return CheckpointError(
        f"the file {name} of the checkpoint {folder} is damaged; restore it from a copy"
    )


def not_readable(folder: Place, error: OSError) -> SetupError:
    """Return the error for a checkpoint that cannot be read."""
    return SetupError(f"the checkpoint folder {folder} cannot be read ({folder.refusal(error)})")


def not_writable(folder: Place, error: OSError) -> SetupError:
    """Return the error for a checkpoint that cannot be written."""
    return SetupError(f"the checkpoint folder {folder} cannot be written ({folder.refusal(error)})")


def _ranges(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the ranges of a micro-batch by topic partition, as the checkpoint has them."""
    starts, ends = before["positions"], after["positions"]
    return {
        name: {"start": starts.get(name), "end": end}
        for name, end in sorted(ends.items())
        if starts.get(name) != end
    }
