"""The reference names everything that a user can write or meet: the test walks the code, and not
the generator's texts.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
from tools import reference, reference_texts

from ledgerlake import api
from ledgerlake.decode import compat, schema
from ledgerlake.options.config import SECTION_CLASSES
from ledgerlake.options.declared import declared
from ledgerlake.options.sink_options import SinkOptions
from ledgerlake.options.source_options import SourceOptions
from ledgerlake.publish.topic_writer import COLUMN_TYPES
from ledgerlake.reasons import REASONS

_DOCS = Path(__file__).parents[1] / "docs"
_PAGES = reference.pages()
_OPTIONS = [
    (field, option)
    for kind in (*SECTION_CLASSES, SourceOptions, SinkOptions)
    for field, option in declared(kind)
]
_SCHEMAS = {
    "The table of messages": schema.MESSAGES,
    "The table of rejects": schema.REJECTS,
    "The view `messages`": schema.VIEW,
    "The view `entries`": schema.ENTRIES,
    "The view `compat`": compat.compat_columns(schema.VIEW),
}


def first_cells(page: str, title: str = "") -> list[str]:
    """What the first column of the tables of a page, or of one of its sections, has."""
    text = (_DOCS / page).read_text()
    if title:
        text = re.split(r"^#+ ", text.split(f"# {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[
            0
        ]
    return re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)


@pytest.mark.parametrize("page", _PAGES)
def test_a_page_of_the_reference_is_what_the_code_says(page: str) -> None:
    assert (_DOCS / page).read_text() == _PAGES[page], "run: make reference"


def test_every_option_of_spark_is_there_under_all_its_names() -> None:
    page = (_DOCS / "options.md").read_text()
    for _, option in _OPTIONS:
        for name in (option.spark, *option.same_as):
            assert name is None or option.is_internal or f"`{name}`" in page


def test_every_key_of_the_configuration_is_there_in_its_section() -> None:
    for _, option in _OPTIONS:
        if option.section and not option.is_internal:
            assert option.key in first_cells("options.md", f"`[{option.section}]`")


@pytest.mark.parametrize("title", _SCHEMAS)
def test_every_column_is_there_in_its_order(title: str) -> None:
    assert first_cells("columns.md", title) == _SCHEMAS[title].names


def test_every_column_of_written_rows_is_there() -> None:
    assert first_cells("columns.md", "Rows that are written to topics") == list(COLUMN_TYPES)


def test_no_text_is_of_a_column_that_is_not_there() -> None:
    assert reference_texts.COLUMNS.keys() == {
        name for columns in (schema.VIEW, schema.REJECTS, schema.ENTRIES) for name in columns.names
    }


def test_every_reason_is_there_and_is_given_somewhere() -> None:
    assert first_cells("reject-reasons.md") == sorted(REASONS)
    modules = [
        path
        for room in ("proto", "udfs", "streaming")
        for path in (_DOCS.parent / room).rglob("*.py")
    ]
    code = "".join(path.read_text() for path in modules if path.name != "reasons.py")
    assert [reason for reason in REASONS if not re.search(rf"\b{reason.upper()}\b", code)] == []


def test_every_metric_that_is_served_is_there() -> None:
    assert first_cells("metrics.md") == [name for name, *_ in reference.metrics()]


def test_every_command_is_there_with_each_of_its_arguments() -> None:
    page = (_DOCS / "cli.md").read_text()
    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(reference.commands())
    for name, command in reference.commands().items():
        described = " ".join(first_cells("cli.md", name))
        for action in reference.arguments(command):
            assert all(option in described for option in action.option_strings)
            assert (
                action.option_strings
                or str(action.metavar or action.dest) in described
                or action.choices
            )


def test_every_error_is_there() -> None:
    assert first_cells("errors.md", "Errors") == [
        error.__name__ for error in reference.error_classes()
    ]


def test_every_name_of_the_api_is_there_with_its_methods() -> None:
    titles = re.findall(r"^##+ (.+)$", (_DOCS / "python-api.md").read_text(), re.MULTILINE)
    for name in api.__all__:
        value: Any = getattr(api, name)
        assert name in titles
        assert inspect.getdoc(value)
        methods = reference.public_methods(value) if inspect.isclass(value) else []
        assert all(f"{name}.{method}" in titles for method, _ in methods)
