"""``ledgerlake peek`` shows stored entries of a topic."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ledgerlake.cli.command import (
    add_command,
    add_service_url,
    add_topic,
    client_settings,
    json_text,
)
from ledgerlake.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "peek",
        _peek,
        "show entries of a topic as the broker stored them",
        "ledgerlake peek orders --from last -n 5",
    )
    add_topic(command)
    command.add_argument(
        "-n", "--count", type=int, default=10, help="how many entries per partition (default: 10)"
    )
    command.add_argument(
        "--from",
        dest="start",
        default="earliest",
        help="earliest, a message id, or last: the last ones of the last ledger",
    )
    add_service_url(command)


def _peek(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.peek import entry_line, peek

    if options.count < 1:
        raise UsageError("--count must be at least 1")
    is_empty = True
    for entry in peek(client_settings(options), options.topic, options.start, options.count):
        is_empty = False
        print(json_text(entry) if options.json else entry_line(entry))
    if is_empty:
        after = "" if options.start == "last" else f" from {options.start} on"
        print(f"{options.topic} has no entry{after}", file=sys.stderr)
    return 0
