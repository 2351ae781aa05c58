"""``ledgerlake upkeep`` merges small files of the tables, and removes unused ones."""

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
        "upkeep",
        _upkeep,
        "merge small files of the tables and remove unused ones, as a running pipeline does by "
        "itself",
        "ledgerlake upkeep orders.toml",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")


def _upkeep(options: argparse.Namespace) -> int:
    from ledgerlake.pipeline.iceberg import follow
    from ledgerlake.pipeline.upkeep import keep_up

    config = load_config_with_paths(options.config)
    for kept in keep_up(config):
        if options.json:
            print(json.dumps(asdict(kept)))
        else:
            why = (
                f" (it has {', '.join(kept.obstacles)}; run Delta's OPTIMIZE)"
                if kept.obstacles
                else ""
            )
            print(
                f"{kept.table}: {kept.merged:,} small files merged{why}, {kept.removed:,} unused "
                "files removed"
            )
    for followed in follow(config):
        if options.json:
            print(json.dumps(asdict(followed)))
        else:
            news = (
                "has nothing new"
                if followed.version is None
                else f"has version {followed.version} now"
            )
            print(f"the Iceberg table {followed.iceberg_table} {news}")
    return 0
