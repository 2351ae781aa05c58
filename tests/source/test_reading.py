"""The source's own pieces against a peer: views, partial batches, the planner, the latest
offset.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import chain, combinations_with_replacement
from typing import Any

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode import weights
from ledgerlake.decode.split import entries_of
from ledgerlake.errors import DeadlineError, SetupError
from ledgerlake.options.bounds import AtTime, Bound
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source.batch_limits import LimitPlanner
from ledgerlake.source.bounds import first_available, resolve_end, resolve_start
from ledgerlake.source.latest_offset import LatestOffset
from ledgerlake.source.loss import NO_INDEX_YET
from ledgerlake.source.pieces import read_pieces
from ledgerlake.source.planning import EntryRange, entry_range
from ledgerlake.source.read_until import next_until
from ledgerlake.source.reread import read_again
from ledgerlake.source.views import read_entries, read_messages
from ledgerlake.stored.offsets import PartitionOffset, from_json
from ledgerlake.values.schemas import column_type
from ledgerlake.wire.chunks import encode_marker
from ledgerlake.wire.entry import encode_batch, encode_entry, message_count, parse_entry
from ledgerlake.wire.message_id import BEFORE_ALL, MessageId, Position
from ledgerlake.wire.value_schema import ValueSchema
from tests.chunks import chunk_entries
from tests.encryption import encrypted
from tests.entries import BROKER_TIME_MS, batch, metadata, single
from tests.peer import TOPIC, Peer
from tests.waiting import wait_until


def options_for(peer: Peer, **more: str) -> Any:
    return parse_options(
        {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000", **more}
    )


def everything(peer: Peer) -> EntryRange:
    return EntryRange(TOPIC, BEFORE_ALL, peer.entries[-1][0])


def test_entries_share_a_bundle_until_it_has_a_mebibyte() -> None:
    with Peer() as peer:
        peer.add(
            *[single(b"x" * 300_000) for _ in range(7)], single(b"x" * 2_000_000), single(b"small")
        )
        pieces = list(read_pieces(options_for(peer), everything(peer)))
        assert [len(entries_of(piece.frames)) for piece in pieces] == [4, 4, 1]


def test_a_range_without_entries_has_no_piece() -> None:
    with Peer() as peer:
        peer.add(single(b"x"))
        span = EntryRange(TOPIC, Position(7, 0), Position(7, 5))
        assert list(read_pieces(options_for(peer), span)) == []


def test_entries_are_read_again_by_position_and_what_is_gone_is_nothing() -> None:
    with Peer() as peer:
        peer.add(*[single(b"%d" % number) for number in range(60)])
        del peer.entries[30:33], peer.entries[3]
        entry_ids = [0, 1, 3, 4, 50, 31, 33, 59, 2]
        raw_entries = list(
            read_again(
                options_for(peer).client,
                TOPIC,
                [Position(peer.entries[0][0].ledger_id, entry_id) for entry_id in entry_ids],
            )
        )
        values = [None if raw is None else bytes(parse_entry(raw).payload) for raw in raw_entries]
        assert values == [b"0", b"1", None, b"4", b"50", None, b"33", b"59", b"2"]


def test_of_a_topic_that_is_deleted_nothing_is_read_again() -> None:
    with Peer(is_deleted=True) as peer:
        assert list(
            read_again(options_for(peer).client, TOPIC, [Position(7, 0), Position(7, 4)])
        ) == [None, None]


def test_chunks_and_markers_travel_alone_and_plain_entries_stay_together() -> None:
    with Peer() as peer:
        chunks = chunk_entries(b"x" * 100, 2)
        marker = encode_marker(metadata(), 2, [Position(1, 1), Position(1, 2)])
        peer.add(
            single(b"a"),
            batch([b"b"]),
            chunks[0],
            single(b"c"),
            chunks[1],
            marker,
            b"garbage",
            single(b"d"),
        )
        pieces = list(read_pieces(options_for(peer), everything(peer)))
        assert [piece.kind for piece in pieces] == [
            "entries",
            "chunk",
            "entries",
            "chunk",
            "marker",
            "entries",
        ]
        assert [len(entries_of(piece.frames)) for piece in pieces] == [2, 1, 1, 1, 1, 2]


def test_messages_and_rejects_are_rows_of_one_view() -> None:
    with Peer() as peer:
        peer.add(batch([b"a", b"b"]), b"garbage", single(b"c"))
        rows = [
            row
            for part in read_messages(options_for(peer), everything(peer))
            for row in part.to_pylist()
        ]
        assert sorted((row["entry_id"], row["value"], row["reject_reason"]) for row in rows) == [
            (0, b"a", None),
            (0, b"b", None),
            (1, b"garbage", "malformed_entry"),
            (2, b"c", None),
        ]


def test_a_start_inside_a_batch_leaves_out_what_was_taken() -> None:
    with Peer() as peer:
        peer.add(batch([b"0", b"1", b"2"]), batch([b"3"]))
        span = EntryRange(TOPIC, Position(7, -1), Position(7, 1), after_batch_index=1)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"2", b"3"]


@pytest.mark.parametrize(
    ("after", "until", "expected"),
    [
        (None, 1, [b"0", b"1", b"2", b"3", b"4"]),
        (1, 0, [b"2", b"3"]),
        (None, 9, [b"0", b"1", b"2", b"3", b"4", b"5"]),
    ],
)
def test_an_end_inside_a_batch_leaves_out_what_is_behind_it(
    after: int | None, until: int, expected: list[bytes]
) -> None:
    with Peer() as peer:
        peer.add(batch([b"0", b"1", b"2"]), batch([b"3", b"4", b"5"]), batch([b"6"]))
        span = EntryRange(TOPIC, Position(7, -1), Position(7, 1), after, end_batch_index=until)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == expected


def test_both_ends_of_a_read_can_lie_in_the_same_batch() -> None:
    with Peer() as peer:
        peer.add(batch([b"0", b"1", b"2", b"3"]))
        span = EntryRange(TOPIC, Position(7, -1), Position(7, 0), 0, end_batch_index=2)
        rows = [row for part in read_messages(options_for(peer), span) for row in part.to_pylist()]
        assert [row["value"] for row in rows] == [b"1", b"2"]


def cut_topic() -> list[bytes]:
    """Entries of each kind, with and without messages."""
    damaged = batch([b"x", b"y", b"z"])
    short = encode_batch(
        [(pb.SingleMessageMetadata(payload_size=0), value) for value in (b"good", b"bad")]
    )[:-1]
    return [
        single(b"alone"),
        batch([b"0", b"1", b"2"]),
        damaged[:-1] + bytes([damaged[-1] ^ 1]),
        batch([b"3", b"4"], pb.ZSTD),
        encode_entry(metadata(num_messages_in_batch=2, uncompressed_size=len(short)), short),
        *chunk_entries(b"large", 2),
        encrypted(single(b"hidden"), "key"),
        encrypted(batch([b"5", b"6"]), "key"),
    ]


@pytest.mark.parametrize("view", [read_messages, read_entries])
def test_ranges_one_after_the_other_give_what_one_gives_wherever_they_are_cut(view: Any) -> None:
    entries = cut_topic()
    cuts: list[tuple[int, int | None]] = [(-1, None)]
    for number, entry in enumerate(entries):
        cuts += [(number - 1, index) for index in range(message_count(memoryview(entry)))]
        cuts.append((number, None))
    offsets = [PartitionOffset(Position(7, before), index) for before, index in cuts]
    with Peer() as peer:
        peer.add(*entries)
        options = options_for(peer)

        @cache
        def rows(first: int, last: int) -> list[tuple[Any, ...]]:
            span = entry_range(TOPIC, offsets[first], offsets[last])
            return [
                (row["entry_id"], row.get("message_id"), row["reject_reason"])
                for part in view(options, span)
                for row in part.to_pylist()
            ]

        end = len(offsets) - 1
        # Messages come before the rejects among them.
        expected = sorted(rows(0, end), key=str)
        assert {row[0] for row in expected} == set(range(len(entries)))
        for first, second in combinations_with_replacement(range(1, end), 2):
            pieces = [rows(0, first), rows(second, end)]
            if first < second:
                pieces.insert(1, rows(first, second))
            assert sorted(chain(*pieces), key=str) == expected, (offsets[first], offsets[second])


@pytest.mark.parametrize("number", [2, 4, 8])
def test_a_read_that_begins_inside_a_batch_without_messages_names_it(number: int) -> None:
    with Peer() as peer:
        peer.add(*cut_topic())
        span = EntryRange(TOPIC, Position(7, number - 1), Position(7, number), after_batch_index=0)
        (part,) = (rows for rows in read_messages(options_for(peer), span) if rows.num_rows)
        assert part["entry_id"].to_pylist() == [number]
        assert part["reject_reason"].null_count == 0


def test_entries_have_their_bytes_and_both_kinds_of_metadata() -> None:
    with Peer() as peer:
        entry = batch([b"a", b"b"], 1, index=5)
        peer.add(entry, b"garbage")
        first, second = [
            row
            for part in read_entries(options_for(peer), everything(peer))
            for row in part.to_pylist()
        ]
        assert (first["broker_index"], first["num_messages_in_batch"], first["compression"]) == (
            5,
            2,
            "LZ4",
        )
        assert (first["entry"], first["reject_reason"]) == (entry, None)
        assert (second["entry"], second["reject_reason"]) == (b"garbage", "malformed_entry")


@pytest.mark.parametrize("broker", [None, pb.BrokerEntryMetadata(index=5)])
def test_broker_metadata_can_be_required(broker: pb.BrokerEntryMetadata | None) -> None:
    with Peer() as peer:
        peer.add(encode_entry(metadata(), b"bare", broker))
        assert len(list(read_messages(options_for(peer), everything(peer)))) == 1
        says = f"messages of {TOPIC} have no broker timestamp; set brokerEntryMetadataInterceptors"
        with pytest.raises(SetupError, match=says):
            list(read_messages(options_for(peer, requireBrokerMetadata="true"), everything(peer)))


def cluster_of(peer: Peer) -> Cluster:
    return Cluster(ClientSettings(peer.url, give_up_after_s=2))


def test_starts_and_ends_become_positions() -> None:
    with Peer() as peer:
        peer.add(single(b"a"), single(b"b"), first=4)
        cluster = cluster_of(peer)
        assert resolve_start(cluster, TOPIC, "earliest").position == Position(7, 3)
        assert resolve_start(cluster, TOPIC, "latest").position == Position(7, 5)
        assert resolve_start(cluster, TOPIC, MessageId(7, 5)).position == Position(7, 4)
        assert resolve_start(cluster, TOPIC, MessageId(7, 5, 0)).position == Position(7, 4)
        assert resolve_end(cluster, TOPIC, "latest").position == Position(7, 5)
        assert resolve_end(cluster, TOPIC, MessageId(7, 4)).position == Position(7, 4)


@pytest.mark.parametrize("bound", ["earliest", "latest", AtTime(5)])
def test_an_empty_topic_starts_where_its_first_ledger_does_and_ends_before_everything(
    bound: Bound,
) -> None:
    with Peer(first_ledger_id=4) as peer:
        cluster = cluster_of(peer)
        begin = Position(4, -1)
        assert resolve_start(cluster, TOPIC, bound) == PartitionOffset(begin, index=NO_INDEX_YET)
        assert resolve_start(cluster, TOPIC, bound, is_pinned=True) == PartitionOffset(begin)
        assert resolve_end(cluster, TOPIC, "latest") == PartitionOffset(BEFORE_ALL)


def test_a_start_at_the_beginning_has_the_index_before_the_first_message() -> None:
    with Peer() as peer:
        peer.add(batch([b"a", b"b"], index=21))
        assert resolve_start(cluster_of(peer), TOPIC, "earliest") == PartitionOffset(
            Position(7, -1), index=19
        )


def test_the_latest_offset_has_time_and_index_and_is_rarely_asked_for() -> None:
    with Peer() as peer:
        peer.add(batch([b"a", b"b"], index=9))
        latest = LatestOffset(cluster_of(peer), TOPIC)
        offsets = [latest.get() for _ in range(1000)]
        assert (offsets[0].index, offsets[0].position) == (9, Position(7, 0))
        assert set(offsets) == {offsets[0]}
        assert peer.requests.count("CommandGetLastMessageId") <= 4


def test_where_the_broker_cannot_read_the_last_entry_the_end_is_what_a_reader_gets() -> None:
    with Peer() as peer:
        peer.add(batch([b"a", b"b"], index=9))
        peer.unreadable_last = True
        latest = LatestOffset(cluster_of(peer), TOPIC)

        def end() -> PartitionOffset:
            latest.expire()
            return latest.get()

        # An entry that comes too late for an answer is in the next one.
        wait_until(lambda: end() == PartitionOffset(Position(7, 0), None, BROKER_TIME_MS + 9, 9))
        peer.add(single(b"c", index=10), first=1)
        wait_until(lambda: end().position == Position(7, 1))
        assert end().position == Position(7, 1)
        wait_until(
            lambda: resolve_start(cluster_of(peer), TOPIC, "latest").position == Position(7, 1)
        )
        assert first_available(cluster_of(peer), TOPIC) == Position(7, -1)


def test_where_the_broker_cannot_tell_an_empty_topic_is_empty() -> None:
    with Peer() as peer:
        peer.unreadable_last = True
        assert LatestOffset(cluster_of(peer), TOPIC).get() == PartitionOffset(BEFORE_ALL)
        assert first_available(cluster_of(peer), TOPIC) == BEFORE_ALL


def test_a_range_is_not_taken_for_complete_because_the_broker_cannot_tell() -> None:
    with Peer() as peer:
        peer.add(single(b"a"), single(b"b"))
        peer.hold_back = {Position(7, 1)}
        peer.unreadable_last = True
        settings = ClientSettings(peer.url, give_up_after_s=5, poll_timeout_s=1)
        reader = EntryReader(Cluster(settings), TOPIC, BEFORE_ALL)
        assert next_until(reader, Position(7, 1)).position == Position(7, 0)  # type: ignore[union-attr]
        with pytest.raises(DeadlineError):
            next_until(reader, Position(7, 1))


@pytest.mark.parametrize(
    ("rows", "size", "stops"),
    [
        pytest.param(7, None, [1, 3, 5, 7, 8], id="rows"),
        pytest.param(1, None, [0, 1, 2, 3, 4, 5, 6, 7, 8], id="at least one entry"),
        pytest.param(None, 10**9, [8], id="budget for all"),
        pytest.param(None, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8], id="bytes"),
    ],
)
def test_the_limit_planner_stops_where_the_budget_does(
    rows: int | None, size: int | None, stops: list[int]
) -> None:
    with Peer() as peer:
        peer.add(*[batch([b"a", b"b", b"c"]) for _ in range(9)])
        planner, end = LimitPlanner(cluster_of(peer), TOPIC), PartitionOffset(Position(7, 8))
        after, entry_ids = BEFORE_ALL, []
        while after < end.position:
            after = planner.advance(after, end, rows, size).position
            entry_ids.append(after.entry_id)
        assert entry_ids == stops


def test_the_limit_planner_starts_over_where_it_is_told() -> None:
    with Peer() as peer:
        peer.add(*[single(b"x") for _ in range(6)])
        planner, end = LimitPlanner(cluster_of(peer), TOPIC), PartitionOffset(Position(7, 5))
        assert planner.advance(BEFORE_ALL, end, 2, None).position == Position(7, 1)
        assert planner.advance(BEFORE_ALL, end, 2, None).position == Position(7, 1)
        assert planner.advance(Position(7, 1), end, 3, None).position == Position(7, 4)


def test_a_reader_travels_without_its_connections() -> None:
    import pickle

    from ledgerlake.source.stream_reader import LedgerlakeStreamReader

    with Peer() as peer:
        peer.add(single(b"x"))
        reader = LedgerlakeStreamReader(options_for(peer, startingOffsets="earliest"))
        start = reader.initialOffset()
        copy = pickle.loads(pickle.dumps(reader))
        assert copy.__dict__["_planner"] is None
        assert from_json(start)[TOPIC].position == Position(7, -1)
        reader.stop()


def test_values_of_many_columns_are_decoded_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = [
        {"name": f"f{number}", "type": ["null", "int"], "default": None} for number in range(48)
    ]
    definition = json.dumps({"type": "record", "name": "R", "fields": fields})
    with Peer() as peer:
        peer.add(batch([b"{}"] * 7))
        value_schema = ValueSchema(pb.Schema.Json, definition.encode())
        options = replace(options_for(peer), value_schema=value_schema)
        # Two values and a half.
        monkeypatch.setattr(
            weights, "MAX_VALUES_BYTES", 5 * weights.fixed_bytes(column_type(value_schema)) // 2
        )
        parts = list(read_messages(options, EntryRange(TOPIC, BEFORE_ALL, Position(7, 0))))
    assert [part.num_rows for part in parts] == [2, 2, 2, 1]
