"""Which schema a typed read uses (``schema = auto``), and those that its messages were written by.

The reader's is the newest that the registry has when a query is analysed. It travels with the first
column, as metadata of Spark's, so that planner and tasks read by the very schema that the query's
columns come from, also when a newer one is registered meanwhile. Restarting a query takes the
newest.
"""

from __future__ import annotations

import base64
import json
import os
from typing import TYPE_CHECKING, Any

from ledgerlake.client.backoff import with_retries
from ledgerlake.client.cluster import Cluster, shared_cluster
from ledgerlake.client.topics import split_partition
from ledgerlake.errors import SetupError, UsageError
from ledgerlake.wire.value_schema import NO_SCHEMA, ValueSchema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.decode.typed import SchemaOfVersion
    from ledgerlake.options.source_options import SourceOptions

METADATA_KEY = "pulsar.schema"


def find_value_schema(options: SourceOptions) -> ValueSchema:
    """The newest schema of the topics that are read; none if they have none.

    Raises:
        UsageError: they have different ones, and the options do not allow that.
        SetupError: a pattern that matches no topic yet.
        BrokerError, TransportError: the broker cannot be asked.
    """
    cluster = Cluster(options.client)
    try:
        topics = list(dict.fromkeys(split_partition(one)[0] for one in cluster.all_partitions(options.topics)))
        if not topics:
            raise SetupError(
                f"no topic matches {options.topics.pattern} yet, so there is no schema to read by; create one, or read with "
                "schema = bytes"
            )
        found = {topic: _newest(cluster, topic) for topic in topics}
    finally:
        cluster.close()
    first, *others = found.items()
    for topic, one in others:
        if one != first[1] and not options.allows_different_schemas:
            raise UsageError(
                f"{first[0]} and {topic} have different schemas; read them apart, with schema = bytes, or set "
                "allowDifferentTopicSchemas for values as bytes"
            )
    return first[1] if len(set(found.values())) == 1 else NO_SCHEMA


def schemas_of(client: ClientSettings, topic: str) -> SchemaOfVersion:
    """The versions of a topic's schema, each asked for once in a process."""

    def of_version(version: bytes) -> ValueSchema | None:
        key = (os.getpid(), client, topic, version)
        if key not in _known:
            cluster = shared_cluster(client)
            _known[key] = with_retries(lambda: cluster.schema(topic, version), client.give_up_after_s)
        return _known[key]

    return of_version


_known: dict[tuple[int, Any, str, bytes], ValueSchema | None] = {}


def _newest(cluster: Cluster, topic: str) -> ValueSchema:
    return with_retries(lambda: cluster.schema(topic), cluster.settings.give_up_after_s) or NO_SCHEMA


def note_schema(columns: StructType, schema: ValueSchema) -> StructType:
    """Columns with a schema in the metadata of the first."""
    definition = base64.b64encode(schema.definition).decode()
    data = {"kind": schema.kind, "definition": definition, "properties": schema.properties}
    columns.fields[0].metadata = {METADATA_KEY: json.dumps(data)}
    return columns


def noted_schema(columns: StructType) -> ValueSchema | None:
    """The schema that was noted in columns, if there is one."""
    text = columns.fields[0].metadata.get(METADATA_KEY)
    if text is None:
        return None
    data = json.loads(text)
    properties = tuple((name, value) for name, value in data["properties"])
    return ValueSchema(data["kind"], base64.b64decode(data["definition"]), properties)
