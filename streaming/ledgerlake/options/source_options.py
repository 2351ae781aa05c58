"""The source's options: spelled as in the Spark connectors people know, case-insensitive, and checked before anything starts.

| option | meaning | default |
|---|---|---|
| ``service.url`` | ``pulsar://host:6650``, ``pulsar+ssl://host:6651``; several hosts with commas | required |
| ``topic``, ``topics`` or ``topicsPattern`` | one topic, several with commas, or a regular expression behind ``tenant/namespace/``; topics and partitions that come later are read from their beginning | required |
| ``view`` | ``messages``, ``entries``, ``compat`` for the columns of the JVM connectors, or ``bundles`` (the pipeline's own) | ``messages`` |
| ``schema`` | ``bytes``, or ``auto``: ``value`` by the newest schema of the topic (see ``decode.values``), and what does not fit it a reject with its bytes in ``value_bytes`` | ``bytes``; of ``compat`` ``auto`` |
| ``includeValueBytes`` | with ``schema = auto``, every message's bytes in ``value_bytes`` | ``false`` |
| ``allowDifferentTopicSchemas`` | topics whose schemas differ are read all the same, with values as bytes | ``false`` |
| ``startingOffsets`` | ``earliest``, ``latest``, a message id (its message is the first read), ``after ID``, an ISO time with a zone, ``index N``, ``cursor`` for where ``subscription`` stands, or JSON topic or topic partition -> these; or an offset as a checkpoint holds it | stream ``latest``, batch ``earliest`` |
| ``startingTime`` | in place of it: the first entry that the broker stored at a time or later; ISO with a zone, or milliseconds since 1970, or JSON topic or topic partition -> these | none |
| ``startingIndex`` | in place of it: the message with that number of the broker's, from 0; or JSON topic or topic partition -> these | none |
| ``endingOffsets`` | likewise, the last message read: ``latest``, a message id, ``before ID``, an ISO time (what was stored before it), ``index N``; a stream idles there, or ends with ``Trigger.AvailableNow`` | ``latest``; a stream goes on |
| ``endingTime`` | in place of it: only what the broker stored before a time | none |
| ``endingIndex`` | in place of it: the last message's number | none |
| ``maxRowsPerTrigger`` | messages per micro-batch, at least one entry per topic partition | no limit |
| ``maxBytesPerTrigger`` | stored bytes per micro-batch, likewise | no limit |
| ``minRowsPerTrigger`` | hold a micro-batch back until there are so many messages; ``Trigger.AvailableNow`` does not | none |
| ``maxTriggerDelay`` | but for no longer than this, such as ``30s`` or ``15 minutes`` | ``15m`` |
| ``minPartitions`` | read with at least so many tasks, several to a topic partition where there are fewer of those | one each |
| ``subscription`` | durable subscription that pins what was not read | none |
| ``readCompacted`` | of what was compacted, only the latest message of each key; then the topic as it goes on | ``false`` |
| ``payloadToMessageIdConverter`` | ``package.module:name`` of a function that finds the last message in the last entry of a topic with a compaction of its own (see ``wire.last_message``) | Pulsar's own compaction |
| ``messagePayloadProcessor`` | ``package.module:name`` of a function that finds the messages in entries of a format of its own (see ``decode.payloads``) | Pulsar's own format |
| ``failOnDataLoss`` | end with an error where the topic no longer has what was to be read next; with ``false`` that is a reject, and the read goes on | ``true`` |
| ``requireBrokerMetadata`` | fail where entries have no broker timestamp | ``false`` |
| ``pulsar.client.authPluginClassName`` | ``token``, ``oauth2``, ``basic`` or ``tls``, or the Java class of that name | none |
| ``pulsar.client.authParams`` | a secret as it is, ``file:PATH`` or ``env:NAME``; of OAuth2 and TLS as for the Java client (see ``client.auth``) | none |
| ``pulsar.client.tlsTrustCertsFilePath`` | PEM file of the authorities that are trusted | the machine's |
| ``pulsar.client.tlsCertificateFilePath``, ``pulsar.client.tlsKeyFilePath`` | our own certificate and its key | none |
| ``pulsar.client.tlsHostnameVerificationEnable`` | check that a certificate is for the host | ``true`` |
| ``pulsar.client.tlsAllowInsecureConnection`` | accept any certificate | ``false`` |
| ``pulsar.client.proxyServiceUrl`` | a proxy that passes TLS on to the broker whose name it asks for (SNI), ``pulsar+ssl://host:port``; ``pulsar.client.proxyProtocol`` can only be ``SNI`` | none |
| ``pulsar.client.listenerName`` | which of a broker's advertised addresses to use | the internal one |
| ``pollTimeoutMs`` | how long a broker may keep back entries that it says it has | 120000 |
| ``waitingForNonExistedTopic`` | wait for topics that do not exist yet | ``false`` |
| ``pulsar.client.operationTimeoutMs`` | how long to wait for an answer | 30000 |
| ``pulsar.client.connectionTimeoutMs`` | how long to wait for a connection | 10000 |
| ``retryTimeoutMs`` | how long a broken connection is tried again | 120000 |
| ``cryptoKeyFolder`` | private keys for encrypted topics: PEM files in a folder, by the name of the key | none |
| ``cryptoKeyReader`` | in place of it, ``package.module:name`` of a function from the key's name and metadata to its PEM | none |
| ``cryptoFailureAction`` | what no key opens: ``reject``, ``fail``, or ``pass`` for a message of its bytes as they are | ``reject`` |
| ``maxUncompressedBytes`` | an entry that expands to more is a reject | 134217728 |
| what else the JVM connectors have | see ``connector_options`` | |
| ``wakes`` | the pipeline's own: a folder (see ``source.wake_ups``), or ``always`` for a micro-batch every second | none |
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypedDict, cast

from ledgerlake.client.auth import parse_authentication, tls_files
from ledgerlake.client.topics import TopicSelection, full_name, full_pattern, split_partition
from ledgerlake.client.transport import TlsSettings, parse_service_url
from ledgerlake.decode.codecs import DEFAULT_MAX_UNCOMPRESSED_BYTES
from ledgerlake.decode.crypto import CryptoSettings, FailureAction
from ledgerlake.errors import UsageError
from ledgerlake.options.connector_options import translated
from ledgerlake.options.read_settings import ReadSettings
from ledgerlake.runtime.plugins import check_path
from ledgerlake.stored.offsets import PartitionOffset, from_json
from ledgerlake.wire.message_id import AnyMessageId, parse_message_id
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

View = Literal["messages", "entries", "compat", "bundles"]


@dataclass(frozen=True)
class After:
    """A start behind a message, where the id alone would be a start at it."""

    message_id: AnyMessageId


@dataclass(frozen=True)
class Before:
    """An end before a message, where the id alone would be an end at it."""

    message_id: AnyMessageId


@dataclass(frozen=True)
class AtTime:
    """The first entry that was stored at a time or later: a start at it, an end before it."""

    time_ms: int


@dataclass(frozen=True)
class AtIndex:
    """The message with this number of the broker's: a start or an end at it."""

    index: int


