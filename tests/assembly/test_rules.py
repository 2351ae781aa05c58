"""The event table of chunk assembly, line by line, and its limits."""

from __future__ import annotations

from typing import Any

import pytest

from ledgerlake.assembly.rules import (
    Chunk,
    ChunkedMessageKey,
    ChunkEvent,
    Deliver,
    IncompleteMessages,
    Limits,
    Reject,
    Retain,
    Spill,
)
from ledgerlake.reasons import Reason
from ledgerlake.wire.message_id import Position

KEY_A, KEY_B, KEY_C = (ChunkedMessageKey(name, f"{name}-1") for name in "abc")


class Feed:
    """Chunks at consecutive entries, ten bytes each, and five of metadata."""

    def __init__(self, **limits: int) -> None:
        self.pending = IncompleteMessages(Limits(**limits))
        self.entry = -1

    def __call__(
        self,
        key: ChunkedMessageKey,
        chunk_id: int,
        count: int,
        at: int | None = None,
        **changes: Any,
    ) -> list[Any]:
        if at is None:
            self.entry += 1
        fields: dict[str, Any] = {
            "key": key,
            "position": Position(1, self.entry if at is None else at),
            "chunk_id": chunk_id,
            "chunk_count": count,
            "total_bytes": 10 * count,
            "size_bytes": 10,
            "entry_bytes": 15,
            "time_ms": self.entry,
            "publish_ms": 7,
        }
        return self.pending.arrive(Chunk(**fields | changes))


def at(*entries: int) -> tuple[Position, ...]:
    return tuple(Position(1, entry) for entry in entries)


def hold(entry: int) -> Retain:
    return Retain(Position(1, entry))


def test_chunks_in_order_are_held_and_the_last_one_delivers() -> None:
    feed = Feed()
    assert feed(KEY_A, 0, 3) == [hold(0)]
    assert feed(KEY_A, 1, 3) == [hold(1)]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 1, 2), reread=False)]
    assert (feed.pending.messages, feed.pending.kept_bytes) == ((), 0)


def test_messages_of_several_producers_interleave() -> None:
    feed = Feed()
    feed(KEY_A, 0, 2)
    feed(KEY_B, 0, 2)
    assert feed(KEY_A, 1, 2) == [Deliver(KEY_A, at(0, 2), reread=False)]
    assert feed(KEY_B, 1, 2) == [Deliver(KEY_B, at(1, 3), reread=False)]


def test_a_first_chunk_that_comes_again_elsewhere_starts_the_set_over() -> None:
    feed = Feed()
    feed(KEY_A, 0, 2)
    assert feed(KEY_A, 0, 2) == [
        Reject(Reason("chunk_resent"), KEY_A, at(0), bytes_kept=True),
        hold(1),
    ]
    assert feed(KEY_A, 1, 2) == [Deliver(KEY_A, at(1, 2), reread=False)]


def test_a_chunk_belongs_to_the_message_that_it_names_whoever_has_sent_it() -> None:
    """Nothing in an entry tells who has really sent it, as ``SECURITY.md`` says."""
    ended = Feed()
    ended(KEY_A, 0, 2)
    assert ended(KEY_A, 1, 2) == [Deliver(KEY_A, at(0, 1), reread=False)]
    assert ended(KEY_A, 1, 2) == [Reject(Reason("chunk_orphan"), KEY_A, at(2), bytes_kept=False)]
    spoiled = Feed()
    spoiled(KEY_A, 0, 2)
    spoiled(KEY_A, 0, 2, publish_ms=8)
    assert spoiled(KEY_A, 1, 2) == [
        Reject(Reason("chunk_mismatch"), KEY_A, at(2), bytes_kept=False)
    ]


def test_a_uuid_that_a_restarted_producer_uses_again_may_have_another_size() -> None:
    feed = Feed()
    feed(KEY_A, 0, 5)
    feed(KEY_A, 1, 5)
    assert feed(KEY_A, 0, 2) == [
        Reject(Reason("chunk_resent"), KEY_A, at(0, 1), bytes_kept=True),
        hold(2),
    ]
    assert feed(KEY_A, 1, 2) == [Deliver(KEY_A, at(2, 3), reread=False)]


