"""What a session and a query are set up with."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ledgerlake.query.session import settings_of

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
PARTITIONS = "spark.sql.shuffle.partitions"


@pytest.mark.spark
def test_a_query_with_a_local_checkpoint_renames_its_files_without_subprocesses(
    spark: SparkSession, tmp_path: Path
) -> None:
    with settings_of(spark, str(tmp_path), None):
        assert spark.conf.get(FILE_MANAGER).endswith(".FileSystemBasedCheckpointFileManager")
    assert spark.conf.get(FILE_MANAGER, None) is None


@pytest.mark.spark
def test_a_choice_of_the_users_stands(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set(FILE_MANAGER, "org.example.Own")
    try:
        with settings_of(spark, str(tmp_path), None):
            assert spark.conf.get(FILE_MANAGER) == "org.example.Own"
        assert spark.conf.get(FILE_MANAGER) == "org.example.Own"
    finally:
        spark.conf.unset(FILE_MANAGER)


@pytest.mark.spark
@pytest.mark.parametrize(("most_keys", "partitions"), [(1, "1"), (2, "2"), (64, "2"), (None, "2")])
def test_state_has_no_more_partitions_than_keys(
    spark: SparkSession, tmp_path: Path, most_keys: int | None, partitions: str
) -> None:
    with settings_of(spark, str(tmp_path), most_keys):
        assert spark.conf.get(PARTITIONS) == partitions
    assert spark.conf.get(PARTITIONS) == "2"


def test_what_workers_are_forked_from_has_imported_their_modules_and_started_no_thread() -> None:
    asked = (
        "import sys, threading, ledgerlake.query.daemon\n"
        "assert {'pyarrow', 'pandas', 'numba', 'ledgerlake.sinks.writing'} <= set(sys.modules)\n"
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", asked], check=True)
