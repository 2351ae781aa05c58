"""The effects of entries that are delivered at once on others: schedules, pauses and cancels.

The properties that say it are in an entry's metadata, which is neither compressed nor encrypted. So
they hold also if the payload cannot be read and the entry is a reject, for example because no key
decrypts it. The properties of a batch are in its payload: if that cannot be read, nobody knows
them. A delayed entry that is rejected before it waits has no effect.
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
from ledgerlake.operators.scheduled import find_in_messages
from ledgerlake.reasons import CANCEL_REFUSED
from ledgerlake.schedules.cancel_messages import TaskCancels
from ledgerlake.wire.schedules import CANCEL_PROPERTY, SENDER_PROPERTIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.assembly.assembler import Entry
    from ledgerlake.decode.messages import Decoded
    from ledgerlake.decode.reference import Row
    from ledgerlake.operators.schedule_events import ScheduleEvents
    from ledgerlake.schedules.cancels import Cancel

_NAMES = re.compile(
    b"|".join(re.escape(name.encode()) for name in (*SENDER_PROPERTIES, CANCEL_PROPERTY))
)


@dataclass(frozen=True)
class Effects:
    """The messages that are delivered, and the cancels by key and message id that are accepted.
    ``rejects`` are the other messages, and the entries of cancels beyond the limits.
    """

    messages: pa.RecordBatch
    cancels: list[Cancel]
    rejects: list[RejectedEntry]


class EffectsInTask:
    """Finds what the entries of one topic partition say in a task.

    Args:
        schedules: gets what they say of schedules.
    """

    def __init__(self, schedules: ScheduleEvents, *, delays_messages: bool) -> None:
        self._schedules = schedules
        self._delays_messages = delays_messages
        self._cancels = TaskCancels()

    def take(self, decoded: Decoded, frames: Entry) -> Effects:
        """Take entries that came in some frames."""
        rejected = decoded.rejects.select(["ledger_id", "entry_id", "entry"]).to_pydict().values()
        return self._take(decoded.messages, list(self._unread(zip(*rejected, strict=True))), frames)

    def take_rejected(self, rejected: RejectedEntry) -> Effects:
        """Take an entry that was rejected when it was read."""
        none = pa.RecordBatch.from_pylist([], schema.MESSAGES)
        position = rejected.position
        unread = self._unread([(position.ledger_id, position.entry_id, rejected.entry or b"")])
        effects = self._take(none, list(unread), None)
        return replace(
            effects, rejects=[replace(reject, entry=rejected.entry) for reject in effects.rejects]
        )

    def _take(self, messages: pa.RecordBatch, unread: list[Row], frames: Entry | None) -> Effects:
        together = _in_order(messages, unread) if unread else messages
        delivered, rejects = find_in_messages(
            together, frames, self._schedules, delays_messages=self._delays_messages
        )
        cancels, refused = self._cancels.take(delivered)
        rejects += [RejectedEntry(position, None, CANCEL_REFUSED) for position in refused]
        if unread:
            ids = pa.array([row["message_id"] for row in unread])
            delivered = delivered.filter(pc.invert(pc.is_in(delivered["message_id"], ids)))
        return Effects(delivered, cancels, rejects)

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