Bound = Literal["earliest", "latest", "cursor"] | AnyMessageId | After | Before | AtTime | AtIndex | PartitionOffset

_Bounds = tuple[Bound | None, tuple[tuple[str, Bound], ...]]

_DURATION = re.compile(r"([0-9]{1,12})\s*(milliseconds?|ms|seconds?|s|minutes?|min|m|hours?|h)")
# No more than 64 bits hold, and only the digits that everybody writes.
_NUMBER = re.compile(r"[0-9]{1,18}")
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}")
DEFAULT_MAX_TRIGGER_DELAY_MS = 15 * 60 * 1000
_VIEWS = ("messages", "entries", "compat", "bundles")
# How to reach a cluster; what ``client_settings`` reads.
CLIENT_OPTIONS = (
    "service.url",
    "pulsar.client.authPluginClassName",
    "pulsar.client.authParams",
    "pulsar.client.tlsTrustCertsFilePath",
    "pulsar.client.tlsCertificateFilePath",
    "pulsar.client.tlsKeyFilePath",
    "pulsar.client.tlsHostnameVerificationEnable",
    "pulsar.client.tlsAllowInsecureConnection",
    "pulsar.client.proxyServiceUrl",
    "pulsar.client.proxyProtocol",
    "pulsar.client.listenerName",
    "pulsar.client.operationTimeoutMs",
    "pulsar.client.connectionTimeoutMs",
    "retryTimeoutMs",
)
_NAMES = (
    "topic",
    "topics",
    "topicsPattern",
    "view",
    "schema",
    "includeValueBytes",
    "allowDifferentTopicSchemas",
    "startingOffsets",
    "startingTime",
    "startingIndex",
    "endingOffsets",
    "endingTime",
    "endingIndex",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minRowsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "subscription",
    "readCompacted",
    "payloadToMessageIdConverter",
    "messagePayloadProcessor",
    "failOnDataLoss",
    "requireBrokerMetadata",
    *CLIENT_OPTIONS,
    "pollTimeoutMs",
    "waitingForNonExistedTopic",
    "cryptoKeyFolder",
    "cryptoKeyReader",
    "cryptoFailureAction",
    "maxUncompressedBytes",
    "wakes",
    "pinnedBy",
)
# Spark adds these to every source by itself.
_SPARKS_OWN = frozenset({"path", "paths"})


