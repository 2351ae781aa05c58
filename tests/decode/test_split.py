"""Bundles cut by kind: nothing is lost, order is kept within a kind, and only complete messages for
a later time wait.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.decode.rejects import RejectedEntry, reject_rows
from ledgerlake.decode.split import PieceKind, entries_of, read_delayed, split_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import Reason
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import SOURCE, bundle, single

STORED_MS = 1_700_000_000_000
DUE_MS = STORED_MS + 60_000


def entry(
    deliver_ms: int | None = None,
    broker_ms: int | None = STORED_MS,
    value: bytes = b"v",
    **more: Any,
) -> bytes:
    defaults: dict[str, Any] = {
        "producer_name": "p",
        "sequence_id": 1,
        "publish_time": STORED_MS - 5000,
    }
    metadata = pb.MessageMetadata(**defaults | more)
    if deliver_ms is not None:
        metadata.deliver_at_time = deliver_ms
    return encode_entry(
        metadata, value, pb.BrokerEntryMetadata(broker_timestamp=broker_ms) if broker_ms else None
    )


PLAIN = entry()
LATER = entry(STORED_MS + 1)


def pieces(*entries: bytes) -> list[tuple[str, list[int], int | None]]:
    """Kind, entry ids and time of each piece."""
    split_pieces = split_bundle(bundle(entries))
    return [
        (kind, [position.entry_id for position in entries_of(view)], time_ms)
        for kind, view, time_ms in split_pieces
    ]


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        pytest.param(LATER, PieceKind.DELAYED, id="later than it was stored"),
        pytest.param(entry(1), PieceKind.DELAYED, id="long past, to be delivered at once"),
        pytest.param(entry(-1), PieceKind.ENTRIES, id="a time before all"),
        pytest.param(entry(0), PieceKind.ENTRIES, id="no time"),
        pytest.param(LATER[:-1] + b"w", PieceKind.ENTRIES, id="damaged, to be rejected"),
        pytest.param(
            entry(STORED_MS + 1, compacted_batch_indexes=[1]),
            PieceKind.DELAYED,
            id="with a field that kernels leave",
        ),
        pytest.param(entry(2**62), PieceKind.ENTRIES, id="a time beyond all, to be rejected"),
    ],
)
def test_an_entry_is_delayed_where_it_says_a_time_and_its_bytes_are_whole(
    raw: bytes, kind: str
) -> None:
    assert [piece[0] for piece in pieces(raw)] == [kind]


def test_a_bundle_without_delayed_entries_stays_one_piece_without_a_copy() -> None:
    frames = bundle([PLAIN, PLAIN, PLAIN])
    ((kind, view, time_ms),) = split_bundle(frames)
    assert (kind, time_ms) == (PieceKind.ENTRIES, STORED_MS)
    assert view.obj is frames


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"num_chunks_from_msg": 2, "chunk_id": 0}, id="chunk"),
        pytest.param({"replicated_from": "a"}, id="plain"),
        pytest.param({"compacted_batch_indexes": [1]}, id="with a field that kernels leave"),
    ],
)
def test_every_piece_says_the_brokers_time_of_its_last_entry(fields: dict[str, Any]) -> None:
    assert [piece[2] for piece in pieces(entry(**fields))] == [STORED_MS]
    assert [piece[2] for piece in pieces(entry(broker_ms=None, **fields))] == [None]


def test_mixed_entries_are_two_pieces_and_that_of_the_first_entry_comes_first() -> None:
    assert pieces(PLAIN, LATER, PLAIN, PLAIN, LATER) == [
        (PieceKind.ENTRIES, [0, 2, 3], STORED_MS),
        (PieceKind.DELAYED, [1, 4], STORED_MS),
    ]
    assert [piece[0] for piece in pieces(LATER, PLAIN, LATER)] == [
        PieceKind.DELAYED,
        PieceKind.ENTRIES,
    ]


def test_entries_that_travel_alone_keep_their_place() -> None:
    first, second = chunk_entries(b"large message", 2)
    split_pieces = pieces(PLAIN, LATER, first, LATER, PLAIN, second, PLAIN)
    assert [piece[:2] for piece in split_pieces] == [
        (PieceKind.ENTRIES, [0]),
        (PieceKind.DELAYED, [1]),
        (PieceKind.CHUNK, [2]),
        (PieceKind.DELAYED, [3]),
        (PieceKind.ENTRIES, [4]),
        (PieceKind.CHUNK, [5]),
        (PieceKind.ENTRIES, [6]),
    ]


def test_behind_the_first_chunks_of_a_bundle_other_entries_come_together_and_chunks_keep_their_order() -> (
    None
):
    first, second = chunk_entries(b"large message", 2)
    split_pieces = pieces(*[PLAIN, first, LATER, second] * 20)
    assert [kind for kind, _, _ in split_pieces[:16:4]] == [PieceKind.ENTRIES] * 4
    assert [ids for kind, ids, _ in split_pieces if kind == PieceKind.CHUNK] == [
        [2 * row + 1] for row in range(40)
    ]
    assert [piece[:2] for piece in split_pieces[16:18]] == [
        (PieceKind.ENTRIES, list(range(16, 80, 4))),
        (PieceKind.DELAYED, list(range(18, 80, 4))),
    ]


def test_nothing_is_lost_whatever_the_mixture() -> None:
    rng = random.Random(1)
    choices = [PLAIN, LATER, chunk_entries(b"large message", 2)[0], b"garbage"]
    for _ in range(300):
        entries = [rng.choice(choices) for _ in range(rng.randint(0, 12))]
        entry_ids = [message_id for _, ids, _ in pieces(*entries) for message_id in ids]
        assert sorted(entry_ids) == list(range(len(entries)))


def test_what_is_known_of_delayed_entries() -> None:
    odd_entry = entry(STORED_MS + 7, compacted_batch_indexes=[1])
    past, published = entry(5), entry(5, broker_ms=None)
    frames = bundle([LATER, odd_entry, past, published])
    delayed = read_delayed(frames)
    assert delayed.due_ms.tolist() == [STORED_MS + 1, STORED_MS + 7, STORED_MS, 5]
    assert list(zip(delayed.ledger_ids.tolist(), delayed.entry_ids.tolist(), strict=True)) == [
        (7, number) for number in range(4)
    ]
    assert delayed.frame_ends.tolist()[-1] == len(frames)
    assert entries_of(frames) == {
        Position(7, row): raw for row, raw in enumerate([LATER, odd_entry, past, published])
    }


@pytest.mark.parametrize("broker_ms", [2**63 - 1, 2**63, 2**64 - 1])
def test_a_broker_timestamp_that_no_broker_writes_is_no_delayed_entry(broker_ms: int) -> None:
    assert pieces(entry(DUE_MS, broker_ms)) == [("entries", [0], None)]


@pytest.mark.parametrize("publish_time", [1_760_000_000_000_000, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_publish_time_out_of_range_does_not_move_a_delivery(publish_time: int) -> None:
    ((kind, piece, _),) = split_bundle(bundle([entry(DUE_MS, None, publish_time=publish_time)]))
    assert (kind, read_delayed(piece).due_ms.tolist()) == ("delayed", [DUE_MS])


@pytest.mark.parametrize("more", [{}, {"uuid": "makes it go the plain route"}])
def test_an_entry_id_beyond_the_index_is_not_delayed(more: dict[str, Any]) -> None:
    later = entry(DUE_MS, **more)
    for entry_id, expected in ((2**32 - 1, PieceKind.DELAYED), (2**32, PieceKind.ENTRIES)):
        ((kind, _, _),) = split_bundle(commands.message(1, 7, entry_id, later))
        assert kind == expected


def test_a_reject_says_which_chunk_it_is_and_nothing_of_chunks_otherwise() -> None:
    (chunk, _) = chunk_entries(b"large message", 2, uuid="p-1")
    rejected = [
        RejectedEntry(Position(1, entry_id), entry, Reason("r"))
        for entry_id, entry in enumerate((chunk, single(b"v")))
    ]
    assert reject_rows(rejected, SOURCE)["detail"].to_pylist() == ["chunk 0 of 2 of p-1", ""]


@given(st.lists(st.tuples(st.integers(1, 50), st.booleans()), min_size=1, max_size=12), st.data())
def test_the_latest_time_of_pieces_does_not_depend_on_how_entries_were_cut(
    stored: list[tuple[int, bool]], data: st.DataObject
) -> None:
    """The clock of a broker may step back."""
    entries = [entry(DUE_MS if delays else None, time_ms) for time_ms, delays in stored]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(entries)))) | {len(entries)})
    bundles = [
        b"".join(commands.message(1, 7, number, entries[number]) for number in range(first, end))
        for first, end in zip([0, *cuts], cuts, strict=False)
    ]
    times_ms = [broker_ms for frames in bundles for _, _, broker_ms in split_bundle(frames)]
    assert max(time_ms for time_ms in times_ms if time_ms) == max(time_ms for time_ms, _ in stored)
