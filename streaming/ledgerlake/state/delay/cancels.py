"""Messages that are not to be delivered after all: the property ``ledgerlake.cancel`` of another message.

    id=LEDGER:ENTRY    the message that stands there (of a large one: its last chunk, or both as ``first;last``)
    key=KEY            every message with that key

Rules kept here:
  - A cancel is about what waits when it is stored: messages that stand before it and are due after it. What it hits
    does not depend on how the stream was cut into micro-batches.
  - It is kept until everything that waited then has left, so cancels do not pile up.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal

from ledgerlake.errors import UsageError
from ledgerlake.state.stored import parse_stored, stored
from ledgerlake.wire.message_id import ChunkMessageId, Position, parse_message_id

if TYPE_CHECKING:
    from collections.abc import Iterable

VERSION = 1
CANCEL_PROPERTY = "ledgerlake.cancel"

# Of one topic partition.
MOST_CANCELS = 100_000


@dataclass(frozen=True, slots=True)
class Cancel:
    """One wish, stored at ``position`` at ``time_ms``; ``target`` is a position's text or a key."""

    by: Literal["id", "key"]
    target: str
    position: Position
    time_ms: int
    until_ms: int = 0

    def hits(self, position: Position, deliver_ms: int) -> bool:
        return position < self.position and deliver_ms > self.time_ms


def parse_cancel(text: str, position: Position, time_ms: int) -> Cancel | None:
    """A property's value; None where it names neither an id nor a key."""
    by, _, target = text.partition("=")
    if by == "key" and target:
        return Cancel("key", target, position, time_ms)
    if by != "id":
        return None
    try:
        return Cancel("id", str(_position(target)), position, time_ms)
    except UsageError:
        return None


def _position(text: str) -> Position:
    message_id = parse_message_id(text)
    return (message_id.last if isinstance(message_id, ChunkMessageId) else message_id).position


class Cancels:
    """What is cancelled on one topic partition."""

    def __init__(self, cancels: Iterable[Cancel] = ()) -> None:
        self._by_target: dict[tuple[str, str], list[Cancel]] = {}
        for one in cancels:
            self.add(one)

    def __len__(self) -> int:
        return sum(map(len, self._by_target.values()))

    @property
    def all(self) -> list[Cancel]:
        return [one for cancels in self._by_target.values() for one in cancels]

    @property
    def keys(self) -> list[str]:
        return [target for by, target in self._by_target if by == "key"]

    @property
    def positions(self) -> list[Position]:
        return [_position(target) for by, target in self._by_target if by == "id"]

    def add(self, cancel: Cancel) -> None:
        self._by_target.setdefault((cancel.by, cancel.target), []).append(cancel)

    def hit(self, position: Position, key: str | None, deliver_ms: int) -> bool:
        """Whether a message was cancelled."""
        by_id = self._by_target.get(("id", str(position)), [])
        by_key = self._by_target.get(("key", key), []) if key is not None else []
        return any(one.hits(position, deliver_ms) for one in (*by_id, *by_key))

    def after(self, now_ms: int) -> list[Cancel]:
        """What is still to be kept when everything due by now has left: the last of each target."""
        last = [cancels[-1] for cancels in self._by_target.values()]
        return [one for one in last if one.until_ms > now_ms]


def cancels_to_json(cancels: Iterable[Cancel]) -> str:
    return json.dumps({"version": VERSION, "cancels": [asdict(one) for one in cancels]})


def cancels_from_json(text: str) -> Cancels:
    """Read what is cancelled.

    Raises:
        OffsetError: a newer release wrote it, or it is damaged.
    """
    return Cancels(parse_stored(text, "cancels", lambda data, _version: stored(list[Cancel], data["cancels"]), VERSION))
