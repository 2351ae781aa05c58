"""``python -m tests.readers --tables 2000 --seed 1``: judge so many tables by all readers, and some
of them by Spark too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings

from ledgerlake.stored.places import Place
from ledgerlake.values.record_columns import PULSAR_COLUMN
from tests.readers.judge import compare, differences
from tests.readers.lake import write
from tests.readers.recipes import Recipe, recipes

_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.readers")
    parser.add_argument("--tables", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spark-every", type=int, default=20, help="0: without Spark")
    arguments = parser.parse_args()
    found: list[str] = []
    numbers = itertools.count(1)
    for_spark = _spark_judge() if arguments.spark_every else None

    @seed(arguments.seed)
    @settings(
        max_examples=arguments.tables,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes())
    def judge(recipe: Recipe) -> None:
        number = next(numbers)
        with tempfile.TemporaryDirectory() as folder:
            place = write(recipe, Path(folder))
            new = differences(recipe, place, conditions=12, seed=number)
            if for_spark is not None and number % arguments.spark_every == 0:
                new += for_spark(recipe, place)
        if new and len(found) < _SHOWN:
            print(f"{number}: {recipe}", *new, sep="\n    ", flush=True)
        found.extend(new)

    judge()
    print(f"{next(numbers) - 1:,} tables, {len(found):,} differences")
    return 1 if found else 0


def _spark_judge() -> Callable[[Recipe, Place], list[str]]:
    """Start Spark; return a function that compares it with plain Python."""
    from ledgerlake.runtime.session import start_session
    from tests.readers.spark import Spark

    options = {
        "spark.sql.session.timeZone": "UTC",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    session = start_session("readers", "local[1]", options)

    def judged(recipe: Recipe, place: Place) -> list[str]:
        outer = PULSAR_COLUMN if recipe.shape == "record" else ""
        return compare(recipe, [Spark(session, place, outer)], conditions=8)

    return judged


if __name__ == "__main__":
    sys.exit(main())
