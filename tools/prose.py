"""Lints the prose of the documentation: ``python -m tools.prose`` (part of ``make docs``).

proselint finds cliches, repeated words and needless words in the pages. This module finds long
sentences and unclear phrases, also in the docstrings and comments of the modules: a reader whose
first language is another one has to read them twice. Code, headings and tables are left out, and
lines keep their numbers.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

_ROOT = Path(__file__).parents[1]

MOST_WORDS = 40
MOST_CHARACTERS = 100

# They hide the noun that the sentence is about.
_UNCLEAR = re.compile(r"\b(?:of\s+which|those\s+of|what\s+(?:is|was|comes))\b", re.IGNORECASE)

# The pages use the quotes and dots of code; "oversized" is Pulsar's word.
_CHECKS = {**DEFAULT["checks"], "typography": False, "needless_variants": False}
_CONFIG = Config(max_errors=DEFAULT["max_errors"], checks=_CHECKS)

# ``tools.reference`` makes these.
_GENERATED = {
    f"{name}.md"
    for name in (
        "cli",
        "columns",
        "errors",
        "imports",
        "metrics",
        "options",
        "python-api",
        "reject-reasons",
    )
}

PAGES = [
    *(_ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((_ROOT / "docs").glob("*.md")),
    *sorted((_ROOT / "docs" / "adr").glob("*.md")),
]

# The modules by their names below the repository.
MODULES = {
    str(module.relative_to(_ROOT)): module
    for folder in ("proto", "streaming", "tools", "udfs")
    for module in sorted((_ROOT / folder).rglob("*.py"))
    if module.parent.name != "pb"
}


def findings(page: Path) -> list[str]:
    """Return the findings in a page, as ``file:line: text``."""
    text = page.read_text()
    prose = _prose(text)
    linted = LintFile(page.name, prose)
    found = [(result.pos[0], result.check_result.message) for result in linted.lint(_CONFIG)]
    found += _hard_sentences(prose)
    if page.name not in _GENERATED:
        lines = zip(text.splitlines(), prose.splitlines(), strict=False)
        found += [
            (number, f"a line of {len(line)} characters")
            for number, (line, of_prose) in enumerate(lines, 1)
            if _is_long(line, of_prose)
        ]
    return [f"{page.name}:{line}: {text}" for line, text in sorted(found)]


def module_findings(name: str, source: str) -> list[str]:
    """Return the findings in a module's docstrings and comments, as ``file:line: text``."""
    found = _hard_sentences(_prose(_docstrings_and_comments(source)))
    return [f"{name}:{line}: {text}" for line, text in sorted(found)]


def _hard_sentences(prose: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each finding."""
    for sentence in re.finditer(r"[^.:;!?|]+(?:[.:;!?](?!\s)[^.:;!?|]+)*", prose):
        count = len(sentence[0].split())
        if count > MOST_WORDS:
            start = sentence.start() + len(sentence[0]) - len(sentence[0].lstrip())
            yield prose.count("\n", 0, start) + 1, f"a sentence of {count} words"
    for phrase in _UNCLEAR.finditer(prose):
        words = " ".join(phrase[0].split())
        yield prose.count("\n", 0, phrase.start()) + 1, f'"{words}": name the thing itself'


def _docstrings_and_comments(source: str) -> str:
    """Return the source with "|" for code, with the same lines."""
    lines = ["|"] * len(source.splitlines())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            end_of_code = " | " if token.line[: token.start[1]].strip() else ""
            lines[token.start[0] - 1] = end_of_code + token.string.lstrip("#: ")
    with_docstring = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, with_docstring) and ast.get_docstring(node) is not None:
            text = node.body[0]
            segment = str(ast.get_source_segment(source, text)).replace('"""', "")
            lines[text.lineno - 1 : text.end_lineno] = f"{segment}|".splitlines()
    # A gap between the columns of a table ends a sentence.
    return re.sub(r"(?<=\S) {2,}(?=\S)", " | ", "\n".join(lines))


def _is_long(line: str, prose: str) -> bool:
    """Return whether a line of prose could be shorter; a link has no place to end a line."""
    return len(line) > MOST_CHARACTERS and prose not in ("", "|") and "](" not in line


def _prose(text: str) -> str:
    """Return the text without code, headings and tables, with the same lines."""
    text = re.sub(
        r"^```.*?^```",
        lambda block: "|" + "\n" * block[0].count("\n"),
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    # A paragraph, a heading and an item of a list end a sentence.
    text = re.sub(r"^(#|\|).*$", "|", text, flags=re.MULTILINE)
    text = re.sub(r"^(\s*)(?:[-*]|\d+\.) ", r"\1| ", text, flags=re.MULTILINE)
    text = re.sub(r"\n(?=\s*\n)", "\n|", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`+[^`]*`+", lambda code: "code" + "\n" * code[0].count("\n"), text)


def register() -> None:
    """Load proselint's checks; once for a process."""
    CheckRegistry().register_many(__register__)


if __name__ == "__main__":
    register()
    lines = [line for page in PAGES for line in findings(page)]
    for name, module in MODULES.items():
        lines += module_findings(name, module.read_text())
    print("\n".join(lines))
    sys.exit(bool(lines))
