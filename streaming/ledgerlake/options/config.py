"""The configuration file: TOML, checked whole before Spark starts; an unknown key names the nearest
known one.

Each section is a dataclass here, except ``[source]`` and ``[tls]``, which are options of the source
too. ``docs/options.md`` lists all keys.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
from dataclasses import MISSING, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ledgerlake.assembly.rules import Limits
from ledgerlake.client.topics import full_name, full_pattern
from ledgerlake.delay.tracker import DelaySettings
from ledgerlake.errors import UsageError
from ledgerlake.options.bounds import Bound, parse_end, parse_start
from ledgerlake.options.declared import (
    Sections,
    declared,
    from_toml,
    nearest,
    option,
    to_spark,
    toml_values,
)
from ledgerlake.options.delay_options import MOST_DUE, DelayOptions
from ledgerlake.options.kinds import (
    CATALOG_SETTINGS,
    COUNT,
    DURATION,
    FLAG,
    LIMIT,
    PATH,
    PATH_OR_STATE,
    PLACEHOLDER,
    SECRET,
    SECRET_FILE,
    STATE,
    TEXT,
    URL,
    choice,
    resolve_plain,
)
from ledgerlake.options.source_options import SourceOptions
from ledgerlake.options.spark_options import SparkConfig
from ledgerlake.options.storage_options import StorageConfig
from ledgerlake.options.table_options import (
    MESSAGES_TABLE,
    RowsConfig,
    TableOptions,
    table_name,
)
from ledgerlake.stored.places import Place, check_table_place, parse_place, parse_template
from ledgerlake.stored.secrets import read_variable
from ledgerlake.stored.stores import ENVIRONMENT, S3, StorageSettings, check_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# The name of the table of rejects, beside the names in `[[tables]]`.
REJECTS_TABLE = "rejects"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*){0,2}")
# The folders of standard input, and of the files and pipes that a process has open.
_OPEN_FILES = re.compile(r"/dev(/fd)?|/proc/.+/fd")

SECTIONS = (
    "source",
    "auth",
    "tls",
    "stream",
    "delta",
    "tables",
    "chunks",
    "delay",
    "deliver",
    "upkeep",
    "iceberg",
    "metrics",
    "spark",
    "storage",
)

# From this similarity on, a key is a misspelt one of its section and not one of another section.
_MISSPELT = 0.75

# Arrow and Parquet count the bytes of a value with 31 bits.
_MOST_MESSAGE_BYTES = 2**31 - 1024

_HOUR_MS = 60 * 60 * 1000
_SHORTEST_INTERVAL_MS = 100


_AUTH_METHODS = ("token", "basic", "oauth2", "tls")


@dataclass(frozen=True, kw_only=True)
class AuthConfig:
    """``[auth]``: the identity that the broker sees. A secret is given as it is, as ``file:PATH``
    or as ``env:NAME``.
    """

    method: str = option(
        TEXT,
        MISSING,
        "`token`, `basic`, `oauth2`, or `tls` for the certificate of `[tls]`.",
        toml="auth.method",
    )
    token: str = option(SECRET, "", "The token.", toml="auth.token", is_secret=True)
    user: str = option(TEXT, "", "The user of `basic`.", toml="auth.user")
    password: str = option(
        SECRET, "", "The password of `basic`.", toml="auth.password", is_secret=True
    )
    issuer_url: str = option(URL, "", "The issuer of OAuth2's tokens.", toml="auth.issuer_url")
    private_key: str = option(
        SECRET_FILE,
        "",
        "OAuth2's file of client id and secret.",
        toml="auth.private_key",
        is_secret=True,
    )
    audience: str = option(TEXT, "", "OAuth2's audience.", toml="auth.audience")
    scope: str = option(TEXT, "", "OAuth2's scope.", toml="auth.scope")

    @property
    def parameters(self) -> str:
        """Return the parameters of the authentication plugin, as that plugin names them, with the
        secrets of variables.
        """
        if self.method == "oauth2":
            oauth2 = {"issuerUrl": self.issuer_url, "privateKey": read_variable(self.private_key)}
            return "secret:" + json.dumps(oauth2 | {"audience": self.audience, "scope": self.scope})
        secret = (
            f"{self.user}:{read_variable(self.password)}"
            if self.method == "basic"
            else read_variable(self.token)
        )
        return f"secret:{secret}"


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """``[stream]``: the name of the query, its trigger and its checkpoint."""

    name: str = option(
        TEXT,
        MISSING,
        "The name of the stream: letters, digits, dot, dash and underscore.",
        toml="stream.name",
    )
    trigger_ms: int = option(
        DURATION,
        1000,
        "The time between two micro-batches; messages that are due do not wait for it.",
        toml="stream.trigger",
        shown_default="`1 second`",
    )
    checkpoint: str = option(
        PATH,
        "",
        "The folder of the checkpoint.",
        toml="stream.checkpoint",
        shown_default="`checkpoints/NAME`",
    )


@dataclass(frozen=True, kw_only=True)
class DeltaConfig(RowsConfig):
    """``[delta]``: where the tables are, and what commits to them."""

    section = "delta"

    path: str = option(
        PATH,
        "",
        "The folder of the table of messages. Beside `[[tables]]`, it is for messages that none of "
        "those takes.",
        toml="delta.path",
        shown_default="required, or `table`, or `[[tables]]`",
    )
    table: str = option(
        TEXT,
        "",
        "The name of the table of messages in Spark's catalog, such as `shop.orders`. With `path`, "
        "the table there gets that name. "
        "Without it the table is where the catalog has it, or makes it.",
        toml="delta.table",
    )
    rejects_table: str = option(
        TEXT,
        "",
        "The name of the table of rejects.",
        toml="delta.rejects_table",
        shown_default="`TABLE_rejects`",
    )
    rejects_path: str = option(
        PATH,
        "",
        "The folder of the table of rejects.",
        toml="delta.rejects_path",
        shown_default="`PATH_rejects`",
    )
    on_mismatch: str = option(
        choice("reject", "stop"),
        "reject",
        "What happens to a message that does not fit the columns of a table of records, or for "
        "which `sql`, `where` or `function` "
        "cannot compute a value: it becomes a row of rejects, or the stream ends with an error. A "
        "message that no table takes, or without the key that its table needs, is a reject either "
        "way.",
        toml="delta.on_mismatch",
    )
    fail_on_second_stream: bool = option(
        FLAG,
        True,
        "Fail if another stream writes messages of the same topics to one of the tables. `false` "
        "takes the topics over; what both streams read comes twice.",
        toml="delta.fail_on_second_stream",
    )
    writer: str = option(
        choice("auto", "arrow", "spark"),
        "auto",
        "`arrow` appends the files that tasks write. `spark` has delta-spark write them again. "
        "`auto` does that only if the table has features that `arrow` cannot honour.",
        toml="delta.writer",
    )


@dataclass(frozen=True, kw_only=True)
class TableConfig(RowsConfig):
    """One of ``[[tables]]``: a table that takes some of the messages. A message is in each table
    that takes it.
    """

    section = "tables"

    path: str = option(
        PATH,
        MISSING,
        "The folder of the table. With `{tenant}`, `{namespace}` or `{topic}` in it, each topic "
        "has a table of its own.",
        toml="tables.path",
    )
    topics_pattern: str = option(
        TEXT,
        "",
        "A pattern of its topics, as in `[source]`.",
        toml="tables.topics_pattern",
        shown_default="all topics",
    )
    schema: str = option(
        TEXT,
        "",
        "The name of the record that its messages have by their schema, with or without its "
        "namespace.",
        toml="tables.schema",
        shown_default="any",
    )
    where: str = option(
        TEXT,
        "",
        "An SQL condition that its messages meet.",
        toml="tables.where",
        shown_default="all messages",
    )


@dataclass(frozen=True, kw_only=True)
class ChunksConfig:
    """``[chunks]``: how many large messages may be incomplete on a topic partition, how large, and
    for how long.
    """

    max_pending: int = option(
        COUNT,
        Limits.max_pending,
        "The most incomplete messages of a topic partition.",
        toml="chunks.max_pending",
    )
    max_pending_bytes: int = option(
        COUNT,
        Limits.max_pending_bytes,
        "The most bytes of their entries.",
        toml="chunks.max_pending_bytes",
    )
    max_message_bytes: int = option(
        COUNT,
        Limits.max_message_bytes,
        "The most bytes of a message.",
        toml="chunks.max_message_bytes",
    )
    expire_after_ms: int = option(
        DURATION,
        _HOUR_MS,
        "How long a message may stay incomplete.",
        toml="chunks.expire_after",
        shown_default="`1 hour`",
    )

    @property
    def limits(self) -> Limits:
        """Return the limits of the assembly."""
        return Limits(
            max_pending=self.max_pending,
            max_pending_bytes=self.max_pending_bytes,
            max_message_bytes=self.max_message_bytes,
            expire_after_ms=self.expire_after_ms,
        )


@dataclass(frozen=True, kw_only=True)
class DelayConfig:
    """``[delay]``: how delayed messages wait. The keys of the index are named as in the broker's
    configuration.
    """

    enabled: bool = option(
        FLAG,
        True,
        "Hold delayed messages back. `false` writes those that come at once, and not to the topic "
        "of `[deliver]`.",
        toml="delay.enabled",
    )
    storage: str = option(
        PATH_OR_STATE,
        STATE,
        "`state` for the query's state store, or a folder for the buckets of the index.",
        toml="delay.storage",
    )
    payloads: str = option(
        choice("kept", "reread"),
        "kept",
        "`reread` keeps positions only, and reads due messages from the topic again. The topic has "
        "to hold every message for longer than its delay.",
        toml="delay.payloads",
    )
    min_indexes_per_bucket: int = option(
        COUNT,
        DelaySettings.min_indexes_per_bucket,
        "The fewest messages of a bucket.",
        toml="delay.min_indexes_per_bucket",
    )
    ledger_step_per_bucket: int = option(
        COUNT,
        DelaySettings.ledger_step_per_bucket,
        "The most ledgers of a bucket.",
        toml="delay.ledger_step_per_bucket",
    )
    time_step_per_segment_ms: int = option(
        DURATION,
        5 * 60 * 1000,
        "The most time between the first and the last message of a segment that has more than 250 "
        "messages.",
        toml="delay.time_step_per_segment",
        shown_default="`5 minutes`",
    )
    max_indexes_per_segment: int = option(
        COUNT,
        DelaySettings.max_indexes_per_segment,
        "The most messages of a segment.",
        toml="delay.max_indexes_per_segment",
    )
    max_buckets: int = option(
        COUNT,
        DelaySettings.max_buckets,
        "The most buckets of a topic partition; if there are more, they are merged.",
        toml="delay.max_buckets",
    )
    max_repetitions_per_second: int = option(
        LIMIT,
        1_000,
        "The most occurrences a second of all messages of a topic partition that repeat. A message "
        "beyond it is a reject when it arrives. `0`: no message may repeat.",
        toml="delay.max_repetitions_per_second",
    )
    max_repeated_bytes_per_second: int = option(
        LIMIT,
        4 * 1024 * 1024,
        "The same of the bytes of these occurrences, as long as they are without compression.",
        toml="delay.max_repeated_bytes_per_second",
    )

    @property
    def of_messages(self) -> DelayOptions:
        """Return the options for ``messages()``, which keeps the index in the state store."""
        settings = DelaySettings(
            self.min_indexes_per_bucket,
            self.ledger_step_per_bucket,
            self.time_step_per_segment_ms,
            self.max_indexes_per_segment,
            self.max_buckets,
        )
        return DelayOptions(
            self.enabled,
            reread=self.payloads == "reread",
            settings=settings,
            max_repetitions_per_s=self.max_repetitions_per_second,
            max_repeated_bytes_per_s=self.max_repeated_bytes_per_second,
        )


@dataclass(frozen=True, kw_only=True)
class DeliverConfig:
    """``[deliver]``: a topic that gets due messages too, beside the table."""

    topic: str = option(TEXT, MISSING, "The topic that gets due messages.", toml="deliver.topic")
    starting: str = option(
        choice("earliest", "latest"),
        "earliest",
        "`earliest` sends all messages that wait when `[deliver]` is first used, `latest` those "
        "published from then on. Another topic goes on where the one before it was.",
        toml="deliver.starting",
    )


@dataclass(frozen=True, kw_only=True)
class UpkeepConfig:
    """``[upkeep]``: how the tables are kept small while the pipeline runs, see
    ``pipeline.upkeep``.
    """

    enabled: bool = option(
        FLAG,
        True,
        "Merge small files of the tables, and remove unused ones.",
        toml="upkeep.enabled",
    )
    interval_ms: int = option(
        DURATION,
        60_000,
        "The time between two looks at the tables.",
        toml="upkeep.interval",
        shown_default="`1 minute`",
    )
    busy_percent: int = option(
        COUNT, 10, "For how much of the time it is at work, in percent.", toml="upkeep.busy_percent"
    )
    retention_ms: int = option(
        DURATION,
        7 * 24 * _HOUR_MS,
        "How long unused files are kept, at least; longer if a property of the table says so. "
        "Older versions of the tables cannot be "
        "read. A table that the pipeline creates keeps its log for as long.",
        toml="upkeep.retention",
        shown_default="`7 days`",
    )

    @property
    def retention_hours(self) -> int:
        """Return the retention in whole hours."""
        return -(-self.retention_ms // _HOUR_MS)

    @property
    def table_properties(self) -> dict[str, str]:
        """Return the properties of a new table."""
        interval = f"interval {self.retention_hours} hours"
        return {
            "delta.logRetentionDuration": interval,
            "delta.deletedFileRetentionDuration": interval,
        }


@dataclass(frozen=True, kw_only=True)
class IcebergConfig:
    """``[iceberg]``: the catalog of Iceberg tables that follow the tables, see
    ``table.iceberg_table``.
    """

    catalog: str = option(
        TEXT,
        "default",
        "The name of the catalog. If `pyiceberg` has a configuration of its own for that name, "
        "that counts too.",
        toml="iceberg.catalog",
    )
    settings: tuple[tuple[str, str], ...] = option(
        CATALOG_SETTINGS,
        (),
        "Properties of the catalog, as `pyiceberg` takes them: `type`, `uri`, `warehouse` and so "
        "on. A secret may be `env:NAME`.",
        toml="iceberg.settings",
        is_secret=True,
        shown_default="none",
    )
    interval_ms: int = option(
        DURATION,
        60_000,
        "The time between two snapshots, if the table has something new.",
        toml="iceberg.interval",
        shown_default="`1 minute`",
    )
    retention_ms: int = option(
        DURATION,
        24 * _HOUR_MS,
        "How long a snapshot can be read after another one has replaced it.",
        toml="iceberg.retention",
        shown_default="`1 day`",
    )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """``[metrics]``: where Prometheus and the status page are served, see ``monitor.metrics``."""

    port: int = option(
        COUNT,
        9464,
        "The port on which Prometheus finds `/metrics`, and a browser the status page.",
        toml="metrics.port",
    )
    address: str = option(
        TEXT,
        "127.0.0.1",
        "The address to listen on; `0.0.0.0` for all of this machine. Other machines need the "
        "token.",
        toml="metrics.address",
    )
    token: str = option(
        SECRET,
        "",
        "What a request must bring, as a bearer token or as the password of any user: `file:PATH`, "
        "`env:NAME`, or the token itself. Required unless the address is of this machine alone.",
        toml="metrics.token",
        is_secret=True,
        shown_default="none",
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole, checked configuration.

    Args:
        source: the read; without a start if ``starting`` is ``cursor``, which only the pipeline can
            resolve.
        starting: where the stream's first run begins.
    """

    source: SourceOptions
    starting: Bound
    stream: StreamConfig
    delta: DeltaConfig
    chunks: ChunksConfig
    delay: DelayConfig
    deliver: DeliverConfig | None
    metrics: MetricsConfig | None
    tables: tuple[TableConfig, ...] = ()
    upkeep: UpkeepConfig = field(default_factory=UpkeepConfig)
    iceberg: IcebergConfig = field(default_factory=IcebergConfig)
    spark: SparkConfig = field(default_factory=SparkConfig)
    storage: StorageSettings = ENVIRONMENT

    @property
    def pipeline_delay(self) -> DelayOptions:
        """Return the options of the pipeline's delayed messages: also the folder of the index."""
        folder = (
            None
            if self.delay.storage == STATE
            else self._place(self.delay.storage, "[delay] storage")
        )
        return replace(self.delay.of_messages, folder=folder, most_due=MOST_DUE)

    @property
    def plain_text_warning(self) -> str:
        """Return a warning that messages which are encrypted end to end are published decrypted;
        empty if none are.
        """
        crypto = self.source.client.crypto
        if self.deliver is None or not (crypto.key_folder or crypto.key_reader):
            return ""
        return (
            f"due messages that the keys of [source] open are published to {self.deliver.topic} in "
            "plain text; protect that topic as you protect the keys, or leave out [deliver]"
        )

    @property
    def messages_place(self) -> Place:
        """Return the place of the table of messages."""
        return self._place(self.delta.path, "[delta] path")

    @property
    def table_options(self) -> tuple[TableOptions, ...]:
        """Return the tables of messages; the one of ``[delta]``, if there is one, is the last."""
        tables = [self._table_options(table) for table in self.tables]
        if self.delta.path or not tables:
            tables.append(
                TableOptions(
                    MESSAGES_TABLE,
                    "[delta]",
                    self.messages_place,
                    is_default=bool(tables),
                    **self.delta.of_rows,
                )
            )
        return tuple(tables)

    @property
    def main_table(self) -> str:
        """Return the name of the table that is committed last: that of ``[delta]``, or else the
        first one that has a fixed path.
        """
        *others, last = self.table_options
        if last.name == MESSAGES_TABLE:
            return MESSAGES_TABLE
        return next(table.name for table in (*others, last) if not table.is_template)

    def _table_options(self, table: TableConfig) -> TableOptions:
        section = f"[[tables]] {table.path}"
        return TableOptions(
            table_name(table.path),
            section,
            parse_template(table.path, f"{section} path", self.storage),
            topics_pattern=full_pattern(table.topics_pattern) if table.topics_pattern else "",
            schema=table.schema,
            where=table.where,
            **table.of_rows,
        )

    @property
    def rejects_place(self) -> Place:
        """Return the place of the table of rejects."""
        return self._place(self.delta.rejects_path, "[delta] rejects_path")

    @property
    def checkpoint_place(self) -> Place:
        """Return the place of the checkpoint."""
        return self._place(self.stream.checkpoint, "[stream] checkpoint")

    @property
    def outbox_place(self) -> Place | None:
        """Return where due messages wait to be sent to their topic."""
        return self.checkpoint_place / "ledgerlake" / "outbox" if self.deliver else None

    @property
    def subscription(self) -> str:
        """Return the name of the durable cursor."""
        return f"ledgerlake-{self.stream.name}"

    def _place(self, text: str, where: str) -> Place:
        placeholder = PLACEHOLDER.search(text)
        if placeholder is not None:
            raise UsageError(
                f"{where} is '{text}', and only the path of one of [[tables]] takes a placeholder "
                f"such as {placeholder[0]}; write one folder here, and the tables of single topics "
                "as [[tables]]"
            )
        return parse_place(text, where, self.storage)

    def with_table_paths(self, messages: str, rejects: str) -> Config:
        """Return the same with the folders of the tables.

        Raises:
            UsageError: one lies in another folder of the configuration, or cannot be one of a
            table.
        """
        config = replace(self, delta=replace(self.delta, path=messages, rejects_path=rejects))
        _check_table_paths(config)
        _check_apart(config)
        return config

    def source_options(self) -> dict[str, str]:
        """Return the options of the read by Spark's names."""
        return to_spark(self.source)


