"""When an idle topic partition wants a batch: what is written is read, what is damaged says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.source.wakes import load_wakes, save_wakes

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = str(tmp_path / "deep" / "wakes.json")
    assert load_wakes(path) == {}
    save_wakes(path, {"a": 1, "b": 2})
    save_wakes(path, {"a": 5})
    assert load_wakes(path) == {"a": 5}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 2, "wakes": {"a": 1}}', '{"version": 1, "wakes": {"a": "x"}}']
)
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "wakes.json").write_text(text)
    assert load_wakes(str(tmp_path / "wakes.json")) == {}
