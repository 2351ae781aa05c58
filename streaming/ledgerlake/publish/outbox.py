"""The outbox: due messages for a topic, in files that the last stage writes. They are sent in order
after their batch was committed.

    <checkpoint>/ledgerlake/outbox/outbox.json             the outbox's name, with a version
    <checkpoint>/ledgerlake/outbox/<batch>.<outcome>.json  messages that a run of a micro-batch has
                                                           for the topic
    <checkpoint>/ledgerlake/outbox/<batch>.json            messages of the run that the table has,
                                                           which are to be sent
    <checkpoint>/ledgerlake/outbox/<batch>.begun/<n>.json  its sending may have begun, when the
                                                           target had n partitions
    <checkpoint>/ledgerlake/outbox/<batch>.sent            all messages up to the end of that
                                                           micro-batch are on the topic; JSON with a
                                                           version and the next numbers of all topic
                                                           partitions
    <checkpoint>/ledgerlake/outbox/producers/<hex>.json    another name of a producer, if somebody
                                                           else used the name before
    <checkpoint>/ledgerlake/outbox/*.parquet               due messages of one topic partition and
                                                           micro-batch; removed when sent

So the topic has a position of its own: if it is down, the table does not wait, and the topic gets
the messages later.

Rules kept here:
  - Nothing is changed before ``begin``, which only the owner of the stream may call.
  - A message's number depends only on the messages that were due before it, so a micro-batch that
    is run again gives it the same number. The broker drops a number that it has seen from the same
    producer, so sending again is harmless.
  - Two runs of a micro-batch may differ in what they have for the topic, for example after a key
    came. So each run writes a record of its own before a table gets the micro-batch. Once the main
    table has it, the record of the run that committed is copied to ``<batch>.json``; the outcome in
    the table's commit says which one that is.
  - A record is named by its outcome, a hash of its messages' positions. Two runs with the same
    outcome number the same messages in the same way, so either record will do. So a process that
    was suspended cannot change what its successor sends.
  - A micro-batch is sent after those with lower numbers. It counts as sent only if that was
    recorded: if a file is missing otherwise, that is an error.
  - Before the first message of a micro-batch is sent, the target's number of partitions and their
    ends are recorded. If the micro-batch is sent again, its messages are routed by that number, and
    searched for after those ends. A topic only grows, and a successor asks later, so of several
    records the one with the most partitions is the successor's. A record that a suspended process
    writes late changes nothing.
  - A producer's other name is recorded before the first message is sent under it, together with the
    last number that the topic has under the names before. A name has one successor: of two
    processes that replace it, the later takes the name of the other.
  - The newest ``.sent`` is kept, and covers all micro-batches up to its own. So a record that a
    suspended process writes after its successor has sent the micro-batch is not sent; the next
    start removes it.
  - A record has the numbers of its own topic partitions alone, so what a micro-batch that waits
    costs does not depend on how many others there are. The next micro-batch is numbered from the
    newest ``.sent`` and the records after it.
  - Micro-batches that wait cost neither a commit nor a sending anything: the folder is listed at a
    start, and once for all micro-batches that are sent together.
  - If the checkpoint knows an outbox and it is missing, no new one is begun: there may be unsent
    messages in it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import secrets
import sys
import threading
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.errors import CheckpointError, SetupError
from ledgerlake.stored.fields import exactly, reader_of, stored
from ledgerlake.stored.files import create_json, load_stored, save_json
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from ledgerlake.stored.places import Place
    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.ordered_files import DataFile

VERSION = 1
BEGUN_VERSION = 1
SENT_VERSION = 1
PRODUCER_VERSION = 1


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

    ``next_sequences`` are the next numbers of the topic partitions that it has messages of.
    """

    batch_id: int
    files: list[OutboxFile]
    next_sequences: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class OtherName:
    """Another name of the producer of a topic partition's messages for a partition of the target.

    ``suffix`` is the end of the name, ``before`` that of the name before, empty if that is the
    first. The target has the messages up to number ``stored`` under the names before.
    """

    topic_partition: str
    target: str
    before: str
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
        # The next numbers of every topic partition that ever had a message: after the last
        # micro-batch that was sent by this process or before it, and after the newest.
        self._sent_up_to = -1
        self._sent_sequences: dict[str, int] = {}
        self._next_sequences: dict[str, int] = {}
        self._newest = -1
        self._run: _Run | None = None
        # What runs have of the last micro-batch in the table, if it is not known which one
        # committed.
        self._unsettled: list[OutboxBatch] = []
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

    def examine(self, committed: int | None, name: str | None) -> None:
        """Read the outbox as ``begin`` does, and change nothing.

        Raises:
            As ``begin``.
        """
        self._committed = -1 if committed is None else committed
        try:
            self._record(name)
            self._read(self._names())
        except OSError as error:
            raise self._not_opened(error) from None

    def _not_opened(self, error: OSError) -> SetupError:
        reason = error.strerror or self.folder.reason(error)
        return SetupError(
            f"the outbox {self.folder} cannot be opened ({reason}); look at its disk and its rights"
        )

    def _record(self, name: str | None) -> str | None:
        """Return the name in ``outbox.json``; None if there is no such file.

        Raises:
            CheckpointError: this is not the outbox that the checkpoint knows.
        """
        self._filesystem, self._root = self.folder.filesystem(), self.folder.root
        found = load_stored(self.folder / "outbox.json", "outbox", _name, VERSION)
        if name is not None and found != name:
            raise CheckpointError(
                f"the outbox {self.folder} is {'gone' if found is None else 'another one'}, and "
                "messages may wait in the one that this checkpoint had; restore it from the newest "
                f"copy of the checkpoint, or remove {self.folder}.json to go on without them: the "
                "table has them",
                lost="unknown",
            )
        return found

    def _open(self, name: str | None) -> None:
        found = self._record(name)
        if found is None:
            made = {"version": VERSION, "name": secrets.token_hex(4)}
            create_json(self.folder / "outbox.json", made)
            found = self._record(name)
        assert found is not None
        self.name = found
        self._load()
        self._remove_unknown()

    @property
    def last_sent(self) -> int:
        """Return the last micro-batch whose messages are known to be on the topic; -1 before the
        first.
        """
        return self._sent

    def messages_up_to(self, batch_id: int) -> int:
        """Return how many messages it has had up to a micro-batch; if it is not known which of
        several runs has committed that, the most.
        """
        nexts = dict(self._sent_sequences) if self._sent_up_to <= batch_id else {}
        for number, batch in self._batches.items():
            nexts |= batch.next_sequences if number <= batch_id else {}
        unsettled = [
            batch.next_sequences for batch in self._unsettled if batch.batch_id == batch_id
        ]
        return max(sum((nexts | of_run).values()) for of_run in [{}, *unsettled])

    def add(self, batch: BatchCommit, new_files: dict[str, list[DataFile]]) -> int:
        """Record the files of a run of a micro-batch that is about to be committed, by topic
        partition.

        Returns:
            How many messages the outbox has had with it.
        """
        with self._lock:
            if batch.batch_id <= self._newest:
                # An earlier run of it has committed and is recorded.
                self._remove([file.name for group in new_files.values() for file in group])
                return self.messages_up_to(batch.batch_id)
            numbered = self._numbered(batch.batch_id, new_files)
            self._run = run = _Run(_outcome_name(batch.outcomes), numbered)
            if numbered.files:
                save_json(
                    self._run_path(batch.batch_id, run.outcome),
                    {"version": VERSION, **asdict(numbered)},
                )
            return sum((self._next_sequences | numbered.next_sequences).values())

    def commit(self, batch_id: int, outcomes: dict[str, Any] | None = None) -> None:
        """Release the messages of a micro-batch that is in the table: they may be sent.

        Args:
            outcomes: the digests with which the table had the micro-batch when it was run again
                (see ``BatchCommit``); None if this run has committed it, or they are not known.

        Raises:
            CheckpointError: the record of the run that has committed is missing.
            OffsetError: it is damaged.
        """
        with self._lock:
            run, self._run, self._unsettled = self._run, None, []
            if batch_id <= self._newest or run is None:
                return
            settled = self._settled(run, outcomes)
            if settled is not None:
                self._take(settled)
            if run.batch.files:
                kept = {file.name for file in settled.files} if settled is not None else set()
                self._remove([file.name for file in run.batch.files if file.name not in kept])
                self._remove([self._run_path(batch_id, run.outcome).root.rpartition("/")[2]])

    def _settled(self, run: _Run, outcomes: dict[str, Any] | None) -> OutboxBatch | None:
        """Return the record of a micro-batch's messages that are to be sent, and make it if no
        process has; None if there are none, or they were sent.
        """
        batch_id = run.batch.batch_id
        if (recorded := self._stored(batch_id)) is not None:
            return recorded
        settled = self._of_outcome(run, outcomes)
        if settled is None or not settled.files:
            return None
        is_made = create_json(self._path(batch_id), {"version": VERSION, **asdict(settled)})
        return settled if is_made else self._stored(batch_id)

    def _of_outcome(self, run: _Run, outcomes: dict[str, Any] | None) -> OutboxBatch | None:
        """Return what the run with this outcome has for the topic; None if it has nothing."""
        if outcomes is None or (outcome := _outcome_name(outcomes)) == run.outcome:
            return run.batch
        if outcome == _outcome_name({}):
            return None
        batch_id = run.batch.batch_id
        path = self._run_path(batch_id, outcome)
        found = load_stored(path, "outbox record", _batch, VERSION)
        if found is None and batch_id > _newest_sent(self._names()):
            raise CheckpointError(
                f"the outbox {self.folder} lacks the record of batch {batch_id}, which is in the "
                "table, and its due messages "
                "were not sent; restore it from a complete copy of the checkpoint",
                lost="unknown",
            )
        return found

    def ready(self) -> list[OutboxBatch]:
        """Return the micro-batches to send now, in order, without those that another process has
        sent.
        """
        if not self._waiting():
            return []
        # A long list must not hold up a commit.
        sent = _newest_sent(self._names())
        with self._lock:
            self._sent = max(self._sent, sent)
        return self._waiting()

    def _waiting(self) -> list[OutboxBatch]:
        with self._lock:
            return [
                self._batches[number] for number in sorted(self._batches) if number > self._sent
            ]

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
        if (begun := self._begun(batch.batch_id)) is not None:
            return begun, True
        create_json(
            self._begun_path(batch.batch_id, now.partitions),
            {"version": BEGUN_VERSION, **asdict(now)},
        )
        begun = self._begun(batch.batch_id) or now
        return begun, begun != now

    def other_names(self) -> dict[tuple[str, str], OtherName]:
        """Return the producers that have another name, by topic partition and partition of the
        target.

        Raises:
            OffsetError: a newer release recorded them, or the record is damaged.
        """
        names = [
            load_stored(
                self.folder / f"producers/{file}",
                "outbox record of a producer",
                _other_name,
                PRODUCER_VERSION,
            )
            for file in self._names("/producers")
        ]
        records = [name for name in names if name is not None]
        replaced = {(name.topic_partition, name.target, name.before) for name in records}
        return {
            (name.topic_partition, name.target): name
            for name in records
            if (name.topic_partition, name.target, name.suffix) not in replaced
        }

    def rename(self, name: OtherName) -> None:
        """Record another name of a producer, before it sends its first message under it. If another
        process has replaced the name before, that one's record stays.
        """
        replaced = json.dumps([name.topic_partition, name.target, name.before]).encode()
        file = f"producers/{hashlib.sha256(replaced).hexdigest()[:32]}.json"
        create_json(self.folder / file, {"version": PRODUCER_VERSION, **asdict(name)})

    def sent(self, batch: OutboxBatch) -> None:
        """Record that all messages up to a micro-batch are on the topic, then remove files that are
        no longer needed.
        """
        with self._lock:
            sent = [number for number in sorted(self._batches) if number <= batch.batch_id]
            for number in sent:
                self._sent_sequences |= self._batches[number].next_sequences
            record = _Sent(self._sent_sequences)
            create_json(
                self._sent_path(batch.batch_id), {"version": SENT_VERSION, **asdict(record)}
            )
            before, self._sent_up_to = self._sent_up_to, batch.batch_id
            self._sent = max(self._sent, batch.batch_id)
            self._remove([file.name for file in batch.files])
            for number in sent:
                del self._batches[number]
            self._remove([f"{_number(number)}.json" for number in sent])
            if 0 <= before < batch.batch_id:
                self._remove([f"{_number(before)}.sent"])
            self._remove_folder(f"{_number(batch.batch_id)}.begun")

    def is_sent(self, batch: OutboxBatch) -> bool:
        """Return whether a micro-batch was sent, by whatever process."""
        return batch.batch_id <= _newest_sent(self._names())

    def is_present(self, batch: OutboxBatch, file: OutboxFile) -> bool:
        """Return whether a file exists; if not, another process has sent its micro-batch.

        Raises:
            CheckpointError: the file is missing, and its messages were not sent.
        """
        if self._filesystem.get_file_info(f"{self._root}/{file.name}").type != fs.FileType.NotFound:
            return True
        if self.is_sent(batch):
            return False
        raise CheckpointError(
            f"the outbox {self.folder} lacks {file.name}, which holds {file.rows} due messages of "
            f"{file.topic_partition} "
            "that were not sent; restore it from a complete copy of the checkpoint",
            lost="unknown",
        )

    def _tidy(self, names: set[str]) -> None:
        """Remove the files of sent micro-batches but for the newest ``.sent``, and records of runs
        that did not commit.

        Args:
            names: those that were read. A file that comes later may be a successor's.
        """
        for name in names:
            number, _, kind = name.partition(".")
            if not number.isdigit():
                continue
            if kind == "begun" and int(number) <= self._sent:
                self._remove_folder(name)
            elif (
                (kind == "sent" and int(number) < self._sent)
                or (kind == "json" and int(number) not in self._batches)
                or (_RUN.match(name) and not self._may_have_committed(int(number)))
            ):
                self._remove([name])

    def _may_have_committed(self, batch_id: int) -> bool:
        """Return whether the records of runs of a micro-batch are needed: it is not known yet which
        one the table has.
        """
        return (
            batch_id >= self._committed and batch_id > self._sent and batch_id not in self._batches
        )

    def _numbered(self, batch_id: int, new_files: dict[str, list[DataFile]]) -> OutboxBatch:
        numbers: dict[str, int] = {}
        files = []
        for topic_partition, group in sorted(new_files.items()):
            for file in group:
                first = numbers.get(topic_partition, self._next_sequences.get(topic_partition, 0))
                numbers[topic_partition] = first + file.rows
                files.append(OutboxFile(file.name, topic_partition, first, file.rows))
        return OutboxBatch(batch_id, files, numbers)

    def _take(self, batch: OutboxBatch) -> None:
        self._batches[batch.batch_id] = batch
        self._next_sequences |= batch.next_sequences
        self._newest = batch.batch_id

    def _stored(self, batch_id: int) -> OutboxBatch | None:
        return load_stored(self._path(batch_id), "outbox record", _batch, VERSION)

    def _begun(self, batch_id: int) -> Sending | None:
        """Return how the sending of a micro-batch began; None if it did not."""
        names = self._names(f"/{_number(batch_id)}.begun")
        counts = [name.removesuffix(".json") for name in names]
        partitions = max((int(count) for count in counts if count.isdigit()), default=None)
        return (
            None if partitions is None else self._load_begun(self._begun_path(batch_id, partitions))
        )

    def _load_begun(self, path: Place) -> Sending | None:
        return load_stored(path, "outbox record of a sending", _sending, BEGUN_VERSION)

    def _read(self, names: set[str]) -> None:
        self.other_names()
        self._sent = self._sent_up_to = self._newest = _newest_sent(names)
        if self._sent >= 0:
            record = load_stored(
                self._sent_path(self._sent), "outbox record of what was sent", _sent, SENT_VERSION
            )
            self._sent_sequences = {} if record is None else record.next_sequences
        self._next_sequences = dict(self._sent_sequences)
        for number in _recorded(names):
            if number > self._sent and (batch := self._stored(number)) is not None:
                self._take(batch)
        for name in names:
            if _RUN.match(name) and self._may_have_committed(number := int(name.partition(".")[0])):
                batch = load_stored(self.folder / name, "outbox record", _batch, VERSION)
                self._unsettled += (
                    [batch] if batch is not None and number == self._committed else []
                )

    def _load(self) -> None:
        names = self._names()
        self._read(names)
        self._tidy(names)
        for name in names:
            number, _, kind = name.partition(".")
            if kind == "begun" and int(number) in self._batches:
                self._begun(int(number))

    def _remove_unknown(self) -> None:
        """Remove files that no record names, of micro-batches that the table has.

        Files of a later micro-batch are kept. They may belong to a process that was suspended and
        still commits it: that process owns the stream again if its successor loses its connection
        first. So may files of the last micro-batch, until it is recorded which run has committed.
        """
        recorded = {
            file.name
            for batch in [*self._batches.values(), *self._unsettled]
            for file in batch.files
        }
        for name in self._names() - recorded:
            number = _batch_of_file(name)
            if number <= self._committed and not self._may_have_committed(number):
                self._remove([name])

    def _names(self, below: str = "") -> set[str]:
        selector = fs.FileSelector(self._root + below, allow_not_found=True)
        return {file.base_name for file in self._filesystem.get_file_info(selector)}

    def _path(self, batch_id: int) -> Place:
        return self.folder / f"{_number(batch_id)}.json"

    def _sent_path(self, batch_id: int) -> Place:
        return self.folder / f"{_number(batch_id)}.sent"

    def _run_path(self, batch_id: int, outcome: str) -> Place:
        return self.folder / f"{_number(batch_id)}.{outcome}.json"

    def _begun_path(self, batch_id: int, partitions: int) -> Place:
        return self.folder / f"{_number(batch_id)}.begun/{partitions}.json"

    def _remove(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._filesystem.delete_file(f"{self._root}/{name}")

    def _remove_folder(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.delete_dir(f"{self._root}/{name}")


@dataclass(frozen=True)
class _Run:
    """What a run of a micro-batch has for the topic, and the name of its outcome."""

    outcome: str
    batch: OutboxBatch


# The record of a run: the number of the micro-batch, and the name of the outcome.
_RUN = re.compile(r"[0-9]{10,19}\.[0-9a-f]{16}\.json$")


def _outcome_name(outcomes: dict[str, Any]) -> str:
    """Return a name for what a micro-batch has for the topic, from its digests by topic partition
    (see ``operators.outcome_digest``).
    """
    tallies = {
        name: digest["outbox"] for name, digest in sorted(outcomes.items()) if "outbox" in digest
    }
    return hashlib.sha256(json.dumps(tallies).encode()).hexdigest()[:16]


def _recorded(names: set[str]) -> list[int]:
    """Return the micro-batches with a record of what the table has."""
    parts = [name.partition(".") for name in names]
    return sorted(int(number) for number, _, kind in parts if kind == "json" and number.isdigit())


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
class _Sent:
    """The next numbers of every topic partition that ever had a message, after a micro-batch."""

    next_sequences: dict[str, int]


def _name(data: dict[str, Any]) -> str:
    (found,) = exactly(data, "name")
    name: str = stored(str, found)
    return name


_batch = reader_of(OutboxBatch)


_sent = reader_of(_Sent)


def _sending(data: dict[str, Any]) -> Sending:
    sending: Sending = stored(Sending, data)
    if sending.partitions < 1:
        raise ValueError(f"{sending.partitions} partitions")
    return sending


_other_name = reader_of(OtherName)
