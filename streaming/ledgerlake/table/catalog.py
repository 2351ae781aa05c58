"""Tables by their names in a catalog of Spark's: a Hive metastore, Glue, Unity or another one.

A catalog says where the files of a table are; from then on, the table is written there as one that
is named by its path. So the catalog is asked at a start, and never by a micro-batch. A table whose
commits go through its catalog (the feature ``catalogManaged``) is refused: files that are added by
its path would not be seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from ledgerlake.decode import schema
from ledgerlake.errors import SetupError, TableAccessError, TableError
from ledgerlake.runtime.hadoop import connect_store
from ledgerlake.runtime.java_errors import root_cause
from ledgerlake.stored.places import parse_place
from ledgerlake.table.ordered_files import STATISTICS_PROPERTY, statistics_columns

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from ledgerlake.options.config import Config

_SPARK_CATALOG = "spark_catalog"
_CATALOG_CLASS = f"spark.sql.catalog.{_SPARK_CATALOG}"
# It hands on to the catalog in memory or to Hive's; another class in its place keeps names by
# itself.
_DELTA_CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
_THREE_PARTS = 3


def locate_tables(spark: SparkSession, config: Config, *, makes: bool) -> Config:
    """Return the configuration with the places of its tables, if it names them by a catalog.

    Args:
        makes: a name without a path whose table is missing is given one, in the catalog's own
            place.

    Raises:
        SetupError: the session has no catalog that keeps names. TableError: a table is missing, is
        at another place than its path, or cannot be written there.
    """
    delta = config.delta
    if not delta.table:
        return config
    _check_keeps_names(spark, delta.table)
    # The catalog looks into the place of a table that it knows.
    for path, place in (
        (delta.path, config.messages_place),
        (delta.rejects_path, config.rejects_place),
    ):
        if path:
            connect_store(spark, place)
    tables = (
        (delta.table, delta.path, schema.MESSAGES),
        (delta.rejects_table, delta.rejects_path, schema.REJECTS),
    )
    try:
        return config.with_table_paths(*(_locate(spark, *table, makes=makes) for table in tables))
    except (PySparkException, Py4JJavaError) as error:
        raise TableAccessError(
            f"the catalog cannot tell where {delta.table} is: {root_cause(error)}"
        ) from None


def register_tables(spark: SparkSession, config: Config) -> None:
    """Give the tables at the paths of a configuration their names in the catalog, unless they have
    them.

    Raises:
        TableError: the catalog does not take a name.
        SetupError: Spark cannot reach the store in which the tables are.
    """
    delta = config.delta
    if not delta.table:
        return
    for name, place in (
        (delta.table, config.messages_place),
        (delta.rejects_table, config.rejects_place),
    ):
        connect_store(spark, place)
        try:
            spark.sql(
                f"CREATE TABLE IF NOT EXISTS {name} USING delta LOCATION "
                f"{_quoted(place.hadoop_uri)}"
            )
        except (PySparkException, Py4JJavaError) as error:
            raise TableAccessError(
                f"the catalog does not take the table {name} at {place}: {root_cause(error)}"
            ) from None


def _locate(spark: SparkSession, name: str, path: str, columns: pa.Schema, *, makes: bool) -> str:
    if not spark.catalog.tableExists(name):
        if path:
            return path
        if not makes:
            raise TableError(f"there is no table {name} in the catalog; run the pipeline first")
        _make(spark, name, columns)
    detail = spark.sql(f"DESCRIBE DETAIL {name}").collect()[0]
    if detail.format != "delta":
        raise TableError(
            f"{name} is a table of the format {detail.format} and not a Delta table; use another "
            "name"
        )
    managed = [
        feature
        for feature in detail.tableFeatures or ()
        if feature.startswith(("catalogManaged", "catalogOwned"))
    ]
    if managed:
        raise TableError(
            f"the commits of the table {name} go through its catalog ({managed[0]}), which this "
            "writer cannot do; use an external table, by [delta] path beside [delta] table"
        )
    return _checked_path(name, path, detail.location)


def _checked_path(name: str, path: str, location: str) -> str:
    if not path:
        return location
    where = "[delta] path"
    if parse_place(path, where) != parse_place(location, where):
        raise TableError(
            f"the table {name} is at {location} by the catalog, and not at {path}; correct [delta] "
            "path"
        )
    return path


def _make(spark: SparkSession, name: str, columns: pa.Schema) -> None:
    from delta.tables import DeltaTable
    from pyspark.sql.pandas.types import from_arrow_schema

    made = DeltaTable.createIfNotExists(spark).tableName(name)
    made = made.addColumns(from_arrow_schema(columns))
    made.property(STATISTICS_PROPERTY, statistics_columns(columns)).execute()


def _check_keeps_names(spark: SparkSession, name: str) -> None:
    """Check that the name will be there at the next start: Spark's own catalog in memory is not."""
    parts = name.split(".")
    catalog = parts[0] if len(parts) == _THREE_PARTS else spark.catalog.currentCatalog()
    is_sparks_own = (
        catalog == _SPARK_CATALOG
        and spark.conf.get(_CATALOG_CLASS, _DELTA_CATALOG) == _DELTA_CATALOG
    )
    if (
        is_sparks_own
        and spark.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory"
    ):
        raise SetupError(
            f"[delta] table {name} needs a catalog that keeps names, and this session has Spark's "
            "catalog in memory; set "
            '"spark.sql.catalogImplementation" = "hive" in [spark] settings, or configure a '
            "catalog and name it first"
        )


def _quoted(text: str) -> str:
    """Return a text as a literal of SQL."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