# What ``[tls]`` sets are options of the source too.
SECTION_CLASSES = (
    SourceOptions,
    AuthConfig,
    StreamConfig,
    DeltaConfig,
    TableConfig,
    ChunksConfig,
    DelayConfig,
    DeliverConfig,
    UpkeepConfig,
    IcebergConfig,
    MetricsConfig,
    SparkConfig,
    StorageConfig,
)


def load_config(path: str | Path) -> Config:
    """Read and check a configuration file.

    Raises:
        UsageError: the file cannot be read, is not TOML, or says something wrong; the message names
            file and key.
    """
    return read_config(_content(path), str(path))


def load_config_to_forget(path: str | Path) -> Config:
    """Read and check a configuration file of a stream whose missing checkpoint is to mean that it
    was removed.

    Raises:
        UsageError: as ``load_config``; or the path is a link or a pipe, and another path of the
            file gives another checkpoint.
    """
    content, real_path = _content(path), os.path.realpath(path)
    config = read_config(content, str(path))
    place = config.checkpoint_place
    by_real_path = _parse(content, str(path), os.path.dirname(real_path)).checkpoint_place
    if os.path.realpath(place.root) != os.path.realpath(by_real_path.root):
        raise UsageError(
            f"{path} is a link or a pipe, so its relative [stream] checkpoint is {place} now, and "
            "may be in another folder when the stream runs; write its absolute path"
        )
    return config


