"""The archive of the JVM's classes: when it is made, and that nothing is left if it cannot be made.
A small program takes the place of Java; the live tests make the archive of a real JVM.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ledgerlake.errors import SetupError
from ledgerlake.runtime import class_archive as module
from ledgerlake.runtime.class_archive import ClassArchive, archive_settings
from tests.waiting import wait_until

_LISTED = b"""java/lang/Object id: 0
@lambda-form-invoker [SPECIES_RESOLVE] java.lang.invoke.BoundMethodHandle$Species_LL
java/lang/invoke/BoundMethodHandle$Species_LL id: 7
@lambda-proxy java/lang/Module
java/lang/String id: 15
java/la"""
_ARCHIVED = b"java/lang/Object id: 0\n@lambda-proxy java/lang/Module\njava/lang/String id: 15"
_DAY_S = 24 * 60 * 60

_MAKES = """#!/bin/sh
for option; do case $option in
  -XX:SharedClassListFile=*) listed=${option#*=} ;;
  -XX:SharedArchiveFile=*) archive=${option#*=} ;;
esac; done
cp "$listed" "$archive"
"""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DELAY_S", 0.0)
    monkeypatch.setattr(module, "_free_bytes", lambda: module._NEEDED_BYTES)


def session(home: Path, settings: dict[str, str]) -> Any:
    """A session whose JVM is at work, and whose list is half written if it lists classes."""
    if module.LIST_SETTING in settings:
        Path(settings[module.LIST_SETTING]).write_bytes(_LISTED)
    properties = {"java.home": str(home), "java.class.path": "spark.jar"}
    system = SimpleNamespace(getProperty=properties.get)
    jvm = SimpleNamespace(java=SimpleNamespace(lang=SimpleNamespace(System=system)))
    return SimpleNamespace(conf=settings, _jvm=jvm)


def archive_in(folder: Path, java: str) -> ClassArchive:
    launcher = folder / "java home" / "bin" / "java"
    launcher.parent.mkdir(parents=True)
    launcher.write_text(java)
    launcher.chmod(0o755)
    _, settings = archive_settings(folder / "classes" / "a.jsa", lists_classes=True)
    return ClassArchive(session(folder / "java home", settings))


def left(folder: Path) -> list[str]:
    return sorted(file.name for file in (folder / "classes").iterdir())


def test_a_start_lists_classes_if_it_is_asked_to_and_there_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "a.jsa"
    assert archive_settings(path, lists_classes=False) == ("", {})
    option, settings = archive_settings(path, lists_classes=True)
    # Spark divides the options at spaces outside of quotes.
    assert option == f'"-XX:DumpLoadedClassList={settings[module.LIST_SETTING]}"'
    path.touch()
    for lists in (False, True):
        option, settings = archive_settings(path, lists_classes=lists)
        assert option == f'"-XX:SharedArchiveFile={path}"'
        assert module.LIST_SETTING not in settings


def test_a_start_goes_on_if_its_cache_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert archive_settings(tmp_path / "file" / "classes" / "a.jsa", lists_classes=True) == ("", {})


def test_a_session_that_goes_on_leaves_an_archive_of_its_list_without_half_a_line_and_what_the_jvm_makes(
    tmp_path: Path,
) -> None:
    archive = archive_in(tmp_path, _MAKES)
    assert left(tmp_path) == []
    archive.start()
    wait_until((tmp_path / "classes" / "a.jsa").exists)
    archive.end()
    assert (tmp_path / "classes" / "a.jsa").read_bytes() == _ARCHIVED
    assert left(tmp_path) == ["a.jsa"]


def test_a_session_that_ends_gives_up_what_is_not_finished(tmp_path: Path) -> None:
    archive = archive_in(tmp_path, f"#!/bin/sh\ntouch '{tmp_path}/began'\nexec sleep 600\n")
    archive.start()
    wait_until((tmp_path / "began").exists)
    archive.end()
    assert left(tmp_path) == []


def test_a_session_that_ends_early_makes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_DELAY_S", 600.0)
    archive = archive_in(tmp_path, _MAKES)
    archive.start()
    archive.end()
    assert left(tmp_path) == []


def test_none_is_made_in_the_background_if_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_free_bytes", lambda: module._NEEDED_BYTES - 1)
    archive = archive_in(tmp_path, _MAKES)
    archive.start()
    assert archive._thread is not None
    archive._thread.join()
    assert left(tmp_path) == []
    assert archive.make().exists()


@pytest.mark.parametrize(
    ("limit", "is_less"), [("max", False), (str(2**60), False), ("1000000", True)]
)
def test_a_containers_limit_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, is_less: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(module, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert (module._free_bytes() == 600_000) == is_less


def test_a_part_of_an_archive_is_not_kept_and_the_jvms_words_are_said(tmp_path: Path) -> None:
    archive = archive_in(tmp_path, f"{_MAKES}echo 'An error has occurred'\necho more\nexit 1\n")
    with pytest.raises(SetupError, match=r"/bin/java ended with 1 \(An error has occurred\)"):
        archive.make()
    assert left(tmp_path) == []


def test_a_session_that_lists_no_classes_says_so(tmp_path: Path) -> None:
    archive = ClassArchive(session(tmp_path, {}))
    archive.start()
    archive.end()
    with pytest.raises(SetupError, match=re.escape("this JVM lists no classes")):
        archive.make()


def test_an_archive_that_was_removed_meanwhile_is_not_made_without_a_list(tmp_path: Path) -> None:
    path = tmp_path / "a.jsa"
    path.touch()
    archive = ClassArchive(session(tmp_path, archive_settings(path, lists_classes=True)[1]))
    path.unlink()
    with pytest.raises(SetupError, match="this JVM lists no classes"):
        archive.make()


def test_an_archive_that_is_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.jsa"
    path.write_bytes(b"archive")
    _, settings = archive_settings(path, lists_classes=True)
    assert ClassArchive(session(tmp_path, settings)).make().read_bytes() == b"archive"


def test_what_no_start_has_used_for_a_month_is_removed(tmp_path: Path) -> None:
    archive = archive_in(tmp_path, _MAKES)
    folder = tmp_path / "classes"
    for name, days in (
        ("used.jsa", 31),
        ("old.jsa", 31),
        ("young.jsa", 29),
        ("b.1.list", 2),
        ("c.3.list", 0),
    ):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - days * _DAY_S,) * 2)
    (folder / "killed.in-work").mkdir()
    (folder / "killed.in-work" / "archive").touch()
    os.utime(folder / "killed.in-work", (0, 0))
    archive_settings(folder / "used.jsa", lists_classes=False)
    archive.make()
    assert left(tmp_path) == ["a.jsa", "c.3.list", "used.jsa", "young.jsa"]
