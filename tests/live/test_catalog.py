"""Tables by their names in a catalog: Hive's metastore, embedded, as PySpark has it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable

from ledgerlake.errors import SetupError
from tests.live.object_store import hadoop_version, start_object_store
from tests.live.pipelines import (
    config_file,
    ledgerlake_process,
    publish_numbers,
    run_once,
    sentence,
)

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def in_catalog(runtime: Runtime, folder: Path, topic: str, **delta: str) -> dict[str, Any]:
    """A pipeline with its tables in the default schema of a metastore below the folder."""
    data = runtime.config(folder, topic)
    data["delta"] = {"table": "default.orders", **delta}
    metastore = f"jdbc:derby:;databaseName={folder}/metastore;create=true"
    data["spark"] = {
        "settings": {
            "spark.sql.catalogImplementation": "hive",
            "spark.sql.warehouse.dir": f"{folder}/warehouse",
            "spark.hadoop.javax.jdo.option.ConnectionURL": metastore,
        }
    }
    return data


def numbers(path: Path) -> list[int]:
    return sorted(
        map(int, DeltaTable(str(path)).to_pyarrow_table(columns=["value"])["value"].to_pylist())
    )


def test_a_name_in_spark_s_catalog_in_memory_is_refused(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = runtime.config(tmp_path, topic) | {"delta": {"table": "orders"}}
    with pytest.raises(SetupError, match="needs a catalog that keeps names"):
        run_once(spark, data)
    assert runtime.subscriptions(topic) == {}


@pytest.mark.long
def test_a_table_without_a_path_is_where_the_catalog_makes_it(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    config = config_file(tmp_path, in_catalog(runtime, tmp_path, topic))
    assert "there is no table default.orders in the catalog" in sentence(
        ledgerlake_process("verify", config), 2
    )
    for first in (0, 50):
        publish_numbers(runtime, topic, range(first, first + 50))
        result = ledgerlake_process("run", config, "--once")
        assert result.returncode == 0, result.stderr
    assert numbers(tmp_path / "warehouse" / "orders") == list(range(100))
    verified = ledgerlake_process("verify", config)
    assert verified.returncode == 0, verified.stderr
    assert "100 messages: 0 missing" in verified.stdout
    assert ledgerlake_process("vacuum", config).returncode == 0


@pytest.mark.long
def test_a_table_at_a_path_gets_its_name_and_keeps_its_place(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    data = in_catalog(runtime, tmp_path, topic, path=f"{tmp_path}/lake/my 'orders'")
    publish_numbers(runtime, topic, range(50))
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert result.returncode == 0, result.stderr
    assert numbers(tmp_path / "lake" / "my 'orders'") == list(range(50))
    # By the name alone, the same table is found.
    del data["delta"]["path"]
    publish_numbers(runtime, topic, range(50, 70))
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert result.returncode == 0, result.stderr
    assert numbers(tmp_path / "lake" / "my 'orders'") == list(range(70))
    assert not (tmp_path / "warehouse" / "orders").exists()
    data["delta"]["path"] = f"{tmp_path}/lake/others"
    moved = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert "the table default.orders is at" in sentence(moved, 2)
    assert "correct [delta] path" in moved.stderr


@pytest.mark.long
def test_a_table_in_a_store_gets_its_name_if_spark_has_the_connector_of_the_store(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    with start_object_store() as store:
        root = f"s3://{store.bucket()}/lake"
        data = in_catalog(runtime, tmp_path, topic, path=f"{root}/orders")
        data["spark"]["packages"] = [f"org.apache.hadoop:hadoop-aws:{hadoop_version()}"]
        data["storage"] = store.settings
        config = config_file(tmp_path, data)
        for numbers_of_run in (range(50), range(50, 70)):
            publish_numbers(runtime, topic, numbers_of_run)
            result = ledgerlake_process("run", config, "--once")
            assert result.returncode == 0, result.stderr
        table = DeltaTable(f"{root}/orders", storage_options=store.delta_options).to_pyarrow_table(
            columns=["value"]
        )
        assert sorted(map(int, table["value"].to_pylist())) == list(range(70))
        verified = ledgerlake_process("verify", config)
        assert verified.returncode == 0, verified.stderr
    assert not (tmp_path / "warehouse" / "orders").exists()
