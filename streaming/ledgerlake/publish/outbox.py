"""The outbox: due messages for a topic, in files that the last stage writes. They are sent in order
after their batch was committed.

    <checkpoint>/ledgerlake/outbox/outbox.json         the outbox's name, with a version
    <checkpoint>/ledgerlake/outbox/<batch>.json        files of a micro-batch, and how its messages are numbered
    <checkpoint>/ledgerlake/outbox/<batch>.<n>.begun   its sending may have begun, when the target had n partitions
    <checkpoint>/ledgerlake/outbox/<batch>.sent        all messages of that micro-batch, and of those before it, are on the topic
    <checkpoint>/ledgerlake/outbox/producers.json      other names of producers, if somebody else used the first one
    <checkpoint>/ledgerlake/outbox/*.parquet           due messages of one topic partition and micro-batch; removed when sent

So the topic has a position of its own: if it is down, the table does not wait, and the topic gets
the messages later.

Rules kept here:
  - Nothing is changed before ``begin``, which only the owner of the stream may call.
  - A message's number depends only on the messages that were due before it, so a micro-batch that
    is run again gives it the same number. The broker drops a number that it has seen from the same
    producer, so sending again is harmless.
  - The first record of a micro-batch stands. A later run of the same micro-batch keeps it and
    removes its own files, so that a process that was suspended cannot replace the records of its
    successor.
  - A micro-batch is not sent before the table has it, nor before those with lower numbers. It
    counts as sent only if that was recorded: if a file is missing otherwise, that is an error.
  - Before the first message of a micro-batch is sent, the target's number of partitions and their
    ends are recorded. If the micro-batch is sent again, its messages are routed by that number, and
    searched for after those ends. A topic only grows, and a successor asks later, so of several
    records the one with the most partitions is the successor's. A record that a suspended process
    writes late changes nothing.
  - A producer's other name is recorded before the first message is sent under it, together with the
    last number that the topic has under the names before.
  - The newest ``.sent`` is kept, and covers all micro-batches up to its own. If a suspended process
    writes the record of a micro-batch that its successor has sent, the record is removed.
  - If the checkpoint knows an outbox and it is missing, no new one is begun: there may be unsent
    messages in it.

Version 1 kept everything in ``outbox.json``. A missing file meant that it was sent.
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
PRODUCERS_VERSION = 1


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

    ``next_sequences`` are the next numbers of every topic partition that ever had a message.
    """

    batch_id: int
    range_digest: int
    files: list[OutboxFile]
    next_sequences: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OtherName:
    """Another name of the producer of a topic partition's messages for a partition of the target.

    ``suffix`` is the end of the name. The target has the messages up to number ``stored`` under the
    names before.
    """

    topic_partition: str
    target: str
    suffix: str
    stored: int


@dataclass(frozen=True)
class Sending:
    """The target when the sending of a micro-batch began: messages are routed among its first
    ``partitions``.

    ``ends`` are the last entries of those partitions at that time, by name, as far as they were
    known.
    """

    partitions: int
    ends: dict[str, Position] = field(default_factory=dict)


