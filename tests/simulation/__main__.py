"""``python -m tests.simulation --seeds 1000 --first 1``: play histories, and show those
that fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.driver import Edges
from tests.simulation.history import History, Script, Verdict, shrink
from tests.simulation.many import play_many
from tests.simulation.mutations import MUTATIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="how many processes play them"
    )
    parser.add_argument(
        "--trace", action="store_true", help="show every access of a failing history"
    )
    parser.add_argument(
        "--shrink", action="store_true", help="leave out of a failing script what is not needed"
    )
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument(
        "--mutation", choices=sorted(MUTATIONS), help="put a known fault back first"
    )
    parser.add_argument(
        "--faults",
        action="store_true",
        help="find the first seed for each known fault, and nothing else",
    )
    options = parser.parse_args()
    if options.faults:
        return find_faults(options.first, options.seeds, options.jobs)
    began_s, verdicts, failed = time.monotonic(), [], []
    seeds = range(options.first, options.first + options.seeds)
    for verdict in play_many(seeds, options.jobs, options.mutation):
        verdicts.append(verdict)
        if not verdict.violations:
            continue
        failed.append(verdict.script.seed)
        print(f"seed {verdict.script.seed}: {verdict.violations[0]}", flush=True)
        if not options.keep_going:
            show(verdict.script, options)
            break
    took_s = time.monotonic() - began_s
    print(
        f"{len(verdicts):,} histories in {took_s:.1f} s ({60 * len(verdicts) / took_s:,.0f} a "
        "minute): "
        f"{sum(verdict.batches for verdict in verdicts):,} batches, "
        f"{sum(verdict.messages for verdict in verdicts):,} messages, "
        f"{sum(verdict.trimmed for verdict in verdicts):,} ledgers trimmed, "
        f"{sum(bool(verdict.refused) for verdict in verdicts)} refused starts, "
        f"{len(failed)} failed" + (f": seeds {failed[:50]}" if failed else "")
    )
    return 1 if failed else 0


def show(script: Script, options: argparse.Namespace) -> None:
    """Play a failing history again, and print how it went."""
    with Edges() as edges:
        if options.mutation:
            MUTATIONS[options.mutation](edges)

        def play(script: Script) -> Verdict:
            return History(script, edges, options.trace).play()

        verdict = play(shrink(script, play) if options.shrink else script)
        print(verdict.script, *verdict.trace, *verdict.violations, sep="\n")


def find_faults(first: int, seeds: int, jobs: int) -> int:
    """Put each known fault back, and look for the first seed that finds it."""
    missed = 0
    for name in MUTATIONS:
        found = (
            one for one in play_many(range(first, first + seeds), jobs, name) if one.violations
        )
        verdict = next(found, None)
        found.close()
        if verdict is not None:
            # A fault that no longer fits the code fails by itself, and proves nothing.
            missed += (
                "TypeError" in verdict.violations[0] or "AttributeError" in verdict.violations[0]
            )
            print(f"{name}: seed {verdict.script.seed}: {verdict.violations[0]}", flush=True)
        else:
            missed += 1
            print(f"{name}: not found by {seeds} seeds", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
