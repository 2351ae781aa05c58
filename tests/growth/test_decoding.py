"""Decoding and assembly: work grows with the input at most, and memory stays within its bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.assembly.rules import Chunk, ChunkedMessageKey, Deliver, IncompleteMessages, Limits
from ledgerlake.decode.codecs import compress
from ledgerlake.decode.messages import decode_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.limits import DECODED_PIECE_BYTES, DECODING_FACTOR
from ledgerlake.wire.message_id import Position
from tests.entries import SOURCE, broker, bundle, metadata, single
from tests.fuzz.engine import MIB, Memory
from tests.growth.counting import Case, check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# A number of the metadata that no column holds. The entry is decoded by the reference decoder.
_ODD = 2**63


def peak_bytes(work: Callable[[], object]) -> int:
    """Return how many bytes more than before the process has at most while it does some work."""
    memory = Memory()
    with memory.measured(traced=False):
        work()
    return memory.peak_bytes


def _zipped(plain: bytes, sequence_id: int, index: int) -> bytes:
    fields = {"compression": pb.ZSTD, "uncompressed_size": len(plain), "sequence_id": sequence_id}
    return encode_entry(metadata(**fields), compress(pb.ZSTD, plain), broker(index))


def test_entries_of_the_reference_decoder_are_expanded_a_few_at_a_time() -> None:
    plain = bytes(8 * MIB)
    frames = bundle([_zipped(plain, 1 if index == 20 else _ODD, index) for index in range(40)])
    ids: list[int] = []

    def decode() -> None:
        for part in decode_bundle(frames, SOURCE):
            assert part.messages.nbytes <= DECODED_PIECE_BYTES + len(plain)
            ids.extend(part.messages["entry_id"].to_pylist())

    peak = peak_bytes(decode)
    assert ids == list(range(40))
    assert peak <= DECODING_FACTOR * len(plain) + 10 * DECODED_PIECE_BYTES


def test_odd_entries_between_regular_ones_keep_their_order_in_pieces() -> None:
    values = [bytes([index]) * (3 * MIB if index % 3 else 9) for index in range(30)]
    entries = [single(value, index, sequence_id=_ODD if index % 2 else 1) for index, value in enumerate(values)]
    parts = list(decode_bundle(bundle(entries), SOURCE))
    assert [row for part in parts for row in part.messages["value"].to_pylist()] == values
    assert max(part.messages.nbytes for part in parts) <= DECODED_PIECE_BYTES + 3 * MIB


def _chunk(uuid: str, entry_id: int, chunk_id: int, count: int, *, has_marker: bool = False) -> Chunk:
    key = ChunkedMessageKey("p", uuid)
    return Chunk(key, Position(1, entry_id), chunk_id, count, count, 1, 1, 1, has_marker)


def _arrivals(chunks: Iterable[Chunk], limits: Limits) -> int:
    pending = IncompleteMessages(limits)
    return sum(isinstance(effect, Deliver) for chunk in chunks for effect in pending.arrive(chunk))


def _one_message(n: int) -> Callable[[], None]:
    chunks = [_chunk("p-1", number, number, n) for number in range(n)]

    def work() -> None:
        assert _arrivals(chunks, Limits()) == 1

    return work


def _many_messages(n: int) -> Callable[[], None]:
    chunks = [_chunk(f"p-{number}", 2 * number + at, at, 3) for number in range(n) for at in (0, 1)]

    def work() -> None:
        assert _arrivals(chunks, Limits(max_pending=10, max_spilled=20)) == 0

    return work


def _awaited_chunks(n: int) -> Callable[[], None]:
    chunks = [_chunk("p-1", number, number + 1, n + 2, has_marker=True) for number in range(n)]
    key, positions = chunks[0].key, tuple(chunk.position for chunk in chunks)

    def work() -> None:
        pending = IncompleteMessages(Limits())
        assert not any(effect for chunk in chunks for effect in pending.arrive(chunk))
        assert len(pending.apply_marker(key, positions)) == 1

    return work


CASES = [
    Case("rules, chunks of one message", _one_message, n=200),
    Case("rules, messages of which two chunks came", _many_messages, n=200),
    Case("rules, chunks that wait for a marker", _awaited_chunks, n=200),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_work_of_decoding_grows_with_its_input_at_most(case: Case) -> None:
    check(case)
