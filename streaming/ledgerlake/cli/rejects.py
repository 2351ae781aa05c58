"""``ledgerlake rejects`` tells what the table of rejects has, by reason and topic; with
``--replay`` it puts rejects through again.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, json_text, load_config_with_paths

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "rejects",
        _rejects,
        "how many entries were rejected, by reason and topic, and the last of each; or put them "
        "through again",
        "ledgerlake rejects orders.toml --replay --reason schema_mismatch",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--replay", action="store_true", help="put those through again that fit by now, once each"
    )
    command.add_argument(
        "--reason", action="append", default=[], help="only this one; may be repeated"
    )


def _rejects(options: argparse.Namespace) -> int:
    from ledgerlake.errors import UsageError
    from ledgerlake.options.declared import nearest
    from ledgerlake.reasons import REASONS

    for reason in options.reason:
        if reason not in REASONS:
            raise UsageError(f"there is no reason '{reason}'{nearest(reason, REASONS)}")
    if options.replay:
        return _replay(options)
    from ledgerlake.inspect.reject_counts import count_rejects

    counts = count_rejects(load_config_with_paths(options.config), options.reason)
    for count in counts:
        print(json_text(asdict(count)) if options.json else count.sentence())
    if not counts and not options.json:
        print(f"there are no rejects{' of ' + ', '.join(options.reason) if options.reason else ''}")
    return 0


def _replay(options: argparse.Namespace) -> int:
    from ledgerlake.monitor.progress import counted
    from ledgerlake.replay.replay import replay

    result = replay(load_config_with_paths(options.config), options.reason)
    reasons = sorted(result.replayed.keys() | result.left.keys())
    for reason in reasons:
        counts = {
            "reason": reason,
            "replayed": result.replayed[reason],
            "left": result.left[reason],
        }
        why = result.why.get(reason, "")
        if options.json:
            print(json.dumps({**counts, "why": why}))
        else:
            print(
                f"{reason}: {counts['replayed']:,} replayed, {counts['left']:,} do not fit"
                + (f" ({why})" if why else "")
            )
    if not reasons and not options.json:
        print("there is nothing to replay")
    if result.left_out and not options.json:
        print(
            f"{counted(result.left_out, 'reject is of a topic', 'rejects are of topics')} that the "
            "configuration does not read"
        )
    return 0
