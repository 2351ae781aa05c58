"""Loss and holes told apart: the rule for itself, and in reads of a topic that changed
meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pyspark
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ledgerlake.client.cluster import Cluster
from ledgerlake.errors import DataLossError, TransportError
from ledgerlake.options.bounds import parse_start
from ledgerlake.options.source_options import SourceOptions, parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.checkpoint import as_option
from ledgerlake.reasons import DATA_LOSS
from ledgerlake.source import loss_watch
from ledgerlake.source.bounds import end_position, entry_from, resolve_start
from ledgerlake.source.loss import NO_INDEX_YET, LastRead, Loss, find_loss, moved_to
from ledgerlake.source.loss_watch import pass_moved_cursors
from ledgerlake.source.pieces import read_pieces
from ledgerlake.source.planning import EntryRange, entry_range
from ledgerlake.source.reread import read_again
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.source.views import read_entries, read_messages
from ledgerlake.stored.offsets import PartitionOffset, to_json
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import BEFORE_ALL, ChunkMessageId, MessageId, Position, to_bytes
from tests.entries import BROKER_TIME_MS, batch, single
from tests.peer import TOPIC, Peer
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("last_read", "first_index", "first_ledger", "messages"),
    [
        pytest.param(LastRead(BEFORE_ALL), 5, 12, "none", id="nothing was taken yet"),
        pytest.param(
            LastRead(Position(10, 50), 99),
            200,
            10,
            "none",
            id="the ledger is still there, so a gap is a hole",
        ),
        pytest.param(LastRead(Position(10, 50)), None, 10, "none", id="the same without an index"),
        pytest.param(
            LastRead(Position(10, 50), 99), 100, 12, "none", id="the ledger went, the numbers go on"
        ),
        pytest.param(LastRead(Position(10, 50), 99), 101, 12, 1, id="one message is missing"),
        pytest.param(LastRead(Position(10, 50), 99), 99, 12, "new", id="the numbers begin again"),
        pytest.param(
            LastRead(Position(10, 50), 99), None, 12, None, id="what follows has no number"
        ),
        pytest.param(LastRead(Position(10, 50)), 100, 12, None, id="what was taken has no number"),
    ],
)
def test_only_a_ledger_that_is_gone_and_a_number_that_is_missing_are_loss(
    last_read: LastRead, first_index: int | None, first_ledger: int, messages: int | str | None
) -> None:
    end, begin = Position(13, 9), Position(first_ledger, -1)
    loss = find_loss(
        last_read,
        Position(13, 0),
        first_index,
        begin,
        after=last_read.position,
        end=end,
        pinned_from=None,
    )
    if messages == "none":
        assert loss is None
        return
    assert loss is not None
    assert (loss.after, loss.before, loss.first) == (
        last_read.position,
        Position(13, 0),
        Position(10, 51),
    )
    assert (
        (loss.is_new_topic, loss.messages) == (True, None)
        if messages == "new"
        else (False, messages)
    )


@pytest.mark.parametrize(("first_index", "is_loss"), [(100, False), (102, False), (103, True)])
def test_entries_that_no_reader_gets_explain_numbers_at_the_beginning_of_a_ledger(
    first_index: int, is_loss: bool
) -> None:
    """Markers of transactions, and entries that the broker cannot read."""
    last_read, begin = LastRead(Position(10, 50), 99), Position(12, -1)
    loss = find_loss(
        last_read,
        Position(12, 2),
        first_index,
        begin,
        after=last_read.position,
        end=THERE,
        pinned_from=None,
    )
    assert (loss is not None) is is_loss


def test_an_index_that_counts_more_than_an_entry_holds_looks_like_loss_behind_a_ledger_that_is_gone() -> (
    None
):
    last_read, counted = LastRead(Position(10, 50), 99), 100
    after, begin = last_read.position, Position(12, -1)
    one_message = find_loss(
        last_read,
        Position(12, 0),
        99 + counted,
        begin,
        after=after,
        end=Position(13, 9),
        pinned_from=BEFORE_ALL,
    )
    assert one_message is not None
    assert one_message.messages == counted - 1
    same_ledger = find_loss(
        last_read,
        Position(10, 51),
        99 + counted,
        Position(10, -1),
        after=after,
        end=THERE,
        pinned_from=BEFORE_ALL,
    )
    assert same_ledger is None


GONE, THERE = Position(11, 3), Position(13, 3)


@pytest.mark.parametrize(
    ("pinned_from", "end", "is_loss"),
    [
        pytest.param(None, THERE, True, id="nothing pins it"),
        pytest.param(BEFORE_ALL, THERE, False, id="a cursor has kept everything unread"),
        pytest.param(
            Position(10, 50), THERE, False, id="a cursor was moved up to where the read goes on"
        ),
        pytest.param(Position(12, 7), THERE, True, id="a cursor was moved over what is unread"),
        pytest.param(BEFORE_ALL, GONE, True, id="an entry that was known is gone"),
    ],
)
@pytest.mark.parametrize("index", [None, 99])
def test_without_an_index_a_durable_cursor_says_whether_something_is_lost(
    pinned_from: Position | None, end: Position, is_loss: bool, index: int | None
) -> None:
    last_read, begin = LastRead(Position(10, 50), index), Position(12, -1)
    following = Position(12, 0)
    loss = find_loss(
        last_read,
        following,
        None,
        begin,
        after=last_read.position,
        end=end,
        pinned_from=pinned_from,
    )
    assert (
        (loss == Loss(last_read.position, min(following, end.next), None, False))
        if is_loss
        else (loss is None)
    )


def test_an_index_judges_before_a_cursor() -> None:
    last_read, begin = LastRead(Position(10, 50), 99), Position(12, -1)
    loss = find_loss(
        last_read,
        Position(12, 0),
        105,
        begin,
        after=last_read.position,
        end=THERE,
        pinned_from=BEFORE_ALL,
    )
    assert loss is not None


def test_a_cursor_passes_no_ledger_of_which_a_range_has_read_something_before_that_range_is_committed() -> (
    None
):
    last_read, begin, after = LastRead(Position(10, 50)), Position(12, -1), Position(9, 50)
    assert (
        find_loss(
            last_read, Position(12, 0), None, begin, after=after, end=THERE, pinned_from=BEFORE_ALL
        )
        is not None
    )


@pytest.mark.parametrize(
    ("index", "pinned_from", "first_index", "end", "messages"),
    [
        pytest.param(
            None,
            BEFORE_ALL,
            5,
            THERE,
            "none",
            id="pinned: the empty ledger went when the topic was loaded",
        ),
        pytest.param(None, BEFORE_ALL, None, THERE, "none", id="pinned: the same without an index"),
        pytest.param(None, Position(12, 7), 5, THERE, None, id="pinned: the cursor was moved"),
        pytest.param(None, BEFORE_ALL, 5, GONE, None, id="pinned: an entry that was known is gone"),
        pytest.param(
            NO_INDEX_YET, BEFORE_ALL, 5, THERE, 5, id="pinned: the first messages are missing"
        ),
        pytest.param(
            NO_INDEX_YET,
            None,
            0,
            THERE,
            "none",
            id="no cursor: the topic's very first message follows",
        ),
        pytest.param(NO_INDEX_YET, None, 5, THERE, 5, id="no cursor: messages went before"),
        pytest.param(
            NO_INDEX_YET,
            None,
            None,
            THERE,
            "none",
            id="no cursor, no index: nothing was known to be there",
        ),
        pytest.param(
            NO_INDEX_YET,
            None,
            None,
            GONE,
            None,
            id="no cursor, no index: an entry that was known is gone",
        ),
        pytest.param(
            None, None, 5, THERE, None, id="no cursor: an entry was there, without an index"
        ),
    ],
)
def test_of_a_topic_of_which_nothing_was_read_index_and_cursor_tell_what_was_lost(
    index: int | None,
    pinned_from: Position | None,
    first_index: int | None,
    end: Position,
    messages: int | str | None,
) -> None:
    after, following, begin = Position(10, -1), Position(12, 0), Position(12, -1)
    last_read = LastRead(after, index)
    loss = find_loss(
        last_read, following, first_index, begin, after=after, end=end, pinned_from=pinned_from
    )
    if messages == "none":
        assert loss is None
        return
    assert loss is not None
    assert (loss.after, loss.before, loss.messages, loss.is_new_topic) == (
        after,
        min(following, end.next),
        messages,
        False,
    )


@pytest.mark.parametrize(
    ("marked", "moved"),
    [
        (Position(7, 3), BEFORE_ALL),
        (Position(7, 9), BEFORE_ALL),
        (Position(9, -1), BEFORE_ALL),
        (Position(7, 10), Position(7, 10)),
        (Position(9, 4), Position(9, 4)),
    ],
)
def test_a_cursor_beyond_what_was_taken_was_moved_by_somebody_unless_a_ledger_begins_there(
    marked: Position, moved: Position
) -> None:
    assert moved_to(marked, Position(7, 9)) == moved


def options_for(peer: Peer, **more: str) -> SourceOptions:
    return parse_options(
        {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "3000", **more}
    )


@pytest.mark.parametrize(
    ("first_index", "is_lost"),
    [
        pytest.param(0, False, id="the topic's first message"),
        pytest.param(16, True, id="16 went before it"),
    ],
)
def test_what_went_before_the_first_read_of_a_topic_that_was_empty_is_named(
    first_index: int, is_lost: bool
) -> None:
    with Peer(first_ledger_id=4) as peer:
        reader = LedgerlakeStreamReader(options_for(peer, startingOffsets="earliest"))
        start = reader.initialOffset()
        peer.first_ledger_id = 9
        peer.add(batch([b"a"], index=first_index), ledger_id=9)
        (partition,) = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
        reader.stop()
        if is_lost:
            with pytest.raises(
                DataLossError, match="at most 16 messages after 4:-1 and before 9:0 are lost"
            ):
                list(reader.read(partition))
        else:
            assert sum(part.num_rows for part in reader.read(partition)) == 1


INDEX = pytest.mark.parametrize("has_index", [True, False])


def trimmed(peer: Peer) -> EntryRange:
    """Ledger 7 with messages 0 to 4 and ledger 8 with 5 to 9 are gone; messages 0 to 1 were read.
    Ledger 9 has 10 and 11.
    """
    peer.add(batch([b"10", b"11"], index=11), ledger_id=9)
    return EntryRange(TOPIC, Position(7, 0), Position(9, 0), after_index=1)


def test_a_range_that_the_topic_no_longer_has_whole_ends_the_read_and_is_named() -> None:
    with Peer() as peer:
        span = trimmed(peer)
        with pytest.raises(
            DataLossError,
            match=r"at most 8 messages after 7:0 and before 9:0 are lost.*failOnDataLoss",
        ):
            list(read_messages(options_for(peer), span))


def test_or_it_is_a_reject_and_the_read_goes_on() -> None:
    with Peer() as peer:
        span, options = trimmed(peer), options_for(peer, failOnDataLoss="false")
        rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
        assert [(row["message_id"], row["reject_reason"]) for row in rows] == [
            ("7:1", DATA_LOSS),
            ("9:0:0", None),
            ("9:0:1", None),
        ]
        entries = [row for part in read_entries(options, span) for row in part.to_pylist()]
        assert [(row["ledger_id"], row["entry_id"], row["reject_reason"]) for row in entries] == [
            (7, 1, DATA_LOSS),
            (9, 0, None),
        ]
        assert [piece.kind for piece in read_pieces(options, span)] == [
            "reject",
            "entries",
        ]


def test_a_range_of_which_nothing_is_left_is_lost_too() -> None:
    with Peer() as peer:
        peer.add(batch([b"later"], index=20), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 0), Position(8, 3), after_index=1)
        with pytest.raises(DataLossError, match="at most 18 messages after 7:0 and before 8:4"):
            list(read_messages(options_for(peer), span))


def test_a_range_within_a_single_ledger_that_is_gone_is_lost_too() -> None:
    with Peer() as peer:
        peer.add(batch([b"later"], index=20), ledger_id=9)
        span = EntryRange(TOPIC, Position(8, 0), Position(8, 3), after_index=1)
        with pytest.raises(DataLossError, match="at most 18 messages after 8:0 and before 8:4"):
            list(read_messages(options_for(peer), span))


@INDEX
@pytest.mark.parametrize("is_empty", [True, False])
def test_wherever_ranges_begin_and_end_each_names_what_it_has_lost_itself_and_all_of_that(
    has_index: bool, is_empty: bool
) -> None:
    """So the losses of ranges that follow one another do not overlap, and leave nothing out."""
    gone = [Position(5, 3), Position(7, 0), Position(7, 1), Position(8, 0), Position(8, 1)]
    indexes = {position: 9 + 2 * number for number, position in enumerate(gone)}
    left = Position(9, 0)
    with Peer(first_ledger_id=9) as peer:
        if not is_empty:
            indexes[left] = 18
            peer.add(*with_or_without_index(has_index, 18), ledger_id=9)
        offsets = [
            PartitionOffset(position, None, BROKER_TIME_MS, index if has_index else None)
            for position, index in indexes.items()
        ]
        options = options_for(peer, failOnDataLoss="false")
        for begin, end in combinations(offsets, 2):
            if begin.position == gone[-1]:
                continue
            span = entry_range(TOPIC, begin, end)
            rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
            lost = indexes[min(end.position, gone[-1])] - indexes[begin.position]
            count = f"at most {lost}" if has_index else "an unknown number of"
            before = min(end.position.next, left)
            assert [row["value"].decode() for row in rows if row["reject_reason"]] == [
                f"{count} messages after {begin.position} and before {before} are lost: they were "
                "removed before they were read"
            ]
            assert len(rows) == 1 + (end.position == left)


def test_a_range_from_the_beginning_of_a_topic_of_which_nothing_is_left_is_lost_too() -> None:
    with Peer() as peer:
        peer.add(batch([b"later"], index=0), ledger_id=9)
        span = EntryRange(TOPIC, BEFORE_ALL, Position(8, 3))
        with pytest.raises(
            DataLossError, match="messages after the topic's beginning and before 8:4 are lost"
        ):
            list(read_messages(options_for(peer), span))
        skipping = options_for(peer, failOnDataLoss="false")
        rows = [row for part in read_messages(skipping, span) for row in part.to_pylist()]
        assert [(row["message_id"], row["reject_reason"]) for row in rows] == [("0:0", DATA_LOSS)]


def test_a_range_from_the_beginning_of_a_topic_that_was_deleted_is_lost_too() -> None:
    with Peer(is_deleted=True) as peer:
        span = EntryRange(TOPIC, BEFORE_ALL, Position(8, 3))
        with pytest.raises(
            DataLossError,
            match=r"the topic's beginning and before 8:4 are lost: the topic was deleted",
        ):
            list(read_messages(options_for(peer), span))


def test_a_range_from_the_beginning_of_a_topic_is_whole_wherever_it_begins() -> None:
    with Peer() as peer:
        peer.add(batch([b"a"], index=20), ledger_id=9)
        span = EntryRange(TOPIC, BEFORE_ALL, Position(9, 0))
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"a"]


def test_a_range_that_notes_where_an_empty_topic_begins_is_whole_though_its_ledger_goes() -> None:
    with Peer(first_ledger_id=9) as peer:
        span = EntryRange(TOPIC, BEFORE_ALL, Position(4, -1))
        assert list(read_messages(options_for(peer), span)) == []
        peer.add(batch([b"a"], index=0), ledger_id=9)
        assert list(read_messages(options_for(peer), span)) == []


def test_a_range_that_ends_with_a_hole_in_a_ledger_that_is_there_is_whole() -> None:
    with Peer(first_ledger_id=8) as peer:
        peer.add(batch([b"a"], index=2), ledger_id=8, first=1)
        peer.add(batch([b"later"], index=20), ledger_id=9)
        span = EntryRange(TOPIC, Position(8, 0), Position(8, 3), after_index=1)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"a"]


def test_what_is_removed_while_the_end_of_a_range_is_looked_at_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        peer.add(batch([b"a"], index=0), batch([b"b"], index=1), ledger_id=7)
        peer.add(batch([b"later"], index=2), ledger_id=9)
        ask = entry_from

        def ask_and_remove(*args: Any) -> Any:
            first_entry = ask(*args)
            del peer.entries[:2]
            return first_entry

        monkeypatch.setattr("ledgerlake.source.loss_watch.entry_from", ask_and_remove)
        span = EntryRange(TOPIC, Position(7, 1), Position(9, -1), after_index=1)
        assert [
            row for part in read_messages(options_for(peer), span) for row in part.to_pylist()
        ] == []


def test_a_topic_that_was_created_again_is_named_so() -> None:
    with Peer() as peer:
        peer.add(batch([b"0"], index=0), batch([b"1"], index=1), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 3), Position(9, 1), after_index=40)
        with pytest.raises(DataLossError, match="deleted and created again"):
            list(read_messages(options_for(peer), span))


def test_an_index_that_falls_is_no_other_topic_while_the_ledger_that_was_read_is_there() -> None:
    with Peer() as peer:
        peer.add(*(single(b"a", index) for index in range(10)), ledger_id=3)
        peer.add(single(b"b", 4), ledger_id=60)
        span = EntryRange(TOPIC, Position(3, 9), Position(60, 0), after_index=9)
        assert [
            row["value"]
            for part in read_messages(options_for(peer), span)
            for row in part.to_pylist()
        ] == [b"b"]


@pytest.mark.parametrize("last_index", [2, 3, 4])
def test_a_topic_whose_first_batch_begins_with_number_0_is_another_one(last_index: int) -> None:
    with Peer() as peer:
        peer.add(batch([b"0", b"1", b"2", b"3", b"4"], index=4), single(b"5", 5), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, last_index), Position(9, 1), after_index=last_index)
        with pytest.raises(DataLossError, match="deleted and created again"):
            list(read_messages(options_for(peer), span))


@pytest.mark.parametrize("claimed", [2, 1000])
def test_an_entry_that_claims_more_messages_than_the_broker_counted_makes_no_other_topic(
    claimed: int,
) -> None:
    with Peer() as peer:
        peer.add(
            single(b"4", 4, num_messages_in_batch=claimed), batch([b"5"], index=5), ledger_id=9
        )
        span = EntryRange(TOPIC, Position(7, 3), Position(9, 1), after_index=3)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows if row["reject_reason"] is None] == [b"5"]
        assert all(row["reject_reason"] != DATA_LOSS for row in rows)


def test_gaps_between_ledgers_that_are_there_are_no_loss() -> None:
    with Peer(first_ledger_id=7) as peer:
        peer.add(batch([b"a"], index=30), ledger_id=9, first=5)
        peer.add(batch([b"b"], index=60), ledger_id=12, first=2)
        span = EntryRange(TOPIC, Position(7, 0), Position(12, 2), after_index=1)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"a", b"b"]


@pytest.mark.parametrize(("next_index", "missing"), [(10, 0), (20, 10), (5, 0)])
def test_messages_that_a_broker_counts_between_two_ledgers_and_does_not_send_are_in_the_log(
    next_index: int, missing: int, caplog: pytest.LogCaptureFixture
) -> None:
    with Peer(first_ledger_id=7) as peer:
        peer.add(single(b"a", 9), ledger_id=7)
        peer.add(single(b"b", next_index), ledger_id=12)
        span = EntryRange(TOPIC, Position(7, -1), Position(12, 0))
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
    assert [row["value"] for row in rows] == [b"a", b"b"]
    said = [text for text in caplog.messages if "counts" in text]
    assert len(said) == (missing > 0)
    assert all(f"counts {missing} messages after 7:0 and before 12:0" in text for text in said)


def test_ledgers_that_went_after_all_of_them_was_read_are_no_loss() -> None:
    with Peer() as peer:
        peer.add(batch([b"a"], index=2), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 0), Position(9, 0), after_index=1)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"a"]


def bare_entry(payload: bytes) -> bytes:
    return encode_entry(
        pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=1), payload
    )


def test_a_pinned_topic_without_an_index_goes_on_behind_a_ledger_that_was_trimmed() -> None:
    with Peer() as peer:
        peer.add(bare_entry(b"a"), bare_entry(b"b"), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 3), Position(9, 1))
        with pytest.raises(
            DataLossError, match="an unknown number of messages after 7:3 and before 9:0"
        ):
            list(read_messages(options_for(peer), span))
        pinned = replace(span, pinned_from=BEFORE_ALL)
        rows = [
            row for part in read_messages(options_for(peer), pinned) for row in part.to_pylist()
        ]
        assert [row["value"] for row in rows] == [b"a", b"b"]


def test_a_task_is_told_that_a_cursor_was_moved_after_its_range_was_planned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        peer.add(bare_entry(b"a"), bare_entry(b"b"), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 3), Position(9, 1), pinned_from=BEFORE_ALL)
        jobs = _Properties()
        monkeypatch.setattr(pyspark.TaskContext, "get", lambda: jobs)
        pass_moved_cursors(jobs, {TOPIC: Position(9, 0)})
        with pytest.raises(
            DataLossError, match="an unknown number of messages after 7:3 and before 9:0"
        ):
            list(read_messages(options_for(peer), span))
        pass_moved_cursors(jobs, {})
        assert (
            len(
                [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
            )
            == 2
        )


def with_or_without_index(has_index: bool, *numbers: int) -> list[bytes]:
    return [
        batch([b"%d" % number], index=number) if has_index else bare_entry(b"%d" % number)
        for number in numbers
    ]


class Begun:
    """A stream that began where a user said; ``read`` is one micro-batch, by a new process. The
    cursor is the pipeline's, that of the bare source, or none.
    """

    def __init__(self, peer: Peer, start: str, cursor: str | None) -> None:
        self._peer, self._options = peer, {"startingOffsets": start}
        if cursor == "pipeline":
            cluster = Cluster(options_for(peer).client)
            bound = parse_start(start, "starting")
            offset = {TOPIC: resolve_start(cluster, TOPIC, bound, is_pinned=True)}
            cluster.close()
            self._options = {"startingOffsets": as_option(offset), "pinnedBy": "s"}
        elif cursor == "bare source":
            self._options["subscription"] = "s"
        self._end = self._call(LedgerlakeStreamReader.initialOffset)

    def _call(self, call: Callable[[LedgerlakeStreamReader], Any], **more: str) -> Any:
        reader = LedgerlakeStreamReader(options_for(self._peer, **self._options | more))
        try:
            return call(reader)
        finally:
            reader.stop()

    def read(self, **more: str) -> list[tuple[bytes, str | None]]:
        def of(reader: LedgerlakeStreamReader) -> list[tuple[bytes, str | None]]:
            start, self._end = self._end, reader.latestOffset(self._end, ReadAllAvailable())
            return [
                (row["value"], row["reject_reason"])
                for partition in reader.partitions(start, self._end)
                for rows in reader.read(partition)
                for row in rows.to_pylist()
            ]

        rows: list[tuple[bytes, str | None]] = self._call(of, **more)
        return rows


CURSORS = pytest.mark.parametrize("cursor", [None, "bare source", "pipeline"])
CHUNKED = to_bytes(ChunkMessageId(MessageId(7, 2), MessageId(7, 4))).hex()
OFFSET_OF_ANOTHER = json.dumps(to_json({TOPIC: PartitionOffset(Position(7, 3), None, 1)}))


@CURSORS
@INDEX
@pytest.mark.parametrize(
    ("start", "is_lost"),
    [
        ("7:3", True),
        ("7:0", True),
        ("7:3:1", True),
        ("after 7:2", True),
        (CHUNKED, True),
        ("index 5", True),
        (OFFSET_OF_ANOTHER, True),
        ("earliest", False),
        ("1970-01-01T00:00:00Z", False),
        ("9:0", False),
    ],
)
def test_a_cursor_proves_nothing_about_what_was_gone_when_it_was_created(
    start: str, is_lost: bool, has_index: bool, cursor: str | None
) -> None:
    if (start == OFFSET_OF_ANOTHER and cursor == "pipeline") or (start, has_index) == (
        "index 5",
        False,
    ):
        pytest.skip("a start that cannot be")
    with Peer(clock_ms=lambda: BROKER_TIME_MS) as peer:
        peer.add(*with_or_without_index(has_index, 10, 11), ledger_id=9)
        begun = Begun(peer, start, cursor)
        whole = [(b"10", None), (b"11", None)]
        if is_lost:
            with pytest.raises(DataLossError, match="are lost"):
                Begun(peer, start, cursor).read()
            loss, *rows = begun.read(failOnDataLoss="false")
            assert loss[1] == DATA_LOSS
            assert rows == whole
        else:
            assert begun.read() == whole
        peer.add(*with_or_without_index(has_index, 12), ledger_id=11)
        assert begun.read() == [(b"12", None)], "a loss is named once"


@pytest.mark.parametrize("cursor", ["bare source", "pipeline"])
@INDEX
@pytest.mark.parametrize("start", ["after 7:1", "7:2", "latest", "earliest"])
def test_a_cursor_has_kept_what_was_there_when_the_stream_began(
    start: str, has_index: bool, cursor: str
) -> None:
    with Peer(first_ledger_id=7) as peer:
        if start != "earliest":
            peer.add(*with_or_without_index(has_index, 0, 1), ledger_id=7)
        begun = Begun(peer, start, cursor)
        first = 2 if start != "earliest" else 0
        peer.entries, peer.first_ledger_id = [], 9
        peer.add(*with_or_without_index(has_index, first, first + 1), ledger_id=9)
        assert begun.read() == [(b"%d" % number, None) for number in (first, first + 1)]


class _Properties(dict[str, str]):
    """The local properties of a Spark job, as the driver writes and a task reads them."""

    setLocalProperty = dict.__setitem__
    getLocalProperty = dict.get


def test_a_pinned_topic_without_an_index_that_lost_an_entry_that_was_planned_says_so() -> None:
    with Peer() as peer:
        peer.add(bare_entry(b"later"), ledger_id=9)
        span = EntryRange(TOPIC, Position(7, 3), Position(8, 3), pinned_from=BEFORE_ALL)
        with pytest.raises(
            DataLossError, match="an unknown number of messages after 7:3 and before 8:4"
        ):
            list(read_messages(options_for(peer), span))


def test_what_compaction_left_has_no_losses() -> None:
    with Peer() as peer:
        options, span = options_for(peer, readCompacted="true"), trimmed(peer)
        with pytest.raises(DataLossError):
            list(read_messages(options, span))
        span = replace(span, is_first=True)
        rows = [row for part in read_messages(options, span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"10", b"11"]


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_watch, "_lookups", loss_watch._Lookups())
    monkeypatch.setattr(loss_watch, "LOST_TOPIC_S", 0.5)
    monkeypatch.setattr(loss_watch, "_ASK_AGAIN_S", 0.01)


@pytest.mark.usefixtures("lookups")
def test_a_range_of_a_topic_that_another_one_has_replaced_since_is_lost() -> None:
    with Peer() as peer:
        peer.add(batch([b"another"], index=0), ledger_id=3)
        span = EntryRange(
            TOPIC, Position(500, 10), Position(500, 99), after_index=40, is_end_stored=True
        )
        with pytest.raises(
            DataLossError,
            match=r"after 500:10 and before 500:100 are lost: the topic ends before them, at 3:0: "
            r"it is another",
        ):
            list(read_messages(options_for(peer), span))
        skipping = options_for(peer, failOnDataLoss="false")
        rows = [row for part in read_messages(skipping, span) for row in part.to_pylist()]
        assert [(row["message_id"], row["reject_reason"]) for row in rows] == [
            ("500:11", DATA_LOSS)
        ]


class StaleBroker:
    """A broker that does not know for a while that it has lost the topic. It has two of the
    entries.
    """

    def __init__(self, peer: Peer, monkeypatch: pytest.MonkeyPatch, lookups: int) -> None:
        peer.add(*(batch([b"%d" % number], index=number) for number in range(6)), ledger_id=7)
        peer.last_position = Position(7, 1)
        peer.hold_back = {Position(7, number) for number in range(2, 6)}
        self._peer, self._lookups = peer, lookups
        monkeypatch.setattr(loss_watch, "end_position", self._look_up)

    def _look_up(self, *args: Any) -> Position:
        self._lookups -= 1
        if self._lookups == 0:
            self._peer.last_position = None
            self._peer.hold_back = set()
        return end_position(*args)


ONE_TO_FIVE = EntryRange(TOPIC, Position(7, 0), Position(7, 5), after_index=0, is_end_stored=True)


@pytest.mark.usefixtures("lookups")
@pytest.mark.parametrize("end_messages", [None, 0])
def test_a_range_is_read_on_after_a_broker_that_has_lost_the_topic(
    monkeypatch: pytest.MonkeyPatch, end_messages: int | None
) -> None:
    span = replace(ONE_TO_FIVE, end_batch_index=end_messages)
    with Peer() as peer:
        StaleBroker(peer, monkeypatch, lookups=3)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
    assert [row["value"] for row in rows] == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.usefixtures("lookups")
def test_a_topic_may_be_lost_by_one_broker_after_another_while_a_range_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        StaleBroker(peer, monkeypatch, lookups=2)
        values: list[bytes] = []
        for part in read_messages(options_for(peer, maxUncompressedBytes="1024"), ONE_TO_FIVE):
            values += part["value"].to_pylist()
            if values == [b"1"]:
                time.sleep(1.0)
        assert values == [b"1", b"2", b"3", b"4", b"5"]


@pytest.mark.usefixtures("lookups")
def test_entries_are_read_again_from_the_broker_that_has_the_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        StaleBroker(peer, monkeypatch, lookups=2)
        entries = list(
            read_again(
                options_for(peer).client, TOPIC, [Position(7, 1), Position(7, 3), Position(7, 9)]
            )
        )
        assert entries == [peer.entries[1][1], peer.entries[3][1], None]


@pytest.mark.usefixtures("lookups")
def test_a_topic_that_ends_early_for_long_has_lost_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    with Peer() as peer:
        StaleBroker(peer, monkeypatch, lookups=10_000)
        options = options_for(peer, failOnDataLoss="false")
        rows = [row for part in read_messages(options, ONE_TO_FIVE) for row in part.to_pylist()]
        assert [(row["message_id"], row["reject_reason"]) for row in rows] == [
            ("7:1:0", None),
            ("7:2", DATA_LOSS),
        ]


@pytest.mark.usefixtures("lookups")
def test_brokers_that_do_not_agree_on_the_end_of_a_topic_are_named_and_nothing_is_skipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer() as peer:
        StaleBroker(peer, monkeypatch, lookups=10_000)
        monkeypatch.setattr(loss_watch, "end_position", lambda *_: Position(7, 5))
        with pytest.raises(TransportError, match="ends at 7:5 by one answer and at 7:1 by another"):
            list(read_messages(options_for(peer), ONE_TO_FIVE))


def test_a_change_of_ledger_without_an_index_is_planned_although_the_broker_cannot_read_the_last_entry() -> (
    None
):
    with Peer() as peer:
        peer.add(bare_entry(b"a"), ledger_id=7)
        reader = LedgerlakeStreamReader(
            options_for(peer, startingOffsets="earliest", subscription="s")
        )
        start = reader.initialOffset()
        end = reader.latestOffset(start, ReadAllAvailable())
        assert len(reader.partitions(start, end)) == 1
        reader.commit(end)
        peer.add(bare_entry(b"b"), ledger_id=9)
        peer.unreadable_last = True
        wait_until(lambda: reader.latestOffset(end, ReadAllAvailable()) != end)
        new_end = reader.latestOffset(end, ReadAllAvailable())
        (partition,) = reader.partitions(end, new_end)
        assert sum(part.num_rows for part in reader.read(partition)) == 1
        reader.stop()
