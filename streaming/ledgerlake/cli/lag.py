"""``ledgerlake lag`` tells how far the table is behind its topics."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "lag",
        _lag,
        "how far the table is behind its topics, or behind the stream's ending",
        "ledgerlake lag orders.toml",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")


def _lag(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.lag import find_lags
    from ledgerlake.options.config import load_config
    from ledgerlake.pipeline.start import check_reachable

    config = load_config(options.config)
    check_reachable(config)
    for lag in find_lags(config):
        print(json.dumps(asdict(lag)) if options.json else lag.sentence())
    return 0
