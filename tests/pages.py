"""The code in the pages of the documentation, for the tests that check and run it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

# README and the pages of the site; decisions have no code that users run.
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.glob("*.md"))]

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """A block of code: its place, its language as the page names it, and its text."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page."""
    text = page.read_text()
    return [
        Block(page.name, text.count("\n", 0, match.start()) + 1, match[2], dedent(match[3]))
        for match in _FENCE.finditer(text)
    ]


def inline_code_of(page: Path) -> list[str]:
    """Return the pieces of code in the sentences of a page, each as one line."""
    return [" ".join(match.split()) for match in _INLINE.findall(_FENCE.sub("", page.read_text()))]


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
