"""``ledgerlake cancel`` cancels delayed messages that wait."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Literal

from ledgerlake.cli.command import add_command, load_config_with_short_retries

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "cancel",
        _cancel,
        "cancel delayed messages that wait, by message id, by key, or by the id of a schedule",
        "ledgerlake cancel orders.toml --key order-17",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--id", help="the message's id, such as 12:345")
    target.add_argument(
        "--key", help="every waiting message with this key; of a binary key its base64 text"
    )
    target.add_argument(
        "--schedule", metavar="ID", help="the waiting message of the schedule with this id"
    )
    command.add_argument(
        "--topic", help="only in this topic; default: all topics of the configuration"
    )


def _cancel(options: argparse.Namespace) -> int:
    from ledgerlake.publish.cancel import cancel

    config = load_config_with_short_retries(options.config)
    by: Literal["id", "key", "schedule"] = next(
        name for name in ("id", "key", "schedule") if getattr(options, name) is not None
    )
    target = getattr(options, by)
    names = cancel(config, by, target, options.topic)
    result = {"by": by, "target": target, "topics": names}
    print(json.dumps(result) if options.json else _sentence(by, target, names))
    return 0


def _sentence(by: str, target: str, names: list[str]) -> str:
    """Return the confirmation. The topic stores a cancel even if no message waits for it."""
    return (
        f"cancel of {by} {target} stored in {', '.join(names)}; it applies to the delayed messages "
        "that were stored before it and are due after it"
    )
