"""Print what share of each room's lines and branches the fast tests reach; fail if one is below its
floor: ``make coverage``.

Kernels that numba compiles are not seen by the measurement, so ``decode`` reaches less than it
tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

FLOORS = Path(__file__).with_suffix(".json")


def main() -> int:
    report = Path("build/coverage.json")
    report.parent.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "coverage", "json", "--quiet", "-o", str(report)], check=True
    )
    reached, all_of = _by_room(json.loads(report.read_text())["files"])
    floors = json.loads(FLOORS.read_text())
    below = []
    print(f"{'room':<14}{'reached':>9}{'floor':>8}")
    for room in sorted(all_of):
        share, floor = 100 * reached[room] / all_of[room], floors.get(room, 0)
        print(f"{room:<14}{share:>8.1f} {floor:>7}")
        if share < floor:
            below.append(room)
    if below:
        print(
            f"below the floor: {', '.join(below)}; test what is new, or lower the floor in "
            f"{FLOORS} and say why"
        )
    return 1 if below else 0


def _by_room(files: dict[str, dict[str, dict[str, int]]]) -> tuple[Counter[str], Counter[str]]:
    """Lines and branches of each room: those that were reached, and all."""
    reached: Counter[str] = Counter()
    all_of: Counter[str] = Counter()
    for name, found in files.items():
        below = name.partition("ledgerlake/")[2].split("/")
        room = below[0] if len(below) > 1 else "top"
        summary = found["summary"]
        reached[room] += summary["covered_lines"] + summary["covered_branches"]
        all_of[room] += summary["num_statements"] + summary["num_branches"]
    return reached, all_of


if __name__ == "__main__":
    raise SystemExit(main())
