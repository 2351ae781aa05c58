"""Outcomes become rows: from bytes at hand, from the topic, and where the topic no longer
has them.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pytest

from ledgerlake.assembly.assembler import Assembled, Rejected
from ledgerlake.assembly.rules import ChunkedMessageKey, Limits
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.decode.rejects import RejectedEntry
from ledgerlake.delay.segment import index_rows
from ledgerlake.operators import outcomes
from ledgerlake.operators.due_outcomes import DueOutcomes, Release
from ledgerlake.operators.outcome_types import Delivery, DueEntries, DuePositions, RejectedPositions
from ledgerlake.operators.outcomes import OutcomeDecoder
from ledgerlake.operators.repeating import Repeated
from ledgerlake.operators.results import StageSettings
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import Reason
from ledgerlake.schedules.cancels import Cancel, Cancels
from ledgerlake.schedules.schedules import MarkedPositions, Schedules
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.encryption import encrypted
from tests.entries import BROKER_TIME_MS, batch, single
from tests.operators.test_scheduled import frame
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Iterable

ENTRIES = chunk_entries(b"large message", 3)
DUE_MS = BROKER_TIME_MS + 1_000
AT = tuple(Position(7, number) for number in (1, 2, 4))


def decoder(peer: Peer, max_message_bytes: int = 10**6) -> OutcomeDecoder:
    options = parse_options({"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000"})
    settings = StageSettings(Limits(max_message_bytes=max_message_bytes), DelayOptions(), options)
    return OutcomeDecoder(TopicPartition(*split_partition(TOPIC)), settings)


def fill(peer: Peer) -> None:
    peer.add(single(b"a"), ENTRIES[0], ENTRIES[1], single(b"b"), ENTRIES[2], single(b"c"))


def reject_rows(decoder: OutcomeDecoder, rejected: Any) -> list[dict[str, Any]]:
    tables = [*decoder.reject_tables(rejected), *decoder.last_rejects()]
    return [row for table in tables for row in table.to_pylist()]


def test_a_set_that_was_put_aside_is_read_again_from_the_topic() -> None:
    with Peer() as peer:
        fill(peer)
        (decoded,) = decoder(peer).decode(Assembled(AT, None, AT[-1]))
        assert not isinstance(decoded, list)
        assert decoded.to_pylist()[0]["value"] == b"large message"


def test_what_the_topic_no_longer_has_becomes_rejects_with_positions() -> None:
    with Peer() as peer:
        fill(peer)
        del peer.entries[:2]
        judge = decoder(peer)
        (rejects,) = judge.decode(Assembled(AT, None, AT[-1], known=AT))
        assert isinstance(rejects, list)
        written = reject_rows(judge, rejects)
        assert [(row["reason"], row["entry_id"], row["entry"]) for row in written] == [
            ("chunk_trimmed", 1, None),
            ("chunk_trimmed", 2, ENTRIES[1]),
            ("chunk_trimmed", 4, ENTRIES[2]),
        ]


def test_chunks_without_bytes_are_read_again_to_be_rejected_whole() -> None:
    with Peer() as peer:
        fill(peer)
        judge = decoder(peer)
        (rejects,) = judge.decode(
            Rejected(Reason("chunk_expired"), [(AT[2], None), (AT[0], b"held"), (AT[1], None)])
        )
        assert isinstance(rejects, list)
        written = reject_rows(judge, rejects)
        assert [(row["entry_id"], row["entry"]) for row in written] == [
            (1, b"held"),
            (2, ENTRIES[1]),
            (4, ENTRIES[2]),
        ]
        assert written[1]["detail"] == "chunk 1 of 3 of p-1"


@pytest.mark.parametrize(("target", "value"), [("id", "7:0"), ("key", "k")])
def test_a_due_message_that_cannot_be_decrypted_and_was_cancelled_is_no_reject_to_replay(
    target: Literal["id", "key"], value: str
) -> None:
    kept = encrypted(single(b"secret", partition_key="k", deliver_at_time=50), "theirs")
    with Peer() as peer:
        judge = decoder(peer)
        judge.cancels = Cancels([Cancel(target, value, Position(9, 0), 0, 10**12)])
        due = DueEntries(commands.message(0, 7, 0, kept), 100, {})
        rejects = [
            reject
            for decoded in judge.decode(due)
            if isinstance(decoded, list)
            for reject in decoded
        ]
        assert [(reject.reason, reject.entry) for reject in rejects] == [("cancelled", kept)]


@pytest.mark.parametrize(
    ("target", "value", "reason"),
    [
        ("id", "7:0:1", "cancelled"),
        ("key", "k", "cancelled"),
        ("id", "7:1:1", "encrypted"),
        ("id", "8:0", "encrypted"),
    ],
)
def test_a_due_batch_that_cannot_be_read_is_no_reject_to_replay_if_a_message_in_it_may_be_cancelled(
    target: Literal["id", "key"], value: str, reason: str
) -> None:
    kept = encrypted(batch([b"a", b"b"], deliver_at_time=50), "theirs")
    with Peer() as peer:
        judge = decoder(peer)
        judge.cancels = Cancels([Cancel(target, value, Position(9, 0), 0, 10**12)])
        due = DueEntries(commands.message(0, 7, 0, kept), 100, {})
        rejects = [
            reject
            for decoded in judge.decode(due)
            if isinstance(decoded, list)
            for reject in decoded
        ]
        assert [(reject.reason, reject.entry) for reject in rejects] == [(reason, kept)]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_due_large_message_that_is_too_large_and_was_cancelled_is_no_reject_to_replay(
    is_kept: bool,
) -> None:
    chunks = chunk_entries(b"large message", 3, deliver_at_time=50, partition_key="a")
    with Peer() as peer:
        peer.add(*chunks)
        judge = decoder(peer, max_message_bytes=5)
        judge.cancels = cancels()
        positions = tuple(Position(7, number) for number in range(3))
        message = Assembled(
            positions,
            chunks if is_kept else None,
            positions[-1],
            delivered_ms=100,
            due_ms=50,
            known=positions,
        )
        (rejects,) = judge.decode(message)
        assert isinstance(rejects, list)
        written = reject_rows(judge, rejects)
        assert [(row["reason"], row["entry"]) for row in written] == [
            ("cancelled", chunk) for chunk in chunks
        ]


def cancels() -> Cancels:
    return Cancels(
        [
            Cancel("key", "a", Position(9, 0), 0, 10**12),
            Cancel("id", "7:0", Position(9, 0), 0, 10**12),
        ]
    )


@pytest.mark.parametrize(
    ("last", "reason"),
    [
        pytest.param(b"\x00\x00\xff\xffgarbage", "malformed_entry", id="unreadable metadata"),
        pytest.param(
            chunk_entries(b"ab", 2, uuid="q-1")[1],
            "chunk_mismatch",
            id="a chunk of another message",
        ),
        pytest.param(single(b"a", partition_key="a"), "chunk_mismatch", id="no chunk"),
    ],
)
@pytest.mark.parametrize("in_force", [Cancels(), cancels()])
def test_an_entry_that_a_marker_lists_falsely_ends_the_message_and_not_the_stream(
    last: bytes, reason: str, in_force: Cancels
) -> None:
    with Peer() as peer:
        peer.add(chunk_entries(b"ab", 2)[0], last)
        judge = decoder(peer)
        judge.cancels = in_force
        positions = Position(7, 0), Position(7, 1)
        key = ChunkedMessageKey("p", "p-1")
        message = Assembled(
            positions, None, positions[-1], delivered_ms=10**12, key=key, known=positions[:1]
        )
        (rejects,) = judge.decode(message)
        assert isinstance(rejects, list)
        assert [(reject.position, reject.reason) for reject in rejects] == [(positions[0], reason)]


@pytest.mark.parametrize("is_rejected", [False, True])
def test_a_marker_of_thousands_of_missing_entries_asks_the_broker_a_few_times(
    is_rejected: bool,
) -> None:
    with Peer() as peer:
        peer.add(chunk_entries(b"ab", 2, num_chunks_from_msg=2000)[0])
        peer.add(chunk_entries(b"cd", 2, uuid="q")[0], first=50_000)
        judge = decoder(peer)
        positions = (Position(7, 0), *(Position(7, 20 * number) for number in range(1, 2000)))
        message = Assembled(
            positions, None, positions[-1], key=ChunkedMessageKey("p", "p-1"), known=positions[:1]
        )
        rejected = RejectedPositions(Reason("malformed_marker"), positions[:1])
        (rejects,) = judge.decode(rejected if is_rejected else message)
        assert isinstance(rejects, list)
        written = reject_rows(judge, rejects)
        reason = "malformed_marker" if is_rejected else "chunk_trimmed"
        assert [(row["entry_id"], row["reason"]) for row in written] == [(0, reason)]
        assert len(peer.requests) < 30


@pytest.mark.parametrize("in_chunks_ms", [None, 0, -5, 4_999, 5_000, 5_001, 10_000])
@pytest.mark.parametrize("due_ms", [None, 5_000])
def test_a_large_message_waits_by_the_time_in_its_chunks_or_is_rejected(
    in_chunks_ms: int | None, due_ms: int | None
) -> None:
    """Its marker may say another time. The worker's clock decides nothing, so a repeat does the
    same.
    """
    fields: dict[str, Any] = {} if in_chunks_ms is None else {"deliver_at_time": in_chunks_ms}
    entries = chunk_entries(b"large message", 3, **fields)
    for delivered_ms in (None,) if due_ms is None else (5_000, 10**12):
        with Peer() as peer:
            message = Assembled(AT, list(entries), AT[-1], delivered_ms=delivered_ms, due_ms=due_ms)
            (decoded,) = decoder(peer).decode(message)
        waits = (in_chunks_ms or 0) > 0
        fits = not waits if due_ms is None else waits and (in_chunks_ms or 0) <= due_ms
        if fits:
            assert not isinstance(decoded, list)
        else:
            assert isinstance(decoded, list)
            assert {reject.reason for reject in decoded} == {"malformed_marker"}


@pytest.mark.parametrize(
    "of_another_topic", [{}, {"deliver_at_time": DUE_MS - 1}, {"deliver_at_time": DUE_MS + 1}]
)
@pytest.mark.parametrize("has_repeated", [False, True])
def test_an_entry_of_a_topic_that_was_created_again_is_not_taken_for_one_that_waited(
    of_another_topic: dict[str, int], has_repeated: bool
) -> None:
    """It may be due in a year, or be delivered already."""
    due = DuePositions([Position(7, 0), Position(7, 1), Position(7, 2)], [DUE_MS] * 3, 10**12, {})
    if has_repeated:
        positions, deliveries = (
            [Position(7, 3), *due.positions],
            [Delivery(50, {}), None, None, None],
        )
        due = DuePositions(
            positions,
            [DUE_MS] * 4,
            10**12,
            {},
            100,
            frame(3, 50, schedule="a", every="PT1S"),
            deliveries,
        )
    with Peer() as peer:
        a, b = (single(value, deliver_at_time=DUE_MS) for value in (b"a", b"b"))
        peer.add(a, single(b"another", **of_another_topic), b)
        judge = decoder(peer)
        found, rejects = _content_of(judge.decode(due))
        written = reject_rows(judge, rejects)
    assert [row["value"] for row in found if row["entry_id"] < 3] == [b"a", b"b"]
    assert [(row["reason"], row["entry_id"], row["entry"]) for row in written] == [
        ("entry_trimmed", 1, None)
    ]


def test_occurrences_of_several_messages_come_together_in_their_order() -> None:
    """One of the messages cannot be decoded."""
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=3, publish_time=5, deliver_at_time=1_000
    )
    metadata.compression = pb.ZSTD
    bad = commands.message(1, 7, 3, encode_entry(metadata, b"not compressed"))
    frames = [
        frame(1, 1_000, schedule="a", every="PT1S"),
        frame(2, 1_000, schedule="b", every="PT1S"),
        bad,
    ]
    order = [0, 1, 0, 2, 2, 1, 0]
    deliveries = [
        Delivery(1_000 * number, {"ledgerlake.occurrence": str(number)})
        for number in range(len(order))
    ]
    due = DueEntries(b"".join(frames[place] for place in order), 9_000, {}, deliveries=deliveries)
    found: list[tuple[str, str]] = []
    rejects: list[RejectedEntry] = []
    with Peer() as peer:
        for decoded in decoder(peer).decode(due):
            if isinstance(decoded, list):
                rejects += decoded
                continue
            for row in decoded.to_pylist(maps_as_pydicts="strict"):
                assert row["message_id"] == f"{row['ledger_id']}:{row['entry_id']}"
                assert row["deliver_at"].timestamp() == int(
                    row["properties"]["ledgerlake.occurrence"]
                )
                found.append((row["message_id"], row["properties"]["ledgerlake.occurrence"]))
    assert found == [("7:1", "0"), ("7:2", "1"), ("7:1", "2"), ("7:2", "5"), ("7:1", "6")]
    assert [(str(reject.position), reject.reason) for reject in rejects] == [
        ("7:3", "bad_compression")
    ] * 2
    assert all(reject.entry is not None for reject in rejects)


@pytest.mark.parametrize("is_in_topic", [False, True])
def test_messages_between_occurrences_become_what_they_become_alone(is_in_topic: bool) -> None:
    plain = [
        single(b"plain", partition_key="k", deliver_at_time=50),
        single(b"cancelled", partition_key="a", deliver_at_time=50),
        batch([b"first of a batch", b"second"], deliver_at_time=50),
        single(
            b"expired",
            deliver_at_time=50,
            properties=[pb.KeyValue(key="ledgerlake.expires", value="60")],
        ),
        single(b"cannot be decoded", compression=pb.ZSTD, deliver_at_time=50),
        single(
            b"with an id",
            deliver_at_time=50,
            properties=[pb.KeyValue(key="ledgerlake.schedule", value="b")],
        ),
    ]
    positions = [Position(7, number) for number in range(1, 1 + len(plain))]
    repeating = [frame(0, 50, schedule="a", every="PT1S")] * len(plain)
    deliveries = [
        Delivery(number, {"ledgerlake.occurrence": str(number)}) for number in range(len(plain))
    ]
    alone = [
        commands.message(1, position.ledger_id, position.entry_id, entry)
        for position, entry in zip(positions, plain, strict=True)
    ]
    between = [delivery for own in deliveries for delivery in (own, None)]
    frames = b"".join(frame for pair in zip(repeating, alone, strict=True) for frame in pair)
    mixed: DueEntries | DuePositions = DueEntries(
        frames, 9_000, {}, clock_ms=100, deliveries=between
    )
    if is_in_topic:
        all_positions = [place for position in positions for place in (Position(7, 0), position)]
        mixed = DuePositions(
            all_positions,
            [BROKER_TIME_MS] * len(all_positions),
            9_000,
            {},
            100,
            b"".join(repeating),
            between,
        )
    with Peer() as peer:
        peer.add(b"in the place of the one that repeats", *plain)
        judge = decoder(peer)
        judge.cancels = cancels()
        rows, rejects = _content_of(judge.decode(mixed))
        expected_rows, expected_rejects = _content_of(
            judge.decode(DueEntries(b"".join(alone), 9_000, {}, clock_ms=100))
        )
        occurrences, _ = _content_of(
            judge.decode(DueEntries(b"".join(repeating), 9_000, {}, deliveries=deliveries))
        )
    assert [row for row in rows if row["entry_id"] != 0] == expected_rows
    assert [row for row in rows if row["entry_id"] == 0] == occurrences
    assert [row["entry_id"] for row in rows] == [0, 1, 0, 0, 3, 3, 0, 0, 0, 6]
    assert rejects == expected_rejects


@pytest.mark.parametrize("kinds", [*product(["repeats", "kept", "in the topic"], repeat=3)])
def test_each_message_that_is_due_has_its_own_bytes_wherever_they_are(
    kinds: tuple[str, ...],
) -> None:
    """The bytes of any message may be in the state: it was stored when bytes were kept."""
    entries = [single(name, deliver_at_time=DUE_MS) for name in (b"a", b"b", b"c")]
    due: list[pa.RecordBatch | Repeated] = []
    for number, kind in enumerate(kinds):
        kept = commands.message(1, 7, number, entries[number])
        if kind == "repeats":
            due.append(Repeated(Position(7, number), kept, Delivery(DUE_MS, {"is": "repeated"})))
        else:
            due.append(index_rows([(DUE_MS, 7, number)], [kept if kind == "kept" else None]))
    nothing_separate: Any = SimpleNamespace(load=lambda _position: None)
    nothing: Any = None
    release = Release(DUE_MS + 5, {}, DUE_MS + 5)
    with Peer() as peer:
        peer.add(*entries)
        judge = decoder(peer)
        released = DueOutcomes(
            nothing_separate, nothing, Schedules(nothing, MarkedPositions()), release
        ).in_order(due)
        rows, rejects = _content_of(part for outcome in released for part in judge.decode(outcome))
    assert rejects == []
    found = [
        (row["entry_id"], row["value"], ("is", "repeated") in row["properties"]) for row in rows
    ]
    assert found == [
        (number, value, kind == "repeats")
        for number, (value, kind) in enumerate(zip((b"a", b"b", b"c"), kinds, strict=True))
    ]


def _content_of(
    decoded: Iterable[pa.RecordBatch | list[RejectedEntry]],
) -> tuple[list[dict[str, Any]], list[RejectedEntry]]:
    """Rows of messages, and rejects in the order of their positions."""
    rows: list[dict[str, Any]] = []
    rejects: list[RejectedEntry] = []
    for part in decoded:
        if isinstance(part, list):
            rejects += part
        else:
            rows += part.to_pylist()
    return rows, sorted(rejects, key=lambda reject: reject.position)


def test_an_occurrence_has_the_time_when_it_was_due_and_the_properties_of_its_number() -> None:
    due = DueEntries(
        frame(1, 1_000, schedule="a", every="PT1S"),
        delivered_ms=9_000,
        outputs={},
        deliveries=[Delivery(3_000, {"ledgerlake.occurrence": "3"})],
    )
    with Peer() as peer:
        (messages,) = decoder(peer).decode(due)
    assert not isinstance(messages, list)
    (row,) = messages.to_pylist(maps_as_pydicts="strict")
    assert [row[name].timestamp() for name in ("deliver_at", "delivered_at")] == [3, 9]
    assert row["properties"] == {
        "ledgerlake.schedule": "a",
        "ledgerlake.every": "PT1S",
        "ledgerlake.occurrence": "3",
    }


@pytest.mark.parametrize("most_bytes", [1, 150, 10**6])
def test_entries_that_are_read_again_leave_in_the_order_in_which_they_are_due(
    monkeypatch: pytest.MonkeyPatch, most_bytes: int
) -> None:
    monkeypatch.setattr(outcomes, "_REREAD_BYTES", most_bytes)
    due = [Position(7, number) for number in (3, 0, 4, 1)]
    with Peer() as peer:
        peer.add(*(single(b"%d" % number, deliver_at_time=50) for number in range(5)))
        decoded = list(
            decoder(peer).decode(DuePositions(due, [BROKER_TIME_MS] * len(due), 10**12, {}))
        )
    values = [
        value
        for part in decoded
        if isinstance(part, pa.RecordBatch)
        for value in part["value"].to_pylist()
    ]
    assert values == [b"3", b"0", b"4", b"1"]


@pytest.mark.parametrize("codec", [pb.ZSTD, pb.NONE])
def test_a_large_message_that_cannot_be_read_when_it_is_due_is_rejected_with_its_bytes(
    codec: int,
) -> None:
    """The topic may have removed them while the message waited."""
    entries = chunk_entries(b"large message", 3, compression=codec)
    if codec == pb.NONE:
        entries[1] = chunk_entries(b"large message", 3, uuid="q-1")[1]
    with Peer() as peer:
        judge = decoder(peer)
        (rejects,) = judge.decode(Assembled(AT, entries, AT[-1], delivered_ms=10**12))
        assert isinstance(rejects, list)
        written = reject_rows(judge, rejects)
    assert [(row["entry_id"], row["entry"]) for row in written] == [
        (position.entry_id, entry) for position, entry in zip(AT, entries, strict=True)
    ]


@pytest.mark.parametrize("is_in_topic", [False, True])
def test_due_messages_keep_their_order_beside_one_that_the_kernels_do_not_decode(
    is_in_topic: bool,
) -> None:
    entries = [single(b"%d" % number, deliver_at_time=50) for number in range(5)]
    # A key that is no text, in an entry without a checksum.
    odd = single(b"4", partition_key="??", deliver_at_time=50).replace(b"??", b"\xff\xfe")
    checksum = odd.index(b"\x0e\x01")
    entries[4] = odd[:checksum] + odd[checksum + 6 :]
    order = (3, 0, 4, 1)
    due: DueEntries | DuePositions = DueEntries(
        b"".join(commands.message(1, 7, number, entries[number]) for number in order), 10**12, {}
    )
    if is_in_topic:
        due = DuePositions(
            [Position(7, number) for number in order], [BROKER_TIME_MS] * len(order), 10**12, {}
        )
    with Peer() as peer:
        peer.add(*entries)
        decoded = [part for part in decoder(peer).decode(due) if isinstance(part, pa.RecordBatch)]
    values = [value for part in decoded for value in part["value"].to_pylist()]
    assert values == [b"3", b"0", b"4", b"1"]
