"""A first configuration for a topic: what ``ledgerlake init`` finds out about the topic, and the
file that it writes.

``run`` takes the file as it is: its text is parsed as a configuration before it is returned.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.missing_topics import find_topic_partitions
from ledgerlake.client.topics import TopicSelection, full_name, split_partition
from ledgerlake.errors import LedgerlakeError
from ledgerlake.inspect.entry_values import entry_values
from ledgerlake.inspect.recent_entries import last_entries, message_count
from ledgerlake.monitor.progress import counted
from ledgerlake.options.config import read_config
from ledgerlake.values.column_names import folded
from ledgerlake.values.record_columns import VALUE_COLUMN, record_of

if TYPE_CHECKING:
    from ledgerlake.inspect.recent_entries import LastEntries
    from ledgerlake.wire.value_schema import ValueSchema

# So many topic partitions are looked into, at so many entries of each.
_MOST_PARTITIONS = 100
_MOST_ENTRIES = 100

# From so many messages on, the first micro-batches are limited, so that there is progress to see.
_LARGE_BACKLOG = 1_000_000

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.-]+")
_MOST_FIELDS = 8

# So many values of a topic partition are looked at, if they are not larger.
_VALUES_OF_PARTITION = 20
_MOST_BYTES = 1024 * 1024
_MOST_VALUES = 400
_MOST_NAMES = 50
_FIELD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Answers:
    """What the user says. ``token`` and ``ca_file`` may be empty; a token is ``file:PATH`` or
    ``env:NAME``.
    """

    service_url: str
    topic: str
    table: str
    token: str = ""
    ca_file: str = ""

    @property
    def name(self) -> str:
        """Return the name of the stream."""
        return stream_name(self.topic)


@dataclass(frozen=True)
class LastEntriesFacts:
    """What the last entries of a topic are like; earlier ones may be others.

    Args:
        has_broker_metadata: whether they have the broker's timestamp; None if there are no entries.
        encrypted_for: the names of their keys.
        has_delayed: whether one has a delivery time.
        json_fields: what the configuration can say of values that are JSON, if there is no schema.
    """

    has_broker_metadata: bool | None = None
    encrypted_for: tuple[str, ...] = ()
    has_delayed: bool = False
    json_fields: str = ""


@dataclass(frozen=True)
class TopicFacts:
    """What the broker tells of a topic.

    Args:
        partitions: 0 if it is not partitioned.
        messages: how many it has, by the broker's index; None if that is not known.
        schema: the kind of its newest schema; empty if it has none.
        fields: the columns of its records; none if its values are no records.
    """

    topic: str
    partitions: int = 0
    messages: int | None = 0
    schema: str = ""
    fields: tuple[str, ...] = ()
    last_entries: LastEntriesFacts = LastEntriesFacts()


def stream_name(topic: str) -> str:
    """Return a name for the stream of a topic: its local name, without what a name cannot have."""
    name = _NOT_IN_A_NAME.sub("-", full_name(topic).rpartition("/")[2]).lstrip("_.-")
    return name[:100] or "stream"


def look_at(settings: ClientSettings, topic: str) -> TopicFacts:
    """Ask the broker about a topic.

    Raises:
        UsageError, TopicNotFoundError, BrokerError, TransportError, SetupError.
    """
    topic = full_name(topic)
    cluster = Cluster(settings)
    try:
        names = find_topic_partitions(cluster, TopicSelection((topic,)))
        last = [last_entries(cluster, name, _MOST_ENTRIES) for name in names[:_MOST_PARTITIONS]]
        counts = [message_count(cluster, found) for found in last]
        schema = cluster.schema(topic)
    finally:
        cluster.close()
    entries = [entry for found in last for entry in found.entries]
    keys = {str(key.key) for entry in entries for key in entry.metadata.encryption_keys}
    is_known = len(names) == len(last) and None not in counts
    return TopicFacts(
        topic,
        partitions=sum(split_partition(name)[1] >= 0 for name in names),
        messages=sum(count or 0 for count in counts) if is_known else None,
        schema="" if schema is None else schema.kind_name,
        fields=() if schema is None else _fields(schema),
        last_entries=LastEntriesFacts(
            has_broker_metadata=not any(found.without_broker_metadata for found in last)
            if entries
            else None,
            encrypted_for=tuple(sorted(keys)),
            has_delayed=any(found.has_delayed for found in last),
            json_fields=fields_of_json(_last_values(last)) if schema is None else "",
        ),
    )


def _fields(schema: ValueSchema) -> tuple[str, ...]:
    """Return the columns of a schema's record; none if its values have no columns of their own."""
    try:
        names = tuple(field.name for field in record_of(schema))
    except LedgerlakeError:
        return ()
    return () if names == (VALUE_COLUMN,) else names


def _last_values(last: list[LastEntries]) -> list[bytes]:
    """Return values of the last entries, as far as they can be read here."""
    values: list[bytes] = []
    for entry in [entry for found in last for entry in found.stored[-_VALUES_OF_PARTITION:]]:
        values += filter(None, islice(entry_values(entry, _MOST_BYTES), _VALUES_OF_PARTITION))
    return values[:_MOST_VALUES]


class _NoFieldsError(Exception):
    """Values have no fields that a configuration can name."""


def fields_of_json(values: list[bytes]) -> str:
    """Return the ``json_fields`` of values; empty if one of them is no JSON object, or if a field
    has no one type, or a name that no column has beside the others.
    """
    try:
        objects = [json.loads(value) for value in values]
        return (
            _toml_type(objects)
            if objects and all(isinstance(value, dict) for value in objects)
            else ""
        )
    except (ValueError, RecursionError, _NoFieldsError):
        return ""


