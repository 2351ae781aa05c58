"""The source's options: spelled as in the Spark connectors people know, case-insensitive, and checked before anything starts.

| option | meaning | default |
|---|---|---|
| ``service.url`` | ``pulsar://host:6650`` | required |
| ``topic`` or ``topics`` | one topic, or several with commas | required |
| ``view`` | ``messages``, ``entries``, or ``bundles`` (the pipeline's own) | ``messages`` |
| ``startingOffsets`` | ``earliest``, ``latest``, a message id (its message is the first read), ``after ID``, an ISO time with a zone, or JSON topic partition -> these | stream ``latest``, batch ``earliest`` |
| ``startingTime`` | in place of it: the first entry that the broker stored at a time or later; ISO with a zone, or milliseconds since 1970, or JSON topic partition -> these | none |
| ``endingOffsets`` | the same, inclusive; batch reads only | ``latest`` |
| ``maxRowsPerTrigger`` | messages per micro-batch, at least one entry per topic partition | no limit |
| ``maxBytesPerTrigger`` | stored bytes per micro-batch, likewise | no limit |
| ``minPartitions`` | read with at least so many tasks, several to a topic partition where there are fewer of those | one each |
| ``subscription`` | durable subscription that pins what was not read | none |
| ``requireBrokerMetadata`` | fail where entries have no broker timestamp | ``false`` |
| ``pulsar.client.operationTimeoutMs`` | how long to wait for an answer | 30000 |
| ``pulsar.client.connectionTimeoutMs`` | how long to wait for a connection | 10000 |
| ``retryTimeoutMs`` | how long a broken connection is tried again | 120000 |
| ``maxUncompressedBytes`` | an entry that expands to more is a reject | 134217728 |
| ``wakes`` | the pipeline's own: a file (see ``wakes``), or ``always`` for a micro-batch every second | none |
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal, cast

from ledgerlake.client.cluster import ClientSettings
from ledgerlake.client.topics import full_name
from ledgerlake.client.transport import parse_service_url
from ledgerlake.decode.codecs import DEFAULT_MAX_UNCOMPRESSED_BYTES
from ledgerlake.errors import UsageError
from ledgerlake.wire.message_id import AnyMessageId, parse_message_id

if TYPE_CHECKING:
    from collections.abc import Mapping

View = Literal["messages", "entries", "bundles"]


@dataclass(frozen=True)
class After:
    """A start behind a message, where the id alone would be a start at it."""

    message_id: AnyMessageId


@dataclass(frozen=True)
class Since:
    """A start at the first entry that was stored at a time or later."""

    time_ms: int


Bound = Literal["earliest", "latest"] | AnyMessageId | After | Since

_ISO = re.compile(r"\d{4}-\d{2}-\d{2}")
_VIEWS = ("messages", "entries", "bundles")
_NAMES = (
    "service.url",
    "topic",
    "topics",
    "view",
    "startingOffsets",
    "startingTime",
    "endingOffsets",
    "maxRowsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "subscription",
    "requireBrokerMetadata",
    "pulsar.client.operationTimeoutMs",
    "pulsar.client.connectionTimeoutMs",
    "retryTimeoutMs",
    "maxUncompressedBytes",
    "wakes",
)
# Spark adds these to every source by itself.
_SPARKS_OWN = frozenset({"path", "paths"})


@dataclass(frozen=True)
class SourceOptions:
    """Checked options. ``starting`` and ``ending`` may differ by topic partition (``*_by_topic``)."""

    client: ClientSettings
    topics: tuple[str, ...]
    view: View = "messages"
    starting: Bound | None = None
    starting_by_topic: tuple[tuple[str, Bound], ...] = ()
    ending: Bound | None = None
    ending_by_topic: tuple[tuple[str, Bound], ...] = ()
    max_rows: int | None = None
    max_bytes: int | None = None
    min_partitions: int = 1
    subscription: str | None = None
    require_broker_metadata: bool = False
    max_uncompressed_bytes: int = DEFAULT_MAX_UNCOMPRESSED_BYTES
    wakes: str | None = None

    def starting_of(self, topic_partition: str, default: Bound) -> Bound:
        return dict(self.starting_by_topic).get(topic_partition, self.starting or default)

    def ending_of(self, topic_partition: str) -> Bound:
        return dict(self.ending_by_topic).get(topic_partition, self.ending or "latest")


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Check what the user wrote.

    Raises:
        UsageError: an unknown or missing option, or a value that it cannot have; the message names it.
    """
    known = {name.lower(): name for name in _NAMES}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() in known:
            values[known[name.lower()]] = value
        elif name.lower() not in _SPARKS_OWN:
            raise UsageError(f"the source has no option '{name}'{nearest(name, _NAMES)}")
    if values.get("startingTime") and values.get("startingOffsets"):
        raise UsageError("the options 'startingTime' and 'startingOffsets' exclude each other")
    starting, starting_by_topic = _bounds(values, "startingTime" if values.get("startingTime") else "startingOffsets")
    ending, ending_by_topic = _bounds(values, "endingOffsets")
    if any(isinstance(one, Since) for one in (ending, *dict(ending_by_topic).values())):
        raise UsageError("the option 'endingOffsets' cannot be a time; it is earliest, latest or a message id")
    if any(isinstance(one, After) for one in (ending, *dict(ending_by_topic).values())):
        raise UsageError("the option 'endingOffsets' is inclusive; write the id of the last message without 'after'")
    return SourceOptions(
        client=_client(values),
        topics=_topics(values),
        view=_view(values.get("view", "messages")),
        starting=starting,
        starting_by_topic=starting_by_topic,
        ending=ending,
        ending_by_topic=ending_by_topic,
        max_rows=_positive(values, "maxRowsPerTrigger"),
        max_bytes=_positive(values, "maxBytesPerTrigger"),
        min_partitions=_positive(values, "minPartitions") or 1,
        subscription=values.get("subscription") or None,
        require_broker_metadata=_flag(values, "requireBrokerMetadata"),
        max_uncompressed_bytes=_positive(values, "maxUncompressedBytes") or DEFAULT_MAX_UNCOMPRESSED_BYTES,
        wakes=values.get("wakes") or None,
    )


