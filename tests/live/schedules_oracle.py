"""What must become of schedules, by the rules of ``docs/schedules.md`` and without code of
Ledgerlake; and the comparison of tables and topics with it.

A message of an id, or a cancel of it, that was stored at time T hits the messages of the id that
stand before it and are due after T. The time when a message was stored lies between the time at
which the client published it and the time at which a reader had it. Where that does not decide, the
reader asks the broker (``Stored.broker_ms``).

The rules of the campaign repeat in steps of whole seconds. So an occurrence is found by division.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from deltalake import DeltaTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

Place = tuple[int, int, int]

# A pause begins and ends; without an end it lasts.
Span = tuple[int, float]


@dataclass(frozen=True)
class Rule:
    """How a message repeats.

    Args:
        is_aligned: occurrences are at whole steps since 1970, as with a cron expression.
        anchor_ms: the interval's own start.
        may_skip: not all occurrences that are late are delivered.
    """

    step_ms: int
    is_aligned: bool = False
    anchor_ms: int | None = None
    count: int | None = None
    until_ms: int | None = None
    jitter_ms: int = 0
    may_skip: bool = False

    def occurrences(self, start_ms: int) -> Iterator[tuple[int, int]]:
        """Yield number and time of the occurrences from a time on."""
        origin_ms = 0 if self.is_aligned else start_ms if self.anchor_ms is None else self.anchor_ms
        steps = max(0, -((origin_ms - start_ms) // self.step_ms))
        for number in itertools.count(1):
            time_ms = origin_ms + (steps + number - 1) * self.step_ms
            if number > (self.count or number) or time_ms > (self.until_ms or time_ms):
                return
            yield number, time_ms


@dataclass(frozen=True)
class Message:
    """A message of the campaign; ``kind`` is put, cancel, pause or resume. A pause without an id is
    one of all schedules of a topic partition.
    """

    number: int
    kind: str
    partition: int
    schedule: str | None
    due_ms: int | None = None
    rule: Rule | None = None


@dataclass(frozen=True)
class Stored:
    """A message as a reader of pulsar-client had it from the topic."""

    message: Message
    place: Place
    publish_ms: int
    read_ms: int
    broker_ms: int | None = None

    def is_stored_before(self, time_ms: int) -> bool:
        if self.broker_ms is not None:
            return self.broker_ms < time_ms
        assert self.publish_ms >= time_ms or self.read_ms < time_ms, (
            "the reader has to ask the broker"
        )
        return self.read_ms < time_ms


@dataclass
class Expected:
    """What must become of a message.

    Args:
        at_once: it is a row that was not delayed.
        must: the occurrences that have to be delivered; a message that does not repeat has one.
        may: those that may be; their times.
        reject: the reason of its reject; None if it must not be one.
        may_be_reject: whether it is one depends on jitter.
    """

    at_once: bool = False
    must: set[int] = field(default_factory=set)
    may: dict[int, int] = field(default_factory=dict)
    reject: str | None = None
    may_be_reject: bool = False


@dataclass(frozen=True)
class Delivered:
    """A row, or a message on the topic of due messages; ``at_ms`` is the time of its delivery,
    ``due_ms`` the one at which it says that it was due.
    """

    number: int
    occurrence: int
    nominal: str | None
    at_ms: int
    due_ms: int
    where: str


@dataclass
class Figures:
    """The counts of a campaign."""

    rows: int = 0
    copies: int = 0
    occurrences: int = 0
    rejects: Counter[str] = field(default_factory=Counter)


def expect(stored: Iterable[Stored]) -> dict[int, Expected]:
    """Return what must become of each message."""
    expected: dict[int, Expected] = {}
    by_partition: dict[int, list[Stored]] = defaultdict(list)
    for one in stored:
        by_partition[one.message.partition].append(one)
    for of_partition in by_partition.values():
        of_partition.sort(key=lambda one: one.place)
        pauses_of_all = _pauses(one for one in of_partition if one.message.schedule is None)
        by_id: dict[str, list[Stored]] = defaultdict(list)
        for one in of_partition:
            if one.message.schedule is None:
                expected[one.message.number] = Expected(at_once=True)
            else:
                by_id[one.message.schedule].append(one)
        for of_id in by_id.values():
            for index, one in enumerate(of_id):
                expected[one.message.number] = _expect(one, of_id[index + 1 :], pauses_of_all)
    return expected


def _expect(one: Stored, later: list[Stored], pauses_of_all: list[Span]) -> Expected:
    message = one.message
    if message.kind != "put" or message.due_ms is None:
        return Expected(at_once=True)
    # Messages of one entry do not hit each other.
    hits = [
        other
        for other in later
        if other.message.kind in ("put", "cancel") and other.place[:2] > one.place[:2]
    ]
    if message.rule is not None:
        return _expect_repeating(
            one, message.rule, hits[0] if hits else None, pauses_of_all + _pauses(later)
        )
    if one.is_stored_before(message.due_ms):
        for other in hits:
            if other.is_stored_before(message.due_ms):
                return Expected(reject=_reason(other))
    return Expected(must={1}, may={1: message.due_ms})


def _expect_repeating(one: Stored, rule: Rule, hit: Stored | None, pauses: list[Span]) -> Expected:
    """The first message that hits one that repeats ends it: later occurrences are not delivered."""
    assert one.message.due_ms is not None
    start_ms = one.message.due_ms if one.is_stored_before(one.message.due_ms) else _broker_ms(one)
    end_ms = None if hit is None else _broker_ms(hit)
    expected = Expected()
    if hit is not None and end_ms is not None and start_ms > end_ms:
        return Expected(reject=_reason(hit))
    if next(rule.occurrences(start_ms), None) is None:
        return Expected(reject="no_occurrence")
    for number, nominal_ms in rule.occurrences(start_ms):
        if end_ms is not None and nominal_ms + rule.jitter_ms > end_ms and hit is not None:
            expected.reject = _reason(hit)
            expected.may_be_reject = nominal_ms <= end_ms
        if end_ms is not None and nominal_ms > end_ms:
            break
        last_ms = nominal_ms + rule.jitter_ms
        is_hit = end_ms is not None and last_ms > end_ms
        may_be_paused = any(since < last_ms and nominal_ms <= until for since, until in pauses)
        if not any(since < nominal_ms and last_ms <= until for since, until in pauses):
            expected.may[number] = nominal_ms
        if not (may_be_paused or is_hit or rule.may_skip):
            expected.must.add(number)
    return expected


def _pauses(events: Iterable[Stored]) -> list[Span]:
    spans: list[Span] = []
    since_ms: int | None = None
    for event in events:
        if event.message.kind == "pause" and since_ms is None:
            since_ms = _broker_ms(event)
        elif event.message.kind == "resume" and since_ms is not None:
            spans.append((since_ms, _broker_ms(event)))
            since_ms = None
    return spans if since_ms is None else [*spans, (since_ms, float("inf"))]


def _reason(hit: Stored) -> str:
    return "cancelled" if hit.message.kind == "cancel" else "replaced"


def _broker_ms(one: Stored) -> int:
    assert one.broker_ms is not None, "the reader has to ask the broker"
    return one.broker_ms


def judge(
    stored: dict[int, Stored], folder: Path, copies: list[Delivered]
) -> tuple[list[str], Figures]:
    """Compare tables and the topic of due messages with the expectation; return the faults."""
    expected = expect(stored.values())
    figures = Figures(copies=len(copies))
    wrong, rows = _read_rows(stored, folder / "messages")
    figures.rows = len(rows)
    figures.occurrences = sum(stored[row.number].message.rule is not None for row in rows)
    wrong += _judge_rows(stored, expected, rows)
    delayed = [row for row in rows if not expected[row.number].at_once]
    for row in [*delayed, *copies]:
        due_ms = expected[row.number].may.get(row.occurrence)
        rule = stored[row.number].message.rule
        last_ms = None if due_ms is None else due_ms + (0 if rule is None else rule.jitter_ms)
        if due_ms is not None and last_ms is not None and not due_ms <= row.due_ms <= last_ms:
            wrong.append(
                f"{_name(stored, row)} is due at {due_ms}, and {row.where} at {row.due_ms}"
            )
        if row.at_ms < max(row.due_ms, due_ms or 0):
            wrong.append(
                f"early: {_name(stored, row)}, due at {due_ms}, is {row.where} since {row.at_ms}"
            )
    on_topic = Counter((copy.number, copy.occurrence, copy.nominal) for copy in copies)
    in_table = Counter((row.number, row.occurrence, row.nominal) for row in delayed)
    for key in sorted(on_topic.keys() | in_table.keys(), key=str):
        if on_topic[key] != in_table[key]:
            name = f"{stored[key[0]]}, occurrence {key[1]}"
            wrong.append(
                f"{name} is {in_table[key]} times in the table, {on_topic[key]} times on the topic"
            )
    wrong += _judge_rejects(stored, expected, folder / "rejects", figures)
    return wrong, figures


def _judge_rows(
    stored: dict[int, Stored], expected: dict[int, Expected], rows: list[Delivered]
) -> list[str]:
    wrong: list[str] = []
    found: dict[int, Counter[int]] = defaultdict(Counter)
    for row in rows:
        found[row.number][row.occurrence] += 1
        nominal_ms = expected[row.number].may.get(row.occurrence)
        if row.occurrence and nominal_ms is not None and _to_ms(row.nominal) != nominal_ms:
            wrong.append(f"{_name(stored, row)} has the time {row.nominal}, not {nominal_ms}")
    for number, of_message in expected.items():
        counts = found[number]
        must, may = ({0}, {0: 0}) if of_message.at_once else (of_message.must, of_message.may)
        for occurrence in sorted(must | counts.keys()):
            least, most = occurrence in must, occurrence in may
            if not least <= counts[occurrence] <= most:
                rule = "once" if least else "at most once" if most else "never"
                wrong.append(
                    f"{stored[number]}, occurrence {occurrence}, fired {counts[occurrence]} times, "
                    f"must {rule}"
                )
    return wrong


def _read_rows(stored: dict[int, Stored], table: Path) -> tuple[list[str], list[Delivered]]:
    columns = [
        "value",
        "partition",
        "ledger_id",
        "entry_id",
        "batch_index",
        "properties",
        "deliver_at",
        "delivered_at",
        "broker_timestamp",
    ]
    wrong: list[str] = []
    rows: list[Delivered] = []
    for batch in DeltaTable(str(table)).to_pyarrow_dataset().to_batches(columns=columns):
        for row in batch.to_pylist():
            number = number_of(row["value"])
            properties = dict(row["properties"] or ())
            due_ms, delivered_ms = (
                _milliseconds(row[name]) for name in ("deliver_at", "delivered_at")
            )
            delivered = to_delivered(number, properties, delivered_ms, due_ms, "in the table")
            one = stored.get(number)
            if one is None:
                wrong.append(f"a row of {row['value'][:80]} is of no message")
                continue
            rows.append(delivered)
            place = row["ledger_id"], row["entry_id"], row["batch_index"]
            if (place, row["partition"]) != (one.place, one.message.partition):
                wrong.append(f"{_name(stored, delivered)} has the position {place}")
            if one.broker_ms not in (None, _milliseconds(row["broker_timestamp"])):
                wrong.append(
                    f"{_name(stored, delivered)} has the broker's time {row['broker_timestamp']}"
                )
    return wrong, rows


def _judge_rejects(
    stored: dict[int, Stored], expected: dict[int, Expected], rejects: Path, figures: Figures
) -> list[str]:
    numbers = {(one.message.partition, *one.place[:2]): number for number, one in stored.items()}
    found: dict[int, Counter[str]] = defaultdict(Counter)
    wrong: list[str] = []
    columns = ["partition", "ledger_id", "entry_id", "reason"]
    for row in DeltaTable(str(rejects)).to_pyarrow_table(columns=columns).to_pylist():
        figures.rejects[row["reason"]] += 1
        number = numbers.get((row["partition"], row["ledger_id"], row["entry_id"]))
        if number is None:
            wrong.append(f"the reject {row} is of no message")
        else:
            found[number][row["reason"]] += 1
    for number, of_message in expected.items():
        must = Counter() if of_message.reject is None else Counter([of_message.reject])
        if found[number] != must and not (of_message.may_be_reject and not found[number]):
            wrong.append(
                f"{stored[number]} has the rejects {dict(found[number])}, must have {dict(must)}"
            )
    return wrong


def to_delivered(
    number: int, properties: dict[str, str], at_ms: int, due_ms: int, where: str
) -> Delivered:
    occurrence = int(properties.get("ledgerlake.occurrence", 0))
    return Delivered(
        number, occurrence, properties.get("ledgerlake.occurrence_time"), at_ms, due_ms, where
    )


def number_of(value: bytes) -> int:
    """Return the number of a message of the campaign."""
    return int(value.split(b"|", 1)[0])


def _name(stored: dict[int, Stored], row: Delivered) -> str:
    return f"{stored[row.number]}, occurrence {row.occurrence},"


def _to_ms(text: str | None) -> int | None:
    return (
        None if text is None else _milliseconds(datetime.fromisoformat(text.replace("Z", "+00:00")))
    )


def _milliseconds(moment: Any) -> int:
    """Return a time of the table; 0 if there is none."""
    return 0 if moment is None else int(moment.timestamp() * 1000 + 0.001)
