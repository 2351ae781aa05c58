"""``ledgerlake demo`` shows the whole way on an embedded broker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "demo",
        _demo,
        "live producers, the pipeline, the table and a verdict",
        "ledgerlake demo --messages 200000",
    )
    command.add_argument(
        "--messages",
        type=int,
        default=250_000,
        help="how many messages are produced (default: 250000)",
    )


def _demo(options: argparse.Namespace) -> int:
    from ledgerlake.demo import run_demo

    return run_demo(options.messages, as_json=options.json)