def _toml_type(values: list[Any]) -> str:
    """Return the type of a field by its values, which are JSON; empty if all are null.

    Raises:
        _NoFieldsError: it has none.
    """
    values = [value for value in values if value is not None]
    kinds = {type(value) for value in values}
    if kinds == {dict}:
        names = dict.fromkeys(name for value in values for name in value)
        has_columns = len(set(map(folded, names)) | {"pulsar"}) == len(names) + 1
        if (
            not has_columns
            or len(names) > _MOST_NAMES
            or not all(map(_FIELD_NAME.fullmatch, names))
        ):
            raise _NoFieldsError
        typed = {name: _toml_type([value.get(name) for value in values]) for name in names}
        fields = ", ".join(f"{name} = {kind}" for name, kind in typed.items() if kind)
        return f"{{ {fields} }}" if fields else ""
    if kinds == {list}:
        item = _toml_type([item for value in values for item in value])
        return f"[{item}]" if item else ""
    for known, name in (
        ({bool}, "boolean"),
        ({int}, "long"),
        ({int, float}, "double"),
        ({str}, "string"),
    ):
        if kinds <= known:
            return f'"{name}"' if kinds else ""
    raise _NoFieldsError


def config_text(answers: Answers, facts: TopicFacts, file: str) -> str:
    """Return a configuration with comments.

    Args:
        file: where it will be, for a comment.

    Raises:
        UsageError: an answer cannot be.
    """
    sections = [
        _head(facts, file),
        _source(answers, facts),
        _credentials(answers),
        [
            "[stream]",
            f"name = {_text(answers.name)}   # names the query, and its subscription on the broker",
            'trigger = "1 second"',
            f"checkpoint = {_text(f'checkpoints/{answers.name}')}",
        ],
        _delta(answers, facts),
        _delay(facts),
    ]
    text = "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"
    read_config(text.encode(), file)
    return text


def _head(facts: TopicFacts, file: str) -> list[str]:
    partitions = (
        counted(facts.partitions, "partition", "partitions")
        if facts.partitions
        else "no partitions"
    )
    messages = (
        "an unknown number of messages"
        if facts.messages is None
        else counted(facts.messages, "message", "messages")
    )
    schema = f"a schema of the kind {facts.schema}" if facts.schema else "no schema"
    return [
        f"# {_comment(facts.topic)} into a Delta table. When this file was made, the topic had "
        f"{partitions},",
        f"# {messages} and {schema}.",
        f"# Try it: ledgerlake check {_comment(file)}; run it: ledgerlake run {_comment(file)}",
        "# All keys: the page Options of the documentation. Relative paths begin in the folder of "
        "this file.",
    ]


def _source(answers: Answers, facts: TopicFacts) -> list[str]:
    lines = [
        "[source]",
        f"service_url = {_text(answers.service_url)}",
        f"topics = [{_text(facts.topic)}]",
    ]
    lines.append(
        'starting = "earliest"   # or "latest", a message id, or a time such as '
        '"2026-05-01T08:00:00Z"'
    )
    if facts.messages is not None and facts.messages >= _LARGE_BACKLOG:
        lines.append(
            "max_bytes_per_trigger = 1000000000   # the first micro-batches are not larger than a "
            "gigabyte"
        )
    if facts.last_entries.has_broker_metadata:
        lines.append(
            "# The last entries have the broker's timestamp and an index. Remove the # to make one "
            "without them an error:"
        )
        lines.append("# require_broker_metadata = true")
    elif facts.last_entries.has_broker_metadata is False:
        lines.append(
            "# The last entries have no timestamp of the broker's, so their rows are ordered by "
            "publish_time. To change that, set"
        )
        lines.append(
            "# brokerEntryMetadataInterceptors and exposingBrokerEntryMetadataToClientEnabled in "
            "the broker's configuration."
        )
    if facts.last_entries.encrypted_for:
        names = ", ".join(f"{_comment(name)}.pem" for name in facts.last_entries.encrypted_for)
        lines.append(
            'crypto_key_folder = "keys"   # put the private keys there that open the last '
            f"messages: {names}"
        )
    return lines


def _credentials(answers: Answers) -> list[str]:
    lines = []
    if answers.token:
        lines += ["[auth]", 'method = "token"', f"token = {_text(answers.token)}"]
    if answers.ca_file:
        lines += ["[tls]", f"ca_file = {_text(answers.ca_file)}"]
    return lines


def _delta(answers: Answers, facts: TopicFacts) -> list[str]:
    lines = [
        "[delta]",
        f"path = {_text(answers.table)}   # entries that cannot be messages go to "
        f"{_comment(answers.table)}_rejects",
    ]
    if facts.fields:
        shown = ", ".join(map(_comment, facts.fields[:_MOST_FIELDS])) + (
            ", ..." if len(facts.fields) > _MOST_FIELDS else ""
        )
        lines.append(
            f'shape = "record"   # the columns {shown}, and pulsar; "messages" keeps values as '
            "bytes"
        )
    else:
        lines.append(
            'shape = "messages"   # values are bytes; "record" has a column for each field of a '
            "schema"
        )
    if facts.last_entries.json_fields:
        lines += [
            "# The last values are JSON. For a column for each of their fields, write these two "
            "lines in place of shape:",
            '# shape = "record"',
            f"# json_fields = {facts.last_entries.json_fields}",
        ]
    return lines


def _delay(facts: TopicFacts) -> list[str]:
    if not facts.last_entries.has_delayed:
        return []
    return [
        "[delay]",
        "enabled = true   # the topic has delayed messages, which wait until they are due; false "
        "writes them at once",
    ]


def _text(value: str) -> str:
    """Return a text as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(value: str) -> str:
    """Return a text as a comment can have it."""
    return "".join(character if character.isprintable() else "?" for character in value)
