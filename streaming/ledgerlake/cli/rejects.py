"""``ledgerlake rejects`` tells what the table of rejects has, by reason and topic."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, load_config_with_paths

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "rejects",
        _rejects,
        "how many entries were rejected, by reason and topic, and the last of each",
        "ledgerlake rejects orders.toml",
    )
    command.add_argument("config", metavar="CONFIG")


def _rejects(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.reject_counts import count_rejects

    counts = count_rejects(load_config_with_paths(options.config))
    for count in counts:
        print(json.dumps(asdict(count), default=str) if options.json else count.sentence())
    if not counts and not options.json:
        print("there are no rejects")
    return 0
