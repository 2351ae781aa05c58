"""The configuration file: TOML, checked whole before Spark starts; an unknown key names the nearest known one.

[source]   service_url, topics or topics_pattern; starting, ending, read_compacted, payload_to_message_id_converter,
           message_payload_processor, crypto_key_folder, crypto_key_reader, crypto_failure_action, fail_on_data_loss,
           require_broker_metadata, max_rows_per_trigger, max_bytes_per_trigger, min_rows_per_trigger, max_trigger_delay,
           min_partitions, retry_timeout_s
[auth]     method; token, user, password, issuer_url, private_key, audience, scope
[tls]      ca_file, cert_file, key_file, checks_hostname, proxy_url
[stream]   name; trigger, checkpoint
[delta]    path; rejects_path, writer
[chunks]   max_pending, max_pending_bytes, max_message_bytes, expire_after
[delay]    enabled, storage, payloads, min_indexes_per_bucket, ledger_step_per_bucket, time_step_per_segment,
           max_indexes_per_segment, max_buckets
[deliver]  topic; starting
[metrics]  port
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import TopicSelection, full_name, full_pattern
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.errors import UsageError
from ledgerlake.options.delay_options import DelayOptions
from ledgerlake.options.source_options import SourceOptions, duration_ms, nearest, parse_end, parse_options, parse_start

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

_SECTIONS = ("source", "auth", "tls", "stream", "delta", "chunks", "delay", "deliver", "metrics")

# Arrow and Parquet count the bytes of a value with 31 bits.
_MOST_MESSAGE_BYTES = 2**31 - 1024

Section = TypeVar("Section")


@dataclass(frozen=True)
class SourceConfig:
    """``[source]``: which topics, from where on and up to where; ``latest`` is no end."""

    service_url: str
    topics: tuple[str, ...] = ()
    topics_pattern: str | None = None
    starting: str = "earliest"
    ending: str = "latest"
    read_compacted: bool = False
    fail_on_data_loss: bool = True
    payload_to_message_id_converter: str | None = None
    message_payload_processor: str | None = None
    crypto_key_folder: str | None = None
    crypto_key_reader: str | None = None
    crypto_failure_action: str = "reject"
    require_broker_metadata: bool = False
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_rows_per_trigger: int | None = None
    max_trigger_delay: str = "15 minutes"
    min_partitions: int | None = None
    retry_timeout_s: int = 120


@dataclass(frozen=True)
class AuthConfig:
    """``[auth]``: who we are to the broker.

    ``method`` is ``token``, ``basic``, ``oauth2`` or ``tls`` (the certificate of ``[tls]``). Secrets are given as they are, as
    ``file:PATH`` or ``env:NAME``; ``private_key`` is OAuth2's file of client id and secret.
    """

    method: str
    token: str = field(default="", repr=False)
    user: str = ""
    password: str = field(default="", repr=False)
    issuer_url: str = ""
    private_key: str = field(default="", repr=False)
    audience: str = ""
    scope: str = ""

    @property
    def parameters(self) -> str:
        """What the plugin of that method takes."""
        if self.method == "oauth2":
            given = {"issuerUrl": self.issuer_url, "privateKey": self.private_key}
            return "secret:" + json.dumps(given | {"audience": self.audience, "scope": self.scope})
        return f"secret:{self.user}:{self.password}" if self.method == "basic" else f"secret:{self.token}"


@dataclass(frozen=True)
class TlsConfig:
    """``[tls]``: whom we trust, and our own certificate, as paths of PEM files; a proxy that goes by the name in TLS."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    checks_hostname: bool = True
    proxy_url: str | None = None


@dataclass(frozen=True)
class StreamConfig:
    """``[stream]``: the query's identity and rhythm."""

    name: str
    trigger: str = "1 second"
    checkpoint: str = ""


@dataclass(frozen=True)
class DeltaConfig:
    """``[delta]``: where the tables are.

    ``writer``: ``arrow`` appends the files that tasks write, ``spark`` has delta-spark write them again, and ``auto`` does that
    where a table has features that the first cannot honour.
    """

    path: str
    rejects_path: str = ""
    writer: str = "auto"


