"""Hooks for MkDocs (``mkdocs.yml``, ``make docs``).

Some pages of the site are files beside ``docs``: each is added under a name of its own. In the
sources, links lead to files of the repository, so that they work on a code host too. Here a link to
such a file becomes a link to its page, and a link to a file that is no page becomes the text alone.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]

# Files of the repository, and the pages that they are.
PAGES = {
    "ARCHITECTURE.md": "architecture.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "README.md": "index.md",
}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the decisions into the navigation, where it has their pattern."""
    decisions = sorted(f"adr/{path.name}" for path in (_ROOT / "docs" / "adr").glob("*.md"))
    config.nav = _filled(config.nav, decisions)
    return config


def _filled(nav: Any, decisions: list[str]) -> Any:
    if isinstance(nav, dict):
        return {title: _filled(below, decisions) for title, below in nav.items()}
    if isinstance(nav, list):
        return [
            entry
            for item in nav
            for entry in (decisions if item == "adr/*.md" else [_filled(item, decisions)])
        ]
    return nav


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs``."""
    for source, page in PAGES.items():
        if files.get_file_from_path(page) is None:
            files.append(File.generated(config, page, content=(_ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point the links of a page to pages."""
    source = {made: name for name, made in PAGES.items() if name != "README.md"}.get(
        page.file.src_uri
    )
    folder = posixpath.dirname(source or f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def pointed(link: re.Match[str]) -> str:
        mark, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        if not target or "://" in target or target.startswith("mailto:"):
            return link[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        name = PAGES.get(path, path.removeprefix("docs/"))
        if path not in PAGES and not path.startswith("docs/"):
            return text
        return f"{mark}[{text}]({posixpath.relpath(name, here or '.')}{anchor})"

    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(pointed, part) for part in parts)
