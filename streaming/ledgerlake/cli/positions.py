"""``ledgerlake positions`` finds a time, a number or an id in a topic."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ledgerlake.cli.command import (
    add_command,
    add_service_url,
    add_topic,
    client_settings,
    json_text,
)

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "positions",
        _positions,
        "where a time, a message's number or an id stands in a topic, with its neighbours",
        "ledgerlake positions orders --at 2026-05-01T08:00:00Z",
    )
    add_topic(command)
    group = command.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--at",
        metavar="TIME",
        help="ISO with a zone, or milliseconds since 1970: by the broker's clock",
    )
    group.add_argument("--index", metavar="N", help="the broker's number of a message, from 0")
    group.add_argument(
        "--id", help="a message id: as text, or serialised by any client as hex or base64"
    )
    add_service_url(command)


def _positions(options: argparse.Namespace) -> int:
    from ledgerlake.inspect.positions import find_places
    from ledgerlake.options.bounds import AtIndex, AtTime, Bound, parse_index, parse_time_ms
    from ledgerlake.wire.message_id import parse_message_id

    if options.at is not None:
        bound: Bound = AtTime(parse_time_ms(options.at, "--at"))
    elif options.index is not None:
        bound = AtIndex(parse_index(options.index, "--index"))
    else:
        bound = parse_message_id(options.id)
    for place in find_places(client_settings(options), options.topic, bound):
        if options.json:
            print(json_text(asdict(place)))
            continue
        where = (
            f"{place.message_id} ({place.serialised})"
            if place.message_id
            else "behind the last message"
        )
        print(f"{place.topic_partition}: {where}")
        before = "in the same batch" if place.is_inside_batch else _line(place.before)
        lines = (("before", before), ("at", _line(place.at)), ("after", _line(place.after)))
        for word, line in lines:
            print(f"  {word:<6}  {line}")
    return 0


def _line(entry: dict[str, Any] | None) -> str:
    from ledgerlake.inspect.peek import entry_line

    return entry_line(entry) if entry else "no entry"
