"""Ten promises broken in one line each: the fast tests have to find every one of them.

``make mutations`` copies the sources, changes one line at a time, runs the tests beside it, and
prints what they said. It fails if a broken line passes its tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_COPIED = ("proto", "udfs", "streaming", "tests", "pyproject.toml", "docs")


@dataclass(frozen=True)
class Mutation:
    """A promise, the line that keeps it, its replacement, and the tests that have to fail."""

    promise: str
    path: str
    line: str
    broken: str
    tests: tuple[str, ...]


MUTATIONS = (
    Mutation(
        "a cursor passes only what Spark has recorded",
        "streaming/ledgerlake/pipeline/cursors.py",
        "if committed is not None and batch_id <= committed",
        "if committed is not None and batch_id <= committed + 1",
        ("tests/test_simulation.py",),
    ),
    Mutation(
        "rows of a file are in order",
        "streaming/ledgerlake/table/ordered_files.py",
        "if self._stepped_back or (times[1:] < times[:-1]).any():",
        "if self._stepped_back:",
        ("tests/table/test_ordered_files.py",),
    ),
    Mutation(
        "incomplete large messages are limited in number",
        "streaming/ledgerlake/assembly/rules.py",
        "len(self._kept) > limits.max_pending or",
        "len(self._kept) > limits.max_pending + 1 or",
        ("tests/assembly", "tests/model/test_chunks_model.py"),
    ),
    Mutation(
        "a batch that the table has is not committed again",
        "streaming/ledgerlake/table/delta_table.py",
        "if recorded.is_batch(batch):\n            return True",
        "if recorded.is_batch(batch):\n            return False",
        ("tests/table/test_delta_table.py", "tests/test_repeated_batches.py"),
    ),
    Mutation(
        "a delayed message does not come early",
        "streaming/ledgerlake/delay/tracker.py",
        "while bucket.waiting and bucket.next_ms <= cutoff_ms:",
        "while bucket.waiting and bucket.next_ms <= cutoff_ms + 1:",
        ("tests/delay", "tests/model/test_delay_model.py"),
    ),
    Mutation(
        "a damaged entry is a reject",
        "udfs/ledgerlake/decode/messages.py",
        "    status[rows[entries[rows, k.E_CRC] != np.array(checksums, dtype=np.int64)]] = k.ODD",
        "    del checksums",
        ("tests/decode/test_messages.py",),
    ),
    Mutation(
        "what is lost is said",
        "streaming/ledgerlake/source/loss.py",
        "missing = last_index - last_read.index",
        "missing = last_index - last_read.index - 1",
        ("tests/source/test_loss.py",),
    ),
    Mutation(
        "a process that lost the stream does not commit",
        "streaming/ledgerlake/pipeline/commit.py",
        "        check_owner()\n",
        "",
        ("tests/pipeline/test_commit.py",),
    ),
    Mutation(
        "due messages have the same numbers when their batch is run again",
        "streaming/ledgerlake/publish/republisher.py",
        "for sequence, row in enumerate(rows, file.first_sequence):",
        "for sequence, row in enumerate(rows, file.first_sequence + 1):",
        ("tests/publish",),
    ),
    Mutation(
        "a secret is in no repr",
        "streaming/ledgerlake/options/declared.py",
        "return dataclass_field(default=default, repr=not is_secret,",
        "return dataclass_field(default=default, repr=True,",
        ("tests/client/test_auth.py", "tests/options"),
    ),
)


def is_detected(mutation: Mutation, folder: Path) -> bool:
    """Return whether the tests fail with the broken line; the line is restored afterwards.

    Raises:
        ValueError: the line is missing, or there several times.
    """
    path = folder / mutation.path
    source = path.read_text()
    if source.count(mutation.line) != 1:
        raise ValueError(
            f"{mutation.path} has this line {source.count(mutation.line)} times: {mutation.line}"
        )
    path.write_text(source.replace(mutation.line, mutation.broken))
    roots = os.pathsep.join(str(folder / root) for root in ("proto", "udfs", "streaming", "."))
    try:
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutation.tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": roots},
            capture_output=True,
            text=True,
            check=False,
        )
    finally:
        path.write_text(source)
    # 1 is "tests failed"; anything else is a mistake in the tests' call.
    if run.returncode not in (0, 1):
        raise ValueError(run.stdout[-2000:] + run.stderr[-2000:])
    return run.returncode == 1


def main() -> int:
    """Try all mutations; return how many were not detected."""
    missed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path in _COPIED:
            source = _ROOT / path
            if source.is_dir():
                shutil.copytree(source, folder / path, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / path)
        for mutation in MUTATIONS:
            detected = is_detected(mutation, folder)
            missed += not detected
            print(
                f"{'found ' if detected else 'MISSED'}  {mutation.promise} ({mutation.path})",
                flush=True,
            )
    return missed


if __name__ == "__main__":
    sys.exit(main())
