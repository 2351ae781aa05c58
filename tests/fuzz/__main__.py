"""``python -m tests.fuzz --count 100000 --seed 1``: judge so many inputs, the same number of each
target but the slowest.

Each target runs in a process of its own, so that a crash of native code is a failure like any
other, and with numba's checks of indexes (``NUMBA_BOUNDSCHECK``). A failing input is saved as hex
in ``--failures``; move it to ``tests/golden/fuzz/<target>/`` once it is understood. ``--index``
repeats one input of one target.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# Before anything imports numba; compiled so, the code lies in a cache of its own.
os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")
os.environ.setdefault(
    "NUMBA_CACHE_DIR", str(Path(__file__).parents[2] / "build" / "fuzz" / "numba")
)

from tests.fuzz.apart import run_apart
from tests.fuzz.engine import MIB, Result, input_of, judge
from tests.fuzz.targets import TARGETS, target_of

if TYPE_CHECKING:
    from tests.fuzz.engine import Failure, Target


def main() -> int:
    arguments = _arguments()
    targets = [target_of(name) for name in arguments.target] if arguments.target else list(TARGETS)
    if arguments.index is not None:
        return max(_repeat(target, arguments.seed, arguments.index) for target in targets)
    failures = Path(arguments.failures)
    inputs_per_target = -(-arguments.count // len(targets))
    total, peak, longest, failed = 0, Result(), Result(), 0
    began = time.monotonic()
    print(
        f"{'target':18} {'inputs':>11} {'taken':>11} {'refused':>11} {'a second':>9} {'memory':>9} "
        f"{'longest':>9}  failures"
    )
    for target in targets:
        result = run_apart(target, arguments.seed, -(-inputs_per_target // target.cost))
        for failure in result.failures:
            print(f"{target.name}: {failure.what} ({result.failed[failure.what]} times)")
            print(f"    {_save(failures, failure)}; again: {failure.command}")
        total, failed = total + result.count, failed + result.failed.total()
        peak = max(peak, result, key=lambda target_result: target_result.memory_bytes)
        longest = max(longest, result, key=lambda target_result: target_result.longest_s)
        print(
            f"{target.name:18} {result.count:>11,} {result.taken:>11,} {result.refused:>11,} "
            f"{result.count / max(result.seconds, 1e-9):>9,.0f} {result.memory_bytes / MIB:>5.1f} "
            f"MiB {result.longest_s:>7.2f} s  {result.failed.total()}",
            flush=True,
        )
        if arguments.report:
            _note(Path(arguments.report), target, arguments.seed, result)
    seconds = time.monotonic() - began
    print(
        f"{total:,} inputs in {seconds:,.0f} s, largest memory {peak.memory_bytes / MIB:.1f} MiB, "
        f"longest input {longest.longest_s:.2f} s, {failed:,} failed"
    )
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz all parsers and kernels."
    )
    parser.add_argument("--count", type=int, default=100_000, help="inputs of all targets together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target", action="append", choices=sorted(target.name for target in TARGETS)
    )
    parser.add_argument(
        "--index", type=int, help="judge this one input and say what is wrong with it"
    )
    parser.add_argument(
        "--failures", default="build/fuzz/failures", help="folder of failing inputs"
    )
    parser.add_argument("--report", help="a file that gets a line of JSON for each target")
    return parser.parse_args()


def _repeat(target: Target, seed: int, index: int) -> int:
    data = input_of(target, seed, index)
    # The first call compiles and builds what later calls share. An input's memory excludes that.
    judge(target, data)
    failure, taken, peak_bytes = judge(target, data)
    print(f"{target.name}: {len(data)} bytes, {peak_bytes / MIB:.1f} MiB")
    print(data.hex())
    if failure is None:
        print("taken" if taken else "refused as it should be")
        return 0
    print(f"{failure[0]}\n{failure[1]}")
    return 1


def _save(folder: Path, failure: Failure) -> Path:
    path = folder / failure.target / f"{failure.seed}-{failure.index}.hex"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(failure.data.hex() + "\n")
    path.with_suffix(".txt").write_text(f"{failure.what}\n{failure.command}\n{failure.detail}\n")
    return path


def _note(path: Path, target: Target, seed: int, result: Result) -> None:
    line = {
        "target": target.name, "seed": seed, "count": result.count, "taken": result.taken, "refused": result.refused,
        "memory_bytes": result.memory_bytes, "memory_index": result.memory_index,
        "longest_s": round(result.longest_s, 3), "longest_index": result.longest_index, "seconds": round(result.seconds, 1), "failed": dict(result.failed),
    }  # fmt: skip
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
