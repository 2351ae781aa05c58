"""Finds the rejects that a replay tries again, in parts of bounded size.

The table of rejects is read twice: once without keeping entries, which tells where each reject is
and which large message a chunk belongs to; and then the entries of one part after another. The
chunks of a large message are in one part. Chunks that are no whole message within the limits, or
that repeat one, are read without their entries. A reject that was replayed, and one of a topic that
the configuration does not read, is passed over. There are as many rows of ``replayed`` for a
message and a reason as rejects were replayed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import attrgetter
from sys import intern
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from ledgerlake.decode import schema
from ledgerlake.decode.single_entry import chunks_of
from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import REASONS, REPLAYED, Reason
from ledgerlake.table.deletion_vectors import live_part, live_rows
from ledgerlake.table.open_table import not_readable, open_delta
from ledgerlake.table.ordered_files import data_folder, read_row_groups
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.limits import MAX_CHUNKS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.stored.places import Place


# A part has at most so many rejects, and so many bytes of entries, but for one large message.
_PART_ROWS = 20_000
_PART_BYTES = 64 * 1024 * 1024

# Columns that are in each row of a message.
_OF_A_MESSAGE = ("topic", "partition", "ledger_id", "entry_id", "message_id")

# No publish time is negative.
_WHOLE = -1

# Topic, partition, place and reason.
Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class FoundReject:
    """Where a reject is: its topic partition and position; the file, the row group and the row in
    it; and the bytes of its entry. If it is a chunk, ``large_message`` has producer, uuid and
    publish time of its message: a restarted producer may use uuids again. ``chunk_id`` and
    ``chunk_count`` are what the chunk says. A large message that did not fit a table is one chunk;
    it has the id of its first chunk as uuid, and ``_WHOLE`` as publish time. Without
    ``needs_entry``, its row is read without the entry. There may be millions of them, so they
    share their texts and have no keys.
    """

    topic: str
    partition: int
    place: tuple[int, int, int]
    file: str
    row_group: int
    row: int
    size_bytes: int
    large_message: tuple[str, str, int] | None
    chunk_id: int = 0
    chunk_count: int = 0
    needs_entry: bool = True
    reason: str = ""


class RejectsToReplay:
    """The rejects of a version of the table, with one of some reasons.

    ``left_out`` counts the rejects of topics that are not read.

    Args:
        is_read: whether the configuration reads a topic partition.
        max_message_bytes: the limit of a large message.

    Raises:
        TableError: the table cannot be read.
    """

    def __init__(
        self,
        place: Place,
        reasons: Collection[str],
        is_read: Callable[[str, int], bool],
        max_message_bytes: int,
    ) -> None:
        self._place = place
        self._is_read = is_read
        self._max_message_bytes = max_message_bytes
        self.left_out = 0
        try:
            self._table = open_delta(place)
            self._found = self._find(reasons)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            raise not_readable(place, error) from None

    @property
    def sources(self) -> list[tuple[str, int]]:
        """Return the topics of the rejects, each with its partitions."""
        return sorted({(reject.topic, reject.partition) for reject in self._found})

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of rejects in parts, in the order of topic partitions and positions. The
        chunks that have an entry are whole messages.

        Raises:
            TableError: the table cannot be read.
        """
        for part in _parts(self._found, self._max_message_bytes):
            try:
                yield self._rows_of(part)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise not_readable(self._place, error) from None

    def _find(self, reasons: Collection[str]) -> list[FoundReject]:
        found: list[FoundReject] = []
        marks: Counter[Key] = Counter()
        wanted = pa.array(sorted(reasons))
        for file, group, rows, live in self._row_groups():
            is_live = pa.array(live)
            # Rows that somebody else has added may be of no message.
            for name in _OF_A_MESSAGE:
                is_live = pc.and_(is_live, pc.is_valid(rows[name]))
            is_mark = pc.and_(pc.equal(rows["reason"], REPLAYED), is_live)
            marks.update(_keys(rows.filter(is_mark)))
            is_reject = pc.and_(pc.is_in(rows["reason"], wanted), is_live)
            is_reject = pc.and_(is_reject, pc.is_valid(rows["entry"]))
            numbers = np.flatnonzero(is_reject.to_numpy())
            is_read = self._are_read(rows.take(pa.array(numbers)))
            self.left_out += int((~is_read).sum())
            numbers = numbers[is_read]
            chosen = rows.take(pa.array(numbers))
            found += _rejects(chosen, file, group, numbers)
        # A message that was replayed may have been rejected again for the same reason, by another
        # table. The rows of a key have the same message.
        left = []
        for reject in found:
            key = (reject.topic, reject.partition, reject.place, reject.reason)
            if marks.get(key, 0):
                marks[key] -= 1
            else:
                left.append(reject)
        return left

    def _are_read(self, rows: pa.Table) -> NDArray[np.bool_]:
        """Return a mask of the rejects of topic partitions that the configuration reads."""
        sources = list(zip(rows["topic"].to_pylist(), rows["partition"].to_pylist(), strict=True))
        are_read = {source: self._is_read(*source) for source in set(sources)}
        return np.array([are_read[source] for source in sources], dtype=bool)

    def _row_groups(self) -> Iterator[tuple[str, int, pa.Table, Any]]:
        """Yield the row groups of the table's files, and a mask of their rows that are not
        deleted.
        """
        folder = data_folder(self._place, schema.REJECTS, "")
        live_by_name = live_rows(self._table)
        for name in pa.table(self._table.get_add_actions())["path"].to_pylist():
            first = 0
            live = live_by_name.get(name.rpartition("/")[2])
            for group, rows in enumerate(read_row_groups(folder, name)):
                yield name, group, rows, live_part(live, first, rows.num_rows)
                first += rows.num_rows

    def _rows_of(self, part: Iterable[FoundReject]) -> list[dict[str, Any]]:
        """Read the rows of a part."""
        folder = data_folder(self._place, schema.REJECTS, "")
        wanted: dict[str, dict[int, list[FoundReject]]] = defaultdict(lambda: defaultdict(list))
        for reject in part:
            wanted[reject.file][reject.row_group].append(reject)
        rows: list[tuple[FoundReject, dict[str, Any]]] = []
        for file, groups in wanted.items():
            for number, content in enumerate(read_row_groups(folder, file)):
                rows += _rows_in(content, groups.get(number, []))
        rows.sort(key=lambda pair: (pair[0].topic, pair[0].partition, pair[0].place))
        return [
            {"entry": None, **row, "large_message": reject.large_message} for reject, row in rows
        ]


