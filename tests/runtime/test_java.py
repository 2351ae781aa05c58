"""What is fetched once, and where."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import pytest

from ledgerlake.runtime import java

if TYPE_CHECKING:
    from pathlib import Path


def test_jars_that_are_complete_are_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_folder: Path) -> NoReturn:
        raise PermissionError

    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    monkeypatch.setattr(java, "locked", refuse)
    with pytest.raises(PermissionError):
        java.fetch_jars("org", "lake", "1")
    (tmp_path / "jars" / "lake-1").mkdir(parents=True)
    for name in ("complete", "lake.jar"):
        (tmp_path / "jars" / "lake-1" / name).touch()
    assert [jar.name for jar in java.fetch_jars("org", "lake", "1")] == ["lake.jar"]
