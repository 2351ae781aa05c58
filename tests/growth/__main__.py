"""``python -m tests.growth``: print how the work of each case grows; exit code 1 if it is
too fast.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys

import tests.growth
from tests.growth.counting import Case, faults, growth


def main() -> int:
    found: list[str] = []
    print(f"{'':70} {'n':>6}  {'what':16} {'n':>12} {'2n':>12} {'4n':>12}")
    for case in all_cases():
        counts = growth(case)
        for name, numbers in counts.items():
            columns = " ".join(f"{number:>12,}" for number in numbers)
            print(f"{case.name:70} {case.n:>6,}  {name:16} {columns}", flush=True)
        found += faults(case, counts)
    print(*found, sep="\n")
    return 1 if found else 0


def all_cases() -> list[Case]:
    """Return the cases of all modules of this folder."""
    names = [
        module.name
        for module in pkgutil.iter_modules(tests.growth.__path__)
        if module.name.startswith("test_")
    ]
    modules = [importlib.import_module(f"tests.growth.{name}") for name in sorted(names)]
    return [case for module in modules for case in getattr(module, "CASES", ())]


if __name__ == "__main__":
    sys.exit(main())
