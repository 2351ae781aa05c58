"""A table with a commit a second, with and without upkeep: files, log, and time of a commit.

Each commit adds one file of 850 messages of 100 bytes, as a micro-batch over ten quiet topics does.
Two tables take turns. One has upkeep after each sixty commits, which is once a minute. Commits come
as fast as they can; both tables keep a log of the last minute of this clock, and so do removed
files, so that the log is cut as it would be after a week of commits.

    commit ms       what the pipeline's own commit takes in the driver, the mean of the last hundred
    files           of the table, and of those a query over the last five minutes has to open
    log files, MB   what the table keeps beside its data
    upkeep CPU      of this process while it merges, in percent of a core at a commit a second

    python -m bench.upkeep [COMMITS]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.compaction import Compaction
from ledgerlake.table.delta_table import Table
from ledgerlake.table.open_table import open_delta
from ledgerlake.table.ordered_files import BufferedWriter, data_folder

_ROWS, _TOPICS, _VALUE_BYTES = 850, 10, 100
_COMMITS_PER_LOOK = 60
_COUNTED = 100
_QUERY_S = 300
# How often the table is looked at for the picture, and for the rows that are printed.
_COMMITS_PER_SAMPLE = 250
LATEST = Path(__file__).parent / "latest-upkeep.json"

_KEPT = {
    "delta.logRetentionDuration": "interval 60 seconds",
    "delta.deletedFileRetentionDuration": "interval 60 seconds",
}


@dataclass
class _Lake:
    """One table, and what its commits and its upkeep took."""

    table: Table
    compaction: Compaction | None
    commit_s: list[float] = field(default_factory=list)
    upkeep_s: float = 0.0

    def commit(self, number: int, rows: pa.Table) -> None:
        writer = BufferedWriter(
            data_folder(self.table.path, schema.MESSAGES, f"part-{number:08d}-00000")
        )
        writer.write(rows)
        files = writer.finish()
        began_s = time.perf_counter()
        record = BatchCommit("bench", "bench", number, number)
        self.table.contains(record)
        self.table.commit(record, files, {"topic-partition": number})
        self.commit_s.append(time.perf_counter() - began_s)
        if self.compaction is not None and number % _COMMITS_PER_LOOK == 0:
            began_s = time.process_time()
            self.compaction.run()
            self.upkeep_s += time.process_time() - began_s

    def sample(self, number: int) -> dict[str, float]:
        """What the table and its log are after so many commits."""
        actions = pa.table(open_delta(self.table.path).get_add_actions(flatten=True))
        since = np.datetime64(int((number - _QUERY_S) * 1e6), "us")
        log = list(os.scandir(f"{self.table.path}/_delta_log"))
        return {
            "commits": number + 1,
            "commit_ms": 1000 * sum(self.commit_s[-_COUNTED:]) / _COUNTED,
            "files": actions.num_rows,
            "queried": int((actions["max.broker_timestamp"].to_numpy() >= since).sum()),
            "log_files": len(log),
            "log_mb": sum(entry.stat().st_size for entry in log) / 1e6,
            "upkeep_percent": 100 * self.upkeep_s / max(number, 1),
        }


def main(most: int) -> None:
    print(
        f"{'commits':>9}{'upkeep':>8}{'commit ms':>11}{'files':>9}{'queried':>9}{'log files':>11}{'log MB':>9}{'upkeep CPU':>12}"
    )
    with tempfile.TemporaryDirectory(prefix="ledgerlake-bench-") as folder:
        lakes = [
            _lake(Path(folder, "without"), has_upkeep=False),
            _lake(Path(folder, "with"), has_upkeep=True),
        ]
        samples: dict[str, list[dict[str, float]]] = {"without upkeep": [], "with upkeep": []}
        for number in range(most):
            rows = _messages(number)
            for lake in lakes:
                lake.commit(number, rows)
            if (number + 1) % _COMMITS_PER_SAMPLE == 0:
                for lake, taken in zip(lakes, samples.values(), strict=True):
                    taken.append(lake.sample(number))
                    if number + 1 == 1000 or (number + 1) % 2000 == 0:
                        print(_printed(lake, taken[-1]), flush=True)
    LATEST.write_text(json.dumps(samples, indent=1) + "\n")


def _printed(lake: _Lake, sample: dict[str, float]) -> str:
    name = "no" if lake.compaction is None else "yes"
    return (
        f"{sample['commits']:>9,}{name:>8}{sample['commit_ms']:>11.1f}{sample['files']:>9,}{sample['queried']:>9,}"
        f"{sample['log_files']:>11,}{sample['log_mb']:>9.1f}{sample['upkeep_percent']:>12.2f}"
    )


def _lake(path: Path, *, has_upkeep: bool) -> _Lake:
    table = Table(Place(str(path)), schema.MESSAGES)
    path.mkdir()
    table.create(_KEPT)
    return _Lake(table, Compaction(table.path, schema.MESSAGES) if has_upkeep else None)


def _messages(number: int) -> pa.Table:
    """The messages of one second, topic after topic; half of each value is random."""
    each = _ROWS // _TOPICS
    order = np.arange(_ROWS)
    topics = order // each
    time_us = number * 1_000_000 + order % each * (1_000_000 // each)
    noise = os.urandom(_ROWS * _VALUE_BYTES // 2)
    half = _VALUE_BYTES // 2
    columns = {
        "topic": pa.array([f"persistent://public/default/topic-{topic}" for topic in topics]),
        "partition": pa.array(np.full(_ROWS, -1, np.int32)),
        "message_id": pa.array([f"{topic}:{number}:{row}" for row, topic in enumerate(topics)]),
        "ledger_id": pa.array(topics.astype(np.int64)),
        "entry_id": pa.array(np.full(_ROWS, number, np.int64)),
        "batch_index": pa.array((order % each).astype(np.int32)),
        "broker_timestamp": pa.array(time_us, pa.int64()).cast(schema.TIMESTAMP),
        "publish_time": pa.array(time_us, pa.int64()).cast(schema.TIMESTAMP),
        "late": pa.array(np.zeros(_ROWS, bool)),
        "is_null": pa.array(np.zeros(_ROWS, bool)),
        "value": pa.array(
            [noise[half * row : half * (row + 1)] + b"x" * half for row in range(_ROWS)],
            pa.binary(),
        ),
    }
    arrays = [columns.get(one.name, pa.nulls(_ROWS, one.type)) for one in schema.MESSAGES]
    return pa.Table.from_arrays(arrays, schema=schema.MESSAGES)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
