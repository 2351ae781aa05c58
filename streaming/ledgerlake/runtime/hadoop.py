"""Spark's own way to object stores: Hadoop's connectors, which come as a Maven package.

Tables need none. A checkpoint in a store does, and a table that delta-spark reads or writes there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place


def connect_store(spark: SparkSession, place: Place) -> None:
    """Give a session the address and the keys with which its connector reaches a place. They are
    read once, so keys that expire are better those of the environment.

    Raises:
        SetupError: the connector is missing, or a secret cannot be read.
    """
    if place.store is None:
        return
    from py4j.protocol import Py4JJavaError

    jvm = spark.sparkContext._jvm
    assert jvm is not None
    hadoop = jvm.org.apache.hadoop
    try:
        hadoop.fs.FileSystem.getFileSystemClass(
            place.store.hadoop_scheme, spark._jsparkSession.sessionState().newHadoopConf()
        )
    except Py4JJavaError:
        version = hadoop.util.VersionInfo.getVersion()
        raise SetupError(
            f"Spark cannot reach {place} without a connector; "
            f'set [spark] packages = ["org.apache.hadoop:{place.store.connector}:{version}"]'
        ) from None
    for name, value in place.hadoop_settings().items():
        spark.conf.set(name, value)
