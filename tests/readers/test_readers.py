"""Random tables, written by the product's own code: all readers see the rows that plain Python has.

``make readers TABLES=2000`` tries more of them, some with Spark.
"""

from __future__ import annotations

import itertools
import string
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from ledgerlake.errors import UsageError
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import BufferedWriter, data_folder
from ledgerlake.table.record_table import RecordTable
from ledgerlake.values.record_rows import RECORD_COLUMN
from tests.pipeline_tables import opened_tables
from tests.readers.judge import compare, differences
from tests.readers.lake import write
from tests.readers.model import NUMBER, rows_of
from tests.readers.readers import READERS, Condition, DeltaRs, DuckDb, PyArrow, Reader
from tests.readers.recipes import Message, Recipe, recipes

if TYPE_CHECKING:
    from collections.abc import Callable

# Making a table smaller takes minutes, and the recipe of any table can be read.
PHASES = (Phase.explicit, Phase.generate)


@settings(
    max_examples=40,
    derandomize=True,
    database=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
)
@given(recipes())
def test_all_readers_see_the_rows_that_plain_python_has(recipe: Recipe) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert not differences(recipe, write(recipe, Path(folder)), conditions=8)


def test_the_judge_tells_a_reader_that_loses_a_row() -> None:
    messages = [Message(0, {"a": number}, None, [], 1) for number in range(3)]
    recipe = Recipe("record", True, {}, [{"a": "int"}], [(1, messages)])

    class Lossy(Reader):
        name = "lossy"

        def rows(self, columns: list[str]) -> list[dict[str, object]]:
            return [{name: row[name] for name in columns} for row in rows_of(recipe)]

        def numbers(self, condition: Condition) -> list[int]:
            found = [row[NUMBER] for row in rows_of(recipe) if condition.holds(row)]
            return [number for number in found if number != 1]

    found = compare(recipe, [Lossy(None, "pulsar")], conditions=20)  # type: ignore[arg-type]
    assert any("lossy finds [0, 2], not [0, 1, 2]" in one for one in found)


@pytest.mark.parametrize("column", ["a", "key"])
def test_an_empty_text_is_null_in_a_partition_column(tmp_path: Path, column: str) -> None:
    messages = [Message(0, {"a": text}, text, [], 1) for text in ("", None, "x", "")]
    shape = "record" if column == "a" else "messages"
    recipe = Recipe(shape, True, {"partition_by": [column]}, [{"a": "string"}], [(1, messages)])
    assert [row[column] for row in rows_of(recipe)] == [None, None, "x", None]
    assert not differences(recipe, write(recipe, tmp_path), conditions=40)


# How records are nested, from the outside: in a record, in an array, in a map.
NESTED: dict[str, Callable[[pa.DataType], pa.DataType]] = {
    "r": lambda kind: pa.struct([("in", kind)]),
    "a": pa.list_,
    "m": lambda kind: pa.map_(pa.string(), kind),
}
NESTINGS = [
    "".join(chosen) for depth in (1, 2, 3) for chosen in itertools.product(NESTED, repeat=depth)
]


def nested_type(nesting: str, kind: pa.DataType) -> pa.DataType:
    return NESTED[nesting[0]](nested_type(nesting[1:], kind)) if nesting else kind


def nested_value(nesting: str, value: Any) -> Any:
    if not nesting:
        return value
    inner = nested_value(nesting[1:], value)
    return {"r": {"in": inner}, "a": [inner], "m": [("k", inner)]}[nesting[0]]


def without_maps(value: Any) -> Any:
    """Return a value with dicts for maps, which are pairs to one reader and rows to another."""
    if isinstance(value, dict):
        return {name: without_maps(part) for name, part in value.items()}
    if isinstance(value, list):
        pairs = [
            tuple(part.values()) if isinstance(part, dict) and "key" in part else part
            for part in value
        ]
        are_pairs = any(isinstance(part, tuple) for part in pairs)
        return (
            {key: without_maps(part) for key, part in pairs}
            if are_pairs
            else [*map(without_maps, value)]
        )
    return value


def test_a_nested_record_grows_unless_it_is_in_a_map_which_a_reader_could_not_read(
    tmp_path: Path,
) -> None:
    table = RecordTable(Place(str(tmp_path)))
    versions = [pa.struct([("x", pa.int32())]), pa.struct([("x", pa.int32()), ("y", pa.int32())])]
    for number, version in enumerate(versions):
        table.add_columns(
            pa.struct([(nesting, nested_type(nesting, version)) for nesting in NESTINGS])
        )
        if number == 0:
            table.create()
        record = {nesting: nested_value(nesting, {"x": number}) for nesting in NESTINGS}
        row = {"topic": "t", "ledger_id": 1, "entry_id": number, "batch_index": -1}
        writer = BufferedWriter(data_folder(table.path, table.schema, f"part-{number:08}-00000"))
        writer.write(
            pa.Table.from_pylist([row | {NUMBER: number, RECORD_COLUMN: record}], table.schema)
        )
        batch = BatchCommit("stream", "query", number, number)
        assert not table.contains(batch)
        table.commit(batch, writer.finish(), {})
    types = {field.name: field.type for field in table.record}
    assert types == {
        nesting: nested_type(nesting, versions["m" not in nesting]) for nesting in NESTINGS
    }
    expected = [
        {
            nesting: without_maps(
                nested_value(nesting, {"x": number} if "m" in nesting else {"x": number, "y": None})
            )
            for nesting in NESTINGS
        }
        for number in range(2)
    ]
    for reader in READERS:
        rows = reader(table.path, "pulsar").rows([NUMBER, *NESTINGS])
        assert [
            {nesting: without_maps(row[nesting]) for nesting in NESTINGS} for row in rows
        ] == expected


# Polars 2.1 cannot open a folder with some of them.
OF_A_PATH = string.ascii_letters + string.digits + " !\"#$%&'()*+,-.:;<=>?@_`}~{é日"


def test_a_table_is_the_same_folder_for_all_libraries_with_any_path_that_is_taken(
    tmp_path: Path,
) -> None:
    folder = tmp_path / OF_A_PATH
    messages = [Message(0, {"a": number}, "k", [], 1) for number in range(2)]
    recipe = Recipe(
        "record", True, {}, [{"a": "int"}], [(1, messages)] * 9, is_merged=True, has_checkpoint=True
    )
    place = write(recipe, folder)
    assert not compare(
        recipe, [reader(place, "pulsar") for reader in (PyArrow, DuckDb, DeltaRs)], conditions=8
    )
    assert list(tmp_path.iterdir()) == [folder]


def test_a_path_that_one_library_takes_for_another_folder_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {*map(chr, range(1, 128)), "%41", "%2f"}.difference(OF_A_PATH, "/")
    for number, text in enumerate(sorted(others)):
        folder = tmp_path / f"{number}{text}"
        with pytest.raises(UsageError) as raised:
            opened_tables(folder)
        assert repr(f"{folder}/messages") in raised.value.message
    assert not list(tmp_path.iterdir())
    (tmp_path / "a%41").mkdir()
    monkeypatch.chdir(tmp_path / "a%41")
    (tmp_path / "link").symlink_to(tmp_path / "a%41")
    for path in (Path("lake"), tmp_path / "link"):
        with pytest.raises(UsageError, match=r"\[delta\] path cannot be .*a%41"):
            opened_tables(path)
