"""``ledgerlake schedule`` publishes a message that is due later, once or again and again, or moves
it; ``ledgerlake reschedule`` moves what waits; ``ledgerlake pause`` and ``ledgerlake resume`` hold
repetitions back.
"""

from __future__ import annotations

import json
import re
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ledgerlake.cli.command import (
    add_command,
    add_service_url,
    add_spark,
    add_topic,
    client_settings,
    start_spark,
)
from ledgerlake.errors import TopicNotFoundError, UsageError
from ledgerlake.wire.entry import read_stamp
from ledgerlake.wire.schedules import CATCH_UP_PROPERTY, SCHEDULE_PROPERTY, SENDER_PROPERTIES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from ledgerlake.cli.command import Commands
    from ledgerlake.wire.message_id import AnyMessageId

# The options that are not named as the properties that they set.
_OTHER_OPTIONS = {SCHEDULE_PROPERTY: "--id", CATCH_UP_PROPERTY: "--catch-up"}

# They are counted in the calendar, and have no fixed length; about so long each.
_DATES = re.compile(r"([0-9]{1,12})\s*(d|days?|weeks?|months?)", re.IGNORECASE)
_DATE_MS = {"D": 86_400_000, "W": 7 * 86_400_000, "M": 30 * 86_400_000}


def add(commands: Commands) -> None:
    """Declare the commands and their options."""
    command = add_command(
        commands,
        "schedule",
        _schedule,
        "publish a message that is due later, in place of the one that waits under the same id",
        "ledgerlake schedule reminders --id visit-17 --at 2030-05-02T09:00:00+02:00 'Your visit is "
        "today'",
    )
    add_topic(command)
    command.add_argument("value", metavar="VALUE", help="the content, as text")
    command.add_argument("--id", required=True, help="the id of the schedule, 1 to 200 characters")
    due = command.add_mutually_exclusive_group(required=True)
    due.add_argument(
        "--at",
        metavar="TIME",
        help="when it is due: ISO with a zone, or milliseconds since 1970",
    )
    due.add_argument(
        "--in", metavar="SPAN", dest="span", help="when it is due from now, such as '90 minutes'"
    )
    due.add_argument(
        "--cron", metavar="FIELDS", help="it repeats: five cron fields, or six with seconds first"
    )
    due.add_argument(
        "--every",
        metavar="SPAN",
        help="it repeats: such as '15 minutes', '1 day', '2 weeks' or '1 month', or an ISO-8601 "
        "duration or interval, such as PT90M",
    )
    command.add_argument(
        "--from",
        metavar="TIME",
        dest="start",
        help="the time from which its rule counts, as --at; a past one counts as now; default: now",
    )
    command.add_argument(
        "--timezone", metavar="ZONE", help="the zone of --cron and of days, such as Europe/Berlin"
    )
    command.add_argument(
        "--until", metavar="TIME", help="it does not repeat after this time, as --at"
    )
    command.add_argument("--count", type=int, help="it repeats so many times at most")
    command.add_argument(
        "--jitter",
        metavar="SPAN",
        help="each repetition is up to so much later, such as '30 seconds'",
    )
    command.add_argument(
        "--catch-up",
        choices=["all", "last", "none"],
        help="which of the repetitions that a stop, or a micro-batch of more than a minute, "
        "delayed are delivered; default: all",
    )
    command.add_argument("--key", help="the key of the message")
    command.add_argument(
        "--expires",
        metavar="TIME",
        help="if it is released later than this time, as --at, it is not delivered",
    )
    command.add_argument(
        "--create-topic", action="store_true", help="create the topic if it is not there"
    )
    add_service_url(command)
    _add_reschedule(commands)
    for name, text in (
        ("pause", "hold back the repetitions of a schedule"),
        ("resume", "end a pause"),
    ):
        _add_pause(commands, name, text)