class Decoding(TypedDict):
    """The arguments of ``decode_bundle`` and ``decode_entries`` that hold for a whole read."""

    max_bytes: int
    crypto: CryptoSettings


@dataclass(frozen=True)
class SourceOptions:
    """Checked options. ``starting`` and ``ending`` may differ by topic partition (``*_by_topic``).

    ``value_schema``: what values are read by, of a typed read, once that is known. ``pinned_by``: the subscription that the
    pipeline holds; the planner makes it on topic partitions that are new.
    """

    client: ReadSettings
    topics: TopicSelection
    view: View = "messages"
    is_typed: bool = False
    value_schema: ValueSchema | None = None
    includes_value_bytes: bool = False
    allows_different_schemas: bool = False
    starting: Bound | None = None
    starting_by_topic: tuple[tuple[str, Bound], ...] = ()
    ending: Bound | None = None
    ending_by_topic: tuple[tuple[str, Bound], ...] = ()
    max_rows: int | None = None
    max_bytes: int | None = None
    min_rows: int | None = None
    max_trigger_delay_ms: int = DEFAULT_MAX_TRIGGER_DELAY_MS
    min_partitions: int = 1
    subscription: str | None = None
    fail_on_data_loss: bool = True
    require_broker_metadata: bool = False
    max_uncompressed_bytes: int = DEFAULT_MAX_UNCOMPRESSED_BYTES
    payload_processor: str | None = None
    wakes: str | None = None
    pinned_by: str | None = None

    @property
    def decoding(self) -> Decoding:
        """What ``decode`` must know of them."""
        return {"max_bytes": self.max_uncompressed_bytes, "crypto": self.client.crypto}

    def starting_of(self, topic_partition: str, default: Bound) -> Bound:
        return _of(topic_partition, self.starting_by_topic) or self.starting or default

    def ending_of(self, topic_partition: str) -> Bound:
        return _of(topic_partition, self.ending_by_topic) or self.ending or "latest"


