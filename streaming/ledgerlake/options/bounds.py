"""What a read begins and ends at: texts of the user's, checked.

    earliest | latest | cursor      ``cursor`` is where the durable subscription stands; only a
                                    start
    MESSAGE_ID                      the first, or the last, message that is read
    after MESSAGE_ID                only a start
    before MESSAGE_ID               only an end
    2026-05-01T08:00:00+02:00       the first entry that the broker stored then or later; an end
                                    before it
    index N                         the message with that number of the broker's (PIP-70), counted
                                    from 0

Each may be said of all topics, or by topic or topic partition as JSON. An offset, as a checkpoint
holds it, is a start too.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, cast

from ledgerlake.client.topics import full_name
from ledgerlake.errors import UsageError
from ledgerlake.options.kinds import NUMBER
from ledgerlake.stored.offsets import PartitionOffset, from_json, time_text
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import (
    AFTER_ALL,
    BEFORE_ALL,
    AnyMessageId,
    MessageId,
    parse_message_id,
)

if TYPE_CHECKING:
    from collections.abc import Callable

# The times in milliseconds that a user may give: an earlier number is in seconds.
GIVEN_TIMES_MS = range(946_684_800_000, MAX_TIME_MS + 1)

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True)
class After:
    """A start after a message; the id alone is a start at the message."""

    message_id: AnyMessageId


@dataclass(frozen=True)
class Before:
    """An end before a message, where the id alone would be an end at it."""

    message_id: AnyMessageId


@dataclass(frozen=True)
class AtTime:
    """The first entry that was stored at a time or later: a start at it, an end before it."""

    time_ms: int


@dataclass(frozen=True)
class AtIndex:
    """The message with this number of the broker's: a start or an end at it."""

    index: int


Bound = (
    Literal["earliest", "latest", "cursor"]
    | AnyMessageId
    | After
    | Before
    | AtTime
    | AtIndex
    | PartitionOffset
)

# Serialised, ``MessageId.earliest`` and ``MessageId.latest`` are ids too.
_OF_CLIENTS: dict[AnyMessageId, Bound] = {
    MessageId(BEFORE_ALL.ledger_id, BEFORE_ALL.entry_id): "earliest",
    MessageId(AFTER_ALL.ledger_id, AFTER_ALL.entry_id): "latest",
}

# The bound of all topics, and the bounds of single topics by name.
Bounds = tuple[Bound | None, dict[str, Bound]]


def parse_bound(text: str, where: str) -> Bound:
    """``earliest``, ``latest``, ``cursor``, a message id, ``after`` or ``before`` and one, an ISO
    time with a zone, or ``index N``.
    """
    word = text.strip()
    if _ISO.match(word):
        return AtTime(parse_time_ms(word, where))
    if word.lower() in ("earliest", "latest", "cursor"):
        return cast("Bound", word.lower())
    first, _, rest = word.partition(" ")
    if first.lower() == "index":
        return AtIndex(parse_index(rest, where))
    beside = first.lower() if first.lower() in ("after", "before") else None
    try:
        message_id = parse_message_id(rest.strip() if beside else word)
    except UsageError as error:
        raise UsageError(
            f"{where}: {error.message}, an ISO time, index N, earliest or latest"
        ) from None
    if beside is None:
        return _OF_CLIENTS.get(message_id, message_id)
    return After(message_id) if beside == "after" else Before(message_id)


def parse_start(text: str, where: str) -> Bound:
    """A bound that a read can begin at.

    Raises:
        UsageError: it is none.
    """
    return _unless(
        Before,
        parse_bound(text, where),
        f"{where} cannot be '{text.strip()}'; write the id alone, or after",
    )


def parse_end(text: str, where: str) -> Bound:
    """A bound that a read can end at.

    Raises:
        UsageError: it is none.
    """
    if text.strip().lower() == "cursor":
        raise UsageError(f"{where} cannot be 'cursor', which is where a read begins")
    return _unless(
        After,
        parse_bound(text, where),
        f"{where} cannot be '{text.strip()}'; write the id alone, or before",
    )


def _unless(kind: type[After | Before], bound: Bound, refusal: str) -> Bound:
    if isinstance(bound, kind):
        raise UsageError(f"{refusal} and the id")
    return bound


def parse_time_ms(text: str, where: str) -> int:
    """A moment, as ISO with a zone or in milliseconds since 1970.

    Raises:
        UsageError: it is neither, has no zone, or is a number outside of ``GIVEN_TIMES_MS``.
    """
    word = text.strip()
    if NUMBER.fullmatch(word):
        return check_time_ms(int(word), word, where)
    try:
        moment = datetime.fromisoformat(word.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(
            f"{where}: '{word}' is no time; write for example 2026-05-01T08:00:00+02:00"
        ) from None
    if moment.tzinfo is None:
        example = moment.isoformat()
        raise UsageError(
            f"{where}: '{word}' has no zone; write for example {example}Z or {example}+02:00"
        )
    return round(moment.timestamp() * 1000)


def check_time_ms(time_ms: int, text: str, where: str) -> int:
    """Return a time that was given as this text.

    Raises:
        UsageError: it is outside of ``GIVEN_TIMES_MS``.
    """
    if time_ms not in GIVEN_TIMES_MS:
        first, last = time_text(GIVEN_TIMES_MS[0])[:10], time_text(GIVEN_TIMES_MS[-1])[:10]
        raise UsageError(
            f"{where}: '{text}' is no time from {first} to {last}; write for example "
            "2026-05-01T08:00:00+02:00, or 1777615200000 in milliseconds since 1970"
        )
    return time_ms


def parse_index(text: str, where: str) -> int:
    """A message's number.

    Raises:
        UsageError: it is none.
    """
    if not NUMBER.fullmatch(text.strip()):
        raise UsageError(f"{where}: '{text.strip()}' is no message number; they count from 0")
    return int(text)


def one_or_by_topic(
    text: str, where: str, parse: Callable[[str, str], Bound], of_new: Bound | None
) -> Bounds:
    """A bound of all topics, or a JSON object of topics and theirs.

    Args:
        of_new: what holds for a topic partition that an offset does not name.

    Raises:
        UsageError: it is neither, or has two bounds of one topic.
    """
    if not text.startswith("{"):
        return parse(text, where), {}
    try:
        pairs = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON: {text[:80]}") from None
    # A topic may have one of these names.
    if {"version", "positions"} <= {name for name, _ in pairs}:
        return of_new, {**from_json(json.loads(text))}
    by_topic: dict[str, Bound] = {}
    for topic, bound in pairs:
        name = full_name(topic)
        if name in by_topic:
            raise UsageError(f"{where} names {name} twice; give it one bound")
        by_topic[name] = parse(str(bound), where)
    return None, by_topic
