"""The schemas of a pipeline's topics, and the columns of its table of records.

The registry is asked before each micro-batch, after the micro-batch was planned. So every version
that a message of the micro-batch names is known by then, and its fields have columns.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ledgerlake.client.backoff import with_retries
from ledgerlake.decode.record_columns import record_of
from ledgerlake.errors import SetupError
from ledgerlake.operators.results import RecordSettings
from ledgerlake.wire.value_schema import NO_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.table.record_table import RecordTable
    from ledgerlake.wire.value_schema import ValueSchema

_log = logging.getLogger(__name__)

_VERSION_BYTES = 8


class RecordSchemas:
    """The known versions of the topics' schemas.

    Args:
        table: gets the columns.
    """

    def __init__(self, cluster: Cluster, table: RecordTable) -> None:
        self._cluster = cluster
        self._table = table
        self._newest_versions: dict[str, bytes] = {}

    def learn(self, topics: Iterable[str], *, have_messages: bool) -> RecordSettings:
        """Ask for versions that are not known, and add columns for their fields; return what tasks
        need to know.

        Args:
            have_messages: messages of the topics are to be written. Those of a topic without a schema
                need the column ``value``; a topic without messages may get a schema yet.

        Raises:
            TableError: the table cannot be changed.
            BrokerError, TransportError: the registry cannot be asked.
        """
        asked = list(dict.fromkeys(topics))
        give_up_after_s = self._cluster.settings.give_up_after_s
        newest = with_retries(lambda: self._cluster.newest_schemas(asked), give_up_after_s)
        for topic, (version, schema) in newest.items():
            if self._newest_versions.get(topic) == version:
                continue
            for earlier in _versions_between(self._newest_versions.get(topic), version):
                known = with_retries(lambda: self._cluster.schema(topic, earlier), give_up_after_s)  # noqa: B023
                if known is not None:
                    self._add(topic, known)
            self._add(topic, schema)
            self._newest_versions[topic] = version
        if have_messages and len(newest) < len(asked):
            self._table.add_columns(record_of(NO_SCHEMA))
        return RecordSettings.of(self._table.record, self._newest_versions)

    def _add(self, topic: str, schema: ValueSchema) -> None:
        try:
            record = record_of(schema)
        except SetupError as error:
            _log.warning("messages by a schema of %s do not fit a table of records: %s", topic, error.message)
            return
        self._table.add_columns(record)


def _versions_between(known: bytes | None, newest: bytes) -> list[bytes]:
    """Return the versions after a known one and before the newest; Pulsar's registry numbers them."""
    if len(newest) != _VERSION_BYTES:
        return []
    first = 0 if known is None or len(known) != _VERSION_BYTES else int.from_bytes(known, "big") + 1
    return [number.to_bytes(_VERSION_BYTES, "big") for number in range(first, int.from_bytes(newest, "big"))]
