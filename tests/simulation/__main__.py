"""``python -m tests.simulation --seeds 1000 --first 1``: play histories, and show those that fail."""

from __future__ import annotations

import argparse
import sys
import time

from tests.simulation.driver import Edges
from tests.simulation.history import History, Script, Verdict, shrink, write_script
from tests.simulation.mutations import MUTATIONS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many histories")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="show every access of a failing history")
    parser.add_argument("--shrink", action="store_true", help="leave out of a failing script what is not needed")
    parser.add_argument("--keep-going", action="store_true", help="do not end at the first failure")
    parser.add_argument("--mutation", choices=sorted(MUTATIONS), help="put a known fault back first")
    parser.add_argument(
        "--faults", action="store_true", help="find the first seed for each known fault, and nothing else"
    )
    options = parser.parse_args()
    if options.faults:
        return find_faults(options.first, options.seeds)
    began_s, failed, batches, messages, trimmed, refused = time.monotonic(), [], 0, 0, 0, 0
    used_s = time.process_time()
    with Edges() as edges:
        if options.mutation:
            MUTATIONS[options.mutation](edges)

        def play(script: Script, traces: bool = False) -> Verdict:
            return History(script, edges, traces).play()

        played = 0
        for seed in range(options.first, options.first + options.seeds):
            verdict = play(write_script(seed))
            played += 1
            batches, messages = batches + verdict.batches, messages + verdict.messages
            trimmed, refused = trimmed + verdict.trimmed, refused + bool(verdict.refused)
            if not verdict.violations:
                continue
            failed.append(seed)
            print(f"seed {seed}: {verdict.violations[0]}", flush=True)
            if options.keep_going:
                continue
            script = shrink(verdict.script, play) if options.shrink else verdict.script
            verdict = play(script, options.trace)
            print(verdict.script, *verdict.trace, *verdict.violations, sep="\n")
            break
    took_s, used_s = time.monotonic() - began_s, time.process_time() - used_s
    print(
        f"{played:,} histories in {took_s:.1f} s ({60 * played / took_s:,.0f} a minute, {60 * played / used_s:,.0f} a minute of CPU): {batches:,} batches, "
        f"{messages:,} messages, {trimmed:,} ledgers trimmed, {refused} refused starts, {len(failed)} failed"
        + (f": seeds {failed[:50]}" if failed else "")
    )
    return 1 if failed else 0


def find_faults(first: int, seeds: int) -> int:
    """Put each known fault back, and look for the first seed that finds it."""
    missed = 0
    for name, mutate in MUTATIONS.items():
        with Edges() as edges:
            mutate(edges)
            for seed in range(first, first + seeds):
                verdict = History(write_script(seed), edges).play()
                if verdict.violations:
                    print(f"{name}: seed {seed}: {verdict.violations[0]}", flush=True)
                    break
            else:
                missed += 1
                print(f"{name}: not found by {seeds} seeds")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
