"""``ledgerlake check`` tries everything that a start of the pipeline needs."""

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
        "check",
        _check,
        "try everything that a run needs, without Spark, and say what to do; exit 1 if there is a "
        "problem",
        "ledgerlake check orders.toml",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")


def _check(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.checks import check

    has_problem = False
    for finding in check(options.config):
        has_problem = has_problem or finding.state == "problem"
        line = (
            json.dumps(asdict(finding))
            if options.json
            else f"{finding.state:<8} {finding.check:<16} {finding.text}"
        )
        print(line, flush=True)
    return int(has_problem)