def _content(path: str | Path) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        hint = (
            "check the path"
            if str(path).endswith(".toml")
            else "check the path: it is that of a TOML file, and no topic"
        )
        raise UsageError(
            f"the configuration {path} cannot be read ({error.strerror}); {hint}"
        ) from None


def read_config(content: bytes, path: str) -> Config:
    """Check a configuration file's content.

    Args:
        path: where it is, or will be: relative paths begin in its folder.

    Raises:
        UsageError: as ``load_config``.
    """
    return _parse(content, path, folder_of(path))


def _parse(content: bytes, path: str, folder: str) -> Config:
    try:
        data = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the configuration {path} is not UTF-8 from byte {error.start} on; save it as UTF-8"
        ) from None
    except (ValueError, RecursionError) as error:
        # Beside TOML's own error, which is a ValueError: a number without end, an array in an array
        # in an array.
        hint = "; texts stand in quotes" if str(error).startswith("Invalid value") else ""
        raise UsageError(f"the configuration {path} is not TOML: {error}{hint}") from None
    try:
        return parse_config(data, folder)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}") from None


def folder_of(path: str) -> str:
    """Return the folder in which the relative paths of a configuration file begin. It is that of a
    link to the file, and not of what the link leads to: a cluster makes a new folder there with
    each change. A pipe, or standard input, has no folder of its own.
    """
    folder = os.path.dirname(os.path.abspath(path))
    return "." if _OPEN_FILES.fullmatch(folder) else folder


