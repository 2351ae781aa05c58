"""Compares the messages of topics with the rows of tables by their keys. Pure.

Both have a key: topic partition, ledger, entry, batch index and broker index. Messages and rows
come mostly in order, so a record stands for a run of them: ``count`` keys of one entry; both of
their indexes rise by one. Runs of an entry that overlap are compared key by key.

All records of one entry have one hash, so the records of some hashes can be compared by themselves,
and the results are added up (see ``hashed_parts``).

The tables of a topic partition are compared in groups: a message has to be in at least one table of
each group. A table with all messages of the topic is a group by itself; if there is none, all its
tables are one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ledgerlake.verify.hashed_parts import Records
    from ledgerlake.verify.table_rows import Keys

    Counts = NDArray[np.int64]
    Mask = NDArray[np.bool_]


class Kind(IntEnum):
    """A row of a table; a message; an entry whose messages have its position and no more of a key,
    with the last chunk of a large message, or one that cannot be decoded today; or a chunk that no
    table can have.
    """

    ROW = 0
    MESSAGE = 1
    ENTRY = 2
    CHUNK = 3


# ``partition`` and ``table`` are numbers. ``table``, ``group`` and ``due_us`` are of rows only; the
# group is -1 if the row is in none. ``is_not_due``: the message is not due. A broker index of -1
# does not rise: the broker gave none.
RECORD = np.dtype(
    [
        ("kind", np.int8),
        ("is_not_due", bool),
        ("group", np.int16),
        ("partition", np.int32),
        ("table", np.int32),
        ("batch_index", np.int32),
        ("count", np.int32),
        ("ledger_id", np.int64),
        ("entry_id", np.int64),
        ("broker_index", np.int64),
        ("due_us", np.int64),
    ]
)

_ENTRY = ("partition", "ledger_id", "entry_id")
_RUN = ("batch_index", "broker_index", "count")
# The occurrences of a message that repeats have one position, and each a time of its own.
_ROW = ("kind", "table", "due_us")

# Odd numbers with random bits.
_FACTORS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)


@dataclass(frozen=True)
class Compared:
    """What a comparison found. ``duplicate`` are rows beyond the first of one key, time and table.
    ``absent``, ``earlier`` and ``not_due`` are the messages that no table of a group has, by group
    and topic partition: those that are due and those that are not; of the due ones, ``earlier`` are
    those up to the earlier end.
    """

    duplicate: int
    absent: Counts
    earlier: Counts
    not_due: Counts


def message_records(partition: int, keys: Keys, *, is_not_due: bool) -> Records:
    """Return the records of messages that are not large."""
    records = _runs(partition, keys, np.zeros(len(keys), dtype=np.int64))
    records["kind"], records["is_not_due"] = Kind.MESSAGE, is_not_due
    return records


def entry_records(kind: Kind, partition: int, entries: Keys, *, is_not_due: bool) -> Records:
    """Return the records of entries or chunks.

    Args:
        entries: the ledger and the entry of each.
    """
    records = np.zeros(len(entries), dtype=RECORD)
    records["kind"], records["partition"], records["is_not_due"] = kind, partition, is_not_due
    records["count"] = 1
    records["ledger_id"], records["entry_id"] = entries.T
    return records


def row_records(
    table: int, group: int, partition: int, keys: Keys, due_us: NDArray[np.int64]
) -> Records:
    """Return the records of rows.

    Args:
        due_us: when the message of each was due; 0 if it was not delayed.
    """
    records = _runs(partition, keys, due_us)
    records["kind"], records["table"], records["group"] = Kind.ROW, table, group
    return records


def _runs(partition: int, keys: Keys, due_us: NDArray[np.int64]) -> Records:
    """Return a record for each run of keys with the same time."""
    ledger, entry, batch_index, broker_index = keys.T
    begins = np.ones(len(keys), dtype=bool)
    begins[1:] = (
        (ledger[1:] != ledger[:-1]) | (entry[1:] != entry[:-1]) | (due_us[1:] != due_us[:-1])
    )
    begins[1:] |= batch_index[1:] != batch_index[:-1] + 1
    begins[1:] |= broker_index[1:] != np.where(
        broker_index[:-1] < 0, broker_index[:-1], broker_index[:-1] + 1
    )
    first = np.flatnonzero(begins)
    records = np.zeros(len(first), dtype=RECORD)
    for name, column in zip(
        ("ledger_id", "entry_id", "batch_index", "broker_index"), keys.T, strict=True
    ):
        records[name] = column[first]
    records["partition"], records["due_us"] = partition, due_us[first]
    records["count"] = np.diff(first, append=len(keys))
    return records


def entry_hashes(records: Records) -> NDArray[np.uint64]:
    """Return the hash of each record's entry."""
    mixed = np.zeros(len(records), dtype=np.uint64)
    for name, factor in zip(_ENTRY, _FACTORS, strict=True):
        mixed ^= records[name].astype(np.uint64) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(32)
    return mixed * np.uint64(_FACTORS[0])


