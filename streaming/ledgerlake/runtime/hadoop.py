"""Spark's own way to object stores: Hadoop's connectors, which come as a Maven package.

Tables need none. A checkpoint in a store does, and a table that delta-spark reads or writes there.

Hadoop keeps one file system for a bucket in each JVM, with the settings that it had when it was
first used there. So other keys for a bucket need a new process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.runtime.java_errors import root_cause

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place
    from ledgerlake.stored.stores import Store

_NO_CONNECTOR = ("ClassNotFoundException", "UnsupportedFileSystemException")


def no_connector(place: Place, store: Store, version: str) -> SetupError:
    """Return the error of a session without the connector to a place, which Hadoop has in this
    version.
    """
    return SetupError(
        f"Spark needs the package org.apache.hadoop:{store.connector}:{version} to reach {place}; "
        "name it in [spark] packages, in "
        "--packages of spark-submit, or in spark.jars.packages of a session of your own"
    )


def connect_store(spark: SparkSession, place: Place) -> None:
    """Give a session the address and the keys with which its connector reaches a place, and look
    there once. Settings that the session has already stay as they are.

    Raises:
        SetupError: the connector is missing, the place cannot be reached, or a secret cannot be
        read.
    """
    if place.store is None:
        return
    from py4j.protocol import Py4JJavaError

    jvm = spark.sparkContext._jvm
    assert jvm is not None
    state = spark._jsparkSession.sessionState()
    given = state.newHadoopConf()
    for name, value in place.hadoop_settings().items():
        if given.get(name) is None:
            spark.conf.set(name, value)
    hadoop = jvm.org.apache.hadoop
    try:
        path = hadoop.fs.Path(place.hadoop_uri)
        path.getFileSystem(state.newHadoopConf()).exists(path)
    except Py4JJavaError as error:
        if any(name in str(error.java_exception) for name in _NO_CONNECTOR):
            raise no_connector(place, place.store, hadoop.util.VersionInfo.getVersion()) from None
        raise SetupError(
            f"Spark cannot reach {place}: {place.reason(Exception(root_cause(error)))}"
        ) from None