def parse_config(data: dict[str, Any], folder: str | Path = ".") -> Config:
    """Check configuration data.

    Args:
        folder: in which relative paths begin; by default this process's working folder.

    Raises:
        UsageError: a key is unknown, missing, or has a value that it cannot have.
    """
    for name in data:
        if name not in SECTIONS:
            raise UsageError(f"there is no section [{name}]{nearest(name, SECTIONS)}")
    _check_sections_of_keys(data)
    sections = Sections(data, str(folder))
    source, starting = _source(sections)
    stream = _stream(sections)
    tables = _tables(sections)
    delta = _delta(sections, tables)
    delay = from_toml(DelayConfig, "delay", sections)
    if source.message_payload_processor and delay.enabled and delay.payloads == "reread":
        raise UsageError(
            '[delay] payloads = "reread" is not for [source] message_payload_processor: the topic '
            "has no messages as the function returns them; remove payloads"
        )
    config = Config(
        source=source,
        starting=starting,
        stream=stream,
        delta=delta,
        chunks=_chunks(sections),
        delay=delay,
        deliver=_deliver(sections, source) if "deliver" in data else None,
        metrics=_metrics(sections) if "metrics" in data else None,
        tables=tables,
        upkeep=_upkeep(sections),
        iceberg=_iceberg(sections),
        spark=from_toml(SparkConfig, "spark", sections),
        storage=from_toml(StorageConfig, "storage", sections).settings,
    )
    for options in config.table_options:
        options.check()
    _check_iceberg(config)
    _check_table_paths(config)
    _check_apart(config)
    check_settings(
        config.storage,
        {place.store for place in places_of(config).values() if place.store is not None},
    )
    return config


