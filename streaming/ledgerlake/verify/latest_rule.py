"""Which row a table with the latest messages has to have for each key. Pure.

Within a topic partition the position decides. A delayed message counts from its delivery on: it is
later than a plain one if it was due at or after that one's time. Between topic partitions the time
decides. But a message of a later micro-batch is later whatever its time, and nothing tells the
micro-batch of a message afterwards. So of several topic partitions the last message of each may be
the latest, and so may a plain one beside a delayed one that was due later. A table that has another
one of these than the time says is undecided, not wrong. So is a key with a message that repeats:
nothing tells when its last occurrence was delivered. If messages of topic partitions that were not
read come into the table too, one of them may have deleted any key that has no row.

Keys are known by hashes, topic partitions by numbers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    Messages = NDArray[np.void]

# ``time_us`` is that of the delivery, if the message was delayed, else the broker's; 0 if it is not
# known. ``is_uncertain``: it may not count for the table.
MESSAGE = np.dtype(
    [
        ("key", "S16"),
        ("partition", np.int64),
        ("ledger_id", np.int64),
        ("entry_id", np.int64),
        ("batch_index", np.int64),
        ("time_us", np.int64),
        ("was_delayed", bool),
        ("is_deletion", bool),
        ("is_uncertain", bool),
    ]
)
# The time of a message that repeats: none is later.
REPEATS_US = 2**62
NO_MESSAGES: Messages = np.empty(0, dtype=MESSAGE)

_POSITION = ["ledger_id", "entry_id", "batch_index"]

# Messages are kept until there are so many, or twice as many as keys.
_LEAST_MESSAGES = 100_000

RowPlace = tuple[int, int]


class Finding(Enum):
    """The finding on a key: the row is the right one; there is no row; the row is not the latest
    one, or belongs to no message; the topic no longer has its message; its messages were read for
    other tables; or nothing can tell.
    """

    RIGHT = "right"
    MISSING = "missing"
    OUTDATED = "outdated"
    TRIMMED = "trimmed"
    EARLIER = "earlier"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Span:
    """The entries of a topic partition that decide: the first one, None if no entry was read, and
    the last one. Earlier ones are gone, or were read when others counted for the table.
    """

    first: RowPlace | None
    end: RowPlace


class LatestMessages:
    """The messages of one topic partition that may be the latest of their keys: the last plain one
    and the last delayed one of each.
    """

    def __init__(self) -> None:
        self._kept = NO_MESSAGES
        self._added: list[Messages] = []
        self._count = 0

    def __len__(self) -> int:
        """Return how many are known; of those that were added last none is counted yet."""
        return len(self._kept)

    def add(self, messages: Messages) -> None:
        self._added.append(messages)
        self._count += len(messages)
        if self._count > max(_LEAST_MESSAGES, len(self._kept)):
            self.last_of_each()

    def last_of_each(self) -> Messages:
        """Return them."""
        messages = np.concatenate([self._kept, *self._added])
        time_us = np.where(messages["was_delayed"], messages["time_us"], 0)
        position = [messages[name] for name in reversed(_POSITION)]
        order = np.lexsort((*position, time_us, messages["was_delayed"], messages["key"]))
        in_order = messages[order]
        is_last = np.ones(len(in_order), dtype=bool)
        same = (in_order["key"][1:] == in_order["key"][:-1]) & (
            in_order["was_delayed"][1:] == in_order["was_delayed"][:-1]
        )
        is_last[:-1] = ~same
        self._kept, self._added, self._count = in_order[is_last], [], 0
        return self._kept


def judge(
    messages: Messages, rows: Messages, spans: Mapping[int, Span], *, has_unread: bool = False
) -> Counter[Finding]:
    """Compare the rows of a table with the last messages of all topic partitions; return how many
    keys have which finding.

    Args:
        messages: see ``LatestMessages``.
        rows: one for each key.
        spans: by topic partition; none of one that was not read.
        has_unread: messages of topic partitions that were not read come into the table too.
    """
    findings: Counter[Finding] = Counter()
    messages, rows = np.sort(messages, order="key"), np.sort(rows, order="key")
    # Almost all keys have one message, and its row.
    keys, first, count = np.unique(messages["key"], return_index=True, return_counts=True)
    place, there = _find(rows["key"], keys)
    only = messages[first]
    is_same = there.copy()
    for name in ("partition", *_POSITION):
        is_same[there] &= rows[name][place[there]] == only[name][there]
    is_right = (count == 1) & ~only["is_uncertain"] & np.where(only["is_deletion"], ~there, is_same)
    findings[Finding.RIGHT] += int(is_right.sum())
    for number in np.flatnonzero(~is_right).tolist():
        of_key = messages[first[number] : first[number] + count[number]]
        row = rows[place[number]] if there[number] else None
        finding = judge_key(list(of_key), row, spans)
        if finding == Finding.MISSING and has_unread:
            finding = Finding.UNDECIDED
        findings[finding] += 1
    _, is_known = _find(keys, rows["key"])
    return findings + _without_messages(rows[~is_known], spans)


def _without_messages(rows: Messages, spans: Mapping[int, Span]) -> Counter[Finding]:
    """Return the findings of keys without messages on the topic: on a broker that trims these
    are most.
    """
    findings: Counter[Finding] = Counter()
    for partition in np.unique(rows["partition"]).tolist():
        of_partition = rows[rows["partition"] == partition]
        span = spans.get(partition)
        is_trimmed = np.ones(len(of_partition), dtype=bool)
        if span is not None and span.first is not None:
            is_trimmed = _is_before(of_partition, span.first)
        findings[Finding.TRIMMED] += int(is_trimmed.sum())
        for row in of_partition[~is_trimmed]:
            findings[judge_key([], row, spans)] += 1
    return findings


def _is_before(rows: Messages, place: RowPlace) -> NDArray[np.bool_]:
    ledger_id, entry_id = place
    is_before: NDArray[np.bool_] = (rows["ledger_id"] < ledger_id) | (
        (rows["ledger_id"] == ledger_id) & (rows["entry_id"] < entry_id)
    )
    return is_before


def judge_key(messages: Sequence[Any], row: Any, spans: Mapping[int, Span]) -> Finding:
    """Return the finding on a key.

    Args:
        messages: the last ones of each topic partition.
        row: the table's row; None if the table has no row of the key.
    """
    if all(_is_trimmed(known, spans) for known in (*messages, *(() if row is None else (row,)))):
        return Finding.EARLIER if messages else Finding.TRIMMED
    is_trimmed = row is not None and _is_trimmed(row, spans)
    if row is not None and not is_trimmed and _place(row) > spans[int(row["partition"])].end:
        return Finding.UNDECIDED
    possible = _possible([*messages, row] if is_trimmed else messages)
    if any(message["is_uncertain"] for message in possible):
        return Finding.UNDECIDED
    latest = max(
        possible, key=lambda message: (message["time_us"], message["was_delayed"]), default=None
    )
    if row is None:
        if latest is not None and latest["is_deletion"]:
            return Finding.RIGHT
        return (
            Finding.UNDECIDED
            if any(message["is_deletion"] for message in possible)
            else Finding.MISSING
        )
    own = [message for message in possible if _is_same(message, row) and not message["is_deletion"]]
    if not own:
        return Finding.OUTDATED
    if is_trimmed:
        return Finding.TRIMMED
    return Finding.RIGHT if latest is own[0] else Finding.UNDECIDED


def _possible(messages: Sequence[Any]) -> list[Any]:
    """Return the messages of a key that may be the latest one."""
    possible = []
    for partition in sorted({int(message["partition"]) for message in messages}):
        of_partition = [message for message in messages if message["partition"] == partition]
        plain = max(
            (message for message in of_partition if not message["was_delayed"]),
            key=_position,
            default=None,
        )
        # It may have left with a later micro-batch than a plain message that came after it was due.
        delayed = max(
            (message for message in of_partition if message["was_delayed"]),
            key=lambda message: (message["time_us"], _position(message)),
            default=None,
        )
        possible += [message for message in (plain, delayed) if message is not None]
    return possible


def _is_trimmed(row: Any, spans: Mapping[int, Span]) -> bool:
    """Return whether the topic does not have the row's message any more, or was not read."""
    span = spans.get(int(row["partition"]))
    return span is None or span.first is None or _place(row) < span.first


def _is_same(message: Any, row: Any) -> bool:
    return bool(message["partition"] == row["partition"]) and _position(message) == _position(row)


def _position(message: Any) -> tuple[int, int, int]:
    return int(message["ledger_id"]), int(message["entry_id"]), int(message["batch_index"])


def _place(row: Any) -> RowPlace:
    return int(row["ledger_id"]), int(row["entry_id"])


def _find(keys: NDArray[Any], wanted: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where the wanted ones are in sorted keys, and which of them are there."""
    places = np.searchsorted(keys, wanted)
    there = places < len(keys)
    there[there] = keys[places[there]] == wanted[there]
    return places, there