def nearest(name: str, known: tuple[str, ...]) -> str:
    """A hint that names the closest known word, or nothing."""
    by_lower = {one.lower(): one for one in known}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    return f"; did you mean '{by_lower[close[0]]}'?" if close else f"; known are {', '.join(known)}"


def parse_bound(text: str, where: str) -> Bound:
    """``earliest``, ``latest``, a message id, ``after`` and a message id, or an ISO time with a zone."""
    word = text.strip()
    if _ISO.match(word):
        return Since(parse_time_ms(word, where))
    if word.lower() in ("earliest", "latest"):
        return cast("Bound", word.lower())
    behind = word.lower().startswith("after ")
    try:
        message_id = parse_message_id(word[len("after ") :].strip() if behind else word)
        return After(message_id) if behind else message_id
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}, an ISO time, earliest or latest") from None


def parse_time_ms(text: str, where: str) -> int:
    """A moment, as ISO with a zone or in milliseconds since 1970.

    Raises:
        UsageError: it is neither, or has no zone.
    """
    word = text.strip()
    if word.isdigit():
        return int(word)
    try:
        moment = datetime.fromisoformat(word.replace("Z", "+00:00"))
    except ValueError:
        raise UsageError(f"{where}: '{word}' is no time; write for example 2026-05-01T08:00:00+02:00") from None
    if moment.tzinfo is None:
        raise UsageError(f"{where}: '{word}' has no zone; write for example {word}Z or {word}+02:00")
    return round(moment.timestamp() * 1000)


def _client(values: dict[str, str]) -> ClientSettings:
    url = values.get("service.url")
    if not url:
        raise UsageError("the option 'service.url' is missing; write pulsar://host:6650")
    parse_service_url(url)
    defaults = ClientSettings(url)
    return ClientSettings(
        url,
        connect_timeout_s=_seconds(values, "pulsar.client.connectionTimeoutMs", defaults.connect_timeout_s),
        request_timeout_s=_seconds(values, "pulsar.client.operationTimeoutMs", defaults.request_timeout_s),
        give_up_after_s=_seconds(values, "retryTimeoutMs", defaults.give_up_after_s),
    )


def _topics(values: dict[str, str]) -> tuple[str, ...]:
    one, several = values.get("topic"), values.get("topics")
    if bool(one) == bool(several):
        raise UsageError("exactly one of the options 'topic' and 'topics' is needed")
    if one and "," in one:
        raise UsageError("the option 'topic' names one topic; use 'topics' for several")
    names = [full_name(name) for name in (one or several or "").split(",") if name.strip()]
    return tuple(dict.fromkeys(names))


def _view(text: str) -> View:
    if text.lower() not in _VIEWS:
        raise UsageError(f"the option 'view' cannot be '{text}'; it is messages or entries")
    return cast("View", text.lower())


def _bounds(values: dict[str, str], name: str) -> tuple[Bound | None, tuple[tuple[str, Bound], ...]]:
    text = values.get(name, "").strip()
    if not text:
        return None, ()
    where = f"the option '{name}'"
    parse = _since if name == "startingTime" else parse_bound
    if not text.startswith("{"):
        return parse(text, where), ()
    try:
        by_topic = json.loads(text)
    except ValueError:
        raise UsageError(f"{where} is not JSON: {text[:80]}") from None
    return None, tuple((full_name(topic), parse(str(bound), where)) for topic, bound in by_topic.items())


def _since(text: str, where: str) -> Bound:
    return Since(parse_time_ms(text, where))


def _positive(values: dict[str, str], name: str) -> int | None:
    text = values.get(name)
    if text is None:
        return None
    if not text.strip().isdigit() or int(text) <= 0:
        raise UsageError(f"the option '{name}' cannot be '{text}'; it is a number above 0")
    return int(text)


def _seconds(values: dict[str, str], name: str, default_s: float) -> float:
    milliseconds = _positive(values, name)
    return default_s if milliseconds is None else milliseconds / 1000


def _flag(values: dict[str, str], name: str) -> bool:
    text = values.get(name, "false").strip().lower()
    if text not in ("true", "false"):
        raise UsageError(f"the option '{name}' cannot be '{text}'; it is true or false")
    return text == "true"
