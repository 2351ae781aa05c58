"""Random tables, written by the product's own code: all readers see the rows that plain Python has.

``make readers TABLES=2000`` tries more of them, some with Spark.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.readers.judge import compare, differences
from tests.readers.lake import write
from tests.readers.model import NUMBER, rows_of
from tests.readers.readers import Condition, Reader
from tests.readers.recipes import Message, Recipe, recipes

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
