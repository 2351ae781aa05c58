"""``ledgerlake run`` runs the pipeline of a configuration until it is stopped."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_spark, start_spark
from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands
    from ledgerlake.runtime.class_archive import ClassArchive

_PIPELINE = "ledgerlake.pipeline.pipeline"
_STOPPING = b"stopping; the current micro-batch is finished first\n"
_STOPPING_NOW = b"stopping\n"
_STOPPING_SOON = b"stopping as soon as Spark has started\n"


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "run",
        _run,
        "run the pipeline of a configuration",
        "ledgerlake run orders.toml --once",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--once", action="store_true", help="end when everything that is there now is in the table"
    )
    add_spark(command)
    command.add_argument(
        "--archive-classes",
        action="store_true",
        help="when it ends, leave an archive of the JVM's classes (180 MB) that makes later starts "
        "shorter; "
        "a run without --once leaves one unasked after some minutes",
    )


def _run(options: argparse.Namespace) -> int:
    # If it is missing, that is said before all else.
    import pyspark  # noqa: F401

    from ledgerlake.monitor.http_server import check_port
    from ledgerlake.monitor.progress_screen import ProgressScreen
    from ledgerlake.monitor.shared_terminal import shared_terminal
    from ledgerlake.options.config import load_config
    from ledgerlake.pipeline.start import check_reachable
    from ledgerlake.runtime.class_archive import ClassArchive

    config = load_config(options.config)
    check_reachable(config)
    if config.metrics is not None:
        check_port(config.metrics.port, config.metrics.address, config.metrics.token)
    with shared_terminal() as terminal:
        screen = ProgressScreen(name=config.stream.name, as_json=options.json, terminal=terminal)
        stop = _Stop()
        stop.listen()
        # The modules take a second, and the JVM some: the one is done while the other starts.
        threading.Thread(target=importlib.import_module, args=(_PIPELINE,), daemon=True).start()
        name = f"ledgerlake {config.stream.name}"
        spark = start_spark(
            name, config, options, lists_classes=options.archive_classes or not options.once
        )
        archive = ClassArchive(spark)
        if stop.is_set():
            spark.stop()
            return stop.exit_code if options.once else 0
        from ledgerlake.pipeline.pipeline import Pipeline

        pipeline = Pipeline(spark, config, screen.add)
        try:
            stop.ends_at = 1
            if stop.is_set():
                raise _StoppedError
            pipeline.start(options.once)
            assert pipeline.query is not None
            stop.ends_at = 2
            if pipeline.metrics is not None and not options.json:
                print(f"the status page is at {pipeline.metrics.url}", file=sys.stderr, flush=True)
            screen.add_delayed(pipeline.delayed_since_earlier)
            screen.start(pipeline.query, lambda: pipeline.reading, lambda: pipeline.is_owner)
            if not options.archive_classes:
                archive.start()
            try:
                is_done = False
                while not (stop.is_set() or is_done):
                    is_done = pipeline.wait(0.5)
                pipeline.stop()
            finally:
                screen.stop()
                archive.end()
        except _StoppedError:
            return stop.exit_code if options.once else 0
        finally:
            stop.ends_at = 2
            pipeline.close()
    if screen.totals.rejects:
        print(
            f"to see why entries were rejected: ledgerlake rejects {options.config}",
            file=sys.stderr,
        )
    if options.json:
        print(json.dumps(asdict(screen.totals)), flush=True)
    if options.archive_classes:
        _archive(archive)
    return stop.exit_code if options.once and not is_done else 0


def _archive(archive: ClassArchive) -> None:
    # All messages are in their tables, so the run has not failed if there is no archive.
    try:
        path = archive.make()
    except SetupError as error:
        print(f"ledgerlake: {error}", file=sys.stderr)
    else:
        print(
            f"classes are archived in {path} ({path.stat().st_size / 1e6:,.0f} MB)", file=sys.stderr
        )


class _StoppedError(BaseException):
    """A signal came while the pipeline was starting."""


class _Stop(threading.Event):
    """Set by SIGINT and SIGTERM.

    Attributes:
        exit_code: that of a process which the signal has ended. ends_at: the number of the signal
        that ends what runs at once. None while Spark starts: a JVM
            would be left that never ends. The first one while the pipeline starts, which may wait
            for the broker or for another process. The second one once it runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.exit_code = 0
        self.ends_at: int | None = None

    def listen(self) -> None:
        """Be set by signals from now on."""
        signal.signal(signal.SIGINT, self._ask)
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, signal_number: int, _frame: object) -> None:
        number = 2 if self.is_set() else 1
        if number == 1:
            os.write(2, {None: _STOPPING_SOON, 1: _STOPPING_NOW}.get(self.ends_at, _STOPPING))
        self.exit_code = 128 + signal_number
        self.set()
        if self.ends_at == 1 and number == 1:
            raise _StoppedError
        if number == 2 and self.ends_at is not None:
            raise SystemExit(self.exit_code)
