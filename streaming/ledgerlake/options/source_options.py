"""The options of the source: named as in the Spark connectors for Pulsar, and checked before
anything starts.

Each field of ``SourceOptions`` declares one option; ``docs/options.md`` is made from them. What a
field says together with others, such as the topics or a bound, is a property.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from ledgerlake.client.topics import TopicSelection, full_name, full_pattern, split_partition
from ledgerlake.decode.codecs import DEFAULT_MAX_UNCOMPRESSED_BYTES
from ledgerlake.decode.crypto import CryptoSettings, FailureAction
from ledgerlake.errors import UsageError
from ledgerlake.options.bounds import (
    AtIndex,
    AtTime,
    Bound,
    Bounds,
    one_or_by_topic,
    parse_end,
    parse_index,
    parse_start,
    parse_time_ms,
)
from ledgerlake.options.client_options import ClientOptions
from ledgerlake.options.connector_options import is_ours
from ledgerlake.options.declared import from_spark, option
from ledgerlake.options.kinds import (
    COUNT,
    DURATION,
    FLAG,
    FUNCTION,
    LIST,
    MILLISECONDS,
    PATH,
    TEXT,
    choice,
)
from ledgerlake.options.read_settings import ReadSettings
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place, from_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ledgerlake.wire.value_schema import ValueSchema

# Spark adds these to every source by itself.
_SPARKS_OWN = frozenset({"path", "paths"})


class Decoding(TypedDict):
    """The arguments of ``decode_bundle`` and ``decode_entries`` that are the same for a
    whole read.
    """

    max_bytes: int
    crypto: CryptoSettings


@dataclass(frozen=True, kw_only=True)
class SourceOptions(ClientOptions):
    """Checked options of a read.

    ``value_schema`` is no option: the schema that the values of a typed read have, once it is
    known.

    Raises:
        UsageError: values that cannot be, or that exclude each other; the message names the
            options.
    """

    topic: str | None = option(
        TEXT,
        None,
        "One topic. Exactly one of `topic`, `topics` and `topicsPattern` is needed.",
        spark="topic",
    )
    topic_names: tuple[str, ...] = option(
        LIST,
        (),
        "Several topics. Partitions that are added later are read from their beginning.",
        spark="topics",
        toml="source.topics",
    )
    topics_pattern: str | None = option(
        TEXT,
        None,
        "A regular expression behind `tenant/namespace/`. Topics that are created later are read "
        "from their beginning.",
        spark="topicsPattern",
        toml="source.topics_pattern",
    )
    view: str = option(
        choice("messages", "entries", "compat"),
        "messages",
        "The columns: of messages, of raw entries, or those of the JVM connectors.",
        spark="view",
    )
    schema: str | None = option(
        choice("bytes", "auto"),
        None,
        "`auto` reads `value` by the newest schema of the topic. A value that does not fit it is a "
        "reject, with its bytes in `value_bytes`.",
        spark="schema",
        shown_default="`bytes`; `auto` for `view = compat`",
    )
    includes_value_bytes: bool = option(
        FLAG,
        False,
        "With `schema = auto`, every message has its bytes in `value_bytes`.",
        spark="includeValueBytes",
    )
    allows_different_schemas: bool = option(
        FLAG,
        False,
        "Read topics with different schemas together; values are bytes then.",
        spark="allowDifferentTopicSchemas",
    )
    starting_offsets: str | None = option(
        TEXT,
        None,
        "`earliest`, `latest`, the id of the first message, `after ID`, an ISO time with a zone, "
        "`index N`, or `cursor` for the position of the durable cursor. As a Spark option also a "
        "JSON object from topics or topic partitions to these, or an offset of a checkpoint.",
        spark="startingOffsets",
        toml="source.starting",
        shown_default="`latest` for a stream, `earliest` for a batch and in TOML",
    )
    starting_time: str | None = option(
        TEXT,
        None,
        "Begin with the first entry that the broker stored at this time or later: ISO with a zone, "
        "milliseconds since 1970, or a JSON object of these by topic.",
        spark="startingTime",
    )
    starting_index: str | None = option(
        TEXT,
        None,
        "Begin with the message that has this broker index, from 0; or a JSON object by topic.",
        spark="startingIndex",
    )
    ending_offsets: str | None = option(
        TEXT,
        None,
        "`latest`, the id of the last message, `before ID`, an ISO time, or `index N`. As a Spark "
        "option also a JSON object by "
        "topic. A stream idles there; with `--once`, which is `Trigger.AvailableNow`, it ends.",
        spark="endingOffsets",
        toml="source.ending",
        shown_default="`latest`: a stream goes on",
    )
    ending_time: str | None = option(
        TEXT, None, "Read only what the broker stored before this time.", spark="endingTime"
    )
    ending_index: str | None = option(
        TEXT, None, "The broker index of the last message.", spark="endingIndex"
    )
    max_rows_per_trigger: int | None = option(
        COUNT,
        None,
        "The most messages of a micro-batch; at least one entry of each topic partition is read.",
        spark="maxRowsPerTrigger",
        toml="source.max_rows_per_trigger",
        shown_default="no limit",
    )
    max_bytes_per_trigger: int | None = option(
        COUNT,
        None,
        "The most stored bytes of a micro-batch; at least one entry of each topic partition is "
        "read.",
        spark="maxBytesPerTrigger",
        toml="source.max_bytes_per_trigger",
        shown_default="no limit",
    )
    min_rows_per_trigger: int | None = option(
        COUNT,
        None,
        "Start a micro-batch only once there are this many messages. With `--once`, which is "
        "`Trigger.AvailableNow`, none waits. "
        "A pipeline does not wait if messages are due; `messages()` does.",
        spark="minRowsPerTrigger",
        toml="source.min_rows_per_trigger",
    )
    max_trigger_delay_ms: int = option(
        DURATION,
        15 * 60 * 1000,
        "The longest wait for that many messages.",
        spark="maxTriggerDelay",
        toml="source.max_trigger_delay",
        shown_default="`15 minutes`",
    )
    min_partitions: int = option(
        COUNT,
        1,
        "Read with at least this many tasks; a topic partition is split if there are fewer of "
        "them. A pipeline splits long ranges for all cores by itself.",
        spark="minPartitions",
        toml="source.min_partitions",
        shown_default="one a topic partition",
    )
    subscription: str | None = option(
        TEXT,
        None,
        "A durable subscription that keeps the broker from deleting what has not been read.",
        spark="subscription",
        same_as=("predefinedSubscription",),
    )
    read_compacted: bool = option(
        FLAG,
        False,
        "Begin with the latest message of each key of the compacted part of a topic.",
        spark="readCompacted",
        toml="source.read_compacted",
        same_as=("pulsar.reader.readCompacted",),
    )
    payload_to_message_id_converter: str | None = option(
        FUNCTION,
        None,
        "A function that finds the last message in the last entry of a topic with a compaction of "
        "its own (PIP-429).",
        spark="payloadToMessageIdConverter",
        toml="source.payload_to_message_id_converter",
        shown_default="Pulsar's own compaction",
    )
    message_payload_processor: str | None = option(
        FUNCTION,
        None,
        "A function that finds the messages in entries of a format of its own.",
        spark="messagePayloadProcessor",
        toml="source.message_payload_processor",
        shown_default="Pulsar's own format",
    )
    fail_on_data_loss: bool = option(
        FLAG,
        True,
        "Fail if the topic has lost the next entries. `false` makes a reject of the loss "
        "and reads on.",
        spark="failOnDataLoss",
        toml="source.fail_on_data_loss",
    )
    require_broker_metadata: bool = option(
        FLAG,
        False,
        "Fail if an entry has no broker timestamp.",
        spark="requireBrokerMetadata",
        toml="source.require_broker_metadata",
    )
    poll_timeout_ms: int = option(
        MILLISECONDS,
        120_000,
        "How long a broker may keep back entries that it says it has.",
        spark="pollTimeoutMs",
    )
    waits_for_topics: bool = option(
        FLAG, False, "Wait for topics that do not exist yet.", spark="waitingForNonExistedTopic"
    )
    crypto_key_folder: str | None = option(
        PATH,
        None,
        "A folder of private keys for encrypted topics: PEM files, named as the keys.",
        spark="cryptoKeyFolder",
        toml="source.crypto_key_folder",
    )
    crypto_key_reader: str | None = option(
        FUNCTION,
        None,
        "In place of the folder, a function from a key's name and metadata to its PEM.",
        spark="cryptoKeyReader",
        toml="source.crypto_key_reader",
    )
    crypto_failure_action: str = option(
        choice("reject", "fail", "pass", synonyms={"discard": "reject", "consume": "pass"}),
        "reject",
        "What becomes of messages that no key opens; `pass` gives their bytes as they are, which "
        "nobody can decrypt later.",
        spark="cryptoFailureAction",
        toml="source.crypto_failure_action",
        same_as=("pulsar.reader.cryptoFailureAction",),
    )
    max_uncompressed_bytes: int = option(
        COUNT,
        DEFAULT_MAX_UNCOMPRESSED_BYTES,
        "An entry that expands to more bytes is a reject.",
        spark="maxUncompressedBytes",
        toml="source.max_uncompressed_bytes",
    )
    wakeups: str | None = option(
        TEXT,
        None,
        "A folder with wake-up times (see `source.wakeup_files`), or `always` for a micro-batch "
        "every second.",
        spark="wakes",
        is_internal=True,
    )
    trigger_ms: int | None = option(
        DURATION,
        None,
        "The pipeline's trigger, whose times the planner keeps (see `source.trigger_times`).",
        spark="trigger",
        is_internal=True,
    )
    pinned_by: str | None = option(
        TEXT,
        None,
        "The subscription that the pipeline holds; the planner makes it on topic partitions that "
        "are new.",
        spark="pinnedBy",
        is_internal=True,
    )
    task_slots: int = option(
        COUNT,
        1,
        "How many tasks of the pipeline can run at once; a long range is cut for so many.",
        spark="taskSlots",
        is_internal=True,
    )
    value_schema: ValueSchema | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.client, self.topics, self.starts, self.ends  # noqa: B018 - what cannot be is refused at once
        self._check_view()
        self._check_admission()
        if self.starting == "cursor" and not self.subscription:
            raise UsageError("a start at the cursor needs the option 'subscription'")

    @cached_property
    def client(self) -> ReadSettings:
        """Return the client's settings. They read all that a topic has, also if it is compacted."""
        return ReadSettings(
            **vars(self.connection)
            | {
                "poll_timeout_s": self.poll_timeout_ms / 1000,
                "waits_for_topics": self.waits_for_topics,
                "has_own_format": self.message_payload_processor is not None,
            },
            converter=self.payload_to_message_id_converter,
            crypto=self._crypto(),
        )

    @cached_property
    def first_client(self) -> ReadSettings:
        """Return the client's settings for where the read of a topic partition begins, and for its
        first range: they read what compaction has left, if the read is to begin with that.
        """
        return replace(self.client, read_compacted=self.read_compacted)

    @cached_property
    def topics(self) -> TopicSelection:
        """Return the topics to read."""
        if sum(map(bool, (self.topic, self.topic_names, self.topics_pattern))) != 1:
            raise UsageError(
                "exactly one of the options 'topic', 'topics' and 'topicsPattern' is needed"
            )
        if self.topics_pattern:
            return TopicSelection(pattern=full_pattern(self.topics_pattern))
        if self.topic and "," in self.topic:
            raise UsageError("the option 'topic' names one topic; use 'topics' for several")
        names = (self.topic.strip(),) if self.topic else self.topic_names
        return TopicSelection(tuple(dict.fromkeys(map(full_name, names))))

    @property
    def needs_wakeups(self) -> bool:
        """Return whether batches are also planned without new entries."""
        return self.wakeups is not None

    @property
    def wakes_always(self) -> bool:
        """Return whether such a batch is planned every second."""
        return self.wakeups == "always"

    @property
    def wakeup_folder(self) -> Place | None:
        """Return the folder of the files that say when such a batch is needed."""
        return None if self.wakeups is None or self.wakes_always else from_text(self.wakeups)

    @property
    def is_typed(self) -> bool:
        """Return whether values are read by a schema."""
        return (self.schema or ("auto" if self.view == "compat" else "bytes")) == "auto"

    @property
    def decoding(self) -> Decoding:
        """Return the settings of ``decode``."""
        return {"max_bytes": self.max_uncompressed_bytes, "crypto": self.client.crypto}

    @property
    def gives_other_messages_later(self) -> bool:
        """Return whether a range that is read again may give other messages, and no reject says so:
        it was compacted meanwhile, or an entry that no key opened is opened.
        """
        return self.read_compacted or self.crypto_failure_action == "pass"

    @cached_property
    def starts(self) -> Bounds:
        """Return where the read begins: the bound of all topics, and the bounds of single ones."""
        # A topic partition that an offset does not name was created after it.
        offsets, time, index = self.starting_offsets, self.starting_time, self.starting_index
        return _bounds("starting", self.topics, offsets, time, index, parse_start, "earliest")

    @cached_property
    def ends(self) -> Bounds:
        """Return where the read ends: the bound of all topics, and the bounds of single ones."""
        offsets, time, index = self.ending_offsets, self.ending_time, self.ending_index
        return _bounds("ending", self.topics, offsets, time, index, parse_end, None)

    @property
    def starting(self) -> Bound | None:
        """Return where the read begins on topics without a bound of their own."""
        return self.starts[0]

    @property
    def starting_by_topic(self) -> dict[str, Bound]:
        """Return where the read begins on single topics and topic partitions."""
        return self.starts[1]

    def starting_of(self, topic_partition: str, default: Bound) -> Bound:
        """Return where the read of a topic partition begins."""
        return _of(topic_partition, self.starts) or default

    def ending_of(self, topic_partition: str) -> Bound:
        """Return where the read of a topic partition ends."""
        return _of(topic_partition, self.ends) or "latest"

    def _crypto(self) -> CryptoSettings:
        if self.crypto_key_folder and self.crypto_key_reader:
            raise UsageError(
                "the options 'cryptoKeyFolder' and 'cryptoKeyReader' exclude each other"
            )
        action = cast("FailureAction", self.crypto_failure_action)
        return CryptoSettings(self.crypto_key_folder, self.crypto_key_reader, action)

    def _check_view(self) -> None:
        if self.schema == "auto" and self.view not in ("messages", "compat"):
            raise UsageError("the option 'schema' is for view = messages and view = compat")

    def _check_admission(self) -> None:
        least, most = self.min_rows_per_trigger, self.max_rows_per_trigger
        if least is not None and most is not None and least > most:
            raise UsageError("the option 'minRowsPerTrigger' is more than 'maxRowsPerTrigger'")


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Check the options that a user wrote for Spark.

    Raises:
        UsageError: an option is unknown or missing, or has a value that it cannot have; the message
            names it.
    """
    return from_spark(
        SourceOptions,
        (
            (name, text)
            for name, text in given.items()
            if name.lower() not in _SPARKS_OWN and is_ours(name)
        ),
        "source",
    )


def _bounds(
    edge: Literal["starting", "ending"],
    topics: TopicSelection,
    offsets: str | None,
    time: str | None,
    index: str | None,
    parse: Callable[[str, str], Bound],
    of_new: Bound | None,
) -> Bounds:
    parsers: list[tuple[str, str | None, Callable[[str, str], Bound]]] = [
        (f"{edge}Offsets", offsets, parse),
        (f"{edge}Time", time, lambda text, where: AtTime(parse_time_ms(text, where))),
        (f"{edge}Index", index, lambda text, where: AtIndex(parse_index(text, where))),
    ]
    bounds = [(name, text, parser) for name, text, parser in parsers if text is not None]
    if not bounds:
        return None, {}
    if len(bounds) > 1:
        raise UsageError(f"the options '{bounds[0][0]}' and '{bounds[1][0]}' exclude each other")
    name, text, parser = bounds[0]
    result = one_or_by_topic(text.strip(), f"the option '{name}'", parser, of_new)
    for topic, bound in result[1].items():
        # An offset may have topics that are not read any more.
        if not isinstance(bound, PartitionOffset) and not _is_read(topic, topics):
            raise UsageError(
                f"the option '{name}' names {topic}, which is not read; {_nearest(topic, topics)}"
            )
    return result


def _is_read(topic: str, topics: TopicSelection) -> bool:
    """Return whether a topic, or one of its partitions, may be selected."""
    return topics.includes(topic) or topic in {split_partition(name)[0] for name in topics.names}


def _nearest(topic: str, topics: TopicSelection) -> str:
    if topics.pattern is not None:
        return f"the topics that are read match {topics.pattern}"
    nearest = max(topics.names, key=lambda name: SequenceMatcher(None, topic, name).ratio())
    return f"the nearest topic that is read is {nearest}"


def _of(topic_partition: str, bounds: Bounds) -> Bound | None:
    """Return the value for a topic partition: its own, its topic's, or that of all."""
    of_all, by_topic = bounds
    return (
        by_topic.get(topic_partition) or by_topic.get(split_partition(topic_partition)[0]) or of_all
    )