def _rows_in(
    content: pa.Table, rejects: list[FoundReject]
) -> Iterator[tuple[FoundReject, dict[str, Any]]]:
    """Yield rejects of a row group with their rows."""
    for needs_entry, columns in ((True, content), (False, content.drop_columns(["entry"]))):
        chosen = [reject for reject in rejects if reject.needs_entry == needs_entry]
        read = columns.take(pa.array([reject.row for reject in chosen], pa.int64()))
        yield from zip(chosen, read.to_pylist(), strict=True)


def _keys(marks: pa.Table) -> Iterator[Key]:
    """Yield the keys of the rejects that were replayed."""
    columns = (marks[name].to_pylist() for name in (*_OF_A_MESSAGE, "detail"))
    for topic, partition, ledger_id, entry_id, message_id, reason in zip(*columns, strict=True):
        yield topic, partition, (ledger_id, entry_id, batch_index_of(message_id)), reason


def _rejects(
    rows: pa.Table, file: str, row_group: int, numbers: NDArray[np.int64]
) -> Iterator[FoundReject]:
    """
    Args:
        numbers: the number of each row in its row group.
    """
    columns = (rows[name].to_pylist() for name in (*_OF_A_MESSAGE, "reason"))
    for topic, partition, ledger_id, entry_id, message_id, reason, number, entry in zip(
        *columns, numbers.tolist(), _buffers(rows["entry"]), strict=True
    ):
        place = (ledger_id, entry_id, batch_index_of(message_id))
        large = _large_message_of(entry, Reason(reason))
        source = intern(topic), partition, place, file, row_group, number
        yield FoundReject(*source, len(entry), *large, reason=intern(reason))


