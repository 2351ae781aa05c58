"""Finds the rejects that a replay tries again, in parts of bounded size.

The table of rejects is read twice: once without keeping entries, which tells where each reject is
and which large message a chunk belongs to; and then the entries of one part after another. The
chunks of a large message are in one part. A reject that was replayed, and one of a topic that the
configuration does not read, is passed over. There are as many rows of ``replayed`` for a message
and a reason as rejects were replayed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from ledgerlake.decode import schema
from ledgerlake.errors import CorruptEntryError
from ledgerlake.reasons import REPLAYED
from ledgerlake.table.deletion_vectors import live_part, live_rows
from ledgerlake.table.open_table import not_readable, open_delta
from ledgerlake.table.ordered_files import data_folder, read_row_groups
from ledgerlake.wire.entry import peek_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from numpy.typing import NDArray

    from ledgerlake.stored.places import Place


# A part has at most so many rejects, and so many bytes of entries, but for one large message.
_PART_ROWS = 20_000
_PART_BYTES = 64 * 1024 * 1024

# Topic, partition, message id and reason.
Key = tuple[Any, ...]


@dataclass(frozen=True)
class FoundReject:
    """Where a reject is: its topic partition and position; the file, the row group and the row in
    it; and the bytes of its entry. ``large_message`` is producer and uuid of the message of which
    it is a chunk.
    """

    topic: str
    partition: int
    place: tuple[int, int, int]
    file: str
    row_group: int
    row: int
    size_bytes: int
    large_message: tuple[str, str] | None


class RejectsToReplay:
    """The rejects of a version of the table, with one of some reasons.

    ``left_out`` is the number of those of topics that are not read.

    Args:
        is_read: whether the configuration reads a topic partition.

    Raises:
        TableError: the table cannot be read.
    """

    def __init__(self, place: Place, reasons: Collection[str], is_read: Callable[[str, int], bool]) -> None:
        self._place = place
        self._is_read = is_read
        self.left_out = 0
        try:
            self._table = open_delta(place)
            self._found = self._find(reasons)
        except (DeltaError, OSError, ValueError, pa.ArrowException) as error:
            raise not_readable(place, error) from None

    @property
    def topics(self) -> list[str]:
        """Return the topics of the rejects."""
        return sorted({reject.topic for reject in self._found})

    def parts(self) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of rejects in parts, in the order of topic partitions and positions.

        Raises:
            TableError: the table cannot be read.
        """
        for part in _parts(self._found):
            try:
                yield self._rows_of(part)
            except (OSError, ValueError, pa.ArrowException) as error:
                raise not_readable(self._place, error) from None

    def _find(self, reasons: Collection[str]) -> list[FoundReject]:
        found: dict[Key, list[FoundReject]] = defaultdict(list)
        marks: Counter[Key] = Counter()
        wanted = pa.array(sorted(reasons))
        for file, group, rows, live in self._row_groups():
            is_live = pa.array(live)
            is_mark = pc.and_(pc.equal(rows["reason"], REPLAYED), is_live)
            marks.update(_keys(rows.filter(is_mark), "detail"))
            is_reject = pc.and_(pc.and_(pc.is_in(rows["reason"], wanted), pc.is_valid(rows["entry"])), is_live)
            numbers = np.flatnonzero(is_reject.to_numpy())
            is_read = self._are_read(rows.take(pa.array(numbers)))
            self.left_out += int((~is_read).sum())
            numbers = numbers[is_read]
            chosen = rows.take(pa.array(numbers))
            for key, reject in zip(_keys(chosen, "reason"), _rejects(chosen, file, group, numbers), strict=True):
                found[key].append(reject)
        # A message that was replayed may have been rejected again for the same reason, by another
        # table. The rows of a key have the same message.
        return [reject for key, of_key in found.items() for reject in of_key[marks[key] :]]

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
                chosen = groups.get(number, [])
                if chosen:
                    read = content.take(pa.array([reject.row for reject in chosen])).to_pylist()
                    rows += zip(chosen, read, strict=True)
        rows.sort(key=lambda pair: (pair[0].topic, pair[0].partition, pair[0].place))
        return [{**row, "large_message": reject.large_message} for reject, row in rows]


def _keys(rows: pa.Table, reason: str) -> Iterator[Key]:
    """Yield topic, partition, message id and reason of each row.

    Args:
        reason: the column that has the reason.
    """
    return zip(*(rows[name].to_pylist() for name in ("topic", "partition", "message_id", reason)), strict=True)


def _rejects(rows: pa.Table, file: str, row_group: int, numbers: NDArray[np.int64]) -> Iterator[FoundReject]:
    """
    Args:
        numbers: the number of each row in its row group.
    """
    columns = (rows[name].to_pylist() for name in ("topic", "partition", "ledger_id", "entry_id", "message_id"))
    for topic, partition, ledger_id, entry_id, message_id, number, entry in zip(
        *columns, numbers.tolist(), _buffers(rows["entry"]), strict=True
    ):
        place = (ledger_id, entry_id, batch_index_of(message_id))
        large = _large_message_of(entry)
        yield FoundReject(topic, partition, place, file, row_group, number, len(entry), large)


def _buffers(entries: pa.ChunkedArray) -> Iterator[memoryview]:
    """Yield the bytes of each entry, without copies."""
    for chunk in entries.cast(pa.large_binary()).chunks:
        _, ends, data = chunk.buffers()
        bounds = np.frombuffer(ends, dtype=np.int64)[chunk.offset : chunk.offset + len(chunk) + 1].tolist()
        content = memoryview(b"" if data is None else data)
        for start, end in pairwise(bounds):
            yield content[start:end]


def _parts(found: Iterable[FoundReject]) -> Iterator[list[FoundReject]]:
    """Yield parts; the chunks of a large message stay together."""
    part: list[FoundReject] = []
    size_bytes = 0
    for group in _groups(found):
        group_bytes = sum(reject.size_bytes for reject in group)
        if part and (len(part) + len(group) > _PART_ROWS or size_bytes + group_bytes > _PART_BYTES):
            yield part
            part, size_bytes = [], 0
        part += group
        size_bytes += group_bytes
    if part:
        yield part


def _groups(found: Iterable[FoundReject]) -> Iterator[list[FoundReject]]:
    """Yield the rejects of an entry, and those of a large message, by the place of the first
    one.
    """
    in_order = sorted(found, key=attrgetter("topic", "partition", "place"))
    large: dict[Any, list[FoundReject]] = defaultdict(list)
    for reject in in_order:
        if reject.large_message is not None:
            large[reject.topic, reject.partition, reject.large_message].append(reject)
    for _, of_entry in groupby(in_order, lambda reject: (reject.topic, reject.partition, reject.place[:2])):
        group = list(of_entry)
        key = (group[0].topic, group[0].partition, group[0].large_message)
        if group[0].large_message is None:
            yield group
        elif key in large:
            yield large.pop(key)


def batch_index_of(message_id: str) -> int:
    """Return the index in its batch of the message with an id; -1 if the id is that of an entry."""
    index = message_id.split(":")[2:]
    return int(index[0]) if index else -1


def _large_message_of(entry: memoryview) -> tuple[str, str] | None:
    try:
        metadata = peek_metadata(entry)
    except CorruptEntryError:
        return None
    return (metadata.producer_name, metadata.uuid) if metadata.num_chunks_from_msg > 1 else None