@pytest.mark.parametrize("key", [KEY_A, KEY_B])
def test_a_chunk_at_the_position_of_one_that_waits_is_rejected_and_the_one_that_waits_stays(
    key: ChunkedMessageKey,
) -> None:
    feed = Feed()
    for number in range(2):
        feed(KEY_A, number, 3)
        for chunk_id in range(3):
            known = Reject(Reason("chunk_known"), key, at(number), bytes_kept=False)
            assert feed(key, chunk_id, 3, at=number, publish_ms=8) == [known]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 1, 2), reread=False)]
    assert feed.pending.messages == ()


def test_a_chunk_sent_again_is_rejected_and_the_set_goes_on() -> None:
    feed = Feed()
    feed(KEY_A, 0, 4)
    feed(KEY_A, 1, 4)
    assert feed(KEY_A, 1, 4) == [Reject(Reason("chunk_duplicate"), KEY_A, at(2), bytes_kept=False)]
    assert feed(KEY_A, 2, 4) == [hold(3)]
    assert feed(KEY_A, 3, 4) == [Deliver(KEY_A, at(0, 1, 3, 4), reread=False)]


def test_a_gap_gives_up_the_set_and_the_chunk_behind_it() -> None:
    feed = Feed()
    feed(KEY_A, 0, 4)
    assert feed(KEY_A, 2, 4) == [
        Reject(Reason("chunk_gap"), KEY_A, at(0), bytes_kept=True),
        Reject(Reason("chunk_gap"), KEY_A, at(1), bytes_kept=False),
    ]
    assert feed(KEY_A, 3, 4) == [Reject(Reason("chunk_orphan"), KEY_A, at(2), bytes_kept=False)]


def test_a_chunk_without_a_beginning_is_an_orphan() -> None:
    assert Feed()(KEY_A, 1, 2) == [Reject(Reason("chunk_orphan"), KEY_A, at(0), bytes_kept=False)]


def test_a_chunk_of_another_shape_is_rejected_alone() -> None:
    feed = Feed()
    feed(KEY_A, 0, 3)
    assert feed(KEY_A, 1, 4, total_bytes=30) == [
        Reject(Reason("chunk_mismatch"), KEY_A, at(1), bytes_kept=False)
    ]
    assert feed(KEY_A, 1, 3, total_bytes=31) == [
        Reject(Reason("chunk_mismatch"), KEY_A, at(2), bytes_kept=False)
    ]
    assert feed(KEY_A, 1, 3) == [hold(3)]


def test_chunks_of_a_restarted_producer_do_not_complete_the_set_of_the_first_run() -> None:
    feed = Feed()
    feed(KEY_A, 0, 3)
    feed(KEY_A, 1, 3)
    assert feed(KEY_A, 2, 3, publish_ms=8) == [
        Reject(Reason("chunk_mismatch"), KEY_A, at(2), bytes_kept=False)
    ]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 1, 3), reread=False)]


def test_chunks_sent_again_after_a_reconnect_have_the_same_publish_time_and_complete_the_set() -> (
    None
):
    feed = Feed()
    feed(KEY_A, 0, 3)
    feed(KEY_A, 1, 3)
    assert feed(KEY_A, 1, 3) == [Reject(Reason("chunk_duplicate"), KEY_A, at(2), bytes_kept=False)]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 1, 3), reread=False)]


@pytest.mark.parametrize(
    "changes",
    [
        {"chunk_id": -1},
        {"chunk_id": 3},
        {"chunk_count": 1, "chunk_id": 0},
        {"chunk_count": -5},
        {"total_bytes": -1},
        {"size_bytes": -1},
    ],
)
def test_numbers_that_no_message_can_have_are_invalid_and_open_nothing(
    changes: dict[str, int],
) -> None:
    feed = Feed()
    fields: dict[str, Any] = {"chunk_id": 0, "chunk_count": 3} | changes
    effects = feed(
        KEY_A, fields.pop("chunk_id"), fields.pop("chunk_count"), **{"total_bytes": 30} | fields
    )
    assert effects == [Reject(Reason("chunk_invalid"), KEY_A, at(0), bytes_kept=False)]
    assert feed.pending.messages == ()