def _check_iceberg(config: Config) -> None:
    """Check the Iceberg tables.

    Raises:
        UsageError: two tables have one, or the settings lack the type of the catalog.
    """
    names = [table.iceberg_table for table in config.table_options if table.iceberg_table]
    if len(set(names)) < len(names):
        raise UsageError(
            f"two tables have the iceberg_table {max(names, key=names.count)}; name another one"
        )
    settings = dict(config.iceberg.settings)
    if names and settings and "type" not in settings:
        raise UsageError(
            '[iceberg] settings lack the type of the catalog; write for example type = "sql"'
        )
    if "name" in settings:
        raise UsageError("[iceberg] settings take no name; write [iceberg] catalog")


def _check_sections_of_keys(data: dict[str, Any]) -> None:
    """Check that no key of one section is in another one. A key that looks like a misspelt one of
    its own section is left to the parser of that section.

    Raises:
        UsageError: one is.
    """
    pairs = {
        (str(option.section), option.key)
        for kind in SECTION_CLASSES
        for _, option in declared(kind)
        if option.key
    }
    for section, entries in data.items():
        own = [key for name, key in pairs if name == section]
        for key in entries if isinstance(entries, dict) else ():
            others = sorted(name for name, other in pairs if other == key)
            if (
                others
                and section not in others
                and not get_close_matches(key, own, cutoff=_MISSPELT)
            ):
                raise UsageError(
                    f"[{section}] has no key '{key}'; it belongs to [{'] or ['.join(others)}]"
                )


