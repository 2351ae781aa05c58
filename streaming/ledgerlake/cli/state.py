"""``ledgerlake state`` shows what waits in a pipeline's state."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_spark, start_spark

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "state",
        _state,
        "show what waits: large messages that are not whole, delayed ones",
        "ledgerlake state orders.toml",
    )
    command.add_argument("config", metavar="CONFIG")
    add_spark(command)


def _state(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.open_messages import open_messages
    from ledgerlake.inspect.waiting_messages import waiting_messages
    from ledgerlake.options.config import load_config

    config = load_config(options.config)
    spark = start_spark(f"ledgerlake state {config.stream.name}", config, options)
    found, delayed = open_messages(spark, config), waiting_messages(spark, config)
    if options.json:
        print(json.dumps({"large": [asdict(one) for one in found], "delayed": [asdict(one) for one in delayed]}))
        return 0
    for line in [*(one.sentence() for one in found), *(one.sentence() for one in delayed)]:
        print(line)
    held_bytes = sum(one.held_bytes for one in found)
    print(f"{len(found):,} large messages are not whole, {held_bytes:,} bytes held")
    print(f"{sum(one.waiting for one in delayed):,} delayed messages wait")
    return 0
