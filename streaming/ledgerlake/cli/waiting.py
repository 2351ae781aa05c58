"""``ledgerlake waiting`` lists the delayed messages that wait: they will be delivered, so those
that are known to be cancelled or replaced are not among them.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from ledgerlake.cli.command import add_command, add_spark, start_spark
from ledgerlake.errors import UsageError

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands

_SHOWN = (
    "deliver_at",
    "topic",
    "partition",
    "message_id",
    "ledger_id",
    "entry_id",
    "key",
    "key_bytes",
    "properties",
    "is_known",
    "may_be_cancelled",
)


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "waiting",
        _waiting,
        "list the delayed messages that wait, the next one first, while the pipeline runs or not",
        "ledgerlake waiting orders.toml --due-before 2030-05-02T09:00:00Z --key customer-7",
    )
    command.add_argument("config", metavar="CONFIG", help="the TOML file")
    command.add_argument(
        "--due-before",
        metavar="TIME",
        help="only messages that are due before: ISO with a zone, or milliseconds since 1970",
    )
    command.add_argument(
        "--key",
        help="only messages with that key, and last those whose key is not known here; of a "
        "binary key its base64 text",
    )
    command.add_argument(
        "--schedule",
        metavar="ID",
        help="only the message of the schedule with that id, and last those whose id is not "
        "known here",
    )
    command.add_argument(
        "-n", "--count", type=int, default=20, help="how many are listed at most (default: 20)"
    )
    add_spark(command)


def _waiting(options: argparse.Namespace) -> int:
    from ledgerlake.options.bounds import parse_time_ms
    from ledgerlake.options.config import load_config

    if options.count < 1:
        raise UsageError("--count must be at least 1")
    due_before_ms = (
        None if options.due_before is None else parse_time_ms(options.due_before, "--due-before")
    )
    config = load_config(options.config)
    spark = start_spark(f"ledgerlake waiting {config.stream.name}", config, options)
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.inspect.delayed_messages import waiting
    from ledgerlake.inspect.schedule_pauses import paused_since_ms
    from ledgerlake.wire.message_id import Position
    from ledgerlake.wire.schedules import SCHEDULE_PROPERTY

    rows = waiting(spark, config, due_before_ms, options.schedule, options.key)
    asks_content = options.key is not None or options.schedule is not None
    # What only may be asked for comes last.
    known_first = [rows["is_known"].desc()] if asks_content else []
    order = ("deliver_at", "topic", "partition", "ledger_id", "entry_id", "batch_index")
    ordered = rows.orderBy(*known_first, *order).select(*_SHOWN)
    listed = [row.asDict() for row in ordered.limit(options.count).collect()]
    if all(asks_content and not row["is_known"] for row in listed):
        is_filtered = asks_content or options.due_before is not None
        print(_nothing_found(is_filtered, are_listed=bool(listed)), file=sys.stderr)
    ids = {str((row["properties"] or {}).get(SCHEDULE_PROPERTY, "")) for row in listed} - {""}
    pauses_ms = paused_since_ms(spark, config, ids) if ids else {}
    for row in listed:
        source = TopicPartition(row["topic"], row["partition"])
        position = Position(row["ledger_id"], row["entry_id"])
        _print_row(row, pauses_ms.get((source, position)), options.json)
    return 0


def _nothing_found(is_filtered: bool, *, are_listed: bool) -> str:
    """Return the sentence for a list without a message that is known to be asked for.

    Args:
        are_listed: whether messages are listed whose key and properties are not known.
    """
    which = "no such message" if is_filtered else "no message"
    waits = "is known to wait" if are_listed else "waits"
    # The pipeline may not have read the newest messages yet.
    return f"{which} {waits}, as of the pipeline's last micro-batch"


def _print_row(row: dict[str, Any], paused_since_ms: int | None, as_json: bool) -> None:
    from ledgerlake.client.topics import join_partition
    from ledgerlake.runtime.guarded_output import printable
    from ledgerlake.schedules.cancel_messages import key_text
    from ledgerlake.stored.offsets import moment_text, time_text

    due = moment_text(row["deliver_at"])
    paused_since = None if paused_since_ms is None else time_text(paused_since_ms)
    topic = join_partition(row["topic"], row["partition"])
    own_key = key_text(row["key"], row["key_bytes"])
    if as_json:
        shown = {
            "deliver_at": due,
            "topic": topic,
            "message_id": row["message_id"],
            "key": own_key,
            "is_known": row["is_known"],
            "may_be_cancelled": row["may_be_cancelled"],
        }
        print(
            json.dumps(
                {**shown, "paused_since": paused_since, "properties": row["properties"] or {}}
            )
        )
        return
    paused = "" if paused_since is None else f"  paused since {paused_since}"
    properties = " ".join(f"{name}={value}" for name, value in (row["properties"] or {}).items())
    key = "" if own_key is None else f"  key {own_key}"
    if not row["is_known"]:
        key = "  key and properties not known"
    cancelled = "  a cancel may hit it" if row["may_be_cancelled"] else ""
    print(
        printable(
            f"{due}  {topic} {row['message_id']}{key}{cancelled}{paused}  {properties}".rstrip()
        )
    )
