"""``ledgerlake bundle`` packs what Spark's executors on other machines need."""

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
        "bundle",
        _bundle,
        "pack Ledgerlake and the packages that it needs into an archive for executors on other "
        "machines",
        "ledgerlake bundle ledgerlake.tar.gz",
    )
    command.add_argument(
        "path",
        metavar="FILE",
        nargs="?",
        help="default: a name with the version and the platform, in this folder",
    )


def _bundle(options: argparse.Namespace) -> int:
    from ledgerlake.runtime.bundle import default_name, write_bundle

    bundle = write_bundle(options.path or default_name())
    if options.json:
        print(json.dumps(asdict(bundle)))
        return 0
    print(f"{bundle.path}: {len(bundle.packages)} packages, {bundle.size_bytes / 1e6:,.0f} MB")
    print(f'Set in the configuration: [spark] bundle = "{bundle.path}"')
    return 0