def _of(topic_partition: str, by_topic: tuple[tuple[str, Bound], ...]) -> Bound | None:
    """What is said of a topic partition, or of its topic."""
    bounds = dict(by_topic)
    return bounds.get(topic_partition) or bounds.get(split_partition(topic_partition)[0])


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Check what the user wrote.

    Raises:
        UsageError: an unknown or missing option, or a value that it cannot have; the message names it.
    """
    ours = (translated(name, value) for name, value in given.items() if name.lower() not in _SPARKS_OWN)
    values = spelled((one for one in ours if one is not None), _NAMES, "source")
    if values.get("startingTime") and values.get("startingOffsets"):
        raise UsageError("the options 'startingTime' and 'startingOffsets' exclude each other")
    starting, starting_by_topic = _bounds(values, "starting")
    ending, ending_by_topic = _bounds(values, "ending")
    topics = _topics(values)
    client = replace(
        client_settings(values),
        poll_timeout_s=_seconds(values, "pollTimeoutMs", ReadSettings.poll_timeout_s),
        waits_for_topics=flag(values, "waitingForNonExistedTopic"),
        read_compacted=flag(values, "readCompacted"),
        converter=_function(values, "payloadToMessageIdConverter"),
        crypto=_crypto(values),
    )
    if values.get("startingOffsets", "").strip().lower() == "cursor" and not values.get("subscription"):
        raise UsageError("a start at the cursor needs the option 'subscription'")
    if client.read_compacted and not topics.is_persistent:
        raise UsageError("the option 'readCompacted' is for persistent topics")
    return SourceOptions(
        client=client,
        topics=topics,
        view=_view(values.get("view", "messages")),
        is_typed=_is_typed(values),
        includes_value_bytes=flag(values, "includeValueBytes"),
        allows_different_schemas=flag(values, "allowDifferentTopicSchemas"),
        starting=starting,
        starting_by_topic=starting_by_topic,
        ending=ending,
        ending_by_topic=ending_by_topic,
        max_rows=positive(values, "maxRowsPerTrigger"),
        max_bytes=positive(values, "maxBytesPerTrigger"),
        min_rows=_min_rows(values),
        max_trigger_delay_ms=duration_ms("the option 'maxTriggerDelay'", values.get("maxTriggerDelay", "15m")),
        min_partitions=positive(values, "minPartitions") or 1,
        subscription=values.get("subscription") or None,
        fail_on_data_loss=flag(values, "failOnDataLoss", default=True),
        require_broker_metadata=flag(values, "requireBrokerMetadata"),
        max_uncompressed_bytes=positive(values, "maxUncompressedBytes") or DEFAULT_MAX_UNCOMPRESSED_BYTES,
        payload_processor=_function(values, "messagePayloadProcessor"),
        wakes=values.get("wakes") or None,
        pinned_by=values.get("pinnedBy") or None,
    )


def spelled(given: Iterable[tuple[str, str]], known: tuple[str, ...], where: str) -> dict[str, str]:
    """Options by the names that we know them by, whatever case they were written in.

    Raises:
        UsageError: one that is not known; names the nearest.
    """
    by_lower = {name.lower(): name for name in known}
    values: dict[str, str] = {}
    for name, value in given:
        if name.lower() not in by_lower:
            raise UsageError(f"the {where} has no option '{name}'{nearest(name, known)}")
        values[by_lower[name.lower()]] = value
    return values


def nearest(name: str, known: tuple[str, ...]) -> str:
    """A hint that names the closest known word, or nothing."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else f"; known are {', '.join(known)}"


def parse_bound(text: str, where: str) -> Bound:
    """``earliest``, ``latest``, ``cursor``, a message id, ``after`` or ``before`` and one, an ISO time with a zone, or ``index N``."""
    word = text.strip()
    if _ISO.match(word):
        return AtTime(parse_time_ms(word, where))
    if word.lower() in ("earliest", "latest", "cursor"):
        return cast("Bound", word.lower())
    first, _, rest = word.partition(" ")
    if first.lower() == "index":
        return AtIndex(parse_index(rest, where))
    beside = first.lower() if first.lower() in ("after", "before") else None
    try:
        message_id = parse_message_id(rest.strip() if beside else word)
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}, an ISO time, index N, earliest or latest") from None
    if beside is None:
        return message_id
    return After(message_id) if beside == "after" else Before(message_id)


def parse_start(text: str, where: str) -> Bound:
    """A bound that a read can begin at.

    Raises:
        UsageError: it is none.
    """
    return _unless(
        Before, parse_bound(text, where), f"{where} cannot be '{text.strip()}'; write the id alone, or after"
    )


def parse_end(text: str, where: str) -> Bound:
    """A bound that a read can end at.

    Raises:
        UsageError: it is none.
    """
    if text.strip().lower() == "cursor":
        raise UsageError(f"{where} cannot be 'cursor', which is where a read begins")
    return _unless(
        After, parse_bound(text, where), f"{where} cannot be '{text.strip()}'; write the id alone, or before"
    )


def _unless(kind: type[After | Before], bound: Bound, refusal: str) -> Bound:
    if isinstance(bound, kind):
        raise UsageError(f"{refusal} and the id")
    return bound


