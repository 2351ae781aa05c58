"""``ledgerlake vacuum`` removes files that no table uses."""

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
        "vacuum",
        _vacuum,
        "remove files that killed tasks left behind and that the tables do not use",
        "ledgerlake vacuum orders.toml --dry-run",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--retention-hours",
        type=int,
        help="leave younger files, at least 1; without it, [upkeep] retention and the tables' "
        "own retention hold",
    )
    command.add_argument("--dry-run", action="store_true", help="only say which")


def _vacuum(options: argparse.Namespace) -> int:
    from ledgerlake.monitor.progress import counted
    from ledgerlake.pipeline.known_tables import known_tables
    from ledgerlake.pipeline.unused_files import UnusedFiles

    config = load_config_with_paths(options.config)
    unused_files = UnusedFiles(config, options.retention_hours)
    for table in known_tables(config):
        vacuumed = unused_files.remove(table.place, dry_run=options.dry_run)
        if options.json:
            print(json.dumps(asdict(vacuumed)))
            continue
        print(
            f"{vacuumed.table}: {counted(len(vacuumed.files), 'file', 'files')} "
            f"{'would be ' if options.dry_run else ''}removed"
        )
        for name in vacuumed.files:
            print(f"  {name}")
    return 0
