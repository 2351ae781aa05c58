"""The code in the documentation is right: configurations, commands, queries and Python are read by
the parsers that read a user's. The code of the tutorials runs in ``tests/live/test_tutorials.py``.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shlex
import sys
from functools import cache
from typing import Any

import pytest
from tools import prose, reference

from ledgerlake import cli
from ledgerlake.options.config import SECTION_CLASSES, parse_config
from ledgerlake.options.connector_options import INSTEAD, WITHOUT_EFFECT
from ledgerlake.options.declared import declared
from ledgerlake.options.sink_options import SinkOptions
from ledgerlake.options.source_options import SourceOptions
from ledgerlake.values.row_query import RowQuery
from tests.pages import BLOCKS, PAGES, ROOT, Block, blocks_of, inline_code_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Languages that cannot be run here: other clients, pictures, and the output of commands.
_NOT_RUN = {"go", "java", "mermaid", "text"}

# Commands of other packages, which no test runs.
_OTHER_COMMANDS = {
    "eval",
    ".",
    "pip",
    "python3",
    "spark-class",
    "spark-submit",
    "docker",
    "kubectl",
}

_BLOCKS_BY_LANGUAGE = {
    language: [block for block in BLOCKS if block.language == language]
    for language in {block.language for block in BLOCKS}
}


def of_language(*languages: str) -> pytest.MarkDecorator:
    blocks = [block for language in languages for block in _BLOCKS_BY_LANGUAGE.get(language, [])]
    return pytest.mark.parametrize("block", blocks, ids=[block.place for block in blocks])


def test_each_block_is_of_a_language_that_is_checked() -> None:
    assert _BLOCKS_BY_LANGUAGE.keys() <= {"toml", "sql", "python", "sh", "", "yaml"} | _NOT_RUN


@of_language("toml")
def test_a_configuration_is_one_that_run_would_take(
    block: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r'"env:(\w+)"', block.text):
        monkeypatch.setenv(name, "secret")
    data = tomllib.loads(block.text)
    data.setdefault("source", {}).setdefault("service_url", "pulsar://localhost")
    if "topics_pattern" not in data["source"]:
        data["source"].setdefault("topics", ["a"])
    data.setdefault("stream", {"name": "a"})
    data.setdefault("delta", {}).setdefault(
        "rejects_path" if "tables" in data else "path", "lake/a"
    )
    config = parse_config(data)
    for table in config.tables:
        if table.sql:
            RowQuery(table.sql, "sql")
        if table.where:
            RowQuery(f"select 1 as a from messages where {table.where}", "where")


@of_language("sh", "")
def test_commands_are_what_the_command_line_takes(block: Block) -> None:
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        assert all((ROOT / word).exists() for word in words if word.startswith("deploy/")), line
        if words[0] == "eval":
            words = shlex.split(words[1].removeprefix("$(").removesuffix(")"))
        if words[0] == "ledgerlake":
            cli.parser().parse_args(words[1:])
        elif words[0] == "make":
            assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        elif "deploy/submit.py" in words:
            cli.parser().parse_args(words[words.index("deploy/submit.py") + 1 :])
        else:
            assert words[0] in _OTHER_COMMANDS, line


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_commands_and_keys_in_sentences_are_there(page: Any) -> None:
    sections = {
        (option.section, option.key) for kind in SECTION_CLASSES for _, option in declared(kind)
    }
    for code in inline_code_of(page):
        if (match := re.match(r"ledgerlake ([a-z]+)", code)) and code.split()[0] == "ledgerlake":
            options = [
                name
                for it in reference.arguments(reference.commands()[match[1]])
                for name in it.option_strings
            ]
            assert {word.split("=")[0] for word in code.split() if word.startswith("--")} <= {
                *options,
                "--help",
            }, code
        if match := re.fullmatch(r"\[(\w+)\] (\w+)( = .*)?", code):
            assert (match[1], match[2]) in sections, code


@of_language("python")
def test_python_names_what_is_there(block: Block) -> None:
    """Modules and names can be imported, calls of ours take their arguments, options are known."""
    tree = ast.parse(block.text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            known |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
        elif isinstance(node, ast.Import):
            known |= {
                name.asname or name.name: importlib.import_module(name.name) for name in node.names
            }
    for node in ast.walk(tree):
        # Variables that hold an object of a known class.
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and (made := _class_of(node.value, known))
        ):
            known[node.targets[0].id] = made
        elif (
            isinstance(node, ast.withitem)
            and isinstance(node.optional_vars, ast.Name)
            and (made := _class_of(node.context_expr, known))
        ):
            known[node.optional_vars.id] = made
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _check_call(node, known)


def _class_of(node: ast.expr, known: dict[str, Any]) -> Any:
    made = (
        known.get(node.func.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        else None
    )
    return made if inspect.isclass(made) else None


def _check_call(node: ast.Call, known: dict[str, Any]) -> None:
    function, arguments = node.func, list(node.args)
    called: Any = None
    if isinstance(function, ast.Name):
        called = known.get(function.id)
    elif isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        called = (
            getattr(known[function.value.id], function.attr) if function.value.id in known else None
        )
        if inspect.isclass(known.get(function.value.id)) and inspect.isfunction(called):
            arguments = [function.value, *arguments]
        if function.attr == "option" and isinstance(node.args[0], ast.Constant):
            assert node.args[0].value in _spark_options()
    elif (
        isinstance(function, ast.Attribute)
        and function.attr == "option"
        and isinstance(node.args[0], ast.Constant)
    ):
        assert node.args[0].value in _spark_options()
    if called is not None and getattr(called, "__module__", "").startswith("ledgerlake"):
        inspect.signature(called).bind(
            *arguments, **{str(word.arg): word.value for word in node.keywords}
        )


@cache
def _spark_options() -> set[str]:
    ours = {
        name
        for kind in (SourceOptions, SinkOptions)
        for _, it in declared(kind)
        for name in (it.spark, *it.same_as)
        if name
    }
    return ours | set(INSTEAD) | set(WITHOUT_EFFECT) | {"checkpointLocation"}


@pytest.mark.spark
def test_queries_are_sql(spark: Any) -> None:
    parser = spark._jsparkSession.sessionState().sqlParser()
    for block in _BLOCKS_BY_LANGUAGE["sql"]:
        if "from messages" in block.text:
            RowQuery(block.text, "sql")
        else:
            parser.parsePlan(block.text.strip().rstrip(";"))


@pytest.fixture(scope="module")
def proselint() -> None:
    prose.register()


@pytest.mark.parametrize("page", prose.PAGES, ids=[page.name for page in prose.PAGES])
@pytest.mark.usefixtures("proselint")
def test_prose_is_short_and_plain(page: Any) -> None:
    assert prose.findings(page) == []


@pytest.mark.parametrize("name", prose.MODULES)
def test_docstrings_and_comments_are_short_and_plain(name: str) -> None:
    assert prose.module_findings(name, prose.MODULES[name].read_text()) == []


def test_unclear_phrases_and_long_sentences_of_a_module_are_found() -> None:
    long = "one " * prose.MOST_WORDS
    source = f'''"""A short sentence.

    name   the value
           of which ``what is`` code
    other  {long}
    """

TEXT = "what was"  # What
# comes next.
# {long}


def function() -> None:
    """{long}two.

    {long}
    """
'''
    assert prose.module_findings("a.py", source) == [
        'a.py:4: "of which": name the thing itself',
        'a.py:8: "What comes": name the thing itself',
        f"a.py:14: a sentence of {prose.MOST_WORDS + 1} words",
    ]


def test_each_decision_is_named_as_its_file() -> None:
    for page in (ROOT / "docs" / "adr").glob("*.md"):
        assert page.read_text().startswith(f"# {int(page.name[:4])}. ")


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 130
    assert all(len(line) <= 100 for line in lines if not line.startswith("|"))
    assert blocks_of(ROOT / "README.md")
