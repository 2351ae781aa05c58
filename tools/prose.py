"""Lints the prose of the documentation: ``python -m tools.prose`` (part of ``make docs``).

proselint finds cliches, repeated words and needless words. Sentences of more than ``MOST_WORDS``
words are found here: a reader whose first language is another one has to read them twice. Code,
headings and tables are left out, and lines keep their numbers.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from proselint.checks import __register__
from proselint.config import DEFAULT, Config
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

_ROOT = Path(__file__).parents[1]

MOST_WORDS = 40
MOST_CHARACTERS = 100

# Quotes and dots are those of code; "oversized" is Pulsar's word.
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

# Decisions say what was thought when they were made, and are not changed any more.
PAGES = [
    *(_ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *sorted((_ROOT / "docs").glob("*.md")),
]


def findings(page: Path) -> list[str]:
    """Return what is to be changed, as ``file:line: text``."""
    text = page.read_text()
    prose = _prose(text)
    linted = LintFile(page.name, prose)
    found = [(result.pos[0], result.check_result.message) for result in linted.lint(_CONFIG)]
    for sentence in re.finditer(r"[^.:;!?|]+(?:[.:;!?](?!\s)[^.:;!?|]+)*", prose):
        count = len(sentence[0].split())
        if count > MOST_WORDS:
            start = sentence.start() + len(sentence[0]) - len(sentence[0].lstrip())
            found.append((prose.count("\n", 0, start) + 1, f"a sentence of {count} words"))
    if page.name not in _GENERATED:
        lines = zip(text.splitlines(), prose.splitlines(), strict=False)
        found += [
            (number, f"a line of {len(line)} characters")
            for number, (line, of_prose) in enumerate(lines, 1)
            if _is_long(line, of_prose)
        ]
    return [f"{page.name}:{line}: {text}" for line, text in sorted(found)]


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
    return re.sub(r"`[^`]*`", lambda code: "code" + "\n" * code[0].count("\n"), text)


def register() -> None:
    """Load proselint's checks; once for a process."""
    CheckRegistry().register_many(__register__)


if __name__ == "__main__":
    register()
    lines = [line for page in PAGES for line in findings(page)]
    print("\n".join(lines))
    sys.exit(bool(lines))
