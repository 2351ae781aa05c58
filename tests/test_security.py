"""SECURITY.md and docs/promises.md are tested: each threat and each promise names a test, and `make
test` runs that test.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "SECURITY.md").read_text()
PROMISES = (ROOT / "docs/promises.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT + PROMISES)))


def threats() -> list[list[str]]:
    """The rows of the threat table."""
    table = TEXT.partition("| actor |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


@pytest.mark.parametrize(("path", "name"), NAMED, ids=str)
def test_a_test_that_is_named_is_one_of_make_test(path: str, name: str) -> None:
    body = ast.parse((ROOT / path).read_text()).body
    (test_function,) = (
        node for node in body if isinstance(node, ast.FunctionDef) and node.name == name
    )
    of_all = [
        node.value
        for node in body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    assert not any(
        "pytest.mark.long" in ast.unparse(mark)
        for mark in (*test_function.decorator_list, *of_all)
        if not _varies(mark)
    )


def _varies(mark: ast.expr) -> bool:
    """Whether some variants of the test alone are long ones."""
    return "parametrize" in ast.unparse(mark)


def test_every_threat_says_what_holds_it_and_which_test() -> None:
    rows = threats()
    assert len(rows) > 15
    for row in rows:
        assert len(row) == 5, row
        assert all(row), row
        assert re.fullmatch(r"`tests/[\w/]+\.py::\w+`", row[4]), row


def test_every_promise_has_a_test() -> None:
    rows = [line for line in PROMISES.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 10
    assert all(re.search(r"`tests/[\w/]+\.py::\w+`", row) for row in rows)


def test_nobody_is_asked_to_write_to_an_address() -> None:
    assert "@" not in TEXT
