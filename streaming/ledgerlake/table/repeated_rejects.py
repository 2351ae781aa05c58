"""Commits rows of a micro-batch that its first commit lacks, because a repeat may reject other
entries than the run that committed.

``rejects`` is committed before ``messages``. After a kill between the two, the micro-batch runs
again, and the topic may have changed: a ledger was trimmed, which gives a row of ``data_loss``; or
a key is missing, so that a message becomes a reject. Such rows are in no file of the first run. So
the rows of the repeat are compared with those in the table, and the missing ones are committed
under an application transaction of their own:

    <query>                  the micro-batch as the first run committed it
    <query>:more:<number>    what a repeat has added to it; ``number`` counts from 1, since a repeat
                             may be killed too

If ``messages`` has the micro-batch too, the first run's messages stand, and rejects of them by a
repeat are wrong. But the first run's state is gone with it, so a loss that the repeat finds is
added (``add_losses``). So is a delayed large message that the repeat can no longer read.

The key of a row is its position and its reason, and for a loss also its detail, which says how far
it reaches. Rows are compared with those that the commit added, so that rows that a user has deleted
since do not come again.
"""

from __future__ import annotations

from collections import Counter
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ledgerlake.reasons import DATA_LOSS, DELAYED_TRIMMED
from ledgerlake.table.ordered_files import DataFile, copy_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.delta_table import Table

KEY_COLUMNS = ("topic", "partition", "ledger_id", "entry_id", "message_id", "reason", "detail")

_REASON = KEY_COLUMNS.index("reason")

RowKey = tuple[Any, ...]


def add_missing(table: Table, batch: BatchCommit, files: list[DataFile]) -> None:
    """Commit those rows of a repeat that the commits of its micro-batch lack; remove the repeat's
    files.

    Args:
        table: a table of rejects that contains the micro-batch.
        files: the files of the repeat.

    Raises:
        CheckpointError: the rows of the first run cannot be read back; nothing was changed.
        TableError: the commit did not land.
    """
    _add(table, batch, files, True, lambda _reason: True)


def add_losses(table: Table, batch: BatchCommit, files: list[DataFile], is_in_table: bool) -> None:
    """Commit those losses and trimmed delayed messages of a repeat that the commits of its
    micro-batch lack; remove the repeat's files.

    Args:
        table: a table of rejects.
        files: the files of the repeat.
        is_in_table: whether the table contains the micro-batch as the first run committed it.

    Raises:
        As ``add_missing``.
    """
    _add(table, batch, files, is_in_table, lambda reason: reason in (DATA_LOSS, DELAYED_TRIMMED))


def _add(
    table: Table,
    batch: BatchCommit,
    files: list[DataFile],
    is_in_table: bool,
    is_wanted: Callable[[str], bool],
) -> None:
    additions = _additions(table, batch)
    known = Counter[RowKey]()
    for committed in [*([batch] if is_in_table else []), *map(batch.more, range(1, additions + 1))]:
        version = table.version_of(committed)
        if version is None:
            raise table.not_comparable(batch, "its log does not have the commit any more")
        known += table.keys_of(batch, version)
    missing = [new_file for file in files for new_file in _write_new(table, file, known, is_wanted)]
    if missing:
        table.commit(batch.more(additions + 1), missing, {})
    table.remove_files([file.name for file in files])


def _additions(table: Table, batch: BatchCommit) -> int:
    """Return how many additions to a micro-batch the table has."""
    is_there = (table.number(batch.more(number).query) == batch.batch_id for number in count(1))
    return sum(takewhile(bool, is_there))


def row_keys(rows: pa.Table) -> Iterator[RowKey]:
    """Yield the key of each row."""
    for *position, reason, detail in zip(
        *(rows[name].to_pylist() for name in KEY_COLUMNS), strict=True
    ):
        yield row_key(*position, reason, detail)


def row_key(*values: Any) -> RowKey:
    """Return the key of a row from the values of its ``KEY_COLUMNS``."""
    *position, reason, detail = values
    return (*position, reason, detail if reason == DATA_LOSS else None)


def _write_new(
    table: Table, file: DataFile, known: Counter[RowKey], is_wanted: Callable[[str], bool]
) -> list[DataFile]:
    """Write the rows of a file that are not known, and whose reason is wanted, to new files; return
    those. Each known row is taken off ``known``.
    """

    def are_new(rows: pa.Table) -> pa.Array:
        wanted = [is_wanted(key[_REASON]) and _is_new(key, known) for key in row_keys(rows)]
        return pa.array(wanted, pa.bool_())

    return copy_rows(table.folder, table.schema, file, are_new)


def _is_new(key: RowKey, known: Counter[RowKey]) -> bool:
    known[key] -= 1
    return known[key] < 0
