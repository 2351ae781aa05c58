"""The schemas of a pipeline's topics, and the columns of its tables of records.

The registry is asked before each micro-batch, after the micro-batch was planned. So every version
that a message of the micro-batch names is known by then, and its fields have columns.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ledgerlake.client.backoff import with_retries
from ledgerlake.errors import SetupError
from ledgerlake.operators.results import TopicSchemas
from ledgerlake.values.record_columns import record_of
from ledgerlake.values.schemas import record_name
from ledgerlake.wire.value_schema import NO_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from ledgerlake.client.cluster import Cluster
    from ledgerlake.pipeline.tables import MessagesTable, Tables
    from ledgerlake.wire.value_schema import ValueSchema

_log = logging.getLogger(__name__)

_VERSION_BYTES = 8
FIRST_VERSION = bytes(_VERSION_BYTES)

# So many versions of a topic are read; messages of earlier ones are rejects.
_MOST_VERSIONS = 1000


class RecordSchemas:
    """The known versions of the topics' schemas.

    ``misfits`` are the topics whose newest schema no table of records can have, and why.
    ``records`` are by topic the names of the records in the versions that are known.

    Args:
        tables: tables of records get the columns.
    """

    def __init__(self, cluster: Cluster, tables: Tables) -> None:
        self.misfits: dict[str, str] = {}
        self.records: dict[str, set[str]] = {}
        self._cluster = cluster
        self._tables = tables
        self._newest: dict[str, tuple[bytes, ValueSchema]] = {}
        # The first version that is not known yet of topics whose newest one is a deletion.
        self._next_version: dict[str, int] = {}
        self._is_started = False

    def learn(self, topics: Iterable[str], with_messages: Collection[str] = ()) -> TopicSchemas:
        """Ask for versions that are not known, and add columns for their fields; return what tasks
        need to know. Topics whose tables need no schemas are passed over.

        Args:
            with_messages: the topics with messages to be written. Messages of a topic without a
                schema need the column ``value``; a topic without messages may get a schema yet.

        Raises:
            SetupError, TableError: a table cannot be changed.
            BrokerError, TransportError: the registry cannot be asked.
        """
        names = [topic for topic in dict.fromkeys(topics) if self._tables_with_schemas(topic)]
        answers = dict(zip(names, self._ask([(topic, None) for topic in names]), strict=True))
        without_newest = self._versions_without_newest(
            [
                topic
                for topic, newest in answers.items()
                if newest is None and (topic in with_messages or topic not in self._next_version)
            ]
        )
        for topic, newest in answers.items():
            if newest is None:
                self._learn_without_newest(
                    topic, without_newest.get(topic, {}), topic in with_messages
                )
            elif newest != self._newest.get(topic):
                self._learn_versions(topic, newest)
                self._newest[topic] = newest
        self._tables.add_columns(is_start=not with_messages and not self._is_started)
        self._is_started = True
        return TopicSchemas.of(
            {topic: self._newest[topic] for topic in names if topic in self._newest}
        )

    def _learn_versions(self, topic: str, newest: tuple[bytes, ValueSchema]) -> None:
        known = self._newest.get(topic)
        if known is not None and (
            newest[0] <= known[0] or self._ask([(topic, known[0])]) != [known]
        ):
            # The topic was created again, and its versions begin again.
            known = None
        for answer in self._ask(
            [(topic, version) for version in _versions_between(known and known[0], newest[0])]
        ):
            if answer is not None:
                self._add(topic, answer[1])
        self._add(topic, newest[1])

    def _versions_without_newest(
        self, topics: Collection[str]
    ) -> dict[str, dict[int, ValueSchema]]:
        """Return the versions that are not known of topics without a newest one, by topic and
        number. A deletion has a version, and a schema may come after it. All topics are asked for
        at once.
        """
        found: dict[str, dict[int, ValueSchema]] = {topic: {} for topic in topics}
        following = {topic: self._next_version.get(topic, 0) for topic in topics}
        while following:
            asked = [
                (topic, number + ahead)
                for topic, number in following.items()
                if number < _MOST_VERSIONS
                for ahead in range(2)
            ]
            answers = self._ask([(topic, _version(number)) for topic, number in asked])
            following = {}
            for (topic, number), answer in zip(asked, answers, strict=True):
                if answer is not None:
                    found[topic][number] = answer[1]
                    following[topic] = number + 1
        return found

    def _learn_without_newest(
        self, topic: str, versions: dict[int, ValueSchema], has_messages: bool
    ) -> None:
        """Learn of a topic that has no schema, or whose newest version is a deletion: its messages
        may name earlier ones.
        """
        self._next_version.setdefault(topic, 0)
        for number, registered in versions.items():
            self._add(topic, registered)
            self._next_version[topic] = number + 1
        if has_messages:
            self._add(topic, NO_SCHEMA)

    def _ask(
        self, asked: Sequence[tuple[str, bytes | None]]
    ) -> list[tuple[bytes, ValueSchema] | None]:
        if not asked:
            return []
        return with_retries(
            lambda: self._cluster.schemas(asked), self._cluster.settings.give_up_after_s
        )

    def _add(self, topic: str, registered: ValueSchema) -> None:
        name = record_name(registered)
        self.records.setdefault(topic, set()).add(name)
        for table in self._tables_with_schemas(topic):
            if not table.options.takes_schema(name):
                continue
            try:
                table.note_record(record_of(table.options.value_schema(registered)))
                self.misfits.pop(topic, None)
            except SetupError as error:
                self.misfits[topic] = error.message
                _log.warning(
                    "messages by a schema of %s do not fit a table of records: %s",
                    topic,
                    error.message,
                )

    def _tables_with_schemas(self, topic: str) -> list[MessagesTable]:
        return [table for table in self._tables.of_topic(topic) if table.needs_schemas]


def _version(number: int) -> bytes:
    return number.to_bytes(_VERSION_BYTES, "big")


def _versions_between(known: bytes | None, newest: bytes) -> list[bytes]:
    """Return the versions after a known one and before the newest; Pulsar's registry numbers
    them.
    """
    if len(newest) != _VERSION_BYTES:
        return []
    end = int.from_bytes(newest, "big")
    first = 0 if known is None or len(known) != _VERSION_BYTES else int.from_bytes(known, "big") + 1
    return [_version(number) for number in range(max(first, end - _MOST_VERSIONS), end)]
