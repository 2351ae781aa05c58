"""Rows of a micro-batch that its commit lacks: a repeat may judge otherwise than the run that
committed.

``rejects`` commits before ``messages``. After a kill between the two the micro-batch runs again,
and what it reads may be another thing by then: a ledger was trimmed, which is a row of
``data_loss``; a key is gone, by which a message becomes a reject. Such rows are in no file of the
first run. So the repeat's rows are compared with those that the table took up, and what is missing
there is committed under an application transaction of its own:

    <query>                  the micro-batch as the first run committed it
    <query>:more:<number>    what a repeat has added to it; ``number`` counts from 1, since a repeat may be killed too

If ``messages`` has the micro-batch too, the first run's messages stand, and a repeat that rejects
one of them is wrong. But what waited in the first run's state is gone with it, so a loss that the
repeat finds is added (``add_losses``), and so is a large message that it cannot read again to let it wait.

A row is known by its place and its reason; of a loss also by its detail, which says how far it
reaches. Rows count as the commit took them up, so that what a user has deleted meanwhile does not
come again.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ledgerlake.source.loss import DATA_LOSS, DELAYED_TRIMMED
from ledgerlake.table.ordered_files import DataFile, GatheringWriter, ParquetFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.table.batch_record import BatchRecord
    from ledgerlake.table.delta_table import Table

KEY_COLUMNS = ("topic", "partition", "ledger_id", "entry_id", "message_id", "reason", "detail")

_REASON = KEY_COLUMNS.index("reason")

RowKey = tuple[Any, ...]


def add_missing(table: Table, batch: BatchRecord, files: list[DataFile]) -> None:
    """Commit those rows of a repeat that the commits of its micro-batch lack; remove the files that
    it leaves.

    Args:
        table: one of rejects, which holds the micro-batch.
        files: what the repeat has written.

    Raises:
        CheckpointError: what the table took up cannot be read back; nothing was changed.
        TableError: the commit did not land.
    """
    versions = table.versions_of(batch)
    if not versions:
        raise table.not_comparable(batch, "its history does not show the commit")
    _add(table, batch, files, versions, len(versions), lambda _reason: True)


def add_losses(table: Table, batch: BatchRecord, files: list[DataFile], is_held: bool) -> None:
    """Commit those rows of a loss that the commits of its micro-batch lack; remove the files that
    it leaves.

    Args:
        table: one of rejects.
        files: what the repeat has written.
        is_held: whether the table holds the micro-batch as the first run committed it.

    Raises:
        As ``add_missing``.
    """
    versions = table.versions_of(batch)
    number = len(versions) if is_held else len(versions) + 1
    _add(table, batch, files, versions, number, lambda reason: reason in (DATA_LOSS, DELAYED_TRIMMED))


def _add(
    table: Table,
    batch: BatchRecord,
    files: list[DataFile],
    versions: list[int],
    number: int,
    is_wanted: Callable[[str], bool],
) -> None:
    known = sum((table.keys_of(batch, version) for version in versions), Counter())
    missing = [one for file in files for one in _beyond(table, file.name, known, is_wanted)]
    if missing:
        table.commit(batch.more(number), missing, {})
    table.remove_files([file.name for file in files])


def row_keys(rows: pa.Table) -> Iterator[RowKey]:
    """By what each row is known."""
    for *place, reason, detail in zip(*(rows[name].to_pylist() for name in KEY_COLUMNS), strict=True):
        yield row_key(*place, reason, detail)


def row_key(*values: Any) -> RowKey:
    """By what a row is known whose columns are ``KEY_COLUMNS``."""
    *place, reason, detail = values
    return (*place, reason, detail if reason == DATA_LOSS else None)


def _beyond(table: Table, name: str, known: Counter[RowKey], is_wanted: Callable[[str], bool]) -> list[DataFile]:
    """The rows of a file that are wanted by their reason and not known, in files of their own; what
    is known is taken off.
    """
    folder = table.folder
    prefix = "-".join(name.split("-")[:3])
    writer = GatheringWriter(ParquetFolder(folder.filesystem(), folder.root, table.schema, prefix))
    with pq.ParquetFile(f"{folder.root}/{name}", filesystem=folder.filesystem()) as file:
        for number in range(file.num_row_groups):
            rows = file.read_row_group(number).cast(table.schema)
            wanted = [is_wanted(key[_REASON]) and _is_new(key, known) for key in row_keys(rows)]
            writer.write(rows.filter(pa.array(wanted, pa.bool_())))
    return writer.finish()


def _is_new(key: RowKey, known: Counter[RowKey]) -> bool:
    known[key] -= 1
    return known[key] < 0
