"""The messages of a topic as records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ledgerlake.decode.split import split_bundle
from ledgerlake.operators import local_assembly as in_task
from ledgerlake.options.source_options import parse_options
from ledgerlake.source.pieces import Piece
from ledgerlake.source.planning import EntryRange
from ledgerlake.verify import topic_content
from ledgerlake.verify.entry_set import EntrySet
from ledgerlake.verify.hashed_parts import HashedParts
from ledgerlake.verify.key_comparison import RECORD, Kind, entry_hashes
from ledgerlake.verify.topic_content import ExpectedMessages, TopicContent, read_topic
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.entries import batch, bundle, single

if TYPE_CHECKING:
    import pytest

NO_ENTRIES = np.empty((0, 2), dtype=np.int64)
BEFORE_FIRST = Position(7, -1)
NO_MESSAGES = np.empty((0, 3), dtype=np.int64)


def read(
    monkeypatch: pytest.MonkeyPatch,
    entries: list[bytes],
    rejects: np.ndarray = NO_ENTRIES,
    messages: np.ndarray = NO_MESSAGES,
    chunks: np.ndarray | None = None,
    after: Position = BEFORE_FIRST,
) -> tuple[TopicContent, list[tuple[int, int, int]]]:
    """Read a topic with these entries; return its content, and kind, entry and batch index of each
    record.
    """
    pieces = [Piece(kind, frames) for kind, frames, _ in split_bundle(bundle(entries))]
    monkeypatch.setattr(topic_content, "read_pieces", lambda *_: pieces)
    options = parse_options({"service.url": "pulsar://nowhere:1", "topic": "t"})
    with HashedParts(RECORD, entry_hashes) as records:
        were_rejects = None if chunks is None else EntrySet(chunks)
        expected = ExpectedMessages(0, EntrySet(rejects), records, EntrySet(messages), were_rejects)
        content = read_topic(options, EntryRange("t", after, Position(7, 99)), None, expected)
        found = [part[["kind", "entry_id", "batch_index"]].tolist() for part in records.parts()]
    return content, sorted(record for part in found for record in part)


def test_messages_and_complete_large_messages_are_expected_without_those_in_rejects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [
        single(b"a"),
        batch([b"b", b"c"]),
        *chunk_entries(b"large", 2),
        single(b"d"),
        *chunk_entries(b"open", 3, "q-1")[:2],
    ]
    content, records = read(monkeypatch, entries, np.array([[7, 4]]))
    assert records == [
        (Kind.MESSAGE, 0, -1),
        (Kind.MESSAGE, 1, 0),
        (Kind.MESSAGE, 1, 1),
        (Kind.ENTRY, 3, 0),
    ]
    assert (content.first, content.incomplete_chunks) == (Position(7, 0), 2)


def test_entries_that_are_no_messages_have_to_be_in_rejects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damaged = single(b"a")[:-1] + b"b"
    _, records = read(monkeypatch, [damaged, damaged], np.array([[7, 1]]))
    assert records == [(Kind.ENTRY, 0, 0)]


def test_a_chunk_of_no_message_is_expected_in_rejects_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphans = [chunk_entries(b"large", 2, f"p-{number}")[1] for number in range(3)]
    _, records = read(monkeypatch, orphans, np.array([[7, 1]]))
    assert records == [(Kind.CHUNK, 0, 0), (Kind.CHUNK, 2, 0)]


def test_a_last_chunk_is_not_compared_if_the_topic_may_have_lost_the_chunks_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphans = [
        entry for number in range(3) for entry in chunk_entries(b"large", 3, f"p-{number}")[1:]
    ]
    content, records = read(monkeypatch, orphans, np.array([[7, 3]]), after=Position(6, 4))
    assert (content.not_checked, records) == (2, [])


def test_there_may_be_more_large_messages_than_a_task_can_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(in_task, "MAX_TASK_EVENT_BYTES", 2000)
    entries = [entry for number in range(9) for entry in chunk_entries(b"large", 2, f"p-{number}")]
    _, records = read(monkeypatch, entries)
    assert records == [(Kind.ENTRY, 2 * number + 1, 0) for number in range(9)]


def test_a_message_of_a_batch_in_rejects_accounts_for_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, records = read(monkeypatch, [batch([b"a", b"b", b"c"])], messages=np.array([[7, 0, 1]]))
    assert records == [(Kind.MESSAGE, 0, 0), (Kind.MESSAGE, 0, 2)]
