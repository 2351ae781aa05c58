"""What Spark's Python workers may say when they end."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from ledgerlake.runtime.workers import quieten


def test_a_closed_pipe_leaves_no_traceback_and_another_error_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = SimpleNamespace()
    quieten(daemon)
    for error in (BrokenPipeError("gone"), ConnectionResetError("gone"), ValueError("wrong")):
        try:
            raise error
        except (OSError, ValueError):
            daemon.traceback.print_exc()
    stderr_text = capsys.readouterr().err
    assert "ValueError: wrong" in stderr_text
    assert "gone" not in stderr_text


def test_a_worker_of_sparks_own_daemon_is_quiet_once_it_loads_the_source() -> None:
    """As Spark starts planners: ``python -m pyspark.daemon``, and then ours is imported."""
    code = (
        "import sys\nfrom importlib.machinery import ModuleSpec\nmain = "
        "sys.modules['__main__']\nmain.__spec__ = ModuleSpec('pyspark.daemon', None)\nimport "
        "traceback; main.traceback = traceback\nimport pyspark_ledgerlake\ntry:\n    raise "
        "BrokenPipeError('gone')\nexcept OSError:\n    main.traceback.print_exc()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gone" not in ended.stderr


def test_the_process_that_describes_the_stateful_operator_is_quiet_once_it_loads_it() -> None:
    code = (
        "import sys\nfrom importlib.machinery import ModuleSpec\nmain = "
        "sys.modules['__main__']\nmain.__spec__ = "
        "ModuleSpec('pyspark.sql.streaming.transform_with_state_driver_worker', None)\nimport "
        "ledgerlake.operators.stateful\nprint('a step of it')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == ""