@pytest.mark.parametrize(
    "changes", [{"total_bytes": 2**31}, {"count": 2**31 - 1, "total_bytes": 5}]
)
def test_a_claim_over_the_limits_is_refused_at_its_first_chunk(changes: dict[str, int]) -> None:
    feed = Feed()
    fields = {"count": 3} | changes
    assert feed(KEY_A, 0, fields.pop("count"), **fields) == [
        Reject(Reason("too_large"), KEY_A, at(0), bytes_kept=False)
    ]


def test_more_bytes_than_the_total_are_noticed_when_they_come() -> None:
    feed = Feed()
    feed(KEY_A, 0, 3)
    assert feed(KEY_A, 1, 3, size_bytes=21) == [
        Reject(Reason("chunk_size"), KEY_A, at(0), bytes_kept=True),
        Reject(Reason("chunk_size"), KEY_A, at(1), bytes_kept=False),
    ]
    assert feed(KEY_B, 0, 3, size_bytes=31) == [
        Reject(Reason("chunk_size"), KEY_B, at(2), bytes_kept=False)
    ]


def test_fewer_bytes_than_the_total_are_noticed_at_the_end() -> None:
    feed = Feed()
    feed(KEY_A, 0, 2)
    assert feed(KEY_A, 1, 2, size_bytes=9) == [
        Reject(Reason("chunk_size"), KEY_A, at(0), bytes_kept=True),
        Reject(Reason("chunk_size"), KEY_A, at(1), bytes_kept=False),
    ]


def test_at_the_limit_of_sets_the_oldest_is_put_aside_and_still_delivered() -> None:
    feed = Feed(max_pending=1)
    feed(KEY_A, 0, 3)
    assert feed(KEY_B, 0, 3) == [hold(1), Spill(at(0))]
    assert feed(KEY_C, 0, 3) == [hold(2), Spill(at(1))]
    assert [feed(key, 1, 3) for key in (KEY_A, KEY_B, KEY_C)] == [[], [], [hold(5)]]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 3, 6), reread=True, known=at(0, 3, 6))]
    assert feed(KEY_B, 2, 3) == [Deliver(KEY_B, at(1, 4, 7), reread=True, known=at(1, 4, 7))]
    assert feed(KEY_C, 2, 3) == [Deliver(KEY_C, at(2, 5, 8), reread=False)]


def test_bytes_are_limited_as_well_as_sets() -> None:
    feed = Feed(max_pending_bytes=35)
    feed(KEY_A, 0, 3)
    feed(KEY_B, 0, 3)
    assert feed(KEY_B, 1, 3) == [hold(2), Spill(at(0))]
    assert feed.pending.kept_bytes == 30
    assert feed(KEY_B, 2, 4, total_bytes=30) == [
        Reject(Reason("chunk_mismatch"), KEY_B, at(3), bytes_kept=False)
    ]


def test_a_set_larger_than_the_whole_limit_is_put_aside_itself() -> None:
    feed = Feed(max_pending_bytes=25)
    feed(KEY_A, 0, 3)
    assert feed(KEY_A, 1, 3) == [hold(1), Spill(at(0, 1))]
    assert feed(KEY_A, 2, 3) == [Deliver(KEY_A, at(0, 1, 2), reread=True, known=at(0, 1, 2))]


def test_chunks_that_promise_a_marker_wait_for_it_where_others_would_be_orphans() -> None:
    feed = Feed()
    assert feed(KEY_A, 2, 4, has_marker=True) == []
    assert feed(KEY_A, 3, 4, has_marker=True) == []
    assert [message.awaiting for message in feed.pending.messages] == [True]
    assert feed.pending.apply_marker(KEY_A, at(7, 8, 0, 1)) == [
        Deliver(KEY_A, at(7, 8, 0, 1), reread=True, known=at(0, 1))
    ]
    assert feed.pending.messages == ()