def _source(sections: Sections) -> tuple[SourceOptions, Bound]:
    """``[source]``, ``[auth]`` and ``[tls]``, and where the first run begins."""
    values = toml_values(SourceOptions, "source", sections) | toml_values(
        SourceOptions, "tls", sections
    )
    if bool(values.get("topic_names")) == bool(values.get("topics_pattern")):
        raise UsageError("[source] needs topics or topics_pattern, and not both")
    values["starting_offsets"] = values.get("starting_offsets", "earliest")
    starting = parse_start(values["starting_offsets"], "[source] starting")
    parse_end(values.get("ending_offsets", "latest"), "[source] ending")
    if starting == "cursor":
        del values["starting_offsets"]
    if "auth" in sections.data:
        auth = from_toml(AuthConfig, "auth", sections)
        _check_auth(auth)
        values |= {"auth_plugin": auth.method, "auth_params": auth.parameters}
    return SourceOptions(**values), starting


def _stream(sections: Sections) -> StreamConfig:
    stream = from_toml(StreamConfig, "stream", sections)
    if not _NAME.fullmatch(stream.name):
        raise UsageError(
            f"[stream] name '{stream.name}' may hold letters, digits, dot, dash and underscore only"
        )
    return replace(
        stream,
        checkpoint=stream.checkpoint
        or resolve_plain(f"checkpoints/{stream.name}", sections.folder),
    )


def _tables(sections: Sections) -> tuple[TableConfig, ...]:
    entries = sections.data.get("tables", [])
    if not isinstance(entries, list):
        raise UsageError("write [[tables]] with two brackets, once for each table")
    tables = []
    for number, entry in enumerate(entries, start=1):
        try:
            of_table = replace(sections, data={"tables": entry})
            tables.append(from_toml(TableConfig, "tables", of_table))
        except UsageError as error:
            raise UsageError(
                f"{error.message.replace('[tables]', '[[tables]]')} (table {number})"
            ) from None
    return tuple(tables)


