"""Compiled kernels are kept where nobody else can write, and are loaded from nowhere else."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

import ledgerlake
from ledgerlake.runtime.private_files import is_trusted

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# One small kernel is enough.
_SCRIPT = """
import os, sys, warnings
os.umask(int(sys.argv[1], 8))
warnings.simplefilter("always")
import numpy as np
from ledgerlake.decode import kernels
print(kernels.is_kept())
kernels.read_varint(np.zeros(9, np.uint8), 0, 9)
print(kernels.read_varint.stats.cache_path, sum(kernels.read_varint.stats.cache_hits.values()))
"""


def run(umask: int, **environment: Path) -> tuple[list[str], str]:
    """Return what a process that compiles says, and warns of."""
    names = {name: str(path) for name, path in environment.items()}
    command = [sys.executable, "-c", _SCRIPT, oct(umask)]
    ended = subprocess.run(
        command, env=os.environ | names, check=True, capture_output=True, text=True
    )
    return ended.stdout.split(), ended.stderr


def made(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in {".nbi", ".nbc"} or path.is_dir()]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022], ids=oct)
def test_nobody_else_writes_to_kernels_that_are_kept(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "cache" / "numba"
    first, _ = run(umask, NUMBA_CACHE_DIR=folder)
    assert first[0] == "True"
    assert len(made(tmp_path)) >= 5
    assert [path for path in made(tmp_path) if path.stat().st_mode & OTHERS_WRITE] == []
    # The next process loads them.
    assert run(umask, NUMBA_CACHE_DIR=folder)[0][2] == "1"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A copy of the project, with ``__pycache__`` of its own."""
    # A module of the first folder is the one that is imported.
    for root in map(Path, reversed(list(ledgerlake.__path__))):
        shutil.copytree(
            root,
            tmp_path / "own" / "ledgerlake",
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    (tmp_path / "own" / "ledgerlake" / "__init__.py").touch()
    return tmp_path / "own"


@pytest.mark.parametrize("rights", [0o777, 0o775], ids=oct)
def test_a_folder_that_others_can_write_to_is_passed_over_and_named(
    sources: Path, rights: int
) -> None:
    beside = sources / "ledgerlake" / "decode" / "__pycache__"
    beside.mkdir()
    beside.chmod(rights)
    cache = sources.parent / "home"
    said, warned = run(0o022, PYTHONPATH=sources, XDG_CACHE_HOME=cache)
    assert said[0] == "True"
    assert said[1].startswith(str(cache))
    assert warned.count(f"other users can write to {beside}") == 1
    assert not list(beside.glob("*.nb?"))


def test_without_a_trusted_folder_kernels_are_compiled_and_not_kept(sources: Path) -> None:
    beside = sources / "ledgerlake" / "decode" / "__pycache__"
    numba = sources.parent / "cache" / "numba"
    for folder in (beside, numba):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    said, warned = run(0o022, PYTHONPATH=sources, XDG_CACHE_HOME=numba.parent)
    assert said[0] == "False"
    assert str(beside) in warned
    assert str(numba) in warned
    assert list(numba.rglob("*.nb?")) == []


def test_a_subfolder_that_others_can_write_to_is_not_loaded_from(sources: Path) -> None:
    numba = sources.parent / "numba"
    run(0o022, PYTHONPATH=sources, NUMBA_CACHE_DIR=numba)
    (subfolder,) = numba.iterdir()
    subfolder.chmod(0o777)
    said, warned = run(0o022, PYTHONPATH=sources, NUMBA_CACHE_DIR=numba)
    assert said[1] == str(sources / "ledgerlake" / "decode" / "__pycache__")
    assert str(subfolder) in warned


def test_a_folder_that_others_can_replace_is_not_loaded_from(sources: Path) -> None:
    scratch = sources.parent / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    said, warned = run(0o022, PYTHONPATH=sources, NUMBA_CACHE_DIR=scratch / "own" / "numba")
    assert said[1] == str(sources / "ledgerlake" / "decode" / "__pycache__")
    assert f"other users can write to {scratch}" in warned


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
def test_a_folder_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    os.chown(tmp_path, 65534, 65534)
    assert not is_trusted(tmp_path)
