"""``ledgerlake schedule`` publishes a message that is due later, or moves it."""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_service_url, client_settings

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "schedule",
        _schedule,
        "publish a message that is due later, in place of the one that waits under the same id",
        "ledgerlake schedule reminders --id visit-17 --at 2026-05-02T09:00:00+02:00 'Your visit is today'",
    )
    command.add_argument("topic", metavar="TOPIC")
    command.add_argument("value", metavar="VALUE", help="the content, as text")
    command.add_argument("--id", required=True, help="the id of the schedule, 1 to 200 characters")
    due = command.add_mutually_exclusive_group(required=True)
    due.add_argument("--at", metavar="TIME", help="when it is due, as ISO time with a zone")
    due.add_argument("--in", metavar="SPAN", dest="span", help="when it is due from now, such as '90 minutes'")
    command.add_argument("--key", help="the key of the message")
    command.add_argument("--expires", metavar="TIME", help="if it is released later than this, it is not delivered")
    add_service_url(command)


def _schedule(options: argparse.Namespace) -> int:
    from ledgerlake.options.bounds import parse_time_ms
    from ledgerlake.options.kinds import duration_ms
    from ledgerlake.publish.schedules import Schedules

    if options.at is not None:
        at_ms = parse_time_ms(options.at, "--at")
    else:
        at_ms = int(time.time() * 1000) + duration_ms("--in", options.span)
    expires_ms = None if options.expires is None else parse_time_ms(options.expires, "--expires")
    with Schedules(client_settings(options), options.topic) as schedules:
        message_id = schedules.put(options.id, options.value.encode(), at=at_ms, key=options.key, expires=expires_ms)
        topic_partition = schedules.partition_of(options.id)
    due = datetime.fromtimestamp(at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    if options.json:
        print(json.dumps({"id": options.id, "topic": topic_partition, "message_id": str(message_id), "due": due}))
    else:
        print(f"schedule {options.id} is due {due}, stored in {topic_partition} as {message_id}")
    return 0