def _check_has_table(given: dict[str, Any]) -> None:
    """Check what ``[delta]`` says beside ``[[tables]]``: without a path it has no table.

    Args:
        given: what it says, by field.

    Raises:
        UsageError: it has an option of a table.
    """
    of_tables = {said.key for _, said in declared(TableConfig)}
    for of_delta, said in declared(DeltaConfig):
        if said.key in of_tables and of_delta.name in given and "path" not in given:
            raise UsageError(
                f"[delta] {said.key} is for the table at [delta] path, which is missing; set path, "
                f"or write {said.key} in one of [[tables]]"
            )


def _delta(sections: Sections, tables: tuple[TableConfig, ...]) -> DeltaConfig:
    given = toml_values(DeltaConfig, "delta", sections)
    delta = DeltaConfig(**given)
    if tables:
        if delta.table:
            raise UsageError("[delta] table is not for a pipeline with [[tables]]; use path")
        if not delta.path and not delta.rejects_path:
            raise UsageError("[delta] needs rejects_path, or path")
        if not delta.path and all("{" in table.path for table in tables):
            raise UsageError("[delta] needs path, or one of [[tables]] a path without placeholders")
        if delta.writer == "spark":
            raise UsageError(
                '[delta] writer = "spark" is not for a pipeline with [[tables]]; remove writer'
            )
        _check_has_table(given)
        delta = replace(delta, writer="arrow")
    elif not delta.path and not delta.table:
        raise UsageError("[delta] needs path, or table")
    if (delta.shape == "record" or delta.partition_by or delta.mode == "latest") and not delta.path:
        raise UsageError(
            '[delta] shape = "record", mode = "latest" and partition_by need path: the pipeline '
            "itself makes such a table"
        )
    if (
        delta.shape == "record" or delta.mode == "latest" or delta.cluster_by or delta.partition_by
    ) and delta.writer == "spark":
        raise UsageError(
            '[delta] shape = "record", mode = "latest", cluster_by and partition_by are not for '
            'writer = "spark"; '
            "remove writer"
        )
    if delta.rejects_path and not delta.path and not tables:
        raise UsageError(
            "[delta] rejects_path needs path; without it, name the table of rejects by "
            "rejects_table"
        )
    if delta.rejects_table and not delta.table:
        raise UsageError("[delta] rejects_table needs table")
    for key, name in (("table", delta.table), ("rejects_table", delta.rejects_table)):
        if name and not _TABLE_NAME.fullmatch(name):
            raise UsageError(
                f"[delta] {key} '{name}' is not TABLE, SCHEMA.TABLE or CATALOG.SCHEMA.TABLE, of "
                "letters, digits and _"
            )
    if delta.table:
        delta = replace(delta, rejects_table=delta.rejects_table or f"{delta.table}_rejects")
    if delta.path:
        delta = replace(
            delta, rejects_path=delta.rejects_path or delta.path.rstrip("/") + "_rejects"
        )
    return delta


def _chunks(sections: Sections) -> ChunksConfig:
    chunks = from_toml(ChunksConfig, "chunks", sections)
    if chunks.max_message_bytes > _MOST_MESSAGE_BYTES:
        raise UsageError(
            f"[chunks] max_message_bytes is more than {_MOST_MESSAGE_BYTES}, the most that a "
            "message can have"
        )
    return chunks


def _deliver(sections: Sections, source: SourceOptions) -> DeliverConfig:
    deliver = from_toml(DeliverConfig, "deliver", sections)
    deliver = replace(deliver, topic=full_name(deliver.topic))
    if source.topics.overlaps(deliver.topic):
        raise UsageError(
            f"[deliver] topic {deliver.topic} is one of those that are read, as a whole or in "
            "part; name another"
        )
    return deliver


def _upkeep(sections: Sections) -> UpkeepConfig:
    upkeep = from_toml(UpkeepConfig, "upkeep", sections)
    if upkeep.busy_percent > 100:
        raise UsageError("[upkeep] busy_percent is above 100")
    if not _SHORTEST_INTERVAL_MS <= upkeep.interval_ms <= 24 * _HOUR_MS:
        raise UsageError("[upkeep] interval is less than 100 milliseconds, or more than a day")
    if upkeep.retention_ms < _HOUR_MS:
        raise UsageError(
            "[upkeep] retention is less than an hour, and files of a micro-batch in work could be "
            "older; write 1 hour or more"
        )
    return upkeep