class Outbox:
    """The outbox of a pipeline. ``name`` tells it apart from all others, also from an earlier one
    in the same folder.
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
            committed: the last micro-batch that the table has.
            name: the name of the outbox that the checkpoint knows; None if it knows none.

        Raises:
            CheckpointError: this is not that outbox.
            OffsetError: a newer release wrote it, or it is damaged.
            SetupError: it cannot be read or written.
        """
        self._committed = -1 if committed is None else committed
        try:
            self._open(name)
        except OSError as error:
            raise self._not_opened(error) from None

    def examine(self, name: str | None) -> None:
        """Read the outbox as ``begin`` does, and change nothing.

        Raises:
            As ``begin``.
        """
        try:
            if not isinstance(self._record(name), _Version1):
                self._read()
        except OSError as error:
            raise self._not_opened(error) from None

    def _not_opened(self, error: OSError) -> SetupError:
        return SetupError(
            f"the outbox {self.folder} cannot be opened ({error.strerror or error}); look at its disk and its rights"
        )

    def _record(self, name: str | None) -> _Version1 | _Version2 | None:
        """Return what ``outbox.json`` has; None if there is none.

        Raises:
            CheckpointError: this is not the outbox that the checkpoint knows.
        """
        self._filesystem, self._root = self.folder.filesystem(), self.folder.root
        record = load_stored(self.folder / "outbox.json", "outbox", _outbox, VERSION)
        if name is not None and (record is None or record.name != name):
            raise CheckpointError(
                f"the outbox {self.folder} is {'gone' if record is None else 'another one'}, and messages may wait in the one "
                f"that this checkpoint had; restore it from the newest copy of the checkpoint, or remove {self.folder}.json "
                "to go on without them: the table has them",
                lost="unknown",
            )
        return record

    def _open(self, name: str | None) -> None:
        record = self._record(name)
        self.folder.make()
        self.name = record.name if record is not None else secrets.token_hex(4)
        if isinstance(record, _Version1):
            self._split_version_1(record)
        save_json(self.folder / "outbox.json", {"version": VERSION, "name": self.name})
        self._load()
        self._remove_unknown()

    @property
    def last_sent(self) -> int:
        """Return the last micro-batch whose messages are known to be on the topic; -1 before the
        first.
        """
        return self._sent

    @property
    def messages(self) -> int:
        """Return how many messages the outbox has had, including those that were sent."""
        return sum(self._latest().next_sequences.values()) if self._batches else 0

    def messages_up_to(self, batch_id: int) -> int:
        """Return how many messages it has had up to a micro-batch."""
        numbers = [number for number in self._batches if number <= batch_id]
        return sum(self._batches[max(numbers)].next_sequences.values()) if numbers else 0

    def add(self, batch: BatchRecord, new_files: dict[str, list[DataFile]]) -> None:
        """Record the files of a micro-batch that is about to be committed, by topic partition."""
        files = [file for _, group in sorted(new_files.items()) for file in group if file.rows]
        if not files:
            return
        with self._lock:
            if batch.batch_id <= _newest_sent(self._names()):
                self._remove([file.name for file in files])
                return
            self._load_before(batch.batch_id)
            stored = self._stored(batch.batch_id)
            if stored is not None and stored.range_digest == batch.range_digest and self._has_all_files(stored):
                self._batches[batch.batch_id] = stored
                recorded = {file.name for file in stored.files}
                self._remove([file.name for file in files if file.name not in recorded])
                return
            numbered = self._numbered(batch, new_files)
            save_json(self._path(batch.batch_id), {"version": VERSION, **asdict(numbered)})
            self._batches[batch.batch_id] = numbered
            if stored is not None:
                self._remove([file.name for file in stored.files])

    def commit(self, batch_id: int) -> None:
        """Release the messages of a micro-batch that is in the table: they may be sent."""
        self._committed = max(self._committed, batch_id)

    def ready(self) -> list[OutboxBatch]:
        """Return the micro-batches to send now, in order, without those that another process has
        sent.
        """
        with self._lock:
            if any(self._sent < number <= self._committed for number in self._batches):
                self._sent = max(self._sent, _newest_sent(self._names()))
            return [self._batches[number] for number in sorted(self._batches) if self._sent < number <= self._committed]

    def begin_sending(self, batch: OutboxBatch, now: Sending) -> tuple[Sending, bool]:
        """Record how a micro-batch is sent, before its first message is sent.

        Args:
            now: how to send it if its sending has not begun; asked of the broker before this call.

        Returns:
            The record of when its sending first began, and whether that was before this call, so
                that some messages may have been sent.

        Raises:
            OffsetError: a newer release recorded it, or the record is damaged.
        """
        with self._lock:
            if (begun := self._begun(batch.batch_id)) is not None:
                return begun, True
            path = self.folder / f"{_number(batch.batch_id)}.{now.partitions}.begun"
            save_json(path, {"version": BEGUN_VERSION, **asdict(now)})
            begun = self._begun(batch.batch_id) or now
            return begun, begun != now

    def other_names(self) -> dict[tuple[str, str], OtherName]:
        """Return the producers that have another name, by topic partition and partition of the target.

        Raises:
            OffsetError: a newer release recorded them, or the record is damaged.
        """
        record = load_stored(
            self.folder / "producers.json", "outbox record of producers", _producers, PRODUCERS_VERSION
        )
        return {(name.topic_partition, name.target): name for name in (record.names if record is not None else [])}

    def rename(self, name: OtherName) -> None:
        """Record another name of a producer, before it sends its first message under it."""
        with self._lock:
            names = self.other_names() | {(name.topic_partition, name.target): name}
            record = _Producers(list(names.values()))
            save_json(self.folder / "producers.json", {"version": PRODUCERS_VERSION, **asdict(record)})

    def sent(self, batch: OutboxBatch) -> None:
        """Record that all messages up to a micro-batch are on the topic, then remove files that are
        no longer needed.
        """
        with self._lock:
            with self._filesystem.open_output_stream(f"{self._root}/{_number(batch.batch_id)}.sent"):
                pass
            self._sent = max(self._sent, batch.batch_id)
            self._remove([file.name for file in batch.files])
            self._tidy()

    def is_present(self, batch: OutboxBatch, file: OutboxFile) -> bool:
        """Return whether a file exists; if not, another process has sent its micro-batch.

        Raises:
            CheckpointError: the file is missing, and its messages were not sent.
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
        """Remove the files of sent micro-batches but for the newest ``.sent`` and the newest
        record, from which the next micro-batch is numbered.
        """
        newest_sent = max((number for number in self._batches if number <= self._sent), default=-1)
        needed = {number for number in self._batches if number > self._sent} | {newest_sent}
        for name in self._names():
            number, _, kind = name.partition(".")
            if (
                (kind == "sent" and int(number) < self._sent)
                or (kind == "json" and number.isdigit() and int(number) <= self._sent and int(number) not in needed)
                or ((begun := _BEGUN.match(name)) and int(begun[1]) <= self._sent)
            ):
                self._remove([name])
        self._batches = {number: self._batches[number] for number in self._batches.keys() & needed}

    def _latest(self) -> OutboxBatch:
        return self._batches[max(self._batches)]

    def _numbered(self, batch: BatchRecord, new_files: dict[str, list[DataFile]]) -> OutboxBatch:
        before = [number for number in self._batches if number < batch.batch_id]
        numbers = dict(self._batches[max(before)].next_sequences) if before else {}
        files = []
        for topic_partition, group in sorted(new_files.items()):
            for file in group:
                first = numbers.get(topic_partition, 0)
                numbers[topic_partition] = first + file.rows
                files.append(OutboxFile(file.name, topic_partition, first, file.rows))
        return OutboxBatch(batch.batch_id, batch.range_digest, files, numbers)

    def _stored(self, batch_id: int) -> OutboxBatch | None:
        return load_stored(self._path(batch_id), "outbox record", _record, VERSION)

    def _begun(self, batch_id: int) -> Sending | None:
        """Return how the sending of a micro-batch began; None if it did not."""
        matches = [match for name in self._names() if (match := _BEGUN.match(name)) and int(match[1]) == batch_id]
        if not matches:
            return None
        newest = max(matches, key=lambda match: int(match[2]))
        return load_stored(self.folder / newest[0], "outbox record of a sending", _sending, BEGUN_VERSION)

    def _has_all_files(self, batch: OutboxBatch) -> bool:
        return {file.name for file in batch.files} <= self._names()

    def _read(self) -> None:
        self.other_names()
        self._sent = _newest_sent(self._names())
        self._batches |= {number: batch for number in self._recorded() if (batch := self._stored(number)) is not None}

    def _load(self) -> None:
        self._read()
        self._tidy()
        for batch_id in self._batches:
            self._begun(batch_id)

    def _load_before(self, batch_id: int) -> None:
        """Load the records of earlier micro-batches that another process wrote.

        A process that was suspended and owns the stream again does not know the records of its
        successor. It has to continue their numbers, and to send the messages that were not sent.
        """
        earlier = [number for number in self._recorded() if number < batch_id]
        for number in earlier:
            if (number > self._sent or number == max(earlier)) and (batch := self._stored(number)) is not None:
                self._batches[number] = batch

    def _recorded(self) -> list[int]:
        """Return the micro-batches that have a record."""
        names = [name.partition(".") for name in self._names()]
        return sorted(int(number) for number, _, kind in names if kind == "json" and number.isdigit())

    def _remove_unknown(self) -> None:
        """Remove files that no record names, of micro-batches that the table has.

        Files of a later micro-batch may be those of a process that was suspended and still commits
        it: it owns the stream again if its successor loses its connection first.
        """
        recorded = {file.name for batch in self._batches.values() for file in batch.files}
        self._remove([name for name in self._names() - recorded if _batch_of_file(name) <= self._committed])

    def _split_version_1(self, record: _Version1) -> None:
        """Write the records of the single file of version 1, in which a missing file was sent."""
        present = self._names()
        batches = {file.batch_id for file in record.files} | {numbers.batch_id for numbers in record.numbers.values()}
        if not batches:
            return
        # A micro-batch that is run again is numbered from the record before it.
        for batch_id in sorted(batches | {max(min(batches) - 1, 0)}):
            batch = OutboxBatch(
                batch_id,
                0,
                [
                    OutboxFile(file.name, file.topic_partition, file.first_sequence, file.rows)
                    for file in record.files
                    if file.batch_id == batch_id and file.name in present
                ],
                {
                    name: numbers.next if numbers.batch_id <= batch_id else numbers.first
                    for name, numbers in record.numbers.items()
                },
            )
            save_json(self._path(batch_id), {"version": VERSION, **asdict(batch)})

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


# The number of the micro-batch, and the number of partitions.
_BEGUN = re.compile(r"([0-9]{10,19})\.([0-9]{1,9})\.begun$")


def _number(batch_id: int) -> str:
    return f"{batch_id:010d}"


def _batch_of_file(name: str) -> int:
    """Return the micro-batch of a file of due messages (see
    ``operators.partition_writer.file_prefix``); for other files, a number above all micro-batches.
    """
    match = re.match(r"part-([0-9]{8,})-.*\.parquet$", name)
    return int(match[1]) if match else sys.maxsize


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
    """The record of an outbox of version 1."""

    name: str
    files: list[_FileOf1] = field(default_factory=list)
    numbers: dict[str, _NumbersOf1] = field(default_factory=dict)


@dataclass(frozen=True)
class _Version2:
    name: str


@dataclass(frozen=True)
class _Producers:
    names: list[OtherName]


def _outbox(data: dict[str, Any], version: int) -> _Version1 | _Version2:
    if version >= VERSION:
        return _Version2(stored(str, data["name"]))
    record: _Version1 = stored(_Version1, {"files": [], "numbers": {}} | data)
    return record


def _record(data: dict[str, Any], _version: int) -> OutboxBatch:
    batch: OutboxBatch = stored(OutboxBatch, data)
    return batch


def _sending(data: dict[str, Any], _version: int) -> Sending:
    sending: Sending = stored(Sending, data)
    if sending.partitions < 1:
        raise ValueError(f"{sending.partitions} partitions")
    return sending


def _producers(data: dict[str, Any], _version: int) -> _Producers:
    producers: _Producers = stored(_Producers, data)
    return producers
