"""Finds the schemas of a typed read (``schema = auto``): the one that it reads by, and those that
its messages were written by.

A read goes by the newest schema that the registry has when the query is analysed. The schema
travels as Spark's metadata of the first column, so that planner and tasks use the very schema from
which the query's columns were made, even if a newer one is registered meanwhile. A restarted query
uses the newest.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from ledgerlake.client.backoff import with_retries
from ledgerlake.client.cluster import Cluster, shared_cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import split_partition
from ledgerlake.errors import SetupError, UsageError
from ledgerlake.wire.value_schema import NO_SCHEMA, ValueSchema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.values.typed import SchemaOfVersion

METADATA_KEY = "pulsar.schema"

_VERSION_BYTES = 8


def find_value_schema(options: SourceOptions) -> ValueSchema:
    """Return the newest schema of the topics that are read; ``NO_SCHEMA`` if they have none.

    Raises:
        UsageError: they have different ones, and the options do not allow that.
        SetupError: a pattern that matches no topic yet.
        BrokerError, TransportError: the broker cannot be asked.
    """
    cluster = Cluster(options.client)
    try:
        names = find_topic_partitions(cluster, options.topics)
        # A topic has its schema also if none of its partitions is there yet.
        names += options.topics.names
        topics = list(dict.fromkeys(split_partition(name)[0] for name in names))
        if not topics:
            raise SetupError(
                f"{options.topics.nothing_there} yet, so there is no schema to read by; "
                "create one, or read with schema = bytes"
            )
        schemas = {topic: _newest(cluster, topic) for topic in topics}
    finally:
        cluster.close()
    (first_topic, first_schema), *others = schemas.items()
    for topic, schema in others:
        if schema != first_schema and not options.allows_different_schemas:
            raise UsageError(
                f"{first_topic} and {topic} have different schemas; read them apart, with schema = "
                "bytes, or set allowDifferentTopicSchemas for values as bytes"
            )
    return first_schema if len(set(schemas.values())) == 1 else NO_SCHEMA


# From so many versions on, one without a schema is not remembered.
_MOST_UNKNOWN = 10_000

# No version is behind it.
_LAST_VERSION = b"\xff" * _VERSION_BYTES


@dataclass
class _Known:
    """What a broker answered: schemas by topic and version, and the newest versions of topics that
    lack one.
    """

    schemas: dict[tuple[ClientSettings, str, bytes], ValueSchema | None] = field(
        default_factory=dict
    )
    newest: dict[tuple[ClientSettings, str], bytes] = field(default_factory=dict)


def schemas_of(client: ClientSettings, topic: str, batch: str = "") -> SchemaOfVersion:
    """Return a function from a schema version of a topic to the schema; the broker is asked for
    each version once. A topic that is created again begins again with its versions, so nothing is
    known from one task or micro-batch to the next.

    A producer may name any version. So once one is missing, versions behind the newest one are not
    asked for: each message to read was sent before, and its version is older than the message.

    Args:
        batch: a text that no other micro-batch has; its tasks in this process share what the broker
            answered.
    """
    known = _known_in(batch) if batch else _Known()

    def of_version(version: bytes) -> ValueSchema | None:
        key = client, topic, version
        if key in known.schemas or not _is_version(version):
            return known.schemas.get(key)
        if version > known.newest.get((client, topic), _LAST_VERSION):
            return None
        cluster = shared_cluster(client)
        schema = with_retries(lambda: cluster.schema(topic, version), client.give_up_after_s)
        if schema is None and (client, topic) not in known.newest:
            (newest,) = with_retries(
                lambda: cluster.schemas([(topic, None)]), client.give_up_after_s
            )
            # Versions before a deletion can still be asked for.
            known.newest[client, topic] = _LAST_VERSION if newest is None else newest[0]
        if schema is not None or len(known.schemas) < _MOST_UNKNOWN:
            known.schemas[key] = schema
        return schema

    return of_version


@lru_cache(maxsize=8)
def _known_in(_batch: str) -> _Known:
    return _Known()


def _is_version(version: bytes) -> bool:
    """Return whether a broker can have given a schema this version: a 64-bit number that is not
    negative. A broker closes the connection if it is asked for a shorter one.
    """
    return len(version) == _VERSION_BYTES and version < b"\x80"


def _newest(cluster: Cluster, topic: str) -> ValueSchema:
    return (
        with_retries(lambda: cluster.schema(topic), cluster.settings.give_up_after_s) or NO_SCHEMA
    )


def attach_schema(columns: StructType, schema: ValueSchema) -> StructType:
    """Write a schema into the metadata of the first column; return the columns."""
    definition = base64.b64encode(schema.definition).decode()
    fields = {"kind": schema.kind, "definition": definition, "properties": schema.properties}
    columns.fields[0].metadata = {METADATA_KEY: json.dumps(fields)}
    return columns


def attached_schema(columns: StructType) -> ValueSchema | None:
    """Return the schema that ``attach_schema`` wrote; None if there is none."""
    text = columns.fields[0].metadata.get(METADATA_KEY)
    if text is None:
        return None
    fields = json.loads(text)
    properties = tuple((name, value) for name, value in fields["properties"])
    return ValueSchema(fields["kind"], base64.b64decode(fields["definition"]), properties)
