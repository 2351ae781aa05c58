"""The files that are fetched once, and their folders."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from ledgerlake.errors import SetupError
from ledgerlake.runtime import java
from ledgerlake.runtime.class_archive import archive_path
from ledgerlake.runtime.session import _JARS, DELTA_VERSION, home_without_zip


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


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> list[str]:
    """Let a download have these files; return the list of downloads."""
    downloads: list[str] = []

    def ivy(dependency: str, pattern: str) -> None:
        downloads.append(dependency)
        for name, content in files.items():
            (Path(pattern).parent / name).write_bytes(content)

    monkeypatch.setattr(java, "_ivy", ivy)
    return downloads


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_only_jars_with_the_expected_checksums_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    downloads = serve(
        monkeypatch, {"lake.jar": b"lake", "pond.jar": b"pond", "other.jar": b"other"}
    )
    expected = {"lake.jar": sha256(b"lake"), "pond.jar": sha256(b"pond")}
    for _ in range(2):
        assert [jar.name for jar in java.fetch_jars("org", "lake", "1", expected)] == [
            "lake.jar",
            "pond.jar",
        ]
    assert len(downloads) == 1


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"lake.jar": b"evil"}, "lake.jar does not have the expected checksum .* find out why"),
        ({}, "lake.jar was not downloaded"),
    ],
)
def test_a_jar_that_is_not_the_expected_one_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes], sentence: str
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    downloads = serve(monkeypatch, files)
    for _ in range(2):
        with pytest.raises(SetupError, match=sentence):
            java.fetch_jars("org", "lake", "1", {"lake.jar": sha256(b"lake")})
    assert len(downloads) == 2
    assert list((tmp_path / "jars" / "lake-1").glob("*.jar")) == []


def test_a_jar_that_was_replaced_later_is_never_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    downloads = serve(monkeypatch, {"lake.jar": b"lake"})
    expected = {"lake.jar": sha256(b"lake")}
    (jar,) = java.fetch_jars("org", "lake", "1", expected)
    jar.write_bytes(b"evil")
    with pytest.raises(SetupError, match=r"lake\.jar does not have the expected checksum"):
        java.fetch_jars("org", "lake", "1", expected)
    # The next start fetches it again.
    assert java.fetch_jars("org", "lake", "1", expected) == [jar]
    assert jar.read_bytes() == b"lake"
    assert len(downloads) == 2


def test_an_archive_that_is_not_the_expected_one_is_never_used_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    serve(monkeypatch, {"lake-1-bin.tar.gz": b"evil"})
    with pytest.raises(
        SetupError, match=r"lake-1-bin.tar.gz does not have the expected checksum .* find out why"
    ):
        java.fetch_file("org", "lake", "1", "bin", "tar.gz", hashlib.sha512(b"lake").hexdigest())
    serve(monkeypatch, {"lake-1-bin.tar.gz": b"lake"})
    path = java.fetch_file("org", "lake", "1", "bin", "tar.gz", hashlib.sha512(b"lake").hexdigest())
    assert path.read_bytes() == b"lake"


def test_a_jar_that_was_added_later_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    serve(monkeypatch, {"lake.jar": b"lake"})
    expected = {"lake.jar": sha256(b"lake")}
    (jar,) = java.fetch_jars("org", "lake", "1", expected)
    (jar.parent / "evil.jar").write_bytes(b"evil")
    assert java.fetch_jars("org", "lake", "1", expected) == [jar]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
@pytest.mark.parametrize("folder", ["jars", "jars/lake-1", "classes", "spark"])
def test_a_folder_of_another_user_in_the_cache_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    monkeypatch.delenv("SPARK_HOME", raising=False)
    serve(monkeypatch, {"lake.jar": b"lake"})

    def use_all() -> None:
        java.fetch_jars("org", "lake", "1", {"lake.jar": sha256(b"lake")})
        archive_path(sys.executable, []).exists()
        with home_without_zip():
            pass

    use_all()
    (tmp_path / folder).mkdir(exist_ok=True)
    os.chown(tmp_path / folder, 65534, 65534)
    with pytest.raises(SetupError, match="other users of this machine can write"):
        use_all()


def test_the_jars_of_a_session_are_pinned() -> None:
    assert any(DELTA_VERSION in name for name in _JARS)
    assert all(len(checksum) == 64 for checksum in _JARS.values())
