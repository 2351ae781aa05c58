"""The digest of a micro-batch's outcome for one topic partition. It is committed with the
micro-batch. A repeat with another outcome is refused, because its state would not fit the table.

The digest counts the rows, the rejects, the released delayed messages and the messages for the
outbox, and has a hash of their positions. Hashes are added up. So the order of rows does not count,
nor how they were cut into bundles, tasks and files.

Rules kept here:
  - Rejects that depend on a table (its columns, its query) are left out: their messages count as
    rows, whatever the table makes of them.
  - Some rejects depend on what lies outside of the stream: on the topic's retention, on keys, on
    the user's function. With some options all messages do: of a compacted topic, fewer are left
    later. With such rejects or options in one of two runs, only released messages are compared that
    waited before the micro-batch: they come from its state.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Collection

    from numpy.typing import NDArray

_OF_TABLES = [reason for reason, declared in REASONS.items() if declared.is_of_a_table]
_OF_SURROUNDINGS = frozenset(reason for reason, declared in REASONS.items() if declared.may_change)

# An odd number without a pattern, from the fraction of the golden ratio.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_HALF = np.uint64(32)

# Sums have 63 bits, which every reader of JSON holds.
_MASK = 2**63 - 1


@dataclass(frozen=True)
class Tally:
    """The number of some rows, and the sum of the hashes of their keys, modulo 2^63."""

    count: int = 0
    digest: int = 0

    @classmethod
    def of(cls, *key_columns: NDArray[np.int64]) -> Tally:
        """Return the tally of rows by the columns of their keys, all of the same length."""
        hashes = np.zeros(len(key_columns[0]), dtype=np.uint64)
        for column in key_columns:
            hashes ^= column.astype(np.int64, copy=False).view(np.uint64)
            hashes *= _FACTOR
            hashes ^= hashes >> _HALF
        return cls(len(hashes), int(hashes.sum(dtype=np.uint64)) & _MASK)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, (self.digest + other.digest) & _MASK)

    def __str__(self) -> str:
        return f"{self.count}:{self.digest:016x}"

    @classmethod
    def parse(cls, text: str) -> Tally:
        """Read what ``str`` wrote."""
        count, digest = text.split(":")
        return cls(int(count), int(digest, 16))


def message_tally(messages: pa.RecordBatch) -> Tally:
    """Return the tally of rows of ``schema.MESSAGES``, by their positions."""
    names = ("ledger_id", "entry_id", "batch_index")
    return Tally.of(*(messages[name].to_numpy() for name in names))


def reject_tally(rejects: pa.Table) -> Tally:
    """Return the tally of rows of ``schema.REJECTS``, by their entries and reasons."""
    is_counted = pc.invert(pc.is_in(rejects["reason"], pa.array(_OF_TABLES)))
    counted = (
        rejects.select(["ledger_id", "entry_id", "reason"]).filter(is_counted).combine_chunks()
    )
    if not counted.num_rows:
        return Tally()
    reasons = pc.dictionary_encode(counted["reason"].chunk(0))
    numbers = np.array([zlib.crc32(reason.encode()) for reason in reasons.dictionary.to_pylist()])
    ids = (counted[name].to_numpy() for name in ("ledger_id", "entry_id"))
    return Tally.of(*ids, numbers[reasons.indices.to_numpy()])


@dataclass(frozen=True)
class OutcomeDigest:
    """The digest of an outcome. ``waited`` are the released messages that were stored before the
    range of the micro-batch. ``may_differ``: messages or rejects depend on what lies outside of the
    stream.
    """

    rows: Tally = Tally()
    rejects: Tally = Tally()
    released: Tally = Tally()
    outbox: Tally = Tally()
    waited: Tally = Tally()
    may_differ: bool = False

    def __add__(self, other: OutcomeDigest) -> OutcomeDigest:
        return OutcomeDigest(
            self.rows + other.rows,
            self.rejects + other.rejects,
            self.released + other.released,
            self.outbox + other.outbox,
            self.waited + other.waited,
            self.may_differ or other.may_differ,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the digest for a commit; a tally of nothing is left out."""
        tallies = {field.name: getattr(self, field.name) for field in _TALLIES}
        data: dict[str, Any] = {name: str(tally) for name, tally in tallies.items() if tally.count}
        return data | {"may_differ": True} if self.may_differ else data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OutcomeDigest:
        """Read a digest.

        Raises:
            ValueError, TypeError, AttributeError: it is damaged.
        """
        tallies = {field.name: Tally.parse(data.get(field.name, "0:0")) for field in _TALLIES}
        return cls(**tallies, may_differ=bool(data.get("may_differ")))

    def difference(self, repeat: OutcomeDigest) -> str:
        """Return what a repeat has otherwise, for people; empty if it has the same outcome."""
        compared = _OF_STATE if self.may_differ or repeat.may_differ else _TALLIES
        for field in compared:
            before, now = getattr(self, field.name), getattr(repeat, field.name)
            if before.count != now.count:
                return f"{before.count} {_NAMES[field.name]}, and now {now.count}"
            if before != now:
                return f"{before.count} {_NAMES[field.name]}, and now as many others"
        return ""


_TALLIES = [field for field in fields(OutcomeDigest) if field.name != "may_differ"]
_OF_STATE = [field for field in _TALLIES if field.name == "waited"]
_NAMES = {
    "rows": "messages",
    "rejects": "rejects",
    "released": "released delayed messages",
    "outbox": "messages for [deliver]",
    "waited": "released messages that had waited",
}


def depends_on_surroundings(reasons: Collection[str]) -> bool:
    """Return whether some of the reasons of rejects depend on what lies outside of the stream."""
    return not _OF_SURROUNDINGS.isdisjoint(reasons)
