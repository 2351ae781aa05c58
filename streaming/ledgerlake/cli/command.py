"""What the commands share: how one is declared, and how those that only read reach a broker."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from pyspark.sql import SparkSession

    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.options.config import Config

    Commands: TypeAlias = argparse._SubParsersAction[Any]

DEFAULT_SERVICE_URL = "pulsar://localhost:6650"
# A person waits for the answer.
GIVE_UP_AFTER_S = 5.0


def _nothing(_record: logging.LogRecord) -> bool:
    return False


def add_command(
    commands: Commands,
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    example: str,
) -> argparse.ArgumentParser:
    """Declare a command with the options that all have.

    Args:
        command: does it, and returns the exit code.
    """
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text, epilog=f"example: {example}"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument(
        "--debug",
        action="store_true",
        help="show the traceback of an error, and all that Spark says",
    )
    parser.set_defaults(command=command)
    return parser


def json_text(shown: object) -> str:
    """Return what a command prints with ``--json``; times are ISO-8601 in UTC."""
    return json.dumps(shown, default=_plain)


def _plain(value: object) -> str:
    from ledgerlake.stored.offsets import moment_text

    return moment_text(value) if isinstance(value, datetime) else str(value)


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Declare the topic of a command that needs no pipeline."""
    parser.add_argument(
        "topic",
        metavar="TOPIC",
        type=_topic,
        help="a topic, such as orders or tenant/namespace/orders",
    )


def _topic(text: str) -> str:
    if text.endswith(".toml") and os.path.isfile(text):
        raise argparse.ArgumentTypeError(
            f"{text} is a configuration; name a topic, and give the file as --config {text}"
        )
    return text


def add_service_url(parser: argparse.ArgumentParser) -> None:
    """Declare how a command without a pipeline reaches a broker."""
    default = os.environ.get("LEDGERLAKE_SERVICE_URL", DEFAULT_SERVICE_URL)
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--service-url",
        default=default,
        help=f"default: $LEDGERLAKE_SERVICE_URL, or {DEFAULT_SERVICE_URL}",
    )
    where.add_argument(
        "--config",
        help="the TOML file that says how to reach the broker, in place of --service-url",
    )


def add_spark(parser: argparse.ArgumentParser) -> None:
    """Declare where Spark runs, above the configuration's ``[spark]``."""
    parser.add_argument("--master", help="Spark's master; default: [spark] master, or local[*,4]")
    parser.add_argument(
        "--conf",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of Spark; may be given several times",
    )


def start_spark(
    name: str, config: Config, options: argparse.Namespace, *, lists_classes: bool = False
) -> SparkSession:
    """Start the session that the configuration and the options of ``add_spark`` ask for, and say
    so.

    Raises:
        UsageError: an option is wrong.
        SetupError: the session cannot be started.
    """
    from ledgerlake.options.spark_options import with_command_line
    from ledgerlake.runtime.session import start_session

    spark = with_command_line(config.spark, options.master, options.conf)
    spark.check_bundle()
    settings = spark.session_settings
    if not options.json:
        print(f"starting Spark for the stream {config.stream.name}", file=sys.stderr, flush=True)
    if not options.debug:
        # Nobody but py4j logs there: a traceback of each call that Ctrl-C has ended.
        logging.getLogger().addFilter(_nothing)
    return _uninterrupted(
        lambda: start_session(
            name, spark.master, settings, lists_classes=lists_classes, says_all=options.debug
        )
    )


def _uninterrupted(start: Callable[[], SparkSession]) -> SparkSession:
    """Return a session. If Ctrl-C comes while the JVM starts, it is raised afterwards: a JVM that
    is left before it has started never ends.
    """
    before = signal.getsignal(signal.SIGINT)
    interrupts: list[int] = []
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        session = start()
    finally:
        # PySpark has set a handler of its own meanwhile, which would end a run in the middle of a
        # micro-batch.
        signal.signal(signal.SIGINT, before)
    if interrupts:
        session.stop()
        raise KeyboardInterrupt
    return session


def load_config_with_short_retries(path: str) -> Config:
    """Return a configuration for a command that asks the broker while a person waits: it gives up
    soon if the broker cannot be reached.

    Raises:
        UsageError: the configuration is wrong.
    """
    from ledgerlake.options.config import load_config

    config = load_config(path)
    return replace(
        config, source=replace(config.source, retry_timeout_ms=int(GIVE_UP_AFTER_S * 1000))
    )


def load_config_with_paths(path: str, load: Callable[[str], Config] | None = None) -> Config:
    """Return a configuration with the paths of its tables; Spark is started if a catalog has to
    tell them.

    Args:
        load: reads the file; ``load_config`` by default.

    Raises:
        UsageError: the configuration is wrong.
        SetupError, TableError: the catalog cannot tell them.
    """
    from ledgerlake.options.config import load_config
    from ledgerlake.runtime.session import start_session
    from ledgerlake.table.catalog import locate_tables

    config = (load or load_config)(path)
    if not config.delta.table or config.delta.path:
        return config
    spark = _uninterrupted(
        lambda: start_session("ledgerlake", config.spark.master, config.spark.session_settings)
    )
    try:
        return locate_tables(spark, config, makes=False)
    finally:
        spark.stop()


def client_settings(options: argparse.Namespace) -> ClientSettings:
    """Return how to reach the broker, by the options of ``add_service_url``.

    Raises:
        UsageError: the configuration is wrong.
    """
    from ledgerlake.client.cluster import ClientSettings

    if options.config:
        return load_config_with_short_retries(options.config).source.client
    return ClientSettings(options.service_url, give_up_after_s=GIVE_UP_AFTER_S)
