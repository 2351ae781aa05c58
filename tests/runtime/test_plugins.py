"""Where a user's functions are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_the_working_folder_is_searched_last(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def function(): ...\n")
    (tmp_path / "zipfile.py").write_text("def function(): ...\n")
    program = (
        f"import os, sys; sys.path.remove(''); os.chdir({str(tmp_path)!r})\n"
        "from ledgerlake.errors import SetupError\n"
        "from ledgerlake.runtime.plugins import load\n"
        "assert callable(load('own:function'))\n"
        "try:\n"
        "    load('zipfile:function')\n"
        "except SetupError as error:\n"
        "    print(error)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "zipfile:function cannot be imported" in ended.stdout