def compare(
    records: Records, groups: NDArray[np.int64], earlier_ends: NDArray[np.int64]
) -> Compared:
    """Compare all records of some entries.

    Args:
        groups: how many groups of tables each topic partition has.
        earlier_ends: ledger and entry up to which each topic partition was read for other tables;
            -1 if it was not.
    """
    records = _without_overlaps(_with_comparable_indexes(_in_order(records)))
    begins_entry = _differs(records, _ENTRY)
    begins_run = begins_entry | _differs(records, _RUN)
    is_row = records["kind"] == Kind.ROW
    duplicate = int(records["count"][is_row & ~begins_run & ~_differs(records, _ROW)].sum())
    entries, runs = _numbers(begins_entry), _numbers(begins_run)
    most = int(groups.max(initial=0))
    absent = np.zeros((most, len(groups)), dtype=np.int64)
    earlier, not_due = np.zeros_like(absent), np.zeros_like(absent)
    is_due, is_earlier = ~records["is_not_due"], _up_to(records, earlier_ends)
    for group in range(most):
        counts = is_row & (records["group"] == group)
        has_row = _has_any(runs, counts) & (records["kind"] != Kind.CHUNK)
        is_there = np.where(records["kind"] == Kind.ENTRY, _has_any(entries, counts), has_row)
        lacks = ~is_row & ~is_there & (groups[records["partition"]] > group)
        absent[group] = _by_partition(records[lacks & is_due & ~is_earlier], len(groups))
        earlier[group] = _by_partition(records[lacks & is_due & is_earlier], len(groups))
        not_due[group] = _by_partition(records[lacks & ~is_due], len(groups))
    return Compared(duplicate, absent, earlier, not_due)


def _up_to(records: Records, ends: NDArray[np.int64]) -> Mask:
    """Return a mask of the records up to the end of their topic partition."""
    ledger_id, entry_id = ends[records["partition"]].T
    is_before: Mask = (records["ledger_id"] < ledger_id) | (
        (records["ledger_id"] == ledger_id) & (records["entry_id"] <= entry_id)
    )
    return is_before


def _in_order(records: Records) -> Records:
    names = (*_ROW, *reversed(_RUN), *reversed(_ENTRY))
    return np.take(records, np.lexsort([records[name] for name in names]))


def _with_comparable_indexes(records: Records) -> Records:
    """Return the records without the broker's index of an entry if a record of that entry lacks it.
    A broker may have begun to show indexes after the rows were written, or no longer show them.
    """
    is_unknown = records["broker_index"] < 0
    has_unknown = _has_any(_numbers(_differs(records, _ENTRY)), is_unknown)
    if (has_unknown == is_unknown).all():
        return records
    records["broker_index"][has_unknown] = -1
    return _in_order(records)


def _without_overlaps(records: Records) -> Records:
    """Return the records with one for each key, if runs of their entry overlap and are not the
    same.
    """
    begins_entry = _differs(records, _ENTRY)
    overlaps = _differs(records, _RUN) & ~begins_entry
    overlaps[1:] &= records["batch_index"][1:] < (records["batch_index"] + records["count"])[:-1]
    if not overlaps.any():
        return records
    is_of_overlap = _has_any(_numbers(begins_entry), overlaps)
    overlapping = records[is_of_overlap]
    counts = overlapping["count"]
    single = np.repeat(overlapping, counts)
    numbers = np.arange(len(single)) - np.repeat(np.cumsum(counts) - counts, counts)
    single["batch_index"] += numbers
    single["broker_index"] += np.where(single["broker_index"] < 0, 0, numbers)
    single["count"] = 1
    return _in_order(np.concatenate([records[~is_of_overlap], single]))


def _differs(records: Records, names: tuple[str, ...]) -> Mask:
    """Return a mask of the records that differ from the one before."""
    differs = np.ones(len(records), dtype=bool)
    differs[1:] = False
    for name in names:
        differs[1:] |= records[name][1:] != records[name][:-1]
    return differs


def _numbers(begins: Mask) -> NDArray[np.int64]:
    return np.cumsum(begins, dtype=np.int64)


def _has_any(numbers: NDArray[np.int64], mask: Mask) -> Mask:
    """Return a mask of the records of whose number at least one is in a mask.

    Args:
        numbers: they rise from 1, by at most one.
    """
    has_any = np.zeros(len(numbers) + 1, dtype=bool)
    has_any[numbers[mask]] = True
    return has_any[numbers]


def _by_partition(records: Records, partitions: int) -> Counts:
    """Return the number of keys of each topic partition."""
    counted = np.bincount(records["partition"], weights=records["count"], minlength=partitions)
    return counted.astype(np.int64)
