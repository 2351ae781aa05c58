"""What the source writes into Spark's checkpoint: a position per topic partition, as JSON that a
person can read.

    {"version": 1, "positions": {"persistent://public/default/orders-partition-0":
        {"ledger": 12, "entry": 345, "time": "2026-05-01T09:00:00.123Z", "index": 98765}}}

The position is the last entry taken (``"entry": -1``: nothing of that ledger; ledger -1: nothing at
all). ``batch``, where present, says that only the messages up to that index of the *next* entry
were taken. ``time`` is the broker's, of that entry, where it is one that can be written so; if the
broker gave none, ``published`` is the producer's. ``index`` is the broker's of the last message
taken. They are for people, and to tell loss from a hole (see ``source.loss``); where a read begins
does not depend on them. ``clock``, if present, is the
planner's time. A micro-batch without new entries, or without a time by the broker, needs it to
release messages that are due and to expire incomplete ones. ``parts``, if present, is into how many
ranges the entries before the position are cut, if they are cut. ``gone``, if present, says that
a read begins there, and that no cursor has kept what came behind it: the topic had lost the
position before, or the read begins with what compaction has left. ``ended``, if present, is a time
at which the read ends: all that the topic had from before that time was taken. What follows may be
removed, so it could not be found again.

Rules kept here:
  - A newer version is refused with advice. An unknown field of a known version is an error too.
  - The JSON of a position does not depend on when or where it was made.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

from ledgerlake.errors import OffsetError
from ledgerlake.stored.fields import check_version, exactly, stored
from ledgerlake.wire.limits import MAX_TIME_MS
from ledgerlake.wire.message_id import BEFORE_ALL, Position

VERSION = 1

_FIELDS = frozenset(
    ("ledger", "entry", "batch", "time", "published", "index", "clock", "parts", "gone", "ended")
)

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True)
class PartitionOffset:
    """The position up to which a topic partition was taken.

    ``time_ms`` is the broker's time of the entry if it is ``by_broker``, or else the producer's.
    """

    position: Position
    batch_index: int | None = None
    time_ms: int | None = None
    index: int | None = None
    clock_ms: int | None = None
    parts: int = 1
    was_gone: bool = False
    by_broker: bool = True
    ended_ms: int | None = None

    def __str__(self) -> str:
        return (
            str(self.position)
            if self.batch_index is None
            else f"{self.next_position}:{self.batch_index}"
        )

    @property
    def broker_ms(self) -> int | None:
        """Return the broker's time of the entry; None if it is not known."""
        return self.time_ms if self.by_broker else None

    @property
    def is_first(self) -> bool:
        """Return whether a read begins here, and nobody has kept what follows."""
        return self.was_gone or self.position == BEFORE_ALL

    @property
    def next_position(self) -> Position:
        """Return the position after ``position`` in the same ledger; ``batch_index`` belongs to
        that one.
        """
        return self.position.next

    @property
    def last_position(self) -> Position:
        """Return the position of the last entry that was taken, whole or in part."""
        return self.position if self.batch_index is None else self.next_position

    def is_beyond(self, other: PartitionOffset) -> bool:
        """Return whether more was taken here than there."""
        return _taken(self) > _taken(other)


def _taken(offset: PartitionOffset) -> tuple[Position, int]:
    return offset.position, -1 if offset.batch_index is None else offset.batch_index


Offset = dict[str, PartitionOffset]


def messages_between(taken: int | None, last: int | None) -> int | None:
    """Return how many messages come after one, up to another, by the broker's indexes of the two;
    None if that is unknown. If the index falls, the broker began to count again in between.
    """
    return None if taken is None or last is None or last < taken else last - taken


def to_json(offset: Offset) -> dict[str, Any]:
    return {
        "version": VERSION,
        "positions": {name: _to_json(offset[name]) for name in sorted(offset)},
    }


def from_json(data: Any) -> Offset:
    """Read an offset from a checkpoint.

    Raises:
        OffsetError: it was written by a newer release, or is no offset of ours.
    """
    if not isinstance(data, dict) or "version" not in data:
        raise OffsetError(
            "the checkpoint holds an offset that Ledgerlake did not write; use another checkpoint "
            "folder"
        )
    try:
        check_version(data["version"], VERSION, "offset version")
        _, positions = exactly(data, "version", "positions")
        return {str(name): _from_json(one) for name, one in positions.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        raise OffsetError(
            f"the checkpoint holds a damaged offset ({error!r}); restore it from a copy"
        ) from None


def _to_json(offset: PartitionOffset) -> dict[str, Any]:
    data: dict[str, Any] = {"ledger": offset.position.ledger_id, "entry": offset.position.entry_id}
    if offset.batch_index is not None:
        data["batch"] = offset.batch_index
    if offset.time_ms is not None and 0 <= offset.time_ms <= MAX_TIME_MS:
        data["time" if offset.by_broker else "published"] = time_text(offset.time_ms)
    if offset.index is not None:
        data["index"] = offset.index
    if offset.clock_ms is not None:
        data["clock"] = time_text(offset.clock_ms)
    if offset.parts > 1:
        data["parts"] = offset.parts
    if offset.was_gone:
        data["gone"] = True
    if offset.ended_ms is not None and 0 <= offset.ended_ms <= MAX_TIME_MS:
        data["ended"] = time_text(offset.ended_ms)
    return data


def _from_json(data: dict[str, Any]) -> PartitionOffset:
    unknown = set(data) - _FIELDS
    if unknown:
        raise ValueError(f"unknown {', '.join(sorted(unknown))}")
    by_broker = "published" not in data
    if not by_broker and "time" in data:
        raise ValueError("two times of an entry")
    parts = stored(int, data.get("parts", 1))
    if parts < 1:
        raise ValueError(f"{parts} parts")
    return PartitionOffset(
        Position(stored(int, data["ledger"]), stored(int, data["entry"])),
        stored(int | None, data.get("batch")),
        _time_ms(data, "time" if by_broker else "published"),
        stored(int | None, data.get("index")),
        _time_ms(data, "clock"),
        parts,
        stored(bool, data.get("gone", False)),
        by_broker,
        _time_ms(data, "ended"),
    )


def time_text(time_ms: int) -> str:
    """Return a time as ISO in UTC, to the millisecond."""
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def moment_text(moment: datetime) -> str:
    """Return a time with a zone as ``time_text`` does."""
    return time_text(round(moment.timestamp() * 1000))


def _time_ms(data: dict[str, Any], name: str) -> int | None:
    if name not in data:
        return None
    moment = datetime.fromisoformat(data[name].replace("Z", "+00:00"))
    if moment < _EPOCH:
        raise ValueError(f"the {name} {data[name]} is before 1970")
    return (moment - _EPOCH) // timedelta(milliseconds=1)
