"""Files of a micro-batch that several topic partitions share (see ``operators.partition_writer``).

Each member of such a file reports it. If an executor is lost, Spark may run a task again of which
some reports are used already. The second run writes files of its own, and not for certain with the
same members. So a file counts for the topic partitions that report it; the rows of its other
members are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ledgerlake.client.topics import split_partition
from ledgerlake.errors import TableAccessError
from ledgerlake.table.ordered_files import DataFile, copy_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ledgerlake.table.delta_table import Table


def settle_shared(table: Table, reported: Mapping[str, list[DataFile]]) -> tuple[list[DataFile], list[str]]:
    """Return the files of a micro-batch, each once.

    Args:
        table: the table for which they were written.
        reported: the files that each topic partition reports.

    Returns:
        The files, and the names of those that others replace, which still exist.

    Raises:
        TableError: a file of which some rows are left out cannot be read.
    """
    files: dict[str, DataFile] = {}
    reporters: dict[str, set[str]] = {}
    for topic_partition, of_partition in reported.items():
        for file in of_partition:
            files[file.name] = file
            reporters.setdefault(file.name, set()).add(topic_partition)
    mixed = {name: file for name, file in files.items() if not reporters[name].issuperset(file.members)}
    settled = [file for name, file in files.items() if name not in mixed]
    for name in mixed:
        settled += _rows_of(table, files[name], reporters[name])
    return settled, list(mixed)


def _rows_of(table: Table, file: DataFile, topic_partitions: set[str]) -> list[DataFile]:
    """Write the rows of some topic partitions to new files."""

    def is_of_them(rows: pa.Table) -> pa.Array:
        wanted = pa.array([False] * rows.num_rows)
        for topic, partition in map(split_partition, sorted(topic_partitions)):
            is_of_one = pc.and_(pc.equal(rows["topic"], topic), pc.equal(rows["partition"], partition))
            wanted = pc.or_(wanted, is_of_one)
        return wanted

    try:
        return copy_rows(table.folder, table.schema, file, is_of_them)
    except (OSError, pa.ArrowException) as error:
        raise TableAccessError(
            f"the file {file.name} of the table at {table.path} cannot be read: {table.folder.reason(error)}"
        ) from None
