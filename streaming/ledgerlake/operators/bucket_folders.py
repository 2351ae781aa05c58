"""The folders in which queries keep buckets of delayed messages: ``<folder>/<query id>/<topic
partition>/<bucket id>``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.client.topics import folder_name, join_partition
from ledgerlake.errors import SetupError
from ledgerlake.operators.bucket_storage import FolderStorage

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.stored.places import Place


def open_folder(
    folder: Place, source: TopicPartition, query_id: str, used: Mapping[int, int]
) -> FolderStorage:
    """Return the storage of one query's topic partition, below a folder for all.

    Args:
        used: the first unfinished segment of each bucket that the query's record names.
    """
    name = folder_name(join_partition(source.topic, source.partition))
    return FolderStorage(folder / query_id / name, used)


def query_id_of_task() -> str:
    """Return the id that Spark gave the query of this task; the id belongs to the checkpoint.

    Raises:
        SetupError: Spark gave none.
    """
    query_id = find_query_id()
    if not query_id:
        raise SetupError(
            "Spark did not tell the query's id, by which its folder of delayed messages is named"
        )
    return query_id


def find_query_id() -> str:
    """Return the id that Spark gave the query of this task; empty outside of tasks of a query."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return "" if context is None else context.getLocalProperty("sql.streaming.queryId") or ""
