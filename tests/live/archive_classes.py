"""Leave an archive of the classes that Spark's JVM loads, with which the tests' many sessions start
sooner: ``python -m tests.live.archive_classes``.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from ledgerlake.runtime.class_archive import archive_path
from ledgerlake.runtime.java import find_java
from ledgerlake.runtime.session import delta_jars
from tests.live.pipelines import config_file, ledgerlake_process, publish_numbers
from tests.live.runtime import start_runtime


def main() -> int:
    if archive_path(find_java(), delta_jars()).exists():
        return 0
    with tempfile.TemporaryDirectory() as folder, start_runtime() as runtime:
        topic = runtime.topic()
        publish_numbers(runtime, topic, range(10))
        config = config_file(Path(folder), runtime.config(Path(folder), topic))
        ran = ledgerlake_process("run", config, "--once", "--archive-classes")
    print(ran.stderr, end="", file=sys.stderr)
    return ran.returncode


if __name__ == "__main__":
    raise SystemExit(main())
