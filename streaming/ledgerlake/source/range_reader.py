"""Reads ranges of entries, and joins them to bundles. Losses and entries that cannot be read come
between the bundles.

There are three special cases: only some messages of the first or last entry belong to the range,
entries may be lost (``loss_watch``), and a function of the user may read entries in its own format
(PIP-96).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import shared_cluster
from ledgerlake.client.reader import EntryReader, open_together
from ledgerlake.decode.messages import WHOLE_BATCH, BatchRange
from ledgerlake.decode.payloads import process_entry
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.scan import scan
from ledgerlake.errors import CorruptEntryError, TopicNotFoundError
from ledgerlake.runtime.plugins import load
from ledgerlake.source.loss_watch import LossWatch
from ledgerlake.source.read_until import next_together_until
from ledgerlake.wire import commands

if TYPE_CHECKING:
    from collections.abc import Collection, Generator, Iterable, Iterator

    from ledgerlake.decode.payloads import MessagePayloadProcessor
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange
    from ledgerlake.wire.connection import EntryReceived, Received
    from ledgerlake.wire.message_id import Position

BUNDLE_BYTES = 1024 * 1024

# The frames of consecutive entries, and which messages of the first entry belong to the range.
Frames = bytes | bytearray | memoryview
Bundle = tuple[Frames, BatchRange]


def read_ranges(
    options: SourceOptions, spans: list[EntryRange]
) -> Generator[tuple[EntryRange, Bundle | RejectedEntry | None], None, None]:
    """Yield the entries of ranges, one range after another, each after None for its begin. Their
    readers are opened together.

    Raises:
        DataLossError: a topic no longer has some of them, and the options say so.
    """
    readers = [
        EntryReader(
            shared_cluster(options.first_client if span.is_first else options.client),
            span.topic_partition,
            span.after,
            scan=scan,
        )
        for span in spans
    ]
    try:
        if len(spans) > 1:
            open_together(
                [reader for reader, span in zip(readers, spans, strict=True) if span.has_entries]
            )
        for span, reader in zip(spans, readers, strict=True):
            yield span, None
            if span.has_entries:
                yield from ((span, bundle) for bundle in _read_range(options, span, reader))
                reader.start_close()
    finally:
        for reader in readers:
            reader.close()


def _read_range(
    options: SourceOptions, span: EntryRange, reader: EntryReader
) -> Generator[Bundle | RejectedEntry, None, None]:
    watch, partly, buffer = LossWatch(options, span), batch_ranges(span), _BundleBuffer()
    process = (
        partial(_process, options, load(options.message_payload_processor))
        if options.message_payload_processor
        else None
    )
    for received in _received(reader, span.end, watch):
        loss = watch.take(received)
        if loss is not None:
            yield from buffer.take()
            yield loss
        for entries in _cut(received, partly) if process is None else received.each():
            batch_range = partly.get(entries.position, WHOLE_BATCH) if partly else WHOLE_BATCH
            if batch_range is not WHOLE_BATCH:
                yield from buffer.take()
            frames = entries.frames if process is None else process(entries.first_entry)
            if isinstance(frames, RejectedEntry):
                yield from buffer.take()
                if batch_range.includes_whole(frames.entry or b""):
                    yield frames
            elif frames:
                buffer.add(frames, batch_range)
            if buffer.size >= BUNDLE_BYTES:
                yield from buffer.take()
    yield from buffer.take()
    loss = watch.end()
    if loss is not None:
        yield loss


def _received(reader: EntryReader, end: Position, watch: LossWatch) -> Iterator[Received]:
    """Yield the entries up to the end; a topic that is deleted has no more."""
    try:
        while (received := next_together_until(reader, end)) is not None or watch.has_more(reader):
            if received is None:
                # The topic is looked up again for the next entry.
                reader.close()
            else:
                yield received
    except TopicNotFoundError:
        watch.topic_is_gone = True


def _cut(received: Received, positions: Collection[Position]) -> Iterable[Received]:
    """Yield entries one by one if the entry at one of the positions is among them, else
    together.
    """
    if any(received.position <= position <= received.last for position in positions):
        return received.each()
    return (received,)


class _BundleBuffer:
    """Frames that are collected until they make a bundle."""

    def __init__(self) -> None:
        self.size = 0
        self._frames: list[Frames] = []
        self._first_entry = WHOLE_BATCH

    def add(self, frames: Frames, batch_range: BatchRange) -> None:
        if not self._frames:
            self._first_entry = batch_range
        self._frames.append(frames)
        self.size += len(frames)

    def take(self) -> Iterator[Bundle]:
        """Yield all frames as one bundle, if there are any."""
        frames, self._frames, self.size = self._frames, [], 0
        if frames:
            yield frames[0] if len(frames) == 1 else b"".join(frames), self._first_entry


def _process(
    options: SourceOptions, processor: MessagePayloadProcessor, entry: EntryReceived
) -> bytes | bytearray | RejectedEntry:
    """Return an entry's frame after the user's function; empty if the function found no message."""
    try:
        changed = process_entry(
            processor, entry.entry, entry.ledger_id, entry.entry_id, **options.decoding
        )
    except CorruptEntryError as error:
        return RejectedEntry(entry.position, bytes(entry.entry), error.reason, error.message)
    if not changed:
        return entry.frames if changed is None else b""
    return commands.message(entry.consumer_id, entry.ledger_id, entry.entry_id, changed)


def batch_ranges(span: EntryRange) -> dict[Position, BatchRange]:
    """Return the entries that are partly in the range, with their messages in it."""
    partly = {}
    if span.after_batch_index is not None:
        partly[span.after.next] = BatchRange(after=span.after_batch_index)
    if span.end_batch_index is not None:
        partly[span.end] = replace(partly.get(span.end, WHOLE_BATCH), until=span.end_batch_index)
    return partly
