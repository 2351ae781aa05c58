"""Spark sees the rows of random tables as plain Python has them, and a table that Spark makes has
the statistics of ours.
"""

from __future__ import annotations

import itertools
import uuid
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

from ledgerlake.decode import schema
from ledgerlake.table import catalog
from ledgerlake.table.ordered_files import STATISTICS_PROPERTY, statistics_columns
from ledgerlake.values.record_columns import PULSAR_COLUMN
from tests.readers.judge import compare
from tests.readers.lake import write
from tests.readers.recipes import Recipe, recipes
from tests.readers.spark import Spark
from tests.readers.test_readers import PHASES

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def test_spark_sees_the_rows_that_plain_python_has(spark: SparkSession, tmp_path: Path) -> None:
    numbers = itertools.count()

    @settings(
        max_examples=4,
        derandomize=True,
        database=None,
        phases=PHASES,
        suppress_health_check=list(HealthCheck),
    )
    @given(recipes())
    def judged(recipe: Recipe) -> None:
        place = write(recipe, tmp_path / str(next(numbers)))
        outer = PULSAR_COLUMN if recipe.shape == "record" else ""
        assert not compare(recipe, [Spark(spark, place, outer)], conditions=6)

    judged()


@pytest.mark.parametrize("columns", [schema.MESSAGES, schema.REJECTS])
def test_a_table_that_the_catalog_makes_names_the_columns_with_statistics(
    spark: SparkSession, columns: pa.Schema
) -> None:
    name = f"default.made_{uuid.uuid4().hex}"
    catalog._make(spark, name, columns)
    try:
        properties = spark.sql(f"DESCRIBE DETAIL {name}").collect()[0].properties
        assert properties[STATISTICS_PROPERTY] == statistics_columns(columns)
    finally:
        spark.sql(f"DROP TABLE {name}")