def _add_reschedule(commands: Commands) -> None:
    command = add_command(
        commands,
        "reschedule",
        _reschedule,
        "give the message that waits under an id another time; its content stays",
        "ledgerlake reschedule orders.toml --id visit-17 --in '2 hours'",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument("--id", required=True, help="the id of the schedule")
    command.add_argument("--topic", help="the topic, if messages of several wait under the id")
    due = command.add_mutually_exclusive_group(required=True)
    due.add_argument(
        "--at",
        metavar="TIME",
        help="when it is due, or from when it repeats: ISO with a zone, or milliseconds since 1970",
    )
    due.add_argument(
        "--in", metavar="SPAN", dest="span", help="the same from now, such as '90 minutes'"
    )
    add_spark(command)


def _reschedule(options: argparse.Namespace) -> int:
    from ledgerlake.client.topics import TopicSelection, full_name, join_partition
    from ledgerlake.inspect.delayed_messages import scheduled_entries
    from ledgerlake.options.config import load_config
    from ledgerlake.publish.effects import check_delays
    from ledgerlake.publish.schedules import move
    from ledgerlake.schedules.schedules import is_hit
    from ledgerlake.stored.offsets import time_text
    from ledgerlake.wire.entry import peek_metadata
    from ledgerlake.wire.schedules import properties_of

    # A fault that needs no checkpoint is told before Spark starts.
    _due_ms(options)
    config = load_config(options.config)
    check_delays(config)
    spark = start_spark(f"ledgerlake reschedule {config.stream.name}", config, options)
    found = scheduled_entries(spark, config, options.id)
    selected = None if options.topic is None else TopicSelection((full_name(options.topic),))
    entries = [
        waiting
        for waiting in found
        if selected is None
        or selected.includes(join_partition(waiting.source.topic, waiting.source.partition))
    ]
    if not entries:
        raise UsageError(
            f"no message with the id {options.id} waits in the checkpoint whose content is known "
            "there; ledgerlake schedule sends it anew"
        )
    topics = sorted({waiting.source.topic for waiting in entries})
    if len(topics) > 1:
        raise UsageError(
            f"messages of {' and '.join(topics)} wait under the id {options.id}; name one with "
            "--topic"
        )
    source, due_ms, entry = max(
        entries, key=lambda waiting: read_stamp(memoryview(waiting.entry)).time_ms
    )
    # Spark's start has taken a while.
    at_ms = _due_ms(options)
    message_id = move(config, source, entry, due_ms, at_ms)
    properties = properties_of(peek_metadata(memoryview(entry)))
    _tell_stored(
        options, message_id, join_partition(source.topic, source.partition), properties, at_ms
    )
    if not is_hit(due_ms, int(time.time() * 1000)):
        # It repeats, or has become due meanwhile.
        print(
            "what was due before the new message was stored may be delivered too, from "
            f"{time_text(due_ms)} on",
            file=sys.stderr,
        )
    return 0


def _add_pause(commands: Commands, name: str, text: str) -> None:
    example = f"ledgerlake {name} reminders --id report"
    command = add_command(commands, name, lambda options: _tell(options, name), text, example)
    add_topic(command)
    target = command.add_mutually_exclusive_group(required=True)
    target.add_argument("--id", help="the id of the schedule")
    target.add_argument("--all", action="store_true", help="all schedules of the topic that repeat")
    add_service_url(command)


def _tell(options: argparse.Namespace, name: str) -> int:
    from ledgerlake.publish.schedules import Schedules

    with Schedules(client_settings(options), options.topic) as schedules:
        tell = schedules.pause if name == "pause" else schedules.resume
        message_ids = tell(options.id, all_schedules=options.all)
    target = "all schedules" if options.id is None else f"schedule {options.id}"
    if options.json:
        print(
            json.dumps(
                {"id": options.id, "command": name, "message_ids": list(map(str, message_ids))}
            )
        )
    else:
        print(
            f"{name} of {target} stored as {', '.join(map(str, message_ids))}; "
            f"{_holds_for(options, name)}"
        )
    return 0


def _holds_for(options: argparse.Namespace, name: str) -> str:
    """Say what a pause or its end is about: the topic stores it, whatever waits there."""
    if options.id is None:
        return (
            "it holds for all messages that repeat, and what they have due from now on"
            if name == "pause"
            else "pauses of single schedules go on"
        )
    if name == "pause":
        return (
            "it holds for the message that repeats under this id now, if there is one, and what it "
            "has due from now on"
        )
    return "a pause of all schedules goes on until ledgerlake resume --all"


def _schedule(options: argparse.Namespace) -> int:
    from ledgerlake.publish.schedules import Schedules, repetition_properties

    try:
        value = options.value.encode()
    except UnicodeEncodeError:
        # Python keeps a byte that is not UTF-8 as half of a surrogate pair.
        raise UsageError("VALUE is not UTF-8 text") from None
    at_ms = _at_ms(options)
    expires_ms = _optional_ms(options.expires, "--expires")
    rule: dict[str, Any] = {
        "cron": options.cron,
        "every": _span("--every", options.every),
        "timezone": options.timezone,
        "until": _optional_ms(options.until, "--until"),
        "count": options.count,
        "jitter": _span("--jitter", options.jitter),
        "catch_up": options.catch_up,
    }
    try:
        opened = Schedules(
            client_settings(options), options.topic, creates_topic=options.create_topic
        )
    except TopicNotFoundError as error:
        if options.create_topic:
            raise
        raise TopicNotFoundError(
            f"{error.message}; --create-topic creates {options.topic}"
        ) from None
    with opened as schedules:
        try:
            message_id = schedules.put(
                options.id, value, at=at_ms, key=options.key, expires=expires_ms, **rule
            )
        except UsageError as error:
            raise UsageError(_with_option_names(error.message)) from None
        topic_partition = schedules.partition_of(options.id)
    properties = {SCHEDULE_PROPERTY: options.id, **repetition_properties(**rule)}
    _tell_stored(options, message_id, topic_partition, properties, at_ms)
    return 0


def _with_option_names(message: str) -> str:
    """Return an error with the options in place of the properties that they set."""
    for name in SENDER_PROPERTIES:
        own = f"--{name.removeprefix('ledgerlake.')}"
        message = message.replace(name, _OTHER_OPTIONS.get(name, own))
    return message


def _tell_stored(
    options: argparse.Namespace,
    message_id: AnyMessageId,
    topic_partition: str,
    properties: Mapping[str, object],
    at_ms: int,
) -> None:
    from ledgerlake.publish.schedules import FirstDue, first_due
    from ledgerlake.stored.offsets import time_text
    from ledgerlake.wire.schedules import parse_schedule

    # The only occurrence may be past by now.
    first = first_due(properties, at_ms) or FirstDue(at_ms)
    due, most_later_ms = time_text(first.time_ms), first.most_later_ms
    repeats = parse_schedule(properties).repeats
    if options.json:
        result = {"id": options.id, "topic": topic_partition, "message_id": str(message_id)}
        when = {"repeats_from": due, "most_later_ms": most_later_ms} if repeats else {"due": due}
        print(json.dumps(result | when))
    else:
        is_past = at_ms < int(time.time() * 1000)
        later = f" (the first time up to {most_later_ms / 1000:g} s later)" if most_later_ms else ""
        says = (
            f"repeats from {due} on{later}"
            if repeats
            else f"is due {due}{', which is past: at once' if is_past else ''}"
        )
        print(f"schedule {options.id} {says}, stored in {topic_partition} as {message_id}")


def _at_ms(options: argparse.Namespace) -> int:
    """Return when a message is due, or from when it repeats."""
    if options.start is not None:
        if options.cron is None and options.every is None:
            raise UsageError("--from is the start of --cron or --every; give --at instead")
        return _time_ms(options.start, "--from")
    return int(time.time() * 1000) if options.cron or options.every else _due_ms(options)


def _due_ms(options: argparse.Namespace) -> int:
    from ledgerlake.options.kinds import duration_ms

    if options.at is not None:
        return _time_ms(options.at, "--at")
    return int(time.time() * 1000) + duration_ms("--in", options.span)


def _span(option: str, text: str | None) -> str | timedelta | None:
    """Return a span that starts with a number as the API takes it; days, weeks and months and all
    that starts with no number as ISO-8601.
    """
    from ledgerlake.options.kinds import checked_span_ms, duration_ms

    if text is None or not text[:1].isdigit():
        return text
    if dates := _DATES.fullmatch(text.strip()):
        count, unit = int(dates[1]), dates[2][0].upper()
        checked_span_ms(count * _DATE_MS[unit], f"{option} '{text}'")
        return f"P{count}{unit}"
    return timedelta(milliseconds=duration_ms(option, text))


def _optional_ms(text: str | None, option: str) -> int | None:
    return None if text is None else _time_ms(text, option)


def _time_ms(text: str, option: str) -> int:
    from ledgerlake.options.bounds import check_time_ms, parse_time_ms

    return check_time_ms(parse_time_ms(text, option), text, option)
