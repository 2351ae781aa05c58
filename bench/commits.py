"""What a commit to a table costs as the table gets more of them: ``make bench``.

Each commit adds two files, as a micro-batch of two tasks does; the files themselves are empty. Time
is what the pipeline's own commit takes in the driver, the mean of the last fifty; the log is what
the table keeps beside its data.

python -m bench.commits [COMMITS]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from deltalake import DeltaTable

from ledgerlake.decode.schema import MESSAGES
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.delta_table import Table
from ledgerlake.table.ordered_files import DataFile

_COUNTED = 50
_TOPIC = "persistent://public/default/orders-partition-0"


def main(most: int) -> None:
    print(f"{'commits':>10}{'ms each':>10}{'CPU ms':>10}{'log MB':>10}{'in files':>10}")
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as path:
        DeltaTable.create(path, MESSAGES)
        table = Table(Place(path), MESSAGES)
        for number in range(most):
            if number % 1000 in (100 - _COUNTED, 1000 - _COUNTED):
                began_s, cpu_s = time.perf_counter(), time.process_time()
            files = [
                DataFile(f"part-{number:08d}-{task}.parquet", 100_000, 1000, _stats(number))
                for task in range(2)
            ]
            for file in files:
                Path(path, file.name).touch()
            record = BatchCommit("bench", "bench", number, number)
            table.contains(record)
            table.commit(record, files, {_TOPIC: number})
            if number + 1 == 100 or (number + 1) % 1000 == 0:
                took_s, spent_s = time.perf_counter() - began_s, time.process_time() - cpu_s
                _print(path, number + 1, took_s * 1000 / _COUNTED, spent_s * 1000 / _COUNTED)


def _print(path: str, commits: int, took_ms: float, cpu_ms: float) -> None:
    entries = list(os.scandir(f"{path}/_delta_log"))
    size_mb = sum(entry.stat().st_size for entry in entries) / 1e6
    print(
        f"{commits:>10,}{took_ms:>10.1f}{cpu_ms:>10.1f}{size_mb:>10.1f}{len(entries):>10,}",
        flush=True,
    )


def _stats(number: int) -> str:
    """Return the statistics of a file with a few columns, about as long as real ones."""
    low = {
        "topic": _TOPIC,
        "ledger_id": number,
        "entry_id": number,
        "broker_index": number,
        "key": "a",
    }
    nulls = dict.fromkeys(low, 0)
    return json.dumps({"numRecords": 1000, "minValues": low, "maxValues": low, "nullCount": nulls})


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
