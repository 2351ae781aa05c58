"""The rows of a small table, all in memory, by the parts of ``verify`` that read a batch at
a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.verify.table_rows import RowOrder, by_topic_partition, rows_before, up_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ledgerlake.verify.table_rows import TableFile, TableRows
    from ledgerlake.wire.message_id import Position


def rows_by_file(table: TableRows, name: str, end: Position) -> list[pa.Table]:
    """Each file's rows of one topic partition up to ``end``; without files that have none."""
    parts: dict[TableFile, list[pa.Table]] = {}
    for file, rows in table.batches():
        for of_rows, part in by_topic_partition(rows):
            if of_rows == name:
                parts.setdefault(file, []).append(up_to(part, end))
    tables = map(pa.concat_tables, parts.values())
    return [rows for rows in tables if rows.num_rows]


def out_of_order(files: Sequence[pa.Table]) -> int:
    """The number of rows of a lane that come after a later one."""
    order = RowOrder()
    for number, file in enumerate(files):
        order.add(None, number, file)
    overlaps = order.overlaps()
    return order.descents + sum(
        rows_before(file, overlaps[number][None])
        for number, file in enumerate(files)
        if number in overlaps
    )
