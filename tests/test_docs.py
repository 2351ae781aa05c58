"""The docs name functions and files that are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation

_ROOT = Path(__file__).parents[1]
_STEPS = re.findall(
    r"^(\d+)\. \[`([\w.]+)`\]\(([^)]+)\)",
    (_ROOT / "docs" / "one-entry.md").read_text(),
    re.MULTILINE,
)
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
def test_each_step_of_an_entrys_way_is_a_function_of_the_file_that_it_links(
    number: str, name: str, link: str
) -> None:
    path = (_ROOT / "docs" / link).resolve()
    module, defined = (
        link.split("ledgerlake/")[1].removesuffix(".py").replace("/", "."),
        path.read_text(),
    )
    assert name.startswith(f"{module}."), f"step {number} links another file"
    assert name.removeprefix(f"{module}.") in names_in(ast.parse(defined).body)


def test_the_way_of_an_entry_never_returns_to_a_module() -> None:
    assert [int(number) for number, _, _ in _STEPS] == list(range(1, len(_STEPS) + 1))
    links = [link for _, _, link in _STEPS]
    assert len(set(links)) == len(links)


@pytest.mark.parametrize("page", _PAGES, ids=[page.name for page in _PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if "://" not in link:
            linked = page.parent / link if link else page
            assert linked.exists(), link
            assert not anchor or anchor in anchors_of(linked), f"{link}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """The anchors that a code host makes of the headings, and that the site has too."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_pages_that_the_code_names_are_there() -> None:
    for room in ("proto", "udfs", "streaming", "bench", "tools", "deploy"):
        for file in (_ROOT / room).rglob("*.*"):
            if file.suffix in (".py", ".yaml", ".sh"):
                for named in re.findall(r"\bdocs/[\w/-]+\.(?:md|svg)", file.read_text()):
                    assert (_ROOT / named).exists(), f"{file}: {named}"


def test_every_page_is_in_the_site() -> None:
    navigation = (_ROOT / "mkdocs.yml").read_text()
    for page in (_ROOT / "docs").glob("*.md"):
        assert f"- {page.name}\n" in navigation


def test_no_rooms_and_no_modules_import_each_other_in_a_circle() -> None:
    assert (
        "Circles of rooms: none. Circles of modules: none."
        in (_ROOT / "docs" / "imports.md").read_text()
    )


@pytest.mark.parametrize("mutation", MUTATIONS, ids=[mutation.promise for mutation in MUTATIONS])
def test_the_line_that_keeps_a_promise_is_there_once(mutation: Mutation) -> None:
    assert (_ROOT / mutation.path).read_text().count(mutation.line) == 1
