"""Where a user's functions are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def test_the_working_folder_is_searched_last(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def function(): ...\n")
    (tmp_path / "zipfile.py").write_text("def function(): ...\n")
    program = (
        f"import os, sys; sys.path.remove(''); os.chdir({str(tmp_path)!r})\nfrom ledgerlake.errors "
        "import SetupError\nfrom ledgerlake.runtime.plugins import load\nassert "
        "callable(load('own:function'))\ntry:\n    load('zipfile:function')\nexcept SetupError as "
        "error:\n    print(error)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert "zipfile:function cannot be imported" in ended.stdout


@pytest.mark.parametrize(
    ("function", "is_searched"),
    [
        ("json:loads", False),
        ("nowhere:function", False),
        ("own:function", True),
        ("packed.own:function", True),
    ],
)
def test_the_working_folder_is_searched_only_if_a_function_is_in_it(
    tmp_path: Path, function: str, is_searched: bool
) -> None:
    (tmp_path / "packed").mkdir()
    for name in ("own.py", "packed/own.py"):
        # It imports its neighbour when it is called.
        (tmp_path / name).write_text("def function():\n    import planted\n")
    for name in ("planted", "json"):
        (tmp_path / f"{name}.py").write_text("def loads(): ...\n")
    program = (
        f"import os, sys; sys.path.remove(''); os.chdir({str(tmp_path)!r}); "
        "sys.modules.pop('json', None)\nfrom ledgerlake.errors import SetupError\nfrom "
        f"ledgerlake.runtime.plugins import load\ntry:\n    load({function!r})\nexcept "
        "SetupError:\n    pass\ntry:\n    import planted\n    print('found')\nexcept "
        "ImportError:\n    print('not found')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert ended.stdout.strip() == ("found" if is_searched else "not found")
