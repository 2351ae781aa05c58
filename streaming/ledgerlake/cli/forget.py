"""``ledgerlake forget`` removes the pipeline's durable cursors."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, load_config_with_paths

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "forget",
        _forget,
        "remove the pipeline's durable cursors from the broker",
        "ledgerlake forget orders.toml",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--topic",
        metavar="NAME",
        help="only for a topic, or a topic partition, that the configuration no longer names; "
        "the checkpoint may stay",
    )


def _forget(options: argparse.Namespace) -> int:
    from ledgerlake.options.config import load_config_to_forget
    from ledgerlake.pipeline.forget import forget, forget_topic, tables_with_rows

    # A topic alone has no need of the tables.
    config = (
        load_config_with_paths(options.config, load_config_to_forget)
        if options.topic is None
        else load_config_to_forget(options.config)
    )
    names = forget(config) if options.topic is None else forget_topic(config, options.topic)
    if options.json:
        print(json.dumps({"subscription": config.subscription, "topics": names}))
    elif names:
        print(f"removed {config.subscription} from {', '.join(names)}")
    else:
        print(
            f"no topic has the subscription {config.subscription}, so there was nothing to remove",
            file=sys.stderr,
        )
    if options.topic is None:
        for path in tables_with_rows(config):
            print(
                f"the table at {path} keeps its rows; remove it before the next run, or they come "
                "twice",
                file=sys.stderr,
            )
    return 0
