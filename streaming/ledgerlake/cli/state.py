"""``ledgerlake state`` shows the messages in a pipeline's state."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_spark, start_spark

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands
    from ledgerlake.delay.due_times import DueSpan

_SPANS_MS = {"minute": 60_000, "hour": 3_600_000, "day": 86_400_000}
_BAR = 40

_UNTIL_DUE = " (a replaced or cancelled one counts until it would have been due)"


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "state",
        _state,
        "show the messages in state: incomplete large ones, delayed ones",
        "ledgerlake state orders.toml",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--by",
        choices=_SPANS_MS,
        help="count the delayed ones by the time in which they are due; needs no Spark",
    )
    add_spark(command)


def _state(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.delayed_counts import delayed_counts
    from ledgerlake.inspect.incomplete_messages import incomplete_messages
    from ledgerlake.monitor.progress import counted
    from ledgerlake.options.config import load_config

    config = load_config(options.config)
    if options.by:
        from ledgerlake.inspect.due_counts import due_counts

        _print_counts(due_counts(config, _SPANS_MS[options.by]), options.by, options.json)
        return 0
    spark = start_spark(f"ledgerlake state {config.stream.name}", config, options)
    incomplete, delayed = incomplete_messages(spark, config), delayed_counts(spark, config)
    if options.json:
        large = [asdict(message) for message in incomplete]
        print(json.dumps({"large": large, "delayed": [asdict(partition) for partition in delayed]}))
        return 0
    for message in incomplete:
        print(message.sentence())
    for partition in delayed:
        print(*partition.lines(), sep="\n")
    kept_bytes = sum(message.kept_bytes for message in incomplete)
    large_count = counted(len(incomplete), "large message is", "large messages are")
    print(f"{large_count} incomplete, {counted(kept_bytes, 'byte', 'bytes')} kept")
    count = sum(partition.delayed for partition in delayed)
    print(counted(count, "delayed message", "delayed messages") + (_UNTIL_DUE if count else ""))
    return 0


def _print_counts(spans: list[DueSpan], by: str, as_json: bool) -> None:
    from ledgerlake.stored.offsets import time_text

    if not spans:
        # The pipeline may not have read the newest messages yet.
        print("no delayed message, as of the pipeline's last micro-batch", file=sys.stderr)
    most = max((span.count for span in spans), default=0)
    for span in spans:
        begin, end = time_text(span.begin_ms), time_text(span.end_ms)
        if as_json:
            shown = {
                "from": begin,
                "until": end,
                "messages": span.count,
                "is_estimate": span.is_estimate,
            }
            print(json.dumps(shown))
            continue
        until = "" if span.length_ms == _SPANS_MS[by] else f"  until {end}"
        count = f"{'about ' if span.is_estimate else ''}{span.count:,}"
        print(f"{begin}  {count:>16} {'#' * round(_BAR * span.count / most)}".rstrip() + until)