def parse_time_ms(text: str, where: str) -> int:
    """A moment, as ISO with a zone or in milliseconds since 1970.

    Raises:
        UsageError: it is neither, or has no zone.
    """
    word = text.strip()
    if _NUMBER.fullmatch(word):
        return int(word)
    try:
        moment = datetime.fromisoformat(word.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(f"{where}: '{word}' is no time; write for example 2026-05-01T08:00:00+02:00") from None
    if moment.tzinfo is None:
        raise UsageError(f"{where}: '{word}' has no zone; write for example {word}Z or {word}+02:00")
    return round(moment.timestamp() * 1000)


def parse_index(text: str, where: str) -> int:
    """A message's number.

    Raises:
        UsageError: it is none.
    """
    if not _NUMBER.fullmatch(text.strip()):
        raise UsageError(f"{where}: '{text.strip()}' is no message number; they count from 0")
    return int(text)


def client_settings(values: dict[str, str]) -> ReadSettings:
    """How to reach the cluster, by checked names.

    Raises:
        UsageError: a value is missing, or one that it cannot have.
    """
    url = values.get("service.url")
    if not url:
        raise UsageError("the option 'service.url' is missing; write pulsar://host:6650")
    parse_service_url(url)
    defaults = ReadSettings(url)
    return ReadSettings(
        url,
        connect_timeout_s=_seconds(values, "pulsar.client.connectionTimeoutMs", defaults.connect_timeout_s),
        request_timeout_s=_seconds(values, "pulsar.client.operationTimeoutMs", defaults.request_timeout_s),
        give_up_after_s=_seconds(values, "retryTimeoutMs", defaults.give_up_after_s),
        authentication=parse_authentication(
            values.get("pulsar.client.authPluginClassName"),
            values.get("pulsar.client.authParams"),
            "the option 'pulsar.client.authParams'",
        ),
        tls=_tls(values),
        listener_name=values.get("pulsar.client.listenerName") or None,
    )


def _tls(values: dict[str, str]) -> TlsSettings:
    cert_file, key_file = tls_files(values.get("pulsar.client.authParams") or "")
    cert_file = values.get("pulsar.client.tlsCertificateFilePath") or cert_file
    key_file = values.get("pulsar.client.tlsKeyFilePath") or key_file
    if (cert_file is None) != (key_file is None):
        raise UsageError("a client certificate needs both its file and its key's")
    return TlsSettings(
        values.get("pulsar.client.tlsTrustCertsFilePath") or None,
        cert_file,
        key_file,
        checks_hostname=flag(values, "pulsar.client.tlsHostnameVerificationEnable", default=True),
        allows_insecure=flag(values, "pulsar.client.tlsAllowInsecureConnection"),
        proxy_url=_sni_proxy(values),
    )


def _sni_proxy(values: dict[str, str]) -> str | None:
    url = values.get("pulsar.client.proxyServiceUrl") or None
    protocol = values.get("pulsar.client.proxyProtocol", "SNI")
    if protocol.strip().upper() != "SNI":
        raise UsageError(f"the option 'pulsar.client.proxyProtocol' cannot be '{protocol}'; it is SNI")
    if url is not None and not (len(parse_service_url(url)) == 1 and url.startswith("pulsar+ssl://")):
        raise UsageError("the option 'pulsar.client.proxyServiceUrl' is one address, pulsar+ssl://host:port")
    if url is not None and not values["service.url"].startswith("pulsar+ssl://"):
        raise UsageError("a proxy that goes by the name in TLS needs a 'service.url' with pulsar+ssl://")
    return url


def _topics(values: dict[str, str]) -> TopicSelection:
    one, several, pattern = (values.get(name) for name in ("topic", "topics", "topicsPattern"))
    if sum(map(bool, (one, several, pattern))) != 1:
        raise UsageError("exactly one of the options 'topic', 'topics' and 'topicsPattern' is needed")
    if pattern:
        return TopicSelection(pattern=full_pattern(pattern))
    if one and "," in one:
        raise UsageError("the option 'topic' names one topic; use 'topics' for several")
    names = [full_name(name) for name in (one or several or "").split(",") if name.strip()]
    return TopicSelection(tuple(dict.fromkeys(names)))


def _view(text: str) -> View:
    if text.lower() not in _VIEWS:
        raise UsageError(f"the option 'view' cannot be '{text}'; it is messages, entries or compat")
    return cast("View", text.lower())


def _is_typed(values: dict[str, str]) -> bool:
    view = _view(values.get("view", "messages"))
    text = values.get("schema", "auto" if view == "compat" else "bytes").strip().lower()
    if text not in ("bytes", "auto"):
        raise UsageError(f"the option 'schema' cannot be '{text}'; it is bytes or auto")
    if text == "auto" and view not in ("messages", "compat"):
        raise UsageError("the option 'schema' is for view = messages and view = compat")
    return text == "auto"


def _bounds(values: dict[str, str], edge: Literal["starting", "ending"]) -> _Bounds:
    """Of a read's start or end, what is said of all topics, and what of single ones."""
    parsers: dict[str, Callable[[str, str], Bound]] = {
        f"{edge}Offsets": parse_start if edge == "starting" else parse_end,
        f"{edge}Time": lambda text, where: AtTime(parse_time_ms(text, where)),
        f"{edge}Index": lambda text, where: AtIndex(parse_index(text, where)),
    }
    given = [name for name in parsers if values.get(name, "").strip()]
    if not given:
        return None, ()
    if len(given) > 1:
        raise UsageError(f"the options '{given[0]}' and '{given[1]}' exclude each other")
    # A topic partition that an offset does not name came after it.
    of_new: Bound | None = "earliest" if edge == "starting" else None
    return _one_or_by_topic(values[given[0]].strip(), f"the option '{given[0]}'", parsers[given[0]], of_new)


def _one_or_by_topic(text: str, where: str, parse: Callable[[str, str], Bound], of_new: Bound | None) -> _Bounds:
    if not text.startswith("{"):
        return parse(text, where), ()
    try:
        by_topic = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError(f"{where} is not JSON: {text[:80]}") from None
    if "version" in by_topic:
        return of_new, tuple(from_json(by_topic).items())
    return None, tuple((full_name(topic), parse(str(bound), where)) for topic, bound in by_topic.items())


def positive(values: dict[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text.strip()) or int(text) <= 0:
        raise UsageError(f"the option '{name}' cannot be '{text}'; it is a number above 0")
    return int(text)


def _min_rows(values: dict[str, str]) -> int | None:
    least, most = positive(values, "minRowsPerTrigger"), positive(values, "maxRowsPerTrigger")
    if least is not None and most is not None and least > most:
        raise UsageError("the option 'minRowsPerTrigger' is more than 'maxRowsPerTrigger'")
    return least


def duration_ms(where: str, text: str) -> int:
    """A time span such as ``200 milliseconds``, ``30s`` or ``1 hour``.

    Raises:
        UsageError: it is none.
    """
    matched = _DURATION.fullmatch(text.strip().lower())
    if matched is None:
        raise UsageError(f"{where} '{text}' is not a duration; write for example '1 second' or '200 milliseconds'")
    unit = matched.group(2)
    return int(matched.group(1)) * (
        1 if unit.startswith(("ms", "mil")) else {"s": 1000, "m": 60_000, "h": 3_600_000}[unit[0]]
    )


def _seconds(values: dict[str, str], name: str, default_s: float) -> float:
    milliseconds = positive(values, name)
    return default_s if milliseconds is None else milliseconds / 1000


def _crypto(values: dict[str, str]) -> CryptoSettings:
    folder, reader = values.get("cryptoKeyFolder") or None, _function(values, "cryptoKeyReader")
    if folder and reader:
        raise UsageError("the options 'cryptoKeyFolder' and 'cryptoKeyReader' exclude each other")
    action = values.get("cryptoFailureAction", "reject").strip().lower()
    if action not in ("reject", "fail", "pass"):
        raise UsageError(f"the option 'cryptoFailureAction' cannot be '{action}'; it is reject, fail or pass")
    return CryptoSettings(folder, reader, cast("FailureAction", action))


def _function(values: dict[str, str], name: str) -> str | None:
    path = values.get(name)
    return None if not path else check_path(path, f"the option '{name}'")


def flag(values: dict[str, str], name: str, default: bool = False) -> bool:
    text = values.get(name, str(default)).strip().lower()
    if text not in ("true", "false"):
        raise UsageError(f"the option '{name}' cannot be '{text}'; it is true or false")
    return text == "true"