def _iceberg(sections: Sections) -> IcebergConfig:
    iceberg = from_toml(IcebergConfig, "iceberg", sections)
    if iceberg.interval_ms < _SHORTEST_INTERVAL_MS:
        raise UsageError("[iceberg] interval is less than 100 milliseconds")
    return iceberg


def _metrics(sections: Sections) -> MetricsConfig:
    metrics = from_toml(MetricsConfig, "metrics", sections)
    if metrics.port > 65535:
        raise UsageError("[metrics] port is above 65535")
    check_reachable_by(metrics.address, metrics.token)
    return metrics


def _check_auth(auth: AuthConfig) -> None:
    if auth.method not in _AUTH_METHODS and "." not in auth.method:
        # An unknown value may be a secret in the wrong place, so the error does not show it.
        raise UsageError(f"[auth] method is not known{nearest(auth.method, _AUTH_METHODS)}")
    if auth.token.startswith(("/", "./", "../", "~/")):
        raise UsageError("[auth] token is a path; write file:PATH for a token in a file")


def check_reachable_by(address: str, token: str) -> None:
    """Check that metrics need a token if other machines can ask for them.

    Raises:
        UsageError: they need none.
    """
    if not token and not is_of_this_machine(address):
        raise UsageError(
            "other machines can reach the [metrics] address; set [metrics] token, or leave the "
            "address out"
        )


def is_of_this_machine(address: str) -> bool:
    """Return whether an address or a host's name is of this machine alone."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address.lower() == "localhost"


def _check_table_paths(config: Config) -> None:
    """Check the paths of the tables that are known by now.

    Raises:
        UsageError: one cannot be the folder of a table.
    """
    for table in _located_tables(config):
        check_table_place(table.place, f"{table.section} path")
    if config.delta.rejects_path:
        check_table_place(config.rejects_place, "[delta] rejects_path")


def _located_tables(config: Config) -> tuple[TableOptions, ...]:
    """Return the tables of messages whose paths no catalog has still to tell."""
    return config.table_options if config.delta.path or config.tables else ()


def _check_apart(config: Config) -> None:
    """Check that no folder lies in another: what removes or replaces one would take the other with
    it.

    Two layouts are fine. Spark and Delta leave folders of a table alone whose names begin with
    ``_`` or ``.``, so a checkpoint may be there; and what waits belongs to the checkpoint, so it
    may be kept in it.

    Raises:
        UsageError: one does, or is no place.
    """
    places = {name: _parts(place) for name, place in places_of(config).items()}
    if config.checkpoint_place.store not in (None, S3):
        raise UsageError(
            f"[stream] checkpoint cannot be '{config.stream.checkpoint}'; it has to be on a disk, "
            "on a volume or in S3"
        )
    for outer, outer_place in places.items():
        for inner, place in places.items():
            if outer == inner or place[: len(outer_place)] != outer_place:
                continue
            if place == outer_place:
                raise UsageError(f"{outer} and {inner} are the same folder")
            below = place[len(outer_place)]
            if (
                outer.startswith(("[delta]", "[[tables]]"))
                and below.startswith(("_", "."))
                and below != "_delta_log"
            ):
                continue
            if (outer, inner) != ("[stream] checkpoint", "[delay] storage"):
                raise UsageError(f"{inner} lies in the folder of {outer}; choose one beside it")


def check_stores(config: Config) -> None:
    """Check that the object stores of a configuration answer.

    Raises:
        SetupError: one does not.
    """
    for place in {place.store: place for place in places_of(config).values()}.values():
        place.check_answers()


def places_of(config: Config) -> dict[str, Place]:
    """Return the folders of a configuration by the keys that name them, without the folders that a
    catalog has still to tell, and without the folders of topics.

    Raises:
        UsageError: two tables have one path.
    """
    places: dict[str, Place] = {}
    names: set[str] = set()
    for table in _located_tables(config):
        if table.name in names:
            raise UsageError(f"{table.section} is there twice; a message is in a table once")
        names.add(table.name)
        if not table.is_template:
            places[f"{table.section} path"] = table.place
    if config.delta.rejects_path:
        places["[delta] rejects_path"] = config.rejects_place
    places["[stream] checkpoint"] = config.checkpoint_place
    folder = config.pipeline_delay.folder
    return places if folder is None else places | {"[delay] storage": folder}


def is_inside(place: Place, outer: Place) -> bool:
    """Return whether a place is in the folder of another one, or is that folder."""
    outer_parts = _parts(outer)
    return _parts(place)[: len(outer_parts)] == outer_parts


def _parts(place: Place) -> tuple[str, ...]:
    """Return the parts of a path or URI, from the root on."""
    if not place.is_local:
        return tuple(part for part in place.uri.split("/") if part)
    # Links count as the folders that they lead to.
    return Path(os.path.realpath(place.root)).parts
