"""What a replay has in memory of a table whose rows lie between two rejects."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ledgerlake.decode import schema
from ledgerlake.replay.replay import _is_at_place
from ledgerlake.table.delta_table import Table
from ledgerlake.table.ordered_files import BufferedWriter, DataFile, data_folder
from tests.growth.memory import measured
from tests.replay.test_replay import TOPIC, config

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.stored.places import Place

_LEDGER_ENTRIES = 50_000
_IN_A_FILE = 300_000
# Positions of all rows would take 24 bytes each at least.
_MOST_BYTES_A_ROW = 12


def _messages(first: int, count: int) -> pa.Table:
    """Messages at positions one behind another, without a value."""
    numbers = np.arange(first, first + count)
    columns = {
        "topic": pa.repeat(TOPIC, count),
        "partition": pa.repeat(-1, count),
        "ledger_id": pa.array(numbers // _LEDGER_ENTRIES),
        "entry_id": pa.array(numbers % _LEDGER_ENTRIES),
        "batch_index": pa.repeat(-1, count),
    }
    arrays = [
        columns[field.name].cast(field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in schema.MESSAGES
    ]
    return pa.Table.from_arrays(arrays, schema=schema.MESSAGES)


def _write(place: Place, n: int) -> None:
    place.make()
    table = Table(place, schema.MESSAGES)
    table.create()
    files: list[DataFile] = []
    for first in range(0, n, _IN_A_FILE):
        writer = BufferedWriter(data_folder(place, schema.MESSAGES, "part-00000000-00000"))
        writer.write(_messages(first, min(_IN_A_FILE, n - first)))
        files += writer.finish()
    table.append_once("rows", 1, None, files)


def _first_and_last(n: int) -> Callable[[], list[bool]]:
    """Prepare a table of so many rows; ask it for the first one, the last one and another."""
    folder = tempfile.TemporaryDirectory()
    options = config(Path(folder.name), path=f"{folder.name}/t").table_options[0]
    _write(options.place, n)
    places = pa.concat_tables([_messages(place, 1) for place in (0, n - 1, n)])
    (messages,) = places.combine_chunks().to_batches()

    def work() -> list[bool]:
        with folder:
            found: list[bool] = _is_at_place(messages, options).tolist()
            return found

    return work


def test_the_rows_between_two_rejects_are_not_in_memory_together() -> None:
    few, many = 300_000, 1_800_000
    (found, least), (found_of_many, most) = (
        measured(_first_and_last, few),
        measured(_first_and_last, many),
    )
    assert found == found_of_many == [True, True, False]
    assert most - least < _MOST_BYTES_A_ROW * (many - few)