def _buffers(entries: pa.ChunkedArray) -> Iterator[memoryview]:
    """Yield the bytes of each entry, without copies."""
    for chunk in entries.cast(pa.large_binary()).chunks:
        _, ends, data = chunk.buffers()
        bounds = np.frombuffer(ends, dtype=np.int64)[
            chunk.offset : chunk.offset + len(chunk) + 1
        ].tolist()
        content = memoryview(b"" if data is None else data)
        for start, end in pairwise(bounds):
            yield content[start:end]


def _parts(found: Iterable[FoundReject], max_message_bytes: int) -> Iterator[list[FoundReject]]:
    """Yield parts; the chunks of a large message stay together."""
    part: list[FoundReject] = []
    size_bytes = 0
    for group in _groups(found, max_message_bytes):
        group_bytes = sum(reject.size_bytes for reject in group if reject.needs_entry)
        if part and (len(part) + len(group) > _PART_ROWS or size_bytes + group_bytes > _PART_BYTES):
            yield part
            part, size_bytes = [], 0
        part += group
        size_bytes += group_bytes
    if part:
        yield part


def _groups(found: Iterable[FoundReject], max_message_bytes: int) -> Iterator[list[FoundReject]]:
    """Yield groups of rejects, each of one entry or of one large message, by the place of the first
    reject.
    """
    in_order = sorted(found, key=attrgetter("topic", "partition", "place"))
    large: dict[Any, list[FoundReject]] = defaultdict(list)
    for reject in in_order:
        if reject.large_message is not None:
            large[reject.topic, reject.partition, reject.large_message].append(reject)
    for _, of_entry in groupby(
        in_order, lambda reject: (reject.topic, reject.partition, reject.place[:2])
    ):
        group = list(of_entry)
        key = (group[0].topic, group[0].partition, group[0].large_message)
        if group[0].large_message is None:
            yield group
        elif key in large:
            yield from _groups_of_large(large.pop(key), max_message_bytes)


def _groups_of_large(
    chunks: list[FoundReject], max_message_bytes: int
) -> Iterator[list[FoundReject]]:
    """Yield the chunks that are a whole message, with others that say they are of it. The others
    may be any number, so they are read without entries, and those beyond a part by themselves.
    """
    whole = _whole_message(chunks, max_message_bytes)
    chosen = {id(chunk) for chunk in whole}
    others = [replace(chunk, needs_entry=False) for chunk in chunks if id(chunk) not in chosen]
    yield [*whole, *others[:_PART_ROWS]]
    yield from ([chunk] for chunk in others[_PART_ROWS:])


def _whole_message(chunks: list[FoundReject], max_message_bytes: int) -> list[FoundReject]:
    """Return the first of each chunk that comes after the one before it; none if they are no
    message within the limits of ``decode.large.read_chunks``.

    Args:
        chunks: in the order of their places.
    """
    whole: list[FoundReject] = []
    for chunk in chunks:
        if chunk.chunk_id == len(whole):
            whole.append(chunk)
    if not whole or not len(whole) == whole[0].chunk_count <= MAX_CHUNKS:
        return []
    return whole if sum(chunk.size_bytes // 2 for chunk in whole) <= max_message_bytes else []


def batch_index_of(message_id: str) -> int:
    """Return the index in its batch of the message with an id; -1 if the id is that of an entry."""
    index = message_id.split(":")[2:]
    return int(index[0]) if index else -1


def _large_message_of(
    entry: memoryview, reason: Reason
) -> tuple[tuple[str, str, int] | None, int, int]:
    """Return the large message that an entry is or is a chunk of, if it is, and the chunk's id and
    count.
    """
    try:
        metadata = peek_metadata(entry)
    except CorruptEntryError:
        return None, 0, 0
    if REASONS[reason].is_of_a_table:
        _, first_chunk_id = chunks_of(metadata)
        if first_chunk_id is None:
            return None, 0, 0
        return (metadata.producer_name, first_chunk_id, _WHOLE), 0, 1
    if metadata.num_chunks_from_msg <= 1:
        return None, 0, 0
    message = metadata.producer_name, metadata.uuid, metadata.publish_time
    return message, metadata.chunk_id, metadata.num_chunks_from_msg
