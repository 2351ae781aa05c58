"""The errors about a missing package."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.live.pipelines import config_file

if TYPE_CHECKING:
    from pathlib import Path

DATA: dict[str, Any] = {
    "source": {"service_url": "pulsar://127.0.0.1:1", "topics": ["orders"]},
    "stream": {"name": "orders"},
    "delta": {"path": "lake/orders"},
    "metrics": {"port": 9464},
}


def without_pyspark(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; sys.modules['pyspark'] = None; from ledgerlake.cli import main; "
        f"sys.exit(main({arguments}))"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )


def test_a_run_without_pyspark_says_how_to_install_it(tmp_path: Path) -> None:
    result = without_pyspark("run", config_file(tmp_path, DATA))
    assert result.returncode == 2
    assert result.stderr == (
        "ledgerlake: the package pyspark is missing; install it with: pip install "
        "'ledgerlake[spark]'\n"
    )


@pytest.mark.parametrize("check", ["tables", "checkpoint", "schema"])
def test_check_goes_on_without_pyspark(tmp_path: Path, check: str) -> None:
    result = without_pyspark("check", config_file(tmp_path, DATA))
    assert (result.returncode, result.stderr) == (1, "")
    assert any(line.startswith(f"skipped  {check} ") for line in result.stdout.splitlines())
    assert "start it or correct the service url" in result.stdout