def test_a_gap_under_a_promised_marker_keeps_positions_and_lets_go_of_bytes() -> None:
    feed = Feed()
    feed(KEY_A, 0, 4, has_marker=True)
    assert feed(KEY_A, 2, 4, has_marker=True) == [Spill(at(0))]
    assert feed.pending.kept_bytes == 0
    assert feed.pending.apply_marker(KEY_A, at(0, 9, 1, 8)) == [
        Deliver(KEY_A, at(0, 9, 1, 8), reread=True, known=at(0, 1))
    ]


def test_chunks_that_a_marker_does_not_list_are_rejected_when_it_comes() -> None:
    feed = Feed()
    feed(KEY_A, 1, 3, has_marker=True)
    feed(KEY_A, 1, 3, has_marker=True)
    assert feed.pending.apply_marker(KEY_A, at(7, 0, 8)) == [
        Reject(Reason("chunk_duplicate"), KEY_A, at(1), bytes_kept=False),
        Deliver(KEY_A, at(7, 0, 8), reread=True, known=at(0)),
    ]


def test_a_marker_of_a_message_that_was_delivered_changes_nothing() -> None:
    feed = Feed()
    feed(KEY_A, 0, 2, has_marker=True)
    feed(KEY_A, 1, 2, has_marker=True)
    assert feed.pending.apply_marker(KEY_A, at(0, 1)) == []


def test_a_first_chunk_begins_anew_also_where_a_marker_was_awaited() -> None:
    feed = Feed()
    feed(KEY_A, 1, 2, has_marker=True)
    assert feed(KEY_A, 0, 2, has_marker=True) == [
        Reject(Reason("chunk_resent"), KEY_A, at(0), bytes_kept=False),
        hold(1),
    ]


def test_positions_that_wait_for_a_marker_are_limited() -> None:
    feed = Feed(max_chunks=4)
    for _ in range(4):
        assert feed(KEY_A, 2, 4, has_marker=True) == []
    assert feed(KEY_A, 3, 4, has_marker=True) == [
        Reject(Reason("chunk_orphan"), KEY_A, at(4), bytes_kept=False)
    ]


def test_a_set_that_was_opened_elsewhere_goes_on_here() -> None:
    feed, elsewhere = Feed(max_pending=1), Feed()
    feed(KEY_B, 0, 3)
    elsewhere(KEY_A, 0, 3, at=5)
    (opened,) = elsewhere.pending.messages
    assert feed.pending.adopt(opened) == [Spill(at(0))]
    assert feed(KEY_A, 1, 3, at=6) == [hold(6)]
    assert feed(KEY_A, 2, 3, at=7) == [Deliver(KEY_A, at(5, 6, 7), reread=False)]


def test_a_message_that_began_again_elsewhere_gives_up_the_old_set() -> None:
    feed = Feed()
    feed(KEY_A, 0, 3)
    assert feed.pending.supersede(KEY_B) == []
    assert feed.pending.supersede(KEY_A) == [
        Reject(Reason("chunk_resent"), KEY_A, at(0), bytes_kept=True)
    ]


def test_what_is_aside_is_limited_too() -> None:
    feed = Feed(max_pending=1, max_spilled=1)
    feed(KEY_A, 0, 2)
    feed(KEY_B, 0, 2)
    assert feed(KEY_C, 0, 2) == [
        hold(2),
        Spill(at(1)),
        Reject(Reason("chunk_evicted"), KEY_A, at(0), bytes_kept=False),
    ]


def test_what_a_producer_puts_beside_the_payload_counts_as_bytes() -> None:
    feed = Feed(max_pending_bytes=10_000)
    feed(KEY_A, 0, 3, entry_bytes=5000)
    assert feed(KEY_B, 0, 3, entry_bytes=5001) == [hold(1), Spill(at(0))]
    assert feed.pending.kept_bytes == 5001


