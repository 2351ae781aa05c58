"""Messages of one topic as rows of a table of records, in a task."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.decode.record_rows import record_rows
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.decode.single_entry import single_entries
from ledgerlake.errors import SetupError
from ledgerlake.source.value_schemas import schemas_of
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.value_schema import NO_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.decode.record_rows import Misfit
    from ledgerlake.operators.results import RecordSettings


_PART_CELLS = 4_000_000


class RecordRows:
    """Converts the messages of a topic.

    Args:
        stops: a message that does not fit ends the task.
    """

    def __init__(self, topic: str, client: ClientSettings, records: RecordSettings, *, stops: bool) -> None:
        self._topic = topic
        self._stops = stops
        self._record = records.record
        self._part_rows = max(1, _PART_CELLS // (_columns(self._record) + 1))
        self._of_version = schemas_of(client, topic, records.registered.get(topic, ""))
        self._newest_version = records.newest_version(topic)

    def of(self, messages: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, list[RejectedEntry]]]:
        """Yield rows of messages, and those that do not fit, in parts: a message of a few bytes may
        have thousands of columns.

        Raises:
            SetupError: a message does not fit, and that is to end the stream.
            BrokerError, TransportError: a version of the schema cannot be read.
        """
        for start in range(0, messages.num_rows, self._part_rows):
            yield self._of_part(messages.slice(start, self._part_rows))

    def _of_part(self, messages: pa.RecordBatch) -> tuple[pa.RecordBatch, list[RejectedEntry]]:
        newest = NO_SCHEMA if self._newest_version is None else self._of_version(self._newest_version) or NO_SCHEMA
        rows, misfits = record_rows(messages, self._of_version, newest, self._record)
        if not misfits:
            return rows, []
        places = messages.select(["ledger_id", "entry_id", "batch_index"]).to_pylist()
        if self._stops:
            raise self._error(misfits[0], places[misfits[0].row])
        entries = single_entries(messages.take(pa.array([misfit.row for misfit in misfits])))
        return rows, [
            RejectedEntry(
                Position(place["ledger_id"], place["entry_id"]),
                entry,
                misfit.reason,
                misfit.detail,
                place["batch_index"],
            )
            for misfit, entry in zip(misfits, entries, strict=True)
            for place in (places[misfit.row],)
        ]

    def _error(self, misfit: Misfit, place: dict[str, int]) -> SetupError:
        message_id = Position(place["ledger_id"], place["entry_id"])
        return SetupError(
            f"the message {message_id} of {self._topic} does not fit the table ({misfit.reason}: {misfit.detail}); correct the "
            'topic\'s schema, or set [delta] on_mismatch = "reject" to go on'
        )


def _columns(kind: pa.DataType) -> int:
    """Return the number of columns of a type, with those inside others."""
    if pa.types.is_struct(kind):
        return 1 + sum(_columns(field.type) for field in kind)
    if pa.types.is_list(kind):
        return 1 + _columns(kind.value_type)
    return 1 + _columns(kind.item_type) if pa.types.is_map(kind) else 1
