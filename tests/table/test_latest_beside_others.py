"""Tables with the latest messages to which other programs add rows as they like, against plain
Python: each key has one row, its latest, and rows of others without a key stay as they are.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from deltalake.transaction import AddAction

from ledgerlake.decode import schema
from ledgerlake.stored.places import Place
from ledgerlake.table import latest_table
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.latest_index import FileRows, LatestIndex, key_hashes
from ledgerlake.table.latest_table import LatestRecordTable, LatestTable
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.values.record_columns import PULSAR_COLUMN
from ledgerlake.values.record_rows import RECORD_COLUMN
from tests.table.test_latest_table import message, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_RECORD = pa.struct([("value", pa.string())])

Rows = dict[str | None, Counter[str]]


class _Table:
    """A table of one shape, and the processes that write micro-batches to it."""

    def __init__(self, folder: Path, shape: str) -> None:
        self.is_record = shape == "record"
        self.path = Place(str(folder / "latest"))
        self.batches = self.messages = 0
        self.start()
        self.table.create()

    def start(self) -> None:
        """Begin anew, as a process does that knows only the table."""
        if self.is_record:
            table = LatestRecordTable(self.path)
            table.check(None)
            table.add_columns(_RECORD)
            self.table: LatestTable | LatestRecordTable = table
        else:
            self.table = LatestTable(self.path, schema.MESSAGES)
            self.table.check(None)

    def batch(self, values: dict[str, str | None]) -> None:
        writer = BufferedWriter(
            data_folder(self.path, self.table.schema, f"part-{self.batches:08}-00000")
        )
        writer.write(self._rows(values))
        record = BatchCommit("stream", "query", self.batches, self.batches)
        assert not self.table.contains(record)
        self.table.commit(record, writer.finish(), {})
        self.batches += 1

    def _rows(self, values: dict[str, str | None]) -> pa.Table:
        rows = []
        for key, value in values.items():
            self.messages += 1
            rows.append(message(self.messages, key, None if value is None else value.encode()))
        if not self.is_record:
            return rows_of(rows)
        for row, value in zip(rows, values.values(), strict=True):
            del row["value"]
            row[RECORD_COLUMN] = {"value": value}
        return pa.Table.from_pylist(rows, schema=self.table.schema)

    def add_foreign(self, rows: Sequence[tuple[str | None, str]], *, is_bare: bool) -> None:
        """Add a file as another program does, with no positions.

        Args:
            rows: keys and values.
            is_bare: the file has no statistics, and no columns without values.
        """
        whole = pa.schema(DeltaTable(self.path.uri).schema())
        content = pa.Table.from_pylist([self._foreign(*row) for row in rows], schema=whole)
        if not is_bare:
            write_deltalake(self.path.uri, content, mode="append")
            return
        content = content.select(
            [name for name in whole.names if content[name].null_count < len(rows)]
        )
        name = f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"
        file = Path(self.path.uri) / name
        pq.write_table(content, file)
        action = AddAction(name, file.stat().st_size, {}, 1, True, "{}")
        table = DeltaTable(self.path.uri)
        table.create_write_transaction([action], "append", table.schema())

    def _foreign(self, key: str | None, value: str) -> dict[str, Any]:
        if not self.is_record:
            return {"key": key, "value": value.encode()}
        return {"value": value} | ({} if key is None else {PULSAR_COLUMN: {"key": key}})

    def content(self) -> Rows:
        key = f"{PULSAR_COLUMN}['key']" if self.is_record else "key"
        query = f"select {key} as key, cast(value as varchar) as value from t"
        found = QueryBuilder().register("t", DeltaTable(self.path.uri)).execute(query)
        result: Rows = {}
        for row in pa.table(found).to_pylist():
            result.setdefault(row["key"], Counter())[row["value"]] += 1
        return result


@pytest.mark.parametrize("shape", ["messages", "record"])
@pytest.mark.parametrize("seed", range(12))
def test_each_key_is_there_once_and_rows_of_others_stay(
    seed: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    monkeypatch.setattr(latest_table, "_MOST_SMALL_FILES", rng.choice([1, 2, 5]))
    monkeypatch.setattr(latest_table, "_MOST_REWRITTEN_ROWS", rng.choice([1, 10, 10_000]))
    table = _Table(tmp_path, shape)
    expected: dict[str, str] = {}
    others: Counter[str] = Counter()
    for number in range(20):
        keys = rng.sample(range(12), rng.randint(1, 6))
        values = {f"k{key}": None if rng.random() < 0.2 else f"{number}" for key in keys}
        table.batch(values)
        latest = expected | values
        expected = {key: value for key, value in latest.items() if value is not None}
        if rng.random() < 0.5:
            absent = [f"k{key}" for key in range(12) if f"k{key}" not in expected]
            new = {key: f"other {number}" for key in absent if rng.random() < 0.5}
            keyless = [f"other {number}, {row}" for row in range(rng.randint(not new, 3))]
            table.add_foreign(
                [*new.items(), *((None, value) for value in keyless)],
                is_bare=rng.random() < 0.5,
            )
            expected |= new
            others.update(keyless)
        if rng.random() < 0.2:
            table.start()
        rows: Rows = {key: Counter([value]) for key, value in expected.items()}
        assert table.content() == rows | ({None: others} if others else {})


@pytest.mark.parametrize("seed", range(20))
def test_rows_that_move_to_another_file_are_those_of_their_keys(seed: int) -> None:
    """Some rows have no key: a file of ours may have got them from another writer's."""
    rng = random.Random(seed)
    index = LatestIndex()
    rows: dict[str, list[str | None]] = {}
    live: dict[str, tuple[str, int]] = {}
    for number in range(12):
        name, keys = f"f{number}", [rng.choice(["a", "b", "c", "d", None]) for _ in range(4)]
        rows[name] = keys
        hashes = key_hashes(pa.table({"key": keys, "key_bytes": pa.nulls(4, pa.binary())}))
        index.add([FileRows(name, hashes, np.zeros(4, dtype=bool), np.arange(4))])
        live |= {key: (name, row) for row, key in enumerate(keys) if key is not None}
        if rng.random() < 0.5:
            moved = rng.sample(sorted(rows), rng.randint(1, len(rows)))
            left = {
                old: [row for row in range(len(rows[old])) if row not in index.deleted[old]]
                for old in moved
            }
            places = [(old, row) for old in moved for row in left[old]]
            index.move({old: len(left[old]) for old in moved}, f"m{number}")
            index.remove_files(moved)
            rows[f"m{number}"] = [rows[old][row] for old, row in places]
            for old in moved:
                del rows[old]
            live = {
                key: (f"m{number}", places.index(place)) if place in places else place
                for key, place in live.items()
            }
        hidden = {
            (name, row)
            for name, keys in rows.items()
            for row, key in enumerate(keys)
            if key is not None and live[key] != (name, row)
        }
        assert {(name, row) for name, of in index.deleted.items() for row in of} == hidden