@pytest.mark.parametrize("has_marker", [False, True])
@pytest.mark.parametrize("max_pending", [1, 100])
def test_the_chunks_of_all_messages_together_are_limited(
    max_pending: int, has_marker: bool
) -> None:
    feed = Feed(max_incomplete_chunks=4, max_pending=max_pending)
    effects = []
    for key in (KEY_A, KEY_B, KEY_C):
        for chunk_id in range(3):
            effects += feed(key, chunk_id, 9, size_bytes=0, has_marker=has_marker)
            assert sum(len(message.positions) for message in feed.pending.messages) <= 4
    assert [effect for effect in effects if isinstance(effect, Reject)] == [
        Reject(Reason("chunk_evicted"), KEY_A, at(0, 1, 2), bytes_kept=max_pending > 1),
        Reject(Reason("chunk_evicted"), KEY_B, at(3, 4, 5), bytes_kept=max_pending > 1),
    ]


def test_sets_expire_by_the_time_of_their_first_chunk() -> None:
    feed = Feed(max_pending=1, expire_after_ms=100)
    feed(KEY_A, 0, 2, time_ms=1000)
    feed(KEY_B, 0, 2, time_ms=1050)
    assert feed.pending.expire(1100) == []
    assert feed.pending.expire(1101) == [
        Reject(Reason("chunk_expired"), KEY_A, at(0), bytes_kept=False)
    ]
    assert feed.pending.expire(2000) == [
        Reject(Reason("chunk_expired"), KEY_B, at(1), bytes_kept=True)
    ]
    assert (feed.pending.messages, feed.pending.kept_bytes) == ((), 0)


def test_a_set_without_a_broker_time_is_as_old_as_the_clock_that_first_sees_it() -> None:
    feed = Feed(expire_after_ms=100)
    feed(KEY_A, 0, 2, time_ms=None, publish_ms=10**15)
    assert feed.pending.expire(1000) == []
    assert feed.pending.expire(1100) == []
    assert feed.pending.expire(1101) == [
        Reject(Reason("chunk_expired"), KEY_A, at(0), bytes_kept=True)
    ]


def test_a_hundred_thousand_open_sets_cost_no_more_each_than_a_few() -> None:
    feed = Feed(max_pending=100, max_spilled=50_000)
    rejected = 0
    for number in range(100_000):
        effects = feed(ChunkedMessageKey("p", str(number)), 0, 2)
        rejected += sum(isinstance(effect, Reject) for effect in effects)
    assert len(feed.pending.messages) == 50_100
    assert rejected == 100_000 - 50_100
    assert feed.pending.kept_bytes == 1500


def test_open_sets_survive_a_restart() -> None:
    feed = Feed(max_pending=1)
    feed(KEY_A, 0, 2)
    feed(KEY_B, 0, 2)
    feed.pending = IncompleteMessages(Limits(max_pending=1), feed.pending.messages)
    assert feed.pending.kept_bytes == 15
    assert feed(KEY_A, 1, 2) == [Deliver(KEY_A, at(0, 2), reread=True, known=at(0, 2))]
    assert feed(KEY_B, 1, 2) == [Deliver(KEY_B, at(1, 3), reread=False)]


def test_every_event_of_the_table_is_reached() -> None:
    feed = Feed()
    limits = Limits(max_message_bytes=100)
    feed.pending = IncompleteMessages(limits)
    reached = {
        feed.pending.classify(Chunk(KEY_A, Position(1, 0), 1, 4, 40, 10, 15, 0, 7, has_marker=True))
    }
    for held_ids in (0, 1, 2):
        for chunk_id in (-1, 0, 1, 2, 3):
            for count, total in ((4, 40), (4, 41), (4, 1000)):
                for entry in (0, 9):
                    chunk = Chunk(KEY_A, Position(1, entry), chunk_id, count, total, 10, 15, 0, 7)
                    reached.add(feed.pending.classify(chunk))
        feed(KEY_A, held_ids, 4)
    assert reached == set(ChunkEvent)
