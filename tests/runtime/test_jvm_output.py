"""Which lines of Spark's processes a person sees."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ledgerlake.runtime.jvm_output import news

if TYPE_CHECKING:
    from pathlib import Path

_WRITES = r"""#!/bin/sh
printf 'WARNING: Using incubator modules: jdk.incubator.vector\n' >&2
printf 'refused: \033]0;title\007\033[2J\rall is well\n\tat org.Stream\n\2331m' >&2
exit 7
"""

_STARTS = """
import sys
from pathlib import Path
from pyspark.errors import PySparkRuntimeError
from ledgerlake.runtime.jvm_output import start_jvm

try:
    start_jvm({}, Path(sys.argv[1]), is_quiet=sys.argv[2] == "True")
except PySparkRuntimeError as error:
    print(error)
"""


def test_only_what_comes_with_every_start_is_left_out() -> None:
    lines = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b"\n",
        b"Starting Streaming TransformWithStateInPandas Python worker.\n",
        b"\n",
        b"12:00:00 ERROR Executor: no space left\n",
        b"\n",
        b"WARNING: Using incubator modules: another\n",
        b"cut",
    ]
    assert list(news(lines)) == [*lines[4:6], *lines[6:]]


@pytest.mark.parametrize("is_quiet", [True, False])
def test_a_terminal_obeys_nothing_that_a_jvm_says_whether_lines_are_left_out_or_not(
    is_quiet: bool, tmp_path: Path
) -> None:
    submit = tmp_path / "bin/spark-submit"
    submit.parent.mkdir()
    submit.write_text(_WRITES)
    submit.chmod(0o700)
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "SPARK_HOME": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", _STARTS, str(tmp_path), str(is_quiet)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    left_out = "WARNING: Using incubator modules: jdk.incubator.vector\n"
    said = r"refused: \x1b]0;title\x07\x1b[2J\rall is well"
    shown = f"{said}\n\tat org.Stream\n" + r"\x9b1m"
    assert done.stderr.decode() == ("" if is_quiet else left_out) + shown
    assert said in done.stdout.decode()
