"""``ledgerlake verify`` compares the table with its topics."""

from __future__ import annotations

import json
import sys
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
        "verify",
        _verify,
        "compare the table with its topics; exit 1 when they differ",
        "ledgerlake verify orders.toml --json",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")


def _verify(options: argparse.Namespace) -> int:
    from ledgerlake.pipeline.start import check_reachable
    from ledgerlake.verify.verify import verify

    config = load_config_with_paths(options.config)
    check_reachable(config)
    verdict = verify(config)
    if options.json:
        print(json.dumps(asdict(verdict)))
    else:
        print(verdict.sentence())
    for warning in verdict.warnings:
        print(warning, file=sys.stderr)
    return 0 if verdict.clean else 1
