"""Due messages on their way to a topic: files that the last stage writes, sent in order when their
batch has committed.

    <checkpoint>/ledgerlake/outbox/outbox.json         the outbox's name, with a version
    <checkpoint>/ledgerlake/outbox/<batch>.json        files of a micro-batch, and how its messages are numbered
    <checkpoint>/ledgerlake/outbox/<batch>.<n>.begun   its sending may have begun, by the target's n partitions
    <checkpoint>/ledgerlake/outbox/<batch>.sent        all messages of that micro-batch, and of those before it, are on the topic
    <checkpoint>/ledgerlake/outbox/*.parquet           due messages of one topic partition and micro-batch; gone when sent

So the topic has a position of its own: it may be down while the table goes on, and gets everything
later.

Rules kept here:
  - Nothing is touched before ``begin``, which only the owner of the stream may call.
  - A message's number depends on what was due before it alone: a micro-batch that is run again
    gives it the same one. The broker drops a number that it has seen from the same producer, so
    sending again is harmless.
  - The first record of a micro-batch stands. A later run of the same micro-batch keeps it and
    removes its own files, so that a process that was suspended cannot replace what its successor
    has recorded or sent.
  - A micro-batch is not sent before the table has it, nor before those with lower numbers. It
    counts as sent only if that was recorded: a file that is missing without that is an error.
  - Before the first message of a micro-batch is sent, the target's number of partitions is
    recorded, and where they end; sent again, it is routed by that number, and looked for behind
    those ends. A topic only grows and a successor asks later, so of several records the one with
    the most partitions is the successor's: a process that was suspended may write one late, and
    changes nothing.
  - The newest ``.sent`` is kept, and what it covers stays sent: a record that a process which was
    suspended writes after its successor has sent and removed that micro-batch means nothing, and is
    removed.
  - An outbox that the checkpoint knows is never begun anew: due messages may wait in the one that
    is gone.

Version 1 kept everything in ``outbox.json``, and took a missing file for sent.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.errors import CheckpointError, SetupError
from ledgerlake.stored.fields import stored
from ledgerlake.stored.files import load_stored, save_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from ledgerlake.stored.places import Place
    from ledgerlake.table.batch_record import BatchRecord
    from ledgerlake.table.ordered_files import DataFile

VERSION = 2
BEGUN_VERSION = 1


@dataclass(frozen=True)
class OutboxFile:
    """Messages of one topic partition in the order in which they are due; the first has number
    ``first_sequence``.
    """

    name: str
    topic_partition: str
    first_sequence: int
    rows: int


@dataclass(frozen=True)
class OutboxBatch:
    """The messages of a micro-batch for the topic.

    ``next_sequences`` are the numbers that come next, of every topic partition that ever had a
    message.
    """

    batch_id: int
    range_digest: int
    files: list[OutboxFile]
    next_sequences: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Sending:
    """The target as the sending of a micro-batch began: messages are routed among its first
    ``partitions``.

    ``ends`` are the last entries of those before it, by name, as far as they were known.
    """

    partitions: int
    ends: dict[str, Position] = field(default_factory=dict)


class Outbox:
    """The outbox of a pipeline. ``name`` tells it apart from all others, also from one that had the
    same place before.
    """

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.name = ""
        self._batches: dict[int, OutboxBatch] = {}
        self._sent = -1
        self._committed = -1
        self._lock = threading.Lock()

    def begin(self, committed: int | None, name: str | None) -> None:
        """Open the outbox, and remove files that no micro-batch needs any more.

        Args:
            committed: the last micro-batch that the table holds.
            name: the outbox's, as far as the checkpoint knows it.

        Raises:
            CheckpointError: it is not the one that the checkpoint knows.
            OffsetError: a newer release wrote it, or it is damaged.
            SetupError: it cannot be read or written.
        """
        self._committed = -1 if committed is None else committed
        try:
            self._open(name)
        except OSError as error:
            raise SetupError(
                f"the outbox {self.folder} cannot be opened ({error.strerror or error}); look at its disk and its rights"
            ) from None

    def _open(self, name: str | None) -> None:
        self._filesystem, self._root = self.folder.filesystem(), self.folder.root
        found = load_stored(self.folder / "outbox.json", "outbox", _outbox, VERSION)
        if name is not None and (found is None or found.name != name):
            raise CheckpointError(
                f"the outbox {self.folder} is {'gone' if found is None else 'another one'}, and messages may wait in the one "
                f"that this checkpoint had; restore it from the newest copy of the checkpoint, or remove {self.folder}.json "
                "to go on without them: the table has them",
                lost="unknown",
            )
        self.folder.make()
        self.name = found.name if found is not None else secrets.token_hex(4)
        if isinstance(found, _Version1):
            self._take_version_1(found)
        save_json(self.folder / "outbox.json", {"version": VERSION, "name": self.name})
        self._load()
        self._remove_unknown()

    @property
    def last_sent(self) -> int:
        """The last micro-batch whose messages are on the topic, as far as is known here; -1 before
        the first.
        """
        return self._sent

    @property
    def messages(self) -> int:
        """Return how many messages the outbox has held, sent ones too."""
        return sum(self._latest().next_sequences.values()) if self._batches else 0

    def messages_up_to(self, batch_id: int) -> int:
        """Return how many messages it had held up to a micro-batch."""
        numbers = [number for number in self._batches if number <= batch_id]
        return sum(self._batches[max(numbers)].next_sequences.values()) if numbers else 0

    def add(self, batch: BatchRecord, found: dict[str, list[DataFile]]) -> None:
        """Record files of a micro-batch that is about to commit, by topic partition."""
        files = [file for _, group in sorted(found.items()) for file in group if file.rows]
        if not files:
            return
        with self._lock:
            if batch.batch_id <= _newest_sent(self._names()):
                self._remove([file.name for file in files])
                return
            self._load_before(batch.batch_id)
            stored = self._stored(batch.batch_id)
            if stored is not None and stored.range_digest == batch.range_digest and self._is_whole(stored):
                self._batches[batch.batch_id] = stored
                known = {file.name for file in stored.files}
                self._remove([file.name for file in files if file.name not in known])
                return
            made = self._numbered(batch, found)
            save_json(self._path(batch.batch_id), {"version": VERSION, **asdict(made)})
            self._batches[batch.batch_id] = made
            if stored is not None:
                self._remove([file.name for file in stored.files])

    def commit(self, batch_id: int) -> None:
        """The micro-batch is in the table: what it holds may be sent."""
        self._committed = max(self._committed, batch_id)

    def ready(self) -> list[OutboxBatch]:
        """Return what is to be sent now, in order; what another process has sent meanwhile is done."""
        with self._lock:
            if any(self._sent < number <= self._committed for number in self._batches):
                self._sent = max(self._sent, _newest_sent(self._names()))
            return [self._batches[number] for number in sorted(self._batches) if self._sent < number <= self._committed]

    def begin_sending(self, batch: OutboxBatch, now: Sending) -> tuple[Sending, bool]:
        """Record how a micro-batch is sent, before its first message is.

        Args:
            now: how it is sent if it has not begun; asked of the broker before this call.

        Returns:
            What was recorded when its sending first began, and whether that was before this call:
                some of it may be sent.

        Raises:
            OffsetError: a newer release recorded it, or the record is damaged.
        """
        with self._lock:
            if (found := self._begun(batch.batch_id)) is not None:
                return found, True
            path = self.folder / f"{_number(batch.batch_id)}.{now.partitions}.begun"
            save_json(path, {"version": BEGUN_VERSION, **asdict(now)})
            kept = self._begun(batch.batch_id) or now
            return kept, kept != now

    def sent(self, batch: OutboxBatch) -> None:
        """Record that all messages up to a micro-batch are on the topic, then remove what is not
        needed any more.
        """
        with self._lock:
            with self._filesystem.open_output_stream(f"{self._root}/{_number(batch.batch_id)}.sent"):
                pass
            self._sent = max(self._sent, batch.batch_id)
            self._remove([file.name for file in batch.files])
            self._tidy()

    def is_present(self, batch: OutboxBatch, file: OutboxFile) -> bool:
        """Return whether a file is there; if not, another process has sent its micro-batch
        meanwhile.

        Raises:
            CheckpointError: it is missing, and its messages with it.
        """
        if self._filesystem.get_file_info(f"{self._root}/{file.name}").type != fs.FileType.NotFound:
            return True
        if batch.batch_id <= _newest_sent(self._names()):
            return False
        raise CheckpointError(
            f"the outbox {self.folder} lacks {file.name}, which holds {file.rows} due messages of {file.topic_partition} "
            "that were not sent; restore it from a complete copy of the checkpoint",
            lost="unknown",
        )

    def _tidy(self) -> None:
        """Keep of what was sent the newest ``.sent``, and the newest record, behind which the next
        micro-batch is numbered.
        """
        newest_sent = max((number for number in self._batches if number <= self._sent), default=-1)
        kept = {number for number in self._batches if number > self._sent} | {newest_sent}
        for name in self._names():
            number, _, kind = name.partition(".")
            if (
                (kind == "sent" and int(number) < self._sent)
                or (kind == "json" and number.isdigit() and int(number) <= self._sent and int(number) not in kept)
                or ((begun := _BEGUN.match(name)) and int(begun[1]) <= self._sent)
            ):
                self._remove([name])
        self._batches = {number: self._batches[number] for number in self._batches.keys() & kept}

    def _latest(self) -> OutboxBatch:
        return self._batches[max(self._batches)]

    def _numbered(self, batch: BatchRecord, found: dict[str, list[DataFile]]) -> OutboxBatch:
        before = [number for number in self._batches if number < batch.batch_id]
        numbers = dict(self._batches[max(before)].next_sequences) if before else {}
        files = []
        for topic_partition, group in sorted(found.items()):
            for file in group:
                first = numbers.get(topic_partition, 0)
                numbers[topic_partition] = first + file.rows
                files.append(OutboxFile(file.name, topic_partition, first, file.rows))
        return OutboxBatch(batch.batch_id, batch.range_digest, files, numbers)

    def _stored(self, batch_id: int) -> OutboxBatch | None:
        return load_stored(self._path(batch_id), "outbox record", _record, VERSION)

    def _begun(self, batch_id: int) -> Sending | None:
        """Return how the sending of a micro-batch began; None if it did not."""
        found = [match for name in self._names() if (match := _BEGUN.match(name)) and int(match[1]) == batch_id]
        if not found:
            return None
        newest = max(found, key=lambda match: int(match[2]))
        return load_stored(self.folder / newest[0], "outbox record of a sending", _sending, BEGUN_VERSION)

    def _is_whole(self, batch: OutboxBatch) -> bool:
        return {file.name for file in batch.files} <= self._names()

    def _load(self) -> None:
        self._sent = _newest_sent(self._names())
        self._batches |= {number: found for number in self._recorded() if (found := self._stored(number)) is not None}
        self._tidy()
        for batch_id in self._batches:
            self._begun(batch_id)

    def _load_before(self, batch_id: int) -> None:
        """Load the records of earlier micro-batches that another process wrote.

        A process that was suspended, and that owns the stream again, knows nothing of what its successor
        recorded. It has to number behind that, and to send what of it was not sent.
        """
        earlier = [number for number in self._recorded() if number < batch_id]
        for number in earlier:
            if (number > self._sent or number == max(earlier)) and (found := self._stored(number)) is not None:
                self._batches[number] = found

    def _recorded(self) -> list[int]:
        """Return the micro-batches that have a record."""
        parts = [name.partition(".") for name in self._names()]
        return sorted(int(number) for number, _, kind in parts if kind == "json" and number.isdigit())

    def _remove_unknown(self) -> None:
        """Remove files that no record names, of micro-batches that the table has.

        Those of a later one may be of a process that was suspended and commits it after all: it
        owns the stream again if its successor lost the connection first.
        """
        known = {file.name for batch in self._batches.values() for file in batch.files}
        self._remove([name for name in self._names() - known if _batch_of_file(name) <= self._committed])

    def _take_version_1(self, found: _Version1) -> None:
        """Split the one file of version 1, in which a missing file had been sent."""
        present = self._names()
        batches = {file.batch_id for file in found.files} | {known.batch_id for known in found.numbers.values()}
        if not batches:
            return
        # A micro-batch that is run again is numbered from the record before it.
        for batch_id in sorted(batches | {max(min(batches) - 1, 0)}):
            made = OutboxBatch(
                batch_id,
                0,
                [
                    OutboxFile(file.name, file.topic_partition, file.first_sequence, file.rows)
                    for file in found.files
                    if file.batch_id == batch_id and file.name in present
                ],
                {
                    name: known.next if known.batch_id <= batch_id else known.first
                    for name, known in found.numbers.items()
                },
            )
            save_json(self._path(batch_id), {"version": VERSION, **asdict(made)})

    def _names(self) -> set[str]:
        return {
            file.base_name for file in self._filesystem.get_file_info(fs.FileSelector(self._root, allow_not_found=True))
        }

    def _path(self, batch_id: int) -> Place:
        return self.folder / f"{_number(batch_id)}.json"

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_file(f"{self._root}/{name}")


# A micro-batch, and the number of partitions.
_BEGUN = re.compile(r"([0-9]{10,19})\.([0-9]{1,9})\.begun$")


def _number(batch_id: int) -> str:
    return f"{batch_id:010d}"


def _batch_of_file(name: str) -> int:
    """The micro-batch that a file of due messages is of (see
    ``operators.partition_writer.file_prefix``); of another file, one that never comes.
    """
    found = re.match(r"part-([0-9]{8,})-.*\.parquet$", name)
    return int(found[1]) if found else sys.maxsize


def _newest_sent(names: set[str]) -> int:
    numbers = [name.partition(".")[0] for name in names if name.endswith(".sent")]
    return max((int(number) for number in numbers if number.isdigit()), default=-1)


@dataclass(frozen=True)
class _FileOf1:
    name: str
    topic_partition: str
    batch_id: int
    first_sequence: int
    rows: int
    committed: bool


@dataclass(frozen=True)
class _NumbersOf1:
    batch_id: int
    first: int
    next: int


@dataclass(frozen=True)
class _Version1:
    """All of an outbox of version 1."""

    name: str
    files: list[_FileOf1] = field(default_factory=list)
    numbers: dict[str, _NumbersOf1] = field(default_factory=dict)


@dataclass(frozen=True)
class _Version2:
    name: str


def _outbox(data: dict[str, Any], version: int) -> _Version1 | _Version2:
    if version >= VERSION:
        return _Version2(stored(str, data["name"]))
    found: _Version1 = stored(_Version1, {"files": [], "numbers": {}} | data)
    return found


def _record(data: dict[str, Any], _version: int) -> OutboxBatch:
    found: OutboxBatch = stored(OutboxBatch, data)
    return found


def _sending(data: dict[str, Any], _version: int) -> Sending:
    found: Sending = stored(Sending, data)
    if found.partitions < 1:
        raise ValueError(f"{found.partitions} partitions")
    return found
