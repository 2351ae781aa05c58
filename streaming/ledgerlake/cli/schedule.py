"""``ledgerlake schedule`` publishes a message that is due later, once or again and again, or moves it;
``ledgerlake pause`` and ``ledgerlake resume`` hold repetitions back.
"""

from __future__ import annotations

import json
import time
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command, add_service_url, client_settings
from ledgerlake.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the commands and their options."""
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
    due.add_argument("--cron", metavar="FIELDS", help="it repeats: five cron fields, or six with seconds first")
    due.add_argument("--every", metavar="SPAN", help="it repeats: an ISO-8601 duration or interval, such as PT15M")
    command.add_argument("--from", metavar="TIME", dest="start", help="the time from which it repeats; default: now")
    command.add_argument("--timezone", metavar="ZONE", help="the zone of --cron and of days, such as Europe/Berlin")
    command.add_argument("--until", metavar="TIME", help="it does not repeat after this time")
    command.add_argument("--count", type=int, help="it repeats so many times at most")
    command.add_argument("--jitter", metavar="SPAN", help="each repetition is up to so much later, such as PT30S")
    command.add_argument(
        "--catch-up", choices=["all", "last", "none"], help="what to do with repetitions that were missed; default: all"
    )
    command.add_argument("--key", help="the key of the message")
    command.add_argument("--expires", metavar="TIME", help="if it is released later than this, it is not delivered")
    add_service_url(command)
    for name, text in (("pause", "hold back the repetitions of a schedule"), ("resume", "end a pause")):
        _add_pause(commands, name, text)


def _add_pause(commands: Commands, name: str, text: str) -> None:
    example = f"ledgerlake {name} reminders --id report"
    command = add_command(commands, name, lambda options: _tell(options, name), text, example)
    command.add_argument("topic", metavar="TOPIC")
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--id", help="the id of the schedule")
    target.add_argument("--all", action="store_true", help="all schedules of the topic that repeat")
    add_service_url(command)


def _tell(options: argparse.Namespace, name: str) -> int:
    from ledgerlake.publish.schedules import Schedules

    with Schedules(client_settings(options), options.topic) as schedules:
        message_ids = (schedules.pause if name == "pause" else schedules.resume)(options.id)
    target = "all schedules" if options.id is None else f"schedule {options.id}"
    if options.json:
        print(json.dumps({"id": options.id, "command": name, "message_ids": list(map(str, message_ids))}))
    else:
        print(f"{name} of {target} stored as {', '.join(map(str, message_ids))}")
    return 0


def _schedule(options: argparse.Namespace) -> int:
    from ledgerlake.publish.schedules import Schedules

    repeats = options.cron is not None or options.every is not None
    try:
        value = options.value.encode()
    except UnicodeEncodeError:
        # Python keeps a byte that is not UTF-8 as half of a surrogate pair.
        raise UsageError("VALUE is not UTF-8 text") from None
    at_ms = _at_ms(options)
    expires_ms, until_ms = _optional_ms(options.expires, "--expires"), _optional_ms(options.until, "--until")
    with Schedules(client_settings(options), options.topic) as schedules:
        message_id = schedules.put(
            options.id,
            value,
            at=at_ms,
            key=options.key,
            expires=expires_ms,
            cron=options.cron,
            every=options.every,
            timezone=options.timezone,
            until=until_ms,
            count=options.count,
            jitter=options.jitter,
            catch_up=options.catch_up,
        )
        topic_partition = schedules.partition_of(options.id)
    due = datetime.fromtimestamp(at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    if options.json:
        result = {"id": options.id, "topic": topic_partition, "message_id": str(message_id)}
        print(json.dumps(result | ({"repeats_from": due} if repeats else {"due": due})))
    else:
        says = f"repeats from {due} on" if repeats else f"is due {due}"
        print(f"schedule {options.id} {says}, stored in {topic_partition} as {message_id}")
    return 0


def _at_ms(options: argparse.Namespace) -> int:
    """Return when a message is due, or from when it repeats."""
    from ledgerlake.options.bounds import parse_time_ms
    from ledgerlake.options.kinds import duration_ms

    now_ms = int(time.time() * 1000)
    if options.start is not None:
        if options.cron is None and options.every is None:
            raise UsageError("--from is the start of --cron or --every; give --at instead")
        return parse_time_ms(options.start, "--from")
    if options.at is not None:
        return parse_time_ms(options.at, "--at")
    return now_ms if options.span is None else now_ms + duration_ms("--in", options.span)


def _optional_ms(text: str | None, option: str) -> int | None:
    from ledgerlake.options.bounds import parse_time_ms

    return None if text is None else parse_time_ms(text, option)
