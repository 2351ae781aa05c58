"""Due messages on their way to a topic: files that the last stage writes, sent in order when their batch has committed.

    <checkpoint>/ledgerlake/outbox/outbox.json    which files there are, in order, and how messages are numbered (versioned)
    <checkpoint>/ledgerlake/outbox/*.parquet      due messages of one topic partition and micro-batch; gone when sent

So the topic has a position of its own: it may be down while the table goes on, and gets everything later.

Rules kept here:
  - A message's number depends on what was due before it alone: a micro-batch that is run again gives it the same one. The
    broker drops a number that it has seen from the same producer, so sending again is harmless.
  - The file of a batch is not sent before the batch has committed.
  - Only the batch's thread writes ``outbox.json``; the sender removes files, and what has no file was sent.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.errors import refuse_newer
from ledgerlake.files import load_json, resolve, save_json

if TYPE_CHECKING:
    from ledgerlake.sinks.ordered import DataFile

VERSION = 1


@dataclass(frozen=True)
class OutboxFile:
    """Messages of one topic partition in the order in which they are due; the first has number ``first_sequence``."""

    name: str
    topic_partition: str
    batch_id: int
    first_sequence: int
    rows: int
    committed: bool = False


@dataclass(frozen=True)
class _Numbers:
    """Of a topic partition: the last batch that had messages, and the numbers before and after it."""

    batch_id: int
    first: int
    next: int


class Outbox:
    """One pipeline's outbox. ``name`` tells it apart from all others, also from one that had the same place before."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._filesystem, self._root = resolve(folder)
        self._filesystem.create_dir(self._root, recursive=True)
        data = load_json(f"{folder}/outbox.json") or {"version": VERSION, "name": secrets.token_hex(4)}
        refuse_newer(f"the outbox {folder}", data["version"], VERSION)
        self.name: str = data["name"]
        self._files = [OutboxFile(**one) for one in data.get("files", [])]
        self._numbers = {name: _Numbers(**one) for name, one in data.get("numbers", {}).items()}
        self._lock = threading.Lock()
        self._remove_left_over()

    def add(self, batch_id: int, found: dict[str, list[DataFile]]) -> None:
        """Files of a batch that is about to commit, by topic partition; those of an earlier try are replaced."""
        if not any(found.values()):
            return
        with self._lock:
            present = self._present()
            for one in self._files:
                if one.batch_id == batch_id and one.name in present:
                    self._remove(one.name)
            self._files = [one for one in self._files if one.batch_id != batch_id and one.name in present]
            for topic_partition, files in sorted(found.items()):
                self._append(batch_id, topic_partition, files)
            self._save()

    def commit(self, batch_id: int) -> None:
        """The batch is in the table: what it holds may be sent."""
        with self._lock:
            if not any(one.batch_id == batch_id for one in self._files):
                return
            self._files = [
                OutboxFile(**{**asdict(one), "committed": one.committed or one.batch_id == batch_id})
                for one in self._files
            ]
            self._save()

    def ready(self) -> list[OutboxFile]:
        """What is to be sent now, in order."""
        with self._lock:
            present = self._present()
            return [one for one in self._files if one.committed and one.name in present]

    def sent(self, one: OutboxFile) -> None:
        self._remove(one.name)

    def _append(self, batch_id: int, topic_partition: str, files: list[DataFile]) -> None:
        rows = sum(one.rows for one in files)
        if not rows:
            return
        before = self._numbers.get(topic_partition, _Numbers(-1, 0, 0))
        sequence = before.first if before.batch_id == batch_id else before.next
        self._numbers[topic_partition] = _Numbers(batch_id, sequence, sequence + rows)
        for one in files:
            self._files.append(OutboxFile(one.name, topic_partition, batch_id, sequence, one.rows))
            sequence += one.rows

    def _save(self) -> None:
        data: dict[str, Any] = {"version": VERSION, "name": self.name}
        data["files"] = [asdict(one) for one in self._files]
        data["numbers"] = {name: asdict(one) for name, one in self._numbers.items()}
        save_json(f"{self.folder}/outbox.json", data)

    def _present(self) -> set[str]:
        found = self._filesystem.get_file_info(fs.FileSelector(self._root))
        return {one.base_name for one in found}

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_file(f"{self._root}/{name}")

    def _remove_left_over(self) -> None:
        """Files of tasks whose batch never came to its end; whoever wrote them is gone."""
        known = {one.name for one in self._files}
        for name in self._present():
            if name.endswith(".parquet") and name not in known:
                self._remove(name)
