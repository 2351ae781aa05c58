"""Tables with the latest message of each key: how long a commit takes, beside delta-rs's MERGE.

``python -m bench.latest [--keys 1000000] [--updates 50000] [--commits 20]``

The table has so many keys. Each commit brings so many messages of random keys. Printed are the
median times of a commit with the index and the deletion vectors, of writing the files that tasks
write, and of a MERGE of the same messages by delta-rs into a table of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from ledgerlake.decode import schema
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.latest_table import LatestTable
from ledgerlake.table.ordered_files import BufferedWriter, data_folder

if TYPE_CHECKING:
    from ledgerlake.table.ordered_files import DataFile

_MIB = 1024 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--updates", type=int, default=50_000)
    parser.add_argument("--commits", type=int, default=20)
    parser.add_argument(
        "--merges", type=int, default=3, help="how many commits delta-rs makes; 0 for none"
    )
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        table = LatestTable(Place(os.path.join(folder, "latest")), schema.MESSAGES)
        table.check(None)
        table.create()
        first = messages(rng.permutation(options.keys), 0)
        commit(table, 0, write(table, 0, first))
        written_s, committed_s, cpu_s = [], [], time.process_time()
        for number in range(1, options.commits + 1):
            rows = messages(rng.integers(0, options.keys, options.updates), number * 10_000_000)
            began_s = time.perf_counter()
            files = write(table, number, rows)
            written_s.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            commit(table, number, files)
            committed_s.append(time.perf_counter() - began_s)
        cpu_s = (time.process_time() - cpu_s) / options.commits
        resident = psutil.Process().memory_info().rss / _MIB
        rate = options.updates / (statistics.median(written_s) + statistics.median(committed_s))
        print(f"{options.keys:,} keys, {options.updates:,} messages a commit")
        print(
            f"  files {statistics.median(written_s):.2f} s, commit "
            f"{statistics.median(committed_s):.2f} s (longest {max(committed_s):.2f} s)"
        )
        print(
            f"  {rate:,.0f} messages/s, {cpu_s:.2f} CPU s a commit, {resident:,.0f} MiB, "
            f"{len(DeltaTable(table.path.uri).file_uris())} files"
        )
        began_s = time.perf_counter()
        again = LatestTable(table.path, schema.MESSAGES)
        again.check(None)
        commit(again, options.commits + 1, write(again, options.commits + 1, first.slice(0, 1)))
        print(f"  first commit after a start {time.perf_counter() - began_s:.2f} s")
        if options.merges:
            print(f"  MERGE of delta-rs {merge(folder, first, rng, options):.2f} s a commit")


def messages(keys: np.ndarray, first: int) -> pa.Table:
    """Rows of ``schema.MESSAGES`` with values of 100 bytes."""
    count = len(keys)
    columns = {
        "topic": pa.repeat("persistent://public/default/orders", count),
        "partition": pa.repeat(pa.scalar(-1, pa.int32()), count),
        "ledger_id": pa.repeat(pa.scalar(first, pa.int64()), count),
        "entry_id": pa.array(np.arange(count)),
        "batch_index": pa.repeat(pa.scalar(-1, pa.int32()), count),
        "publish_time": pa.array(np.arange(first, first + count)).cast(schema.TIMESTAMP),
        "key": pa.array([f"key-{key}" for key in keys.tolist()]),
        "is_null": pa.repeat(False, count),
        "late": pa.repeat(False, count),
        "value": random_values(count),
    }
    arrays = [columns.get(field.name, pa.nulls(count, field.type)) for field in schema.MESSAGES]
    return pa.Table.from_arrays(arrays, schema=schema.MESSAGES)


def random_values(count: int) -> pa.BinaryArray:
    offsets = np.arange(0, 100 * count + 1, 100, dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(os.urandom(100 * count))]
    return pa.Array.from_buffers(pa.binary(), count, buffers)


def write(table: LatestTable, number: int, rows: pa.Table) -> list[DataFile]:
    writer = BufferedWriter(data_folder(table.path, schema.MESSAGES, f"part-{number:08}-00000"))
    writer.write(rows)
    return writer.finish()


def commit(table: LatestTable, number: int, files: list[DataFile]) -> None:
    record = BatchCommit("bench", "bench", number, number)
    assert not table.contains(record)
    table.commit(record, files, {})


def merge(
    folder: str, first: pa.Table, rng: np.random.Generator, options: argparse.Namespace
) -> float:
    """The median time of a MERGE."""
    path = os.path.join(folder, "merged")
    write_deltalake(path, first)
    taken_s = []
    for number in range(options.merges):
        rows = messages(
            np.unique(rng.integers(0, options.keys, options.updates)), (number + 1) * 10_000_000
        )
        began_s = time.perf_counter()
        merger = DeltaTable(path).merge(rows, "t.key = s.key", source_alias="s", target_alias="t")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s)


if __name__ == "__main__":
    main()
