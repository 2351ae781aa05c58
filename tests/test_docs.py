"""The docs name functions and files that are there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

_ROOT = Path(__file__).parents[1]
_STEPS = re.findall(r"^(\d+)\. \[`([\w.]+)`\]\(([^)]+)\)", (_ROOT / "docs" / "one-entry.md").read_text(), re.MULTILINE)
_PAGES = [_ROOT / "README.md", *_ROOT.glob("*.md"), *sorted((_ROOT / "docs").rglob("*.md"))]


def names_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """The classes, functions and methods that a module defines."""
    names: set[str] = set()
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= names_in(node.body, f"{node.name}.")
    return names


@pytest.mark.parametrize(("number", "name", "link"), _STEPS, ids=[name for _, name, _ in _STEPS])
def test_each_step_of_an_entrys_way_is_a_function_of_the_file_that_it_links(number: str, name: str, link: str) -> None:
    path = (_ROOT / "docs" / link).resolve()
    module, defined = link.split("ledgerlake/")[1].removesuffix(".py").replace("/", "."), path.read_text()
    assert name.startswith(f"{module}."), f"step {number} links another file"
    assert name.removeprefix(f"{module}.") in names_in(ast.parse(defined).body)


def test_the_way_of_an_entry_never_returns_to_a_module() -> None:
    assert [int(number) for number, _, _ in _STEPS] == list(range(1, len(_STEPS) + 1))
    links = [link for _, _, link in _STEPS]
    assert len(set(links)) == len(links)


@pytest.mark.parametrize("page", _PAGES, ids=[page.name for page in _PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_picture_of_imports_is_that_of_the_code() -> None:
    completed = subprocess.run(
        [sys.executable, "tools/import_graph.py"], cwd=_ROOT, capture_output=True, text=True, check=True
    )
    page = (_ROOT / "docs" / "imports.md").read_text()
    assert completed.stdout in page, "run python tools/import_graph.py and replace the first picture of docs/imports.md"
    assert "Circles of rooms: none. Circles of modules: none." in completed.stdout


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.promise for mutation in MUTATIONS])
def test_the_line_that_keeps_a_promise_is_there_once(mutation: Mutation) -> None:
    assert (_ROOT / mutation.path).read_text().count(mutation.line) == 1
