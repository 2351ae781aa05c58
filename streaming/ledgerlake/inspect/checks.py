"""Checks of everything that a start of a pipeline needs, one finding for each: what ``ledgerlake
check`` prints. No Spark is started, and nothing is changed, but for a subscription that is held for
a moment, a file that is made and removed, and Delta's jars, which the first run would fetch.

Whatever a start refuses is found by the start's own functions: ``find_java``, ``delta_jars``,
``find_topic_partitions``, ``Checkpoint.check_stream``, ``Tables.examine``, ``Start.examine``,
``RecordSchemas.learn``, ``check_port``. So a new rule of the start is a new rule here. The other
checks are of what would make rejects, late messages or a failed micro-batch later.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from packaging.requirements import Requirement

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.topics import split_partition
from ledgerlake.decode.crypto import open_entry
from ledgerlake.decode.data_keys import unreadable_keys
from ledgerlake.errors import ConsumerBusyError, LedgerlakeError, SetupError, TopicNotFoundError
from ledgerlake.monitor.progress import counted
from ledgerlake.options.config import check_stores, load_config
from ledgerlake.options.table_topics import routing_warnings, tables_without_messages
from ledgerlake.runtime.java import find_java, java_version
from ledgerlake.runtime.plugins import load
from ledgerlake.stored.secrets import said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sized

    from ledgerlake.inspect.recent_entries import LastEntries
    from ledgerlake.options.config import Config
    from ledgerlake.pipeline.components import Components
    from ledgerlake.pipeline.tables import MessagesTable
    from ledgerlake.stored.places import Place

# A person waits for the answer.
_GIVE_UP_AFTER_MS = 5000

# So many topic partitions are looked into, at so many entries of each.
_MOST_PARTITIONS = 100
_MOST_ENTRIES = 20

# So many tables of records are told with their columns.
_MOST_TABLES = 20

# The clocks of two machines that are set by NTP differ by less.
_CLOCK_MOST_MS = 1000

# What a micro-batch needs at least, and what a day needs.
_LEAST_FREE_BYTES = 100 * 1000 * 1000
_FEW_FREE_BYTES = 1000 * 1000 * 1000

_TRIED_JAVA = (17, 21)
_UPPER_BOUNDS = ("<", "<=", "==")

State = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Finding:
    """What a check found: a sentence, which says what to do if there is a problem."""

    check: str
    state: State
    text: str


def check(path: str) -> Iterator[Finding]:
    """Yield the findings on a configuration file, in the order of a start."""
    yield _packages()
    try:
        config = load_config(path)
    except LedgerlakeError as error:
        yield Finding("configuration", "problem", error.message)
        return
    yield Finding("configuration", "ok", path)
    yield from check_config(config)


def check_config(config: Config) -> Iterator[Finding]:
    """Yield the findings on a configuration."""
    yield _found("java", _java)
    yield _found("jars", _jars)
    if config.spark.needs_bundle or config.checkpoint_place.store is not None:
        yield _found("spark", lambda: _spark(config))
    functions = _functions(config)
    if functions:
        yield _found("functions", lambda: _load(functions))
    yield from _disks(config)
    if (
        any(table.iceberg_table for table in config.table_options)
        if config.delta.path or config.tables
        else False
    ):
        yield _found("iceberg", lambda: _iceberg(config))
    patient = replace(config.source, retry_timeout_ms=_GIVE_UP_AFTER_MS)
    of_broker = _Broker(replace(config, source=patient))
    yield from of_broker.check()
    if config.metrics is not None:
        # A run of the stream has the port.
        of_run = Finding("metrics", "skipped", "see checkpoint") if of_broker.is_running else None
        yield of_run or _found("metrics", lambda: _metrics_port(config))


class _Broker:
    """The checks that need a broker; what one of them finds, later ones use. ``is_running`` says
    whether the stream runs now.
    """

    def __init__(self, config: Config) -> None:
        self.is_running = False
        self._config = config
        self._names: list[str] = []
        self._last: list[LastEntries] = []

    def check(self) -> Iterator[Finding]:
        """Yield the findings."""
        with _closing(Cluster(replace(self._config.source.client, give_up_after_s=0.0))) as cluster:
            broker = _found("broker", lambda: self._broker(cluster))
            yield broker
            topics = _after(broker, "topics", lambda: self._topics(cluster))
            yield topics
        with _closing(Cluster(self._config.source.client)) as cluster:
            reading = _after(topics, "reading", lambda: self._reading(cluster))
            yield reading
            yield _after(reading, "broker metadata", self._broker_metadata)
            yield _after(reading, "clock", lambda: clock(self._last, int(time.time() * 1000)))
            yield _found("decryption", lambda: self._decryption(reading))
            if self._config.deliver is not None:
                yield _after(broker, "deliver", lambda: self._deliver(cluster))
        yield from self._stream(reading)

    def _broker(self, cluster: Cluster) -> str:
        cluster.connect()
        source = self._config.source
        over = ", over TLS" if source.service_url.startswith("pulsar+ssl") else ""
        method = source.client.authentication.method
        return f"{source.service_url} answers{over}" + (
            f", and accepts the {method}" if method != "none" else ""
        )

    def _topics(self, cluster: Cluster) -> str | Finding:
        from ledgerlake.client.missing_topics import find_topic_partitions

        selection = self._config.source.topics
        self._names = find_topic_partitions(cluster, selection)
        if not self._names:
            text = (
                f"{selection.nothing_there}; a run waits for the first one, and with "
                "--once it reads nothing"
            )
            return Finding("topics", "warning", text)
        topics = sorted({split_partition(name)[0] for name in self._names})
        return f"{', '.join(topics[:3])}{' ...' if len(topics) > 3 else ''} ({_count(self._names)})"

    def _reading(self, cluster: Cluster) -> str | Finding:
        from ledgerlake.inspect.recent_entries import last_entries

        refused: dict[str, LedgerlakeError] = {}
        for name in self._names[:_MOST_PARTITIONS]:
            try:
                self._last.append(last_entries(cluster, name, _MOST_ENTRIES))
            except LedgerlakeError as error:
                if not self._is_unread(name):
                    raise
                refused[name] = error
        if refused and not self._last:
            raise min(refused.items())[1]
        text = f"{_count(self._last)} can be read"
        return Finding("reading", "warning", f"{text}; {_left_out(refused)}") if refused else text

    def _is_unread(self, name: str) -> bool:
        """Return whether a start leaves a topic partition out that the broker refuses."""
        from ledgerlake.pipeline.checkpoint import Checkpoint
        from ledgerlake.pipeline.left_topics import unread_topic_partitions

        checkpoint = Checkpoint(self._config.checkpoint_place)
        # Another check tells of a checkpoint that cannot be read.
        with suppress(LedgerlakeError):
            return name in unread_topic_partitions(checkpoint, [name])
        return False

    def _broker_metadata(self) -> str | Finding:
        if not any(last.entries for last in self._last):
            return Finding("broker metadata", "skipped", "no topic has a message")
        without = next((last for last in self._last if last.without_broker_metadata), None)
        if without is None:
            return "entries have the broker's timestamp, by which rows are ordered"
        return Finding(
            "broker metadata",
            "problem" if self._config.source.require_broker_metadata else "warning",
            f"entries of {without.topic_partition} have no broker timestamp, so rows are ordered "
            "by publish_time; set brokerEntryMetadataInterceptors and "
            "exposingBrokerEntryMetadataToClientEnabled in the broker's configuration",
        )

    def _decryption(self, reading: Finding) -> str | Finding:
        crypto = self._config.source.client.crypto
        if crypto.key_folder is not None:
            unreadable = unreadable_keys(Path(crypto.key_folder))
            if unreadable:
                raise SetupError(f"{unreadable}; see [source] crypto_key_folder")
        if reading.state in _UNUSABLE:
            return Finding("decryption", "skipped", "see reading")
        encrypted = [(last, last.encrypted) for last in self._last if last.encrypted is not None]
        for last, entry in encrypted:
            assert entry is not None
            try:
                open_entry(entry, crypto)
            except LedgerlakeError:
                names = ", ".join(sorted({str(key.key) for key in entry.metadata.encryption_keys}))
                return Finding(
                    "decryption",
                    "warning" if crypto.failure_action == "pass" else "problem",
                    f"messages of {last.topic_partition} are encrypted for {names}, and no key "
                    "here opens them; put its private key as "
                    "NAME.pem into the folder of [source] crypto_key_folder",
                )
        return (
            "encrypted messages can be opened"
            if encrypted
            else "the last messages are not encrypted"
        )

    def _deliver(self, cluster: Cluster) -> str | Finding:
        from ledgerlake.client.producer import check_may_send

        assert self._config.deliver is not None
        topic = self._config.deliver.topic
        try:
            check_may_send(cluster, topic)
        except TopicNotFoundError:
            text = f"{topic} does not exist; create it, unless the broker creates topics by itself"
            return Finding("deliver", "warning", text)
        if self._config.plain_text_warning:
            return Finding("deliver", "warning", self._config.plain_text_warning)
        return f"messages can be sent to {topic}"

    def _stream(self, reading: Finding) -> Iterator[Finding]:
        """Yield the findings about checkpoint and tables."""
        config = self._config
        if config.delta.table and not config.delta.path:
            for name in ("tables", "checkpoint", "schema"):
                yield Finding(
                    name,
                    "skipped",
                    f"the catalog has the place of {config.delta.table}, and needs Spark",
                )
            return
        if importlib.util.find_spec("pyspark") is None:
            for name in ("tables", "checkpoint", "schema"):
                yield Finding(name, "skipped", "PySpark is missing")
            return
        from ledgerlake.pipeline.components import make_components

        try:
            check_stores(config)
            components = make_components(config)
        except LedgerlakeError as error:
            yield Finding("tables", "problem", error.message)
            return
        try:
            yield from self._pipeline(reading, components)
        finally:
            components.cursors.close()
            components.cluster.close()

    def _pipeline(self, reading: Finding, components: Components) -> Iterator[Finding]:
        from ledgerlake.pipeline.left_topics import known_topic_partitions, left_topics
        from ledgerlake.table.spark_table import SparkTable

        topics = sorted({split_partition(name)[0] for name in self._names})
        config, checkpoint, tables = self._config, components.checkpoint, components.tables
        existing = []

        def examine_tables() -> Finding:
            names = [*self._names, *known_topic_partitions(checkpoint)]
            tables.add_for_topics(sorted({split_partition(name)[0] for name in names}))
            existing.extend(tables.examine())
            for table in tables.by_name.values():
                if isinstance(table, SparkTable):
                    _check_connector(config, table.path)
            new = [str(table.path) for table in tables.by_name.values() if table not in existing]
            tables.check_writers(self._names, existing)
            fit = [f"{len(existing)} are there and fit"] if existing else []
            said = [*fit, *([f"to be made: {', '.join(new)}"] if new else [])]
            if tables.obstacles:
                without = counted(len(tables.obstacles), "topic has", "topics have")
                said.append(
                    f"{without} no table, and the messages are rejects: {tables.obstacles[0]}"
                )
            return Finding("tables", "warning" if tables.obstacles else "ok", "; ".join(said))

        def examine_start() -> str | Finding:
            checkpoint.check_stream(config.stream.name)
            checkpoint.check_writable()
            if config.pipeline_delay.folder is not None:
                _check_writable(config.pipeline_delay.folder)
            if before.state in _UNUSABLE:
                return Finding("checkpoint", "skipped", f"see {before.check}")
            try:
                refused = components.start.examine(self._names, existing, components.outbox)
            except ConsumerBusyError:
                name = config.stream.name
                if checkpoint.start() is None:
                    raise SetupError(
                        f"a stream of the name {name} runs now, with another checkpoint than "
                        f"{checkpoint.folder}; set another [stream] name"
                    ) from None
                self.is_running = True
                return Finding(
                    "checkpoint",
                    "warning",
                    f"another consumer holds the subscription of the stream {name}, so it runs "
                    "now, or ended a moment ago; a second "
                    "run would wait for its end, and what a start compares was not looked at",
                )
            left = left_topics(config, checkpoint)
            if left:
                return Finding(
                    "checkpoint",
                    "warning",
                    f"the checkpoint {checkpoint.folder} has read {min(left)}, which the "
                    "configuration does not name any more; its delayed messages still come; for "
                    "another stream, set another [stream] name, checkpoint and table",
                )
            last = checkpoint.log.last_committed()
            at = (
                "is new"
                if checkpoint.start() is None
                else f"goes on after batch {'none' if last is None else last}"
            )
            text = (
                f"{checkpoint.folder} {at}, and no other process runs the stream "
                f"{config.stream.name}"
            )
            if refused:
                return Finding("checkpoint", "warning", f"{text}; {_left_out(refused)}")
            return text

        def learn_schemas() -> str:
            components.schemas.learn(topics)
            for topic, why in components.schemas.misfits.items():
                raise SetupError(f"messages of {topic} would be rejects: {why}")
            return "values are bytes, which every schema fits"

        tables_fit = _found("tables", examine_tables)
        yield tables_fit
        before = reading if reading.state in _UNUSABLE else tables_fit
        yield _found("checkpoint", examine_start)
        learned = _after(before, "schema", learn_schemas)
        if learned.state != "ok":
            yield learned
            return
        records = {topic: components.schemas.records.get(topic, set()) for topic in topics}
        idle = tables_without_messages(config.table_options, records)
        of_records = [table for table in tables.messages if table.options.has_record_shape]
        yield from [
            Finding("schema", "ok", text)
            for text in _columns(table for table in of_records if table.options.section not in idle)
        ] or ([] if of_records else [learned])
        for warning in routing_warnings(config.table_options, records):
            yield Finding("routing", "warning", warning)


def _columns(tables: Iterable[MessagesTable]) -> list[str]:
    """Return for each table of records a phrase with the known columns."""
    from ledgerlake.table.layout import record_of

    found = []
    for table in tables:
        columns = [field.name for field in record_of(table.table.schema) or ()]
        found.append(
            f"the columns of {table.table.path} are "
            f"{', '.join(columns[:10])}{' ...' if len(columns) > 10 else ''}, and pulsar"
            if columns
            else f"no column of {table.table.path} is known, because its topics have no schema "
            "yet; see json_fields for JSON without one"
        )
    more = len(found) - _MOST_TABLES
    return found[:_MOST_TABLES] + ([f"{more:,} more tables of records"] if more > 0 else [])


def clock(last: list[LastEntries], now_ms: int) -> str | Finding:
    """Compare the clocks of the broker and of this machine, as far as the last entries tell: none
    can be stored in the future.
    """
    stored_ms = max(
        (found.stored_ms for found in last if found.stored_ms is not None), default=None
    )
    if stored_ms is None:
        return Finding("clock", "skipped", "no entry tells the broker's time")
    ahead_ms = stored_ms - now_ms
    if ahead_ms <= _CLOCK_MOST_MS:
        return "no entry is from the future by this machine's clock"
    stored = datetime.fromtimestamp(stored_ms / 1000, tz=timezone.utc).isoformat(timespec="seconds")
    return Finding(
        "clock",
        "warning",
        f"the broker has stored an entry at {stored}, {ahead_ms / 1000:,.0f} s from now by this "
        "machine's clock, so delayed messages "
        "would come late; set the clocks of both machines by NTP",
    )


_UNUSABLE = ("problem", "skipped")


def _found(name: str, call: Callable[[], str | Finding]) -> Finding:
    """Return what a check finds; an error is a problem."""
    try:
        found = call()
    except LedgerlakeError as error:
        return Finding(name, "problem", error.message)
    except OSError as error:
        return Finding(name, "problem", said(str(error)))
    except ModuleNotFoundError as error:
        # The check of packages says how to install it.
        return Finding(name, "skipped", f"the package {error.name} is missing")
    return found if isinstance(found, Finding) else Finding(name, "ok", found)


def _after(before: Finding, name: str, call: Callable[[], str | Finding]) -> Finding:
    """Return what a check finds that another one has to come before."""
    return (
        Finding(name, "skipped", f"see {before.check}")
        if before.state in _UNUSABLE
        else _found(name, call)
    )


def _left_out(refused: dict[str, LedgerlakeError]) -> str:
    """Say why a start leaves topic partitions out."""
    name, error = min(refused.items())
    more = f", and {len(refused) - 1:,} more" if len(refused) > 1 else ""
    return (
        f"a run leaves out {name}{more}, which it has not read yet, and tries again: "
        f"{error.message}"
    )


def _count(topic_partitions: Sized) -> str:
    return counted(len(topic_partitions), "topic partition", "topic partitions")


@contextmanager
def _closing(cluster: Cluster) -> Iterator[Cluster]:
    try:
        yield cluster
    finally:
        cluster.close()


def _packages() -> Finding:
    """Compare the installed packages with the versions that Ledgerlake was tried with."""
    try:
        requirements = [
            Requirement(text) for text in importlib.metadata.requires("ledgerlake") or ()
        ]
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            "packages",
            "skipped",
            "Ledgerlake is not installed as a package, so its requirements are not known",
        )
    newer = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": "spark"}):
            continue
        command = "pip install 'ledgerlake[spark]'"
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            return Finding(
                "packages", "problem", f"{requirement.name} is missing; install it with: {command}"
            )
        unmet = [
            part for part in requirement.specifier if not part.contains(version, prereleases=True)
        ]
        what = (
            f"{requirement.name} {version} is installed, and "
            f"{requirement.name}{requirement.specifier} is needed"
        )
        if any(part.operator not in _UPPER_BOUNDS for part in unmet):
            return Finding("packages", "problem", f"{what}; install it with: {command}")
        if unmet:
            newer.append(f"{requirement.name} {version} ({requirement.specifier})")
    if newer:
        return Finding(
            "packages", "warning", f"other versions than those that were tried: {', '.join(newer)}"
        )
    python = ".".join(map(str, sys.version_info[:3]))
    return Finding(
        "packages", "ok", f"Python {python}, PySpark {importlib.metadata.version('pyspark')}"
    )


def _java() -> str | Finding:
    java = find_java()
    version = java_version(java)
    if version not in _TRIED_JAVA:
        return Finding(
            "java", "warning", f"{java} is Java {version}; Spark is tried with Java 17 and 21"
        )
    return f"{java} is Java {version}"


def _jars() -> str:
    from ledgerlake.runtime.session import delta_jars

    return f"Delta's {len(delta_jars())} jars are there"


def _spark(config: Config) -> str:
    config.spark.check_bundle()
    _check_connector(config, config.checkpoint_place)
    return f"master {config.spark.master}"


def _check_connector(config: Config, place: Place) -> None:
    """Check that Spark gets the connector to a place, by the settings or by its own jars.

    Raises:
        SetupError: it does not.
    """
    named = " ".join([*config.spark.packages, *(value for _, value in config.spark.settings)])
    if place.store is not None and place.store.connector not in named:
        from pyspark.find_spark_home import _find_spark_home

        from ledgerlake.runtime.hadoop import no_connector

        jars = Path(_find_spark_home()) / "jars"
        if not any(jars.glob(f"{place.store.connector}-*.jar")):
            versions = [jar.stem.rpartition("-")[2] for jar in jars.glob("hadoop-client-api-*.jar")]
            raise no_connector(place, place.store, max(versions, default="VERSION"))


def _functions(config: Config) -> list[str]:
    """Return the functions by which a topic is read."""
    source = config.source
    functions = (
        source.crypto_key_reader,
        source.message_payload_processor,
        source.payload_to_message_id_converter,
    )
    return [function for function in functions if function is not None]


def _load(functions: list[str]) -> str:
    for function in functions:
        load(function)
    return f"{', '.join(functions)} can be imported here"


def _metrics_port(config: Config) -> str:
    from ledgerlake.monitor.http_server import check_port

    assert config.metrics is not None
    check_port(config.metrics.port, config.metrics.address, config.metrics.token)
    return f"port {config.metrics.port} is free"


def _iceberg(config: Config) -> str:
    from ledgerlake.pipeline.iceberg import IcebergTables

    IcebergTables(config)
    return "pyiceberg is there"


def _disks(config: Config) -> Iterator[Finding]:
    """Yield for each local disk of the configuration how much of it is free."""
    places = {"checkpoint": config.checkpoint_place}
    if config.delta.path or config.tables:
        places |= {"tables": config.table_options[-1].place, "rejects": config.rejects_place}
    if config.pipeline_delay.folder is not None:
        places["delayed messages"] = config.pipeline_delay.folder
    by_disk: dict[int, tuple[str, list[str]]] = {}
    for what, place in places.items():
        if place.is_local:
            folder = place.nearest_folder()
            by_disk.setdefault(os.stat(folder).st_dev, (folder, []))[1].append(what)
    for folder, kinds in by_disk.values():
        free_bytes = shutil.disk_usage(folder).free
        yield disk(folder, ", ".join(kinds), free_bytes)


def disk(folder: str, kinds: str, free_bytes: int) -> Finding:
    """Return the finding about a disk with so many free bytes."""
    text = f"{free_bytes / 1e9:,.1f} GB are free at {folder} ({kinds})"
    if free_bytes < _LEAST_FREE_BYTES:
        return Finding("disk", "problem", f"{text}; make room, or choose another disk")
    return Finding("disk", "warning" if free_bytes < _FEW_FREE_BYTES else "ok", text)


def _check_writable(storage: Place) -> None:
    try:
        storage.check_writable()
    except OSError as error:
        raise SetupError(
            f"[delay] storage {storage} cannot be written ({storage.refusal(error)})"
        ) from None
