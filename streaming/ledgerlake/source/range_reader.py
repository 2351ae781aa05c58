"""Reading a range of entries: gathered up to a bundle's size, with what is missing or cannot be
read told beside it.

Three things besides plain entries can happen on the way: of the first or last entry only a part
belongs to the range, what was in the topic may be lost (``loss``), and a function of the user's may
read entries in a format of its own (PIP-96).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange
from ledgerlake.decode.payloads import process_entry
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.scan import scan
from ledgerlake.errors import CorruptEntryError, DataLossError, TopicNotFoundError
from ledgerlake.runtime.plugins import load
from ledgerlake.source.bounds import entry_from, first_available
from ledgerlake.source.loss import Loss, Taken, find_loss, told
from ledgerlake.source.positions import next_together_until
from ledgerlake.wire import commands
from ledgerlake.wire.entry import index_count, read_stamp
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, Position

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator

    from ledgerlake.decode.payloads import MessagePayloadProcessor
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.connection import EntryReceived, Received

BUNDLE_BYTES = 1024 * 1024

# The reason of a loss in ``rejects``.
DATA_LOSS = "data_loss"

# Frames of consecutive entries, and what of the first one belongs to the range.
Frames = bytes | bytearray | memoryview
Gathered = tuple[Frames, BatchRange]


def read_range(options: SourceOptions, span: EntryRange) -> Generator[Gathered | RejectedEntry, None, None]:
    """The entries of a range in order.

    Raises:
        DataLossError: the topic no longer has some of them, and the options say so.
    """
    if span.end <= span.after:
        return
    reader = EntryReader(shared_cluster(options.client), span.topic_partition, span.after, scan=scan)
    watch, parts, bundle = _LossWatch(options, span), _parts(span), _Bundle()
    process = (
        partial(_process, options, load(options.message_payload_processor))
        if options.message_payload_processor
        else None
    )
    try:
        for received in _received(reader, span.end, watch):
            loss = watch.take(received)
            if loss is not None:
                yield from bundle.take()
                yield loss
            for one in _cut(received, parts) if process is None else received.each():
                part = parts.get(one.position, WHOLE_BATCH) if parts else WHOLE_BATCH
                if part is not WHOLE_BATCH:
                    yield from bundle.take()
                kept = one.frames if process is None else process(one.first_entry)
                if isinstance(kept, RejectedEntry):
                    yield from bundle.take()
                    yield kept
                elif kept:
                    bundle.add(kept, part)
                if bundle.size >= BUNDLE_BYTES:
                    yield from bundle.take()
    finally:
        reader.close()
    yield from bundle.take()
    loss = watch.end()
    if loss is not None:
        yield loss


def _received(reader: EntryReader, end: Position, watch: _LossWatch) -> Iterator[Received]:
    """Yield the entries up to the end; a topic that is deleted has no more."""
    try:
        while (received := next_together_until(reader, end)) is not None:
            yield received
    except TopicNotFoundError:
        watch.topic_is_gone = True


def _cut(received: Received, places: Collection[Position]) -> Iterable[Received]:
    """Yield entries one by one, if one of some places is among them."""
    if any(received.position <= place <= received.last for place in places):
        return received.each()
    return (received,)


class _Bundle:
    """Frames that wait until there are enough of them."""

    def __init__(self) -> None:
        self.size = 0
        self._frames: list[Frames] = []
        self._first_entry = WHOLE_BATCH

    def add(self, frames: Frames, part: BatchRange) -> None:
        if not self._frames:
            self._first_entry = part
        self._frames.append(frames)
        self.size += len(frames)

    def take(self) -> Iterator[Gathered]:
        """All of them in one, if there are any."""
        frames, self._frames, self.size = self._frames, [], 0
        if frames:
            yield frames[0] if len(frames) == 1 else b"".join(frames), self._first_entry


def _process(
    options: SourceOptions, processor: MessagePayloadProcessor, entry: EntryReceived
) -> bytes | bytearray | RejectedEntry:
    """An entry's frame after the user's function; empty if that found nothing."""
    try:
        changed = process_entry(processor, entry.entry, entry.ledger_id, entry.entry_id, **options.decoding)
    except CorruptEntryError as error:
        return RejectedEntry(entry.position, bytes(entry.entry), error.reason, error.message)
    if not changed:
        return entry.frames if changed is None else b""
    return commands.message(entry.consumer_id, entry.ledger_id, entry.entry_id, changed)


class _LossWatch:
    """Looks for loss where a range goes from one ledger to another, which is the only place where
    there can be any.
    """

    def __init__(self, options: SourceOptions, span: EntryRange) -> None:
        self._cluster = shared_cluster(options.client)
        self._fails = options.fail_on_data_loss
        self._span = span
        self.topic_is_gone = False
        # What compaction took away is no loss, and what it left may stand between ledgers that are
        # gone.
        self._looks = not options.client.read_compacted and span.after.ledger_id >= 0
        self._ledger_id = span.after.ledger_id
        self._last: Received | None = None

    def take(self, received: Received) -> RejectedEntry | None:
        """The loss before some entries of the range.

        Raises:
            DataLossError: there is one, and there must not be.
        """
        loss = None
        if self._looks and received.ledger_id != self._ledger_id:
            loss = self._look(received.position, _first_index(received.first_entry))
        self._ledger_id, self._last = received.ledger_id, received
        return loss

    def end(self) -> RejectedEntry | None:
        """The loss before the end of the range, if its last entry was not received: a hole stands
        there, or it is gone.

        Raises:
            As ``take``.
        """
        if self.topic_is_gone:
            taken = self._taken()
            return self._lost(Loss(taken.position, self._span.end, None, False, "the topic was deleted"))
        if not self._looks or self._taken().position >= self._span.end:
            return None
        # Asked before the first entry is: our own cursor may move meanwhile, and ledgers go that
        # were read.
        begin = first_available(self._cluster, self._span.topic_partition)
        if begin.ledger_id <= self._taken().position.ledger_id:
            return None
        first = entry_from(self._cluster, self._span.topic_partition, BEFORE_ALL, AFTER_ALL)
        return self._look(*(first.position, first.first_index) if first is not None else (self._span.end, None))

    def _look(self, following: Position, first_index: int | None) -> RejectedEntry | None:
        begin = first_available(self._cluster, self._span.topic_partition)
        span = self._span
        pinned_from = None if span.pinned_from is None else max(span.pinned_from, told(span.topic_partition))
        loss = find_loss(
            self._taken(), following, first_index, begin, after=span.after, end=span.end, pinned_from=pinned_from
        )
        return None if loss is None else self._lost(loss)

    def _lost(self, loss: Loss) -> RejectedEntry:
        if self._fails:
            raise DataLossError(
                f"{self._span.topic_partition}: {loss.sentence()}; to record that in rejects and go on, "
                "set failOnDataLoss (fail_on_data_loss) to false"
            )
        return RejectedEntry(loss.first, b"", DATA_LOSS, loss.sentence())

    def _taken(self) -> Taken:
        if self._last is None:
            return Taken(self._span.after, self._span.after_index)
        try:
            return Taken(self._last.last, read_stamp(self._last.last_entry.entry).index)
        except CorruptEntryError:
            return Taken(self._last.last)


def _first_index(entry: EntryReceived) -> int | None:
    try:
        index = read_stamp(entry.entry).index
    except CorruptEntryError:
        return None
    return None if index is None else index - index_count(entry.entry) + 1


def _parts(span: EntryRange) -> dict[Position, BatchRange]:
    """The entries of a range of which not every message belongs to it."""
    parts = {}
    if span.after_batch_index is not None:
        parts[span.after.next] = BatchRange(after=span.after_batch_index)
    if span.end_batch_index is not None:
        parts[span.end] = replace(parts.get(span.end, WHOLE_BATCH), until=span.end_batch_index)
    return parts
