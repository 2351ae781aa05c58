"""The controls in a task: the schedules, pauses and cancels that entries name for other messages.

The properties for that are in an entry's metadata, which is neither compressed nor encrypted. So
they hold also if the payload cannot be read and the entry is a reject, for example because no key
decrypts it. The properties of a batch are in its payload: if that cannot be read, nobody knows
them. A delayed entry that is rejected before it waits has no effect.

An entry whose properties cannot be used is a reject for that alone, whether its payload can be read
or not. Only ``cancel_refused`` is a reject beside another outcome: the entry is also written, or
also a reject because its payload cannot be read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.decode import schema
from ledgerlake.decode.reference import unread_row
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.schedule_events import ScheduleEvents
from ledgerlake.operators.scheduled import (
    find_in_frames,
    find_in_messages,
    refusal_of_large,
    schedule_at_once,
)
from ledgerlake.reasons import CANCEL_REFUSED
from ledgerlake.schedules.cancel_messages import TaskCancels
from ledgerlake.wire.schedules import CANCEL_PROPERTY, SENDER_PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.assembly.assembler import Assembled, Entry
    from ledgerlake.decode.messages import BatchRange, Decoded, TopicPartition
    from ledgerlake.decode.reference import Row
    from ledgerlake.operators.scheduled import DelayedFrames
    from ledgerlake.schedules.cancels import Cancel
    from ledgerlake.source.pieces import SingleEntry

_NAMES = re.compile(
    b"|".join(re.escape(name.encode()) for name in (*SENDER_PROPERTIES, CANCEL_PROPERTY))
)


@dataclass(frozen=True)
class Effects:
    """The messages that are delivered, and the cancels by key and message id that are accepted.
    ``rejects`` are the other messages, and the entries of cancels beyond the limits. ``refused``
    are the message ids of those among them whose payload cannot be read.
    """

    messages: pa.RecordBatch
    cancels: list[Cancel]
    rejects: list[RejectedEntry]
    refused: pa.Array


class TaskControls:
    """The schedules, pauses and cancels of one topic partition in a task: what its entries say of
    other messages. ``rows`` hands the events of schedules and pauses on to the stateful stage.
    """

    def __init__(self, *, delays_messages: bool) -> None:
        self._delays_messages = delays_messages
        self._at_once, self._arriving = ScheduleEvents(), ScheduleEvents()
        self._cancels = TaskCancels()

    def arriving(self, frames: memoryview, first_entry: BatchRange) -> DelayedFrames:
        """Take delayed entries, which wait from now on."""
        return find_in_frames(frames, first_entry, self._arriving)

    def at_once(self, decoded: Decoded, frames: Entry) -> tuple[Effects, pa.RecordBatch]:
        """Take entries that are delivered at once; return the effects, and the rows of rejects that
        stay.

        Args:
            frames: the ``MESSAGE`` frames that they came in.
        """
        rejected = decoded.rejects.select(["ledger_id", "entry_id", "entry"]).to_pydict().values()
        unread = list(self._unread(zip(*rejected, strict=True)))
        effects = self._take(decoded.messages, unread, frames)
        is_refused = pc.is_in(decoded.rejects["message_id"], effects.refused)
        return effects, decoded.rejects.filter(pc.invert(is_refused))

    def rejected(self, rejected: RejectedEntry) -> Effects:
        """Take an entry that was rejected when it was read; its own reject is among the others."""
        none = pa.RecordBatch.from_pylist([], schema.MESSAGES)
        position = rejected.position
        unread = self._unread([(position.ledger_id, position.entry_id, rejected.entry or b"")])
        effects = self._take(none, list(unread), None)
        rejects = [replace(reject, entry=rejected.entry) for reject in effects.rejects]
        return replace(effects, rejects=rejects if len(effects.refused) else [rejected, *rejects])

    def refused(self, single: SingleEntry) -> RejectedEntry | None:
        """Return the reject of a chunk or a marker whose properties cannot be used."""
        refusal = refusal_of_large(single.entry, delays_messages=self._delays_messages)
        return None if refusal is None else RejectedEntry(single.position, single.entry, *refusal)

    def accepts(self, message: Assembled) -> bool:
        """Take a large message; return False if there is no room for the event of its schedule."""
        scheduled = schedule_at_once(message)
        return scheduled is None or self._at_once.add(scheduled)

    def rows(
        self, topic_partition: TopicPartition, *, all_events: bool = False
    ) -> Iterator[pa.RecordBatch]:
        """Yield rows for the stateful stage; see ``ScheduleEvents.rows``."""
        for events in (self._at_once, self._arriving):
            yield from events.rows(topic_partition, all_events=all_events)

    @property
    def has_events(self) -> bool:
        """Return whether an entry says something of a schedule or a pause."""
        return self._at_once.is_any or self._arriving.is_any

    def _take(self, messages: pa.RecordBatch, unread: list[Row], frames: Entry | None) -> Effects:
        together = _in_order(messages, unread) if unread else messages
        delivered, rejects = find_in_messages(
            together, frames, self._at_once, delays_messages=self._delays_messages
        )
        cancels, beyond = self._cancels.take(delivered)
        rejects += [RejectedEntry(position, None, CANCEL_REFUSED) for position in beyond]
        ids = pa.array([row["message_id"] for row in unread], pa.string())
        refused = ids
        if unread:
            refused = ids.filter(pc.invert(pc.is_in(ids, delivered["message_id"])))
            delivered = delivered.filter(pc.invert(pc.is_in(delivered["message_id"], ids)))
        return Effects(delivered, cancels, rejects, refused)

    def _unread(self, rejected: Iterable[tuple[int, int, Entry]]) -> Iterator[Row]:
        """Yield the messages whose payload cannot be read and that say something."""
        for ledger_id, entry_id, entry in rejected:
            if _NAMES.search(entry) is None:
                continue
            try:
                row = unread_row(memoryview(entry), ledger_id, entry_id)
            except CorruptEntryError:
                continue
            if row is not None and not (self._delays_messages and row["deliver_at"]):
                yield row


def _in_order(messages: pa.RecordBatch, unread: list[Row]) -> pa.RecordBatch:
    """Return messages in the order of the topic, so that which of them are refused does not depend
    on how the entries were cut.
    """
    together = pa.Table.from_batches(
        [messages, pa.RecordBatch.from_pylist(unread, messages.schema)]
    )
    order = np.lexsort(
        [together[name].to_numpy() for name in ("batch_index", "entry_id", "ledger_id")]
    )
    (batch,) = together.take(pa.array(order)).combine_chunks().to_batches()
    return batch
