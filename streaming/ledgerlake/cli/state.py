"""``ledgerlake state`` shows the messages in a pipeline's state."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_spark, start_spark

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands

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
    add_spark(command)


def _state(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.delayed_counts import waiting_messages
    from ledgerlake.inspect.incomplete_messages import incomplete_messages
    from ledgerlake.monitor.progress import counted
    from ledgerlake.options.config import load_config

    config = load_config(options.config)
    spark = start_spark(f"ledgerlake state {config.stream.name}", config, options)
    incomplete, delayed = incomplete_messages(spark, config), waiting_messages(spark, config)
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
    waiting = sum(partition.waiting for partition in delayed)
    print(
        counted(waiting, "delayed message waits", "delayed messages wait")
        + (_UNTIL_DUE if waiting else "")
    )
    return 0