@dataclass(frozen=True)
class ChunksConfig:
    """``[chunks]``: how many large messages may be open on a topic partition, how large, and for how long."""

    max_pending: int = Limits.max_pending
    max_pending_bytes: int = Limits.max_pending_bytes
    max_message_bytes: int = Limits.max_message_bytes
    expire_after: str = "1 hour"

    @property
    def limits(self) -> Limits:
        return Limits(
            max_pending=self.max_pending,
            max_pending_bytes=self.max_pending_bytes,
            max_message_bytes=self.max_message_bytes,
            expire_after_ms=duration_ms("[chunks] expire_after", self.expire_after),
        )


@dataclass(frozen=True)
class DelayConfig:
    """``[delay]``: how delayed messages wait.

    ``storage`` is ``state`` (the query's state store) or a folder; ``payloads`` is ``kept``, or ``reread`` where the topic
    holds every message for longer than it is delayed. The rest is about the index, named as in the broker's configuration.
    """

    enabled: bool = True
    storage: str = "state"
    payloads: str = "kept"
    min_indexes_per_bucket: int = DelaySettings.min_indexes_per_bucket
    ledger_step_per_bucket: int = DelaySettings.ledger_step_per_bucket
    time_step_per_segment: str = "5 minutes"
    max_indexes_per_segment: int = DelaySettings.max_indexes_per_segment
    max_buckets: int = DelaySettings.max_buckets

    @property
    def options(self) -> DelayOptions:
        settings = DelaySettings(
            self.min_indexes_per_bucket,
            self.ledger_step_per_bucket,
            duration_ms("[delay] time_step_per_segment", self.time_step_per_segment),
            self.max_indexes_per_segment,
            self.max_buckets,
        )
        folder = None if self.storage == "state" else self.storage
        return DelayOptions(self.enabled, folder, self.payloads == "reread", settings=settings)


@dataclass(frozen=True)
class DeliverConfig:
    """``[deliver]``: a topic that gets due messages too, beside the table.

    ``starting``: ``earliest`` is everything that waits when the topic is first named, ``latest`` what is published from then
    on.
    """

    topic: str
    starting: str = "earliest"


@dataclass(frozen=True)
class MetricsConfig:
    """``[metrics]``: where Prometheus finds them, see ``pipeline.metrics``."""

    port: int = 9464


@dataclass(frozen=True)
class Config:
    """A whole, checked configuration."""

    source: SourceConfig
    stream: StreamConfig
    delta: DeltaConfig
    chunks: ChunksConfig = ChunksConfig()
    delay: DelayConfig = DelayConfig()
    deliver: DeliverConfig | None = None
    auth: AuthConfig | None = None
    tls: TlsConfig = TlsConfig()
    metrics: MetricsConfig | None = None

    @property
    def delay_options(self) -> DelayOptions:
        return replace(self.delay.options, republish=self.deliver.starting if self.deliver else None)

    @property
    def outbox_path(self) -> str | None:
        """Where due messages wait for their topic."""
        return f"{self.stream.checkpoint}/ledgerlake/outbox" if self.deliver else None

    @property
    def subscription(self) -> str:
        """The name of the durable cursor, after the stream."""
        return f"ledgerlake-{self.stream.name}"

    def source_options(self) -> dict[str, str]:
        """The options of the bare source that say the same."""
        source = self.source
        given = {
            "service.url": source.service_url,
            "topics": ",".join(source.topics) or None,
            "topicsPattern": source.topics_pattern,
            "startingOffsets": source.starting if source.starting.strip().lower() != "cursor" else None,
            "endingOffsets": source.ending,
            "readCompacted": str(source.read_compacted).lower(),
            "failOnDataLoss": str(source.fail_on_data_loss).lower(),
            "payloadToMessageIdConverter": source.payload_to_message_id_converter,
            "messagePayloadProcessor": source.message_payload_processor,
            "cryptoKeyFolder": source.crypto_key_folder,
            "cryptoKeyReader": source.crypto_key_reader,
            "cryptoFailureAction": source.crypto_failure_action,
            "requireBrokerMetadata": str(source.require_broker_metadata).lower(),
            "maxRowsPerTrigger": source.max_rows_per_trigger,
            "maxBytesPerTrigger": source.max_bytes_per_trigger,
            "minRowsPerTrigger": source.min_rows_per_trigger,
            "maxTriggerDelay": source.max_trigger_delay,
            "minPartitions": source.min_partitions,
            "retryTimeoutMs": source.retry_timeout_s * 1000,
            "pulsar.client.authPluginClassName": self.auth.method if self.auth else None,
            "pulsar.client.authParams": self.auth.parameters if self.auth else None,
            "pulsar.client.tlsTrustCertsFilePath": self.tls.ca_file,
            "pulsar.client.tlsCertificateFilePath": self.tls.cert_file,
            "pulsar.client.tlsKeyFilePath": self.tls.key_file,
            "pulsar.client.proxyServiceUrl": self.tls.proxy_url,
            "pulsar.client.tlsHostnameVerificationEnable": str(self.tls.checks_hostname).lower(),
        }
        return {name: str(value) for name, value in given.items() if value is not None}

    def parsed_options(self) -> SourceOptions:
        return parse_options(self.source_options())


