"""Random lives of schedules against a dict and a clock, one seed one life.

A life: messages with and without an id are stored, delayed or not, small or large; some repeat; ids
are cancelled, paused and resumed. The topic may be created again, with lower ledger ids. It is cut
into micro-batches and these into tasks, rows come shuffled, any micro-batch may be killed and run
again, and idle ones come between. Only expiry and the occurrences to catch up with depend on the
micro-batches: on the time of the one that releases the message.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import join_partition
from ledgerlake.decode.split import split_bundle
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.operators import repeating
from ledgerlake.operators.ingest import decode_ranges
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.stage_rows import RowKind, StateSummary
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.schedules.cancels import Cancels, cancels_from_json
from ledgerlake.source.pieces import Piece
from ledgerlake.source.planning import EntryRange
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import encode_chunks
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.operators.stage import SOURCE, Stage, stage_settings

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

_IS_LONG = os.environ.get("LEDGERLAKE_CAMPAIGN") == "long"
SEEDS = 10_000 if _IS_LONG else 150
_AT_ONCE = 50

BEGIN_MS = 1_700_000_000_000
LEDGER_ID = 7
# Of the topic after it was created again in another cluster.
LOWER_LEDGER_ID = 3
SMALL = DelaySettings(
    min_indexes_per_bucket=3, ledger_step_per_bucket=1, max_indexes_per_segment=2, max_buckets=2
)
SETTINGS = stage_settings(Limits(max_message_bytes=10**6))


@dataclass(frozen=True)
class Message:
    """What a sender stored; ``entry_id`` is that of the last chunk of a large message."""

    number: int
    time_ms: int
    entry_id: int
    due_ms: int | None = None
    schedule_id: str | None = None
    cancels: str | None = None
    expires_ms: int | None = None
    chunks: int = 1
    every_s: int | None = None
    by_cron: bool = False
    count: int | None = None
    until_ms: int | None = None
    jitter_ms: int = 0
    catch_up: str | None = None
    pauses: str | None = None
    resumes: str | None = None
    ledger_id: int = LEDGER_ID

    @property
    def value(self) -> bytes:
        return b"%06d" % self.number

    def entries(self) -> list[bytes]:
        names = {"ledgerlake.schedule": self.schedule_id, "ledgerlake.expires": self.expires_ms}
        names["ledgerlake.cancel"] = None if self.cancels is None else f"schedule={self.cancels}"
        names["ledgerlake.every"] = (
            f"PT{self.every_s}S" if self.every_s and not self.by_cron else None
        )
        names["ledgerlake.cron"] = (
            f"*/{self.every_s} * * * * *" if self.every_s and self.by_cron else None
        )
        names |= {"ledgerlake.count": self.count, "ledgerlake.until": self.until_ms}
        names["ledgerlake.catchup"] = self.catch_up
        names["ledgerlake.jitter"] = f"PT{self.jitter_ms / 1000:.3f}S" if self.jitter_ms else None
        names |= {"ledgerlake.pause": self.pauses, "ledgerlake.resume": self.resumes}
        properties = [
            pb.KeyValue(key=name, value=str(text))
            for name, text in names.items()
            if text is not None
        ]
        metadata = pb.MessageMetadata(
            producer_name="p",
            sequence_id=self.number,
            publish_time=self.time_ms,
            properties=properties,
        )
        if self.due_ms is not None:
            metadata.deliver_at_time = self.due_ms
        if self.chunks == 1:
            return [encode_entry(metadata, self.value, _stamp(self.time_ms))]
        size = -(-len(self.value) // self.chunks)
        stored = encode_chunks(metadata, self.value, size)
        return [_stamped(entry, self.time_ms) for entry in stored]

    def released_from_ms(self) -> int:
        """The time from which a micro-batch may release it."""
        return max(self.due_ms or 0, self.time_ms)

    def occurrences_ms(self) -> list[int]:
        """The times at which it is due, by its rule alone."""
        assert self.every_s is not None
        start_ms, step_ms = self.released_from_ms(), self.every_s * 1000
        # BEGIN_MS and minutes are multiples of the steps that a cron expression has.
        first_ms = -(-start_ms // step_ms) * step_ms if self.by_cron else start_ms
        times_ms = [first_ms + number * step_ms for number in range(self.count or 40)]
        due_ms = [start_ms - 1]
        for time_ms in times_ms:
            if self.until_ms is None or time_ms <= self.until_ms:
                # Some number from the id and the time, and the order of occurrences stays.
                text = f"{time_ms} {self.schedule_id}".encode()
                number = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
                due_ms.append(max(time_ms + number % (self.jitter_ms + 1), due_ms[-1] + 1))
        return due_ms[1:]


def _stamp(time_ms: int) -> pb.BrokerEntryMetadata:
    return pb.BrokerEntryMetadata(broker_timestamp=time_ms)


def _stamped(entry: bytes, time_ms: int) -> bytes:
    broker = _stamp(time_ms).SerializeToString()
    return b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker + entry


def life(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    time_ms, entry_id, ledger_id = BEGIN_MS, -1, LEDGER_ID
    again_at = rng.randint(1, 20) if rng.random() < 0.3 else None
    for number in range(rng.randint(3, 40)):
        time_ms += rng.choice([0, 1, 10, 500, 3_000])
        if number == again_at:
            time_ms, entry_id, ledger_id = time_ms + 1, -1, LOWER_LEDGER_ID
        schedule_id = rng.choice(["a", "b", "c", "ü" * 200, None])
        kinds = {
            "delayed": 10,
            "large": 2,
            "late": 2,
            "plain": 2,
            "cancel": 3,
            "repeats": 6,
            "pause": 2,
            "resume": 2,
        }
        kind = rng.choices(list(kinds), list(kinds.values()))[0]
        due_ms = {
            "delayed": time_ms + rng.choice([1, 400, 2_000, 9_000]),
            "large": time_ms + rng.choice([1, 2_000, 9_000]),
            "late": time_ms - rng.choice([0, 5_000]),
            "repeats": time_ms + rng.choice([-5_000, 0, 1, 700, 4_000]),
        }.get(kind)
        expires_ms = (
            None
            if due_ms is None or rng.random() < 0.7
            else due_ms + rng.choice([-1, 0, 100, 5_000])
        )
        chunks = rng.choice([2, 3]) if kind == "large" else 1
        entry_id += chunks
        message = Message(
            number,
            time_ms,
            entry_id,
            due_ms,
            schedule_id,
            None,
            expires_ms,
            chunks,
            ledger_id=ledger_id,
        )
        if kind == "cancel":
            message = replace(message, schedule_id=None, cancels=schedule_id or "a")
        elif kind in ("pause", "resume"):
            target = "all" if rng.random() < 0.3 else f"schedule={schedule_id or 'a'}"
            pauses, resumes = (target, None) if kind == "pause" else (None, target)
            message = replace(message, schedule_id=None, pauses=pauses, resumes=resumes)
        elif kind == "repeats":
            message = _repeating(rng, replace(message, schedule_id=schedule_id or "a"))
        messages.append(message)
    return messages


def _repeating(rng: random.Random, message: Message) -> Message:
    has_end, every_s = rng.random() < 0.3, rng.choice([1, 2, 5])
    return replace(
        message,
        every_s=every_s,
        by_cron=rng.random() < 0.4,
        count=rng.choice([1, 3, 25]),
        until_ms=message.time_ms + rng.choice([-1, 4_000, 9_999]) if has_end else None,
        jitter_ms=rng.choice([0, 0, 700, 1000 * every_s]),
        catch_up=rng.choice([None, "all", "last", "none"]),
        expires_ms=None,
    )


@dataclass
class Batch:
    """A micro-batch: its messages and its time."""

    messages: list[Message]
    clock_ms: int


def cut(rng: random.Random, messages: list[Message]) -> list[Batch]:
    """Micro-batches of all messages, with idle ones between, up to a time when all is due."""
    batches: list[Batch] = []
    remaining = list(messages)
    while remaining:
        count = rng.randint(
            1, sum(message.ledger_id == remaining[0].ledger_id for message in remaining)
        )
        taken, remaining = remaining[:count], remaining[count:]
        batches.append(Batch(taken, taken[-1].time_ms))
        next_ms = remaining[0].time_ms if remaining else taken[-1].time_ms + 1
        if next_ms > taken[-1].time_ms and rng.random() < 0.4:
            batches.append(Batch([], rng.randrange(taken[-1].time_ms, next_ms)))
        if rng.random() < 0.1:
            # The planner's clock jumps back.
            batches.append(Batch([], BEGIN_MS - rng.choice([1, 3_600_000])))
    return [
        *batches,
        # After a stop, some occurrences are a minute late, and others are not.
        Batch([], messages[-1].time_ms + rng.choice([1_000, 3_000, 75_000])),
        Batch([], BEGIN_MS + 10**9),
    ]


@dataclass
class Lapse:
    """A message at a time when it is due: its number among the occurrences, None if it does not
    repeat, and the reason if it is not delivered.
    """

    message: Message
    due_ms: int
    number: int | None = None
    reason: str | None = None


def expected(batches: list[Batch]) -> tuple[list[list[bytes]], list[tuple[bytes, str]]]:
    """The values that each micro-batch delivers in order, plain ones first, and all rejects."""
    messages = [message for batch in batches for message in batch.messages]
    lapses = [
        lapse
        for message in messages
        if message.due_ms is not None
        for lapse in lapses_of(message, messages)
    ]
    delivered: list[list[bytes]] = []
    rejected: list[tuple[bytes, str]] = []
    arrived: set[int] = set()
    for batch in batches:
        values = [message.value for message in batch.messages if message.due_ms is None]
        arrived |= {message.number for message in batch.messages}
        due = [
            lapse
            for lapse in lapses
            if lapse.due_ms <= batch.clock_ms and lapse.message.number in arrived
        ]
        lapses = [lapse for lapse in lapses if lapse not in due]
        for lapse in sorted(
            due, key=lambda lapse: (lapse.due_ms, lapse.message.ledger_id, lapse.message.entry_id)
        ):
            message = lapse.message
            if lapse.reason is not None:
                rejected.append((message.value, lapse.reason))
            elif lapse.number is not None and (
                is_held_back(lapse, messages) or is_missed(lapse, due, batch.clock_ms)
            ):
                continue
            elif message.expires_ms is not None and batch.clock_ms > message.expires_ms:
                rejected.append((message.value, "expired"))
            else:
                number = (
                    1 if lapse.number is None and message.schedule_id is not None else lapse.number
                )
                values.append(message.value + (b"" if number is None else b"#%d" % number))
        delivered.append(values)
    assert not lapses
    return delivered, rejected


def lapses_of(message: Message, messages: list[Message]) -> list[Lapse]:
    """When a delayed message is due, up to the one at which it has been replaced or cancelled."""
    ends = [
        (other.time_ms, "replaced" if other.schedule_id else "cancelled")
        for other in messages[message.number + 1 :]
        if message.schedule_id is not None
        and message.schedule_id in (other.schedule_id, other.cancels)
    ]
    start_ms = message.released_from_ms()
    if message.every_s is None:
        reason = next((reason for end_ms, reason in ends if start_ms > end_ms), None)
        return [Lapse(message, start_ms, None, reason)]
    end_ms, reason = ends[0] if ends else (10**18, "")
    if start_ms > end_ms:
        return [Lapse(message, start_ms, None, reason)]
    times_ms = message.occurrences_ms()
    if not times_ms:
        return [Lapse(message, start_ms, None, "no_occurrence")]
    lapses: list[Lapse] = []
    for number, due_ms in enumerate(times_ms, 1):
        if due_ms > end_ms:
            return [*lapses, Lapse(message, due_ms, None, reason)]
        lapses.append(Lapse(message, due_ms, number))
    return lapses


def is_held_back(lapse: Lapse, messages: list[Message]) -> bool:
    """Whether the last word before it was due was a pause, of its id or of all."""
    own = f"schedule={lapse.message.schedule_id}"
    for target, behind in ((own, lapse.message.number), ("all", -1)):
        words = [
            message.pauses is not None
            for message in messages[behind + 1 :]
            if target in (message.pauses, message.resumes) and message.time_ms < lapse.due_ms
        ]
        if words and words[-1]:
            return True
    return False


def is_missed(lapse: Lapse, due: list[Lapse], clock_ms: int) -> bool:
    together = [other for other in due if other.message == lapse.message and other.number]
    first_ms = min((other.due_ms for other in together), default=clock_ms)
    if lapse.message.catch_up in (None, "all") or clock_ms - first_ms <= 60_000:
        return False
    if any((other.number or 0) > (lapse.number or 0) for other in together):
        return True
    return lapse.message.catch_up == "none" and clock_ms - lapse.due_ms > 60_000


def range_of(messages: list[Message], clock_ms: int) -> tuple[EntryRange, list[Piece]]:
    """What a task reads: a range with its pieces, none if it is idle."""
    frames = b""
    for message in messages:
        entries = message.entries()
        first = message.entry_id - len(entries) + 1
        frames += b"".join(
            commands.message(1, message.ledger_id, first + offset, entry)
            for offset, entry in enumerate(entries)
        )
    end = Position(messages[-1].ledger_id, messages[-1].entry_id) if messages else Position(-1, -1)
    span = EntryRange(
        join_partition(SOURCE.topic, SOURCE.partition),
        Position(-1, -1),
        end,
        clock_ms=None if messages else clock_ms,
    )
    pieces = [
        Piece(kind, piece, broker_ms=broker_ms)
        for kind, piece, broker_ms in (split_bundle(frames) if frames else ())
    ]
    return span, pieces


@dataclass
class Results:
    """What the last stage made of the micro-batches."""

    delivered: list[list[bytes]] = field(default_factory=list)
    rejected: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def run_batch(stage: Stage, batch: Batch, rng: random.Random, results: Results) -> Stage:
    """Run a micro-batch, and those that release what it has left; return the stage after them."""
    values: list[bytes] = []
    while True:
        stage, run = run_one(stage, batch, rng)
        values += run.values
        for reason, place in run.rejected:
            results.rejected[reason].append(place)
        if not run.has_left_some:
            break
        batch = Batch([], batch.clock_ms)
    results.delivered.append(values)
    return stage


@dataclass
class Run:
    """What one run of a micro-batch delivered and rejected, and whether it has left due
    messages.
    """

    values: list[bytes]
    rejected: list[tuple[str, str]]
    has_left_some: bool = False


def run_one(stage: Stage, batch: Batch, rng: random.Random) -> tuple[Stage, Run]:
    """Run a micro-batch. After a kill it is run again under another cut: the table has what the
    first run delivered, and the state is that of the second.
    """
    if rng.random() < 0.7:
        return stage, run_once(stage, batch, rng)
    killed, again = stage.copy(), stage.copy()
    again.delay = replace(
        stage.delay, settings=replace(SMALL, max_fresh_messages=rng.choice([0, 2]))
    )
    run, repeat = run_once(killed, batch, rng), run_once(again, batch, rng)
    assert repeat.values == run.values
    assert sorted(repeat.rejected) == sorted(run.rejected)
    assert repeat.has_left_some == run.has_left_some
    return again, run


def run_once(stage: Stage, batch: Batch, rng: random.Random) -> Run:
    cuts = sorted(rng.randrange(len(batch.messages) + 1) for _ in range(rng.randint(0, 2)))
    parts = [
        batch.messages[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch.messages)], strict=True)
    ]
    tasks = [part for part in parts if part] or [[]]
    rows = [
        row for task in tasks for row in decode_ranges([range_of(task, batch.clock_ms)], SETTINGS)
    ]
    decoder = OutcomeDecoder(SOURCE, SETTINGS)
    plain: list[bytes] = []
    run = Run([], [])
    for outcome in stage.run(rows, rng):
        if isinstance(outcome, StateSummary):
            run.has_left_some = outcome.more_due
        elif isinstance(outcome, Cancels):
            decoder.cancels = outcome
        elif getattr(outcome, "kind", None) == RowKind.ROWS:
            (messages,) = pa.ipc.open_stream(outcome.entry)
            plain += messages["value"].to_pylist()
        else:
            for decoded in decoder.decode(outcome):
                if isinstance(decoded, list):
                    run.rejected += [(reject.reason, str(reject.position)) for reject in decoded]
                    assert all(reject.entry is not None for reject in decoded)
                else:
                    run.values += map(
                        _numbered, decoded["value"].to_pylist(), decoded["properties"].to_pylist()
                    )
    run.values = sorted(plain) + run.values
    return run


def play(seed: int) -> Results:
    rng = random.Random(seed)
    batches = cut(rng, life(rng))
    stage = Stage(Limits(), DelayOptions(settings=SMALL, most_due=rng.choice([1, 3, 1_000])))
    results = Results()
    for batch in batches:
        stage = run_batch(stage, batch, rng, results)
    delivered, rejected = expected(batches)
    assert results.delivered == delivered, seed
    places = {message.value: message for batch in batches for message in batch.messages}
    expected_rejects: dict[str, list[str]] = defaultdict(list)
    for value, reason in rejected:
        message = places[value]
        expected_rejects[reason] += [
            f"{message.ledger_id}:{message.entry_id - chunk}" for chunk in range(message.chunks)
        ]
    assert {reason: sorted(places) for reason, places in results.rejected.items()} == {
        reason: sorted(places) for reason, places in expected_rejects.items()
    }, seed
    for name in ("schedule_blocks", "schedules", "separate", "parts"):
        assert not stage.states[name].values, (seed, name)
    for (text,) in stage.states["cancels"].values.values():
        cancels, marked, pauses = cancels_from_json(text)
        assert not cancels.all, seed
        assert not marked, seed
        # A pause that ended at the time of the last micro-batch may hold for a later message.
        assert len(pauses.ended_ms) <= 2, seed
        assert (pauses.since_ms is not None) == is_paused(batches), seed
    if is_paused(batches):
        assert stage.states["cancels"].values, seed
    return results


def is_paused(batches: list[Batch]) -> bool:
    """Whether all schedules are paused at the end."""
    words = [
        message.pauses is not None
        for batch in batches
        for message in batch.messages
        if "all" in (message.pauses, message.resumes)
    ]
    return bool(words) and words[-1]


def _numbered(value: bytes, properties: list[tuple[str, str]]) -> bytes:
    number = dict(properties).get("ledgerlake.occurrence")
    return value if number is None else value + b"#" + number.encode()


@pytest.mark.parametrize("start", range(0, SEEDS, _AT_ONCE))
def test_no_cut_into_batches_and_no_kill_changes_what_becomes_of_schedules(start: int) -> None:
    plays = [play(seed) for seed in range(start, start + _AT_ONCE)]
    reasons = {reason for results in plays for reason in results.rejected}
    assert reasons == {"replaced", "cancelled", "expired", "no_occurrence"}


def test_no_limit_of_occurrences_changes_what_becomes_of_schedules(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Messages that catch up, or expire, depend on the micro-batch of their release, and are left
    out.
    """
    for seed in range(SEEDS // 5):
        rng = random.Random(seed)
        monkeypatch.setattr(repeating, "MOST_OVERDUE", rng.choice([1, 3]))
        monkeypatch.setattr(repeating, "MOST_PASSED", rng.choice([0, 2]))
        batches = cut(
            rng, [replace(message, catch_up=None, expires_ms=None) for message in life(rng)]
        )
        stage = Stage(Limits(), DelayOptions(settings=SMALL))
        results = Results()
        for batch in batches:
            stage = run_batch(stage, batch, rng, results)
        delivered, rejected = expected(batches)
        assert results.delivered == delivered, seed
        assert not stage.states["schedule_blocks"].values, seed
        places = {message.value: message for batch in batches for message in batch.messages}
        counts = Counter(reason for value, reason in rejected for _ in range(places[value].chunks))
        assert {reason: len(places) for reason, places in results.rejected.items()} == counts, seed


# What a message of a short life may be that is stored at a time.
KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "repeats": lambda time_ms: _twice(time_ms - 5_000),
    "cancels": lambda _: {"cancels": "a"},
    "pauses": lambda _: {"pauses": "schedule=a"},
    "resumes": lambda _: {"resumes": "schedule=a"},
    "pauses all": lambda _: {"pauses": "all"},
    "resumes all": lambda _: {"resumes": "all"},
}
MORE_KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "repeats later": lambda time_ms: _twice(time_ms + 1_000),
    "waits": lambda time_ms: {"schedule_id": "a", "due_ms": time_ms + 1_000},
    "replaces": lambda _: {"schedule_id": "a"},
}


