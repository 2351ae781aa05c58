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
_STOPPING_SOON = b"stopping as soon as Spark has started\n"


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands, "run", _run, "run the pipeline of a configuration", "ledgerlake run orders.toml --once"
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument("--once", action="store_true", help="end when everything that is there now is in the table")
    add_spark(command)
    command.add_argument(
        "--archive-classes",
        action="store_true",
        help="when it ends, leave an archive of the JVM's classes (180 MB) that makes later starts shorter; "
        "a run without --once leaves one unasked after some minutes",
    )


def _run(options: argparse.Namespace) -> int:
    # If it is missing, that is said before all else.
    import pyspark  # noqa: F401

    from ledgerlake.options.config import load_config
    from ledgerlake.pipeline.http_server import check_port
    from ledgerlake.pipeline.progress_screen import ProgressScreen
    from ledgerlake.pipeline.shared_terminal import shared_terminal
    from ledgerlake.pipeline.start import check_reachable
    from ledgerlake.runtime.class_archive import ClassArchive

    config = load_config(options.config)
    check_reachable(config)
    if config.metrics is not None:
        check_port(config.metrics.port, config.metrics.address, config.metrics.token)
    with shared_terminal() as terminal:
        screen = ProgressScreen(name=config.stream.name, as_json=options.json, terminal=terminal)
        stop = _Stop()
        _stop_on_signals(stop, is_starting=True)
        # The modules take a second, and the JVM some: the one is done while the other starts.
        threading.Thread(target=importlib.import_module, args=(_PIPELINE,), daemon=True).start()
        name = f"ledgerlake {config.stream.name}"
        spark = start_spark(name, config, options, lists_classes=options.archive_classes or not options.once)
        archive = ClassArchive(spark)
        if stop.is_set():
            spark.stop()
            return stop.exit_code if options.once else 0
        from ledgerlake.pipeline.pipeline import Pipeline

        pipeline = Pipeline(spark, config, screen.add)
        try:
            pipeline.start(options.once)
            assert pipeline.query is not None
            _stop_on_signals(stop, is_starting=False)
            if pipeline.metrics is not None and not options.json:
                print(f"the status page is at {pipeline.metrics.url}", file=sys.stderr, flush=True)
            screen.add_waiting(pipeline.waiting_since_earlier)
            screen.start(pipeline.query, lambda: pipeline.reading)
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
        finally:
            pipeline.close()
    if screen.totals.rejects:
        print(f"to see why entries were rejected: ledgerlake rejects {options.config}", file=sys.stderr)
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
        print(f"classes are archived in {path} ({path.stat().st_size / 1e6:,.0f} MB)", file=sys.stderr)


class _Stop(threading.Event):
    """Set by a signal; ``exit_code`` is that of a process which the signal has ended."""

    exit_code = 0


def _stop_on_signals(stop: _Stop, *, is_starting: bool) -> None:
    """Have SIGINT and SIGTERM set ``stop``. A second one ends this process at once, unless Spark is
    starting: that would leave a JVM that never ends.
    """

    def ask(signal_number: int, _frame: object) -> None:
        if stop.is_set() and not is_starting:
            raise SystemExit(128 + signal_number)
        if not stop.is_set():
            os.write(2, _STOPPING_SOON if is_starting else _STOPPING)
        stop.exit_code = 128 + signal_number
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)