def load_config(path: str | Path) -> Config:
    """Read and check a configuration file.

    Raises:
        UsageError: the file cannot be read, is not TOML, or says something wrong; the message names file and key.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the configuration {path} cannot be read ({error.strerror}); check the path") from None
    return read_config(content, str(path))


def read_config(content: bytes, path: str) -> Config:
    """Check a configuration file's content; ``path`` is for the message.

    Raises:
        UsageError: as ``load_config``.
    """
    try:
        data = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the configuration {path} is not UTF-8 from byte {error.start} on; save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # Beside TOML's own error, which is a ValueError: a number without end, an array in an array in an array.
        raise UsageError(f"the configuration {path} is not TOML: {error}") from None
    try:
        return parse_config(data)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from None


def parse_config(data: dict[str, Any]) -> Config:
    """Check configuration data.

    Raises:
        UsageError: a key is unknown, missing, or has a value that it cannot have.
    """
    for name in data:
        if name not in _SECTIONS:
            raise UsageError(f"there is no section [{name}]{nearest(name, _SECTIONS)}")
    source = _section(SourceConfig, "source", data)
    stream = _section(StreamConfig, "stream", data)
    delta = _section(DeltaConfig, "delta", data)
    chunks = _section(ChunksConfig, "chunks", data)
    if chunks.max_message_bytes > _MOST_MESSAGE_BYTES:
        raise UsageError(
            f"[chunks] max_message_bytes is more than {_MOST_MESSAGE_BYTES}, the most that a message can have"
        )
    duration_ms("[chunks] expire_after", chunks.expire_after)
    delay = _section(DelayConfig, "delay", data)
    if delay.payloads not in ("kept", "reread"):
        raise UsageError(f"[delay] payloads cannot be '{delay.payloads}'; it is kept or reread")
    duration_ms("[delay] time_step_per_segment", delay.time_step_per_segment)
    deliver = _section(DeliverConfig, "deliver", data) if "deliver" in data else None
    if deliver is not None:
        if deliver.starting not in ("earliest", "latest"):
            raise UsageError(f"[deliver] starting cannot be '{deliver.starting}'; it is earliest or latest")
        if not delay.enabled:
            raise UsageError("[deliver] publishes what was held back, and [delay] enabled = false holds nothing back")
        deliver = replace(deliver, topic=full_name(deliver.topic))
        selection = (
            TopicSelection(pattern=full_pattern(source.topics_pattern))
            if source.topics_pattern
            else TopicSelection(tuple(map(full_name, source.topics)))
        )
        if selection.includes(deliver.topic):
            raise UsageError(f"[deliver] topic {deliver.topic} is one of those that are read; name another")
    if bool(source.topics) == bool(source.topics_pattern):
        raise UsageError("[source] needs topics or topics_pattern, and not both")
    source = replace(source, topics=tuple(full_name(topic) for topic in source.topics))
    parse_start(source.starting, "[source] starting")
    parse_end(source.ending, "[source] ending")
    if not _NAME.fullmatch(stream.name):
        raise UsageError(f"[stream] name '{stream.name}' may hold letters, digits, dot, dash and underscore only")
    parse_trigger(stream.trigger)
    stream = replace(stream, checkpoint=stream.checkpoint or f"checkpoints/{stream.name}")
    delta = replace(delta, rejects_path=delta.rejects_path or delta.path.rstrip("/") + "_rejects")
    if delta.writer not in ("auto", "arrow", "spark"):
        raise UsageError(f"[delta] writer cannot be '{delta.writer}'; it is auto, arrow or spark")
    _check_apart(stream, delta, delay)
    auth = _section(AuthConfig, "auth", data) if "auth" in data else None
    metrics = _section(MetricsConfig, "metrics", data) if "metrics" in data else None
    if metrics is not None and metrics.port > 65535:
        raise UsageError("[metrics] port is above 65535")
    config = Config(source, stream, delta, chunks, delay, deliver, auth, _section(TlsConfig, "tls", data), metrics)
    config.parsed_options()
    return config


def _check_apart(stream: StreamConfig, delta: DeltaConfig, delay: DelayConfig) -> None:
    """Check that no folder lies in another: what removes or replaces one would take the other with it.

    Two layouts are fine. Spark and Delta leave folders of a table alone whose names begin with ``_`` or ``.``, so a checkpoint may be
    there; and what waits belongs to the checkpoint, so it may be kept in it.

    Raises:
        UsageError: one does.
    """
    places = {
        "[delta] path": _place(delta.path),
        "[delta] rejects_path": _place(delta.rejects_path),
        "[stream] checkpoint": _place(stream.checkpoint),
    }
    if delay.storage != "state":
        places["[delay] storage"] = _place(delay.storage)
    for outer, outer_place in places.items():
        for inner, place in places.items():
            if outer == inner or place[: len(outer_place)] != outer_place:
                continue
            if place == outer_place:
                raise UsageError(f"{outer} and {inner} are the same folder")
            below = place[len(outer_place)]
            if outer.startswith("[delta]") and below.startswith(("_", ".")) and below != "_delta_log":
                continue
            if (outer, inner) != ("[stream] checkpoint", "[delay] storage"):
                raise UsageError(f"{inner} lies in the folder of {outer}; choose one beside it")


def _place(path: str) -> tuple[str, ...]:
    """The parts of a path or URI, from the root on."""
    scheme, _, rest = path.rpartition("://")
    if scheme in ("", "file"):
        return ("file", *Path(os.path.abspath(rest)).parts[1:])
    return (scheme, *(part for part in rest.split("/") if part))


def parse_trigger(text: str) -> str:
    """An interval that Spark understands, such as ``1 second`` or ``200 milliseconds``."""
    return f"{duration_ms('[stream] trigger', text)} milliseconds"


def _section(kind: type[Section], name: str, data: dict[str, Any]) -> Section:
    given = data.get(name, {})
    if not isinstance(given, dict):
        raise UsageError(f"[{name}] must be a section")
    known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"[{name}] has no key '{key}'{nearest(key, tuple(known))}")
        values[key] = _checked(f"[{name}] {key}", value, str(known[key].type).removesuffix(" | None"))
    for key, one in known.items():
        if key not in values and one.default is one.default_factory:
            raise UsageError(f"[{name}] {key} is missing")
    return kind(**values)


def _checked(where: str, value: Any, kind: str) -> Any:
    if kind.startswith("tuple"):
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"{where} must be a list of texts")
        return tuple(value)
    if kind == "str" and isinstance(value, str):
        return value
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "int" and isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    wanted = {"str": "a text", "bool": "true or false"}.get(kind, "a whole number above 0")
    raise UsageError(f"{where} must be {wanted}")
