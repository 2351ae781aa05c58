"""Behind the stateful stage: rows of ``FLOW`` become outcomes again, and outcomes become messages or rejects."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.client.topics import join_partition
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import ENTRIES
from ledgerlake.errors import CorruptEntryError
from ledgerlake.operators.assembly import Assembled, Entry, Outcome, Rejected
from ledgerlake.operators.rows import Standing, standing_from_json
from ledgerlake.source.partition_reader import Piece, read_again
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ledgerlake.client.cluster import ClientSettings


def read_flow(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[TopicPartition, Outcome | Piece | Standing]]:
    """What the rows say, in their order; each is to be used up before the next."""
    rows = (row for batch in batches for number in range(batch.num_rows) for row in batch.slice(number, 1).to_pylist())
    for row in rows:
        source = TopicPartition(row["topic"], row["partition"])
        if row["kind"] == "report":
            yield source, standing_from_json(row["note"])
        elif row["kind"] == ENTRIES:
            yield source, Piece(ENTRIES, memoryview(row["entry"]), json.loads(row["note"]))
        elif row["kind"] == "reject":
            yield source, Rejected(row["note"], [(Position(row["ledger_id"], row["entry_id"]), row["entry"])])
        else:
            yield source, _message(row, rows)


def _message(header: dict[str, Any], rows: Iterator[dict[str, Any]]) -> Assembled:
    note = json.loads(header["note"])
    positions = tuple(Position(**one) for one in note["positions"])
    if note["read_again"]:
        return Assembled(positions, None)
    # Taken now, since the rows behind must be reached also when the message is given up half-way.
    entries = [next(rows)["entry"] for _ in positions]
    return Assembled(positions, _emptying(entries))


def _emptying(entries: list[bytes | None]) -> Iterator[bytes | None]:
    """The entries in order, each let go of once it was used."""
    entries.reverse()
    while entries:
        yield entries.pop()


class OutcomeDecoder:
    """Outcomes of one topic partition as rows; reads from the topic what nobody holds any more."""

    def __init__(self, source: TopicPartition, client: ClientSettings, max_message_bytes: int) -> None:
        self._source = source
        self._client = client
        self._max_message_bytes = max_message_bytes

    def decode(self, outcome: Outcome) -> pa.RecordBatch | list[RejectedEntry]:
        """A row of ``schema.MESSAGES``, or what is no message.

        Raises:
            BrokerError, TransportError: entries had to be read again and could not.
        """
        if isinstance(outcome, Rejected):
            return [RejectedEntry(*one, outcome.reason) for one in outcome.entries]
        entries = self._read_again(outcome.positions) if outcome.entries is None else outcome.entries
        try:
            return decode_large(_all_there(entries), outcome.positions, self._source, self._max_message_bytes)
        except CorruptEntryError as error:
            return [RejectedEntry(one, None, error.reason, error.message) for one in outcome.positions]

    def whole(self, rejected: list[RejectedEntry]) -> Iterator[pa.Table]:
        """Rows of ``schema.REJECTS``, one by one; entries whose bytes are not at hand are read from the topic.

        Raises:
            As ``decode``.
        """
        in_order = sorted(rejected, key=lambda one: one.position)
        again = self._read_again([one.position for one in in_order if one.entry is None])
        for one in in_order:
            found = replace(one, entry=next(again)) if one.entry is None else one
            yield reject_rows([found], self._source)

    def _read_again(self, positions: Iterable[Position]) -> Iterator[bytes | None]:
        return read_again(self._client, join_partition(self._source.topic, self._source.partition), positions)


def _all_there(entries: Iterable[Entry | None]) -> Iterator[Entry]:
    for entry in entries:
        if entry is None:
            raise CorruptEntryError("the topic no longer has all of its chunks", reason="chunk_trimmed")
        yield entry
