"""Random lives of schedules against a dict and a clock, one seed one life.

A life: messages with and without an id are stored, delayed or not, small or large; ids are cancelled.
The topic is cut into micro-batches and these into tasks, rows come shuffled, any micro-batch may be
killed and run again, and idle ones come between. Only expiry depends on the micro-batches: on the
time of the one that releases the message.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.decode import schema
from ledgerlake.decode.messages import WHOLE_BATCH
from ledgerlake.decode.split import split_bundle
from ledgerlake.delay.cancels import Cancels
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.rows import StateSummary
from ledgerlake.operators.stage_input import forward_bundles
from ledgerlake.operators.stage_output import read_stage_rows
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import encode_chunks
from ledgerlake.wire.entry import encode_entry
from tests.operators.stage import SOURCE, Stage
from tests.operators.test_delayed import pa_row

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

SEEDS = 5_000 if os.environ.get("LEDGERLAKE_CAMPAIGN") == "long" else 150
_AT_ONCE = 50

BEGIN_MS = 1_700_000_000_000
LEDGER_ID = 7
SMALL = DelaySettings(min_indexes_per_bucket=3, ledger_step_per_bucket=1, max_indexes_per_segment=2, max_buckets=2)
OPTIONS = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})


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

    @property
    def value(self) -> bytes:
        return b"%06d" % self.number

    def entries(self) -> list[bytes]:
        names = {"ledgerlake.schedule": self.schedule_id, "ledgerlake.expires": self.expires_ms}
        names["ledgerlake.cancel"] = None if self.cancels is None else f"schedule={self.cancels}"
        properties = [pb.KeyValue(key=name, value=str(text)) for name, text in names.items() if text is not None]
        metadata = pb.MessageMetadata(
            producer_name="p", sequence_id=self.number, publish_time=self.time_ms, properties=properties
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


def _stamp(time_ms: int) -> pb.BrokerEntryMetadata:
    return pb.BrokerEntryMetadata(broker_timestamp=time_ms)


def _stamped(entry: bytes, time_ms: int) -> bytes:
    broker = _stamp(time_ms).SerializeToString()
    return b"\x0e\x02" + len(broker).to_bytes(4, "big") + broker + entry


def life(rng: random.Random) -> list[Message]:
    messages: list[Message] = []
    time_ms, entry_id = BEGIN_MS, -1
    for number in range(rng.randint(3, 40)):
        time_ms += rng.choice([0, 1, 10, 500, 3_000])
        schedule_id = rng.choice(["a", "b", "c", "ü" * 200, None])
        kind = rng.choices(["delayed", "large", "late", "plain", "cancel"], [10, 2, 2, 2, 3])[0]
        due_ms = {
            "delayed": time_ms + rng.choice([1, 400, 2_000, 9_000]),
            "large": time_ms + rng.choice([1, 2_000, 9_000]),
            "late": time_ms - rng.choice([0, 5_000]),
        }.get(kind)
        expires_ms = None if due_ms is None or rng.random() < 0.7 else due_ms + rng.choice([-1, 0, 100, 5_000])
        chunks = rng.choice([2, 3]) if kind == "large" else 1
        entry_id += chunks
        message = Message(number, time_ms, entry_id, due_ms, schedule_id, None, expires_ms, chunks)
        if kind == "cancel":
            message = replace(message, schedule_id=None, cancels=schedule_id or "a")
        messages.append(message)
    return messages


@dataclass
class Batch:
    """A micro-batch: what was stored in it, and its time."""

    messages: list[Message]
    clock_ms: int


def cut(rng: random.Random, messages: list[Message]) -> list[Batch]:
    """Micro-batches of all messages, with idle ones between, up to a time when all is due."""
    batches: list[Batch] = []
    remaining = list(messages)
    while remaining:
        count = rng.randint(1, len(remaining))
        taken, remaining = remaining[:count], remaining[count:]
        batches.append(Batch(taken, taken[-1].time_ms))
        next_ms = remaining[0].time_ms if remaining else taken[-1].time_ms + 1
        if next_ms > taken[-1].time_ms and rng.random() < 0.4:
            batches.append(Batch([], rng.randrange(taken[-1].time_ms, next_ms)))
    return [*batches, Batch([], batches[-1].clock_ms + rng.choice([1_000, 3_000])), Batch([], BEGIN_MS + 10**9)]


def expected(batches: list[Batch]) -> tuple[list[list[bytes]], set[tuple[bytes, str]]]:
    """The values that each micro-batch delivers in order, plain ones first, and all rejects."""
    waits: dict[str, list[Message]] = defaultdict(list)
    ended: dict[int, str] = {}
    for message in (message for batch in batches for message in batch.messages):
        for schedule_id, reason in ((message.schedule_id, "replaced"), (message.cancels, "cancelled")):
            if schedule_id is None:
                continue
            for other in waits[schedule_id]:
                if other.released_from_ms() > message.time_ms:
                    ended.setdefault(other.number, reason)
        if message.schedule_id is not None and message.due_ms is not None:
            waits[message.schedule_id].append(message)
    delivered: list[list[bytes]] = []
    rejected: set[tuple[bytes, str]] = set()
    pending: list[Message] = []
    for batch in batches:
        values = [message.value for message in batch.messages if message.due_ms is None]
        pending += [message for message in batch.messages if message.due_ms is not None]
        due = [message for message in pending if message.released_from_ms() <= batch.clock_ms]
        pending = [message for message in pending if message not in due]
        for message in sorted(due, key=lambda message: (message.released_from_ms(), message.entry_id)):
            if message.number in ended:
                rejected.add((message.value, ended[message.number]))
            elif message.expires_ms is not None and batch.clock_ms > message.expires_ms:
                rejected.add((message.value, "expired"))
            else:
                values.append(message.value)
        delivered.append(values)
    assert not pending
    return delivered, rejected


def bundles(messages: list[Message], clock_ms: int) -> Iterator[pa.RecordBatch]:
    """What a task reads: pieces of a range, or the empty piece of an idle one."""
    frames = b""
    for message in messages:
        entries = message.entries()
        first = message.entry_id - len(entries) + 1
        frames += b"".join(
            commands.message(1, LEDGER_ID, first + offset, entry) for offset, entry in enumerate(entries)
        )
    end = messages[-1].entry_id if messages else -1
    pieces: list[Any] = list(split_bundle(frames)) if frames else []
    pieces = pieces or [("entries", memoryview(b""), None)]
    for kind, piece, broker_ms in pieces:
        row = {
            "topic": SOURCE.topic,
            "partition": SOURCE.partition,
            "kind": getattr(kind, "value", kind),
            "frames": bytes(piece),
            "after_batch_index": WHOLE_BATCH.after,
            "until_batch_index": WHOLE_BATCH.until,
            "broker_ms": broker_ms,
            "end_ledger_id": LEDGER_ID,
            "end_entry_id": end,
            "clock_ms": clock_ms if not messages else None,
        }
        yield pa.RecordBatch.from_pylist([row], schema=schema.BUNDLES)


@dataclass
class Results:
    """What the last stage made of the micro-batches."""

    delivered: list[list[bytes]] = field(default_factory=list)
    rejected: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))


def run_batch(stage: Stage, batch: Batch, rng: random.Random, results: Results) -> None:
    cuts = sorted(rng.randrange(len(batch.messages) + 1) for _ in range(rng.randint(0, 2)))
    parts = [batch.messages[a:b] for a, b in zip([0, *cuts], [*cuts, len(batch.messages)], strict=True)]
    tasks = [part for part in parts if part] or [[]]
    rows = [
        row for task in tasks for row in forward_bundles(bundles(task, batch.clock_ms), OPTIONS, delays_messages=True)
    ]
    decoder = OutcomeDecoder(SOURCE, OPTIONS, 10**6, delays_messages=True)
    plain: list[bytes] = []
    values: list[bytes] = []
    for _, outcome in read_stage_rows([pa_row(row) for row in stage.run(rows, rng)]):
        if isinstance(outcome, StateSummary):
            continue
        if isinstance(outcome, Cancels):
            decoder.cancels = outcome
        elif isinstance(outcome, pa.RecordBatch):
            plain += outcome["value"].to_pylist()
        else:
            for decoded in decoder.decode(outcome):
                if isinstance(decoded, list):
                    for reject in decoded:
                        results.rejected[reject.reason].add(str(reject.position))
                        assert reject.entry is not None
                else:
                    values += decoded["value"].to_pylist()
    results.delivered.append(sorted(plain) + values)


def play(seed: int) -> Results:
    rng = random.Random(seed)
    batches = cut(rng, life(rng))
    stage = Stage(Limits(), DelayOptions(settings=SMALL))
    results = Results()
    for batch in batches:
        if rng.random() < 0.3:
            run_batch(stage.copy(), batch, rng, Results())
        run_batch(stage, batch, rng, results)
    delivered, rejected = expected(batches)
    assert results.delivered == delivered, seed
    places = {message.value: message for batch in batches for message in batch.messages}
    expected_rejects: dict[str, set[str]] = defaultdict(set)
    for value, reason in rejected:
        message = places[value]
        for chunk in range(message.chunks):
            expected_rejects[reason].add(f"{LEDGER_ID}:{message.entry_id - chunk}")
    assert results.rejected == expected_rejects, seed
    for name in ("schedule_blocks", "large", "parts", "cancels"):
        assert not stage.states[name].values, (seed, name)
    return results


@pytest.mark.parametrize("start", range(0, SEEDS, _AT_ONCE))
def test_no_cut_into_batches_and_no_kill_changes_what_becomes_of_schedules(start: int) -> None:
    plays = [play(seed) for seed in range(start, start + _AT_ONCE)]
    reasons = {reason for results in plays for reason in results.rejected}
    assert reasons == {"replaced", "cancelled", "expired"}