def _twice(due_ms: int) -> dict[str, Any]:
    return {"schedule_id": "a", "due_ms": due_ms, "every_s": 1, "count": 2}


def outcome_of(messages: list[Message], cuts: tuple[int, ...]) -> tuple[Any, Any]:
    """The values and rejects of a life that is cut before some messages."""
    stage, rng = Stage(Limits(), DelayOptions(settings=SMALL)), random.Random(0)
    parts = [messages[a:b] for a, b in pairwise([0, *cuts, len(messages)])]
    batches = [Batch(part, part[-1].time_ms) for part in parts]
    runs = [run_once(stage, batch, rng) for batch in [*batches, Batch([], BEGIN_MS + 10**6)]]
    return (
        Counter(value for run in runs for value in run.values),
        Counter(reject for run in runs for reject in run.rejected),
    )


@pytest.mark.parametrize("first", [*KINDS, *(MORE_KINDS if _IS_LONG else ())])
def test_every_cut_of_a_short_life_with_equal_times_gives_the_same(first: str) -> None:
    kinds = KINDS | MORE_KINDS if _IS_LONG else KINDS
    for others in product(kinds, kinds):
        for gaps_ms in ((0, 0), (0, 1_000), (1_000, 0)):
            times_ms = accumulate(gaps_ms, initial=BEGIN_MS)
            messages = [
                Message(number, time_ms, number, **kinds[kind](time_ms))
                for number, (kind, time_ms) in enumerate(zip((first, *others), times_ms))
            ]
            whole, *cut = (outcome_of(messages, cuts) for cuts in ((), (1,), (2,), (1, 2)))
            assert cut == [whole] * 3, (first, others, gaps_ms)
