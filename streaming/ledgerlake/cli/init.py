"""``ledgerlake init`` writes a first configuration for a topic."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.cli.command import DEFAULT_SERVICE_URL, GIVE_UP_AFTER_S, add_command
from ledgerlake.errors import LedgerlakeError, SetupError, TopicNotFoundError, UsageError

if TYPE_CHECKING:
    import argparse

    from ledgerlake.cli.command import Commands


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "init",
        _init,
        "look at a topic and write a configuration for it; on a terminal, ask for what no option "
        "says",
        "ledgerlake init --service-url pulsar://localhost:6650 --topic orders",
    )
    command.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        help="default: the topic's name with .toml, in this folder",
    )
    command.add_argument(
        "--service-url", help=f"default: $LEDGERLAKE_SERVICE_URL, or {DEFAULT_SERVICE_URL}"
    )
    command.add_argument("--topic", help="the topic to read")
    command.add_argument(
        "--table",
        metavar="PATH",
        help="the folder of the table; default: lake/ and the topic's name, beside FILE",
    )
    command.add_argument(
        "--token", metavar="REFERENCE", default="", help="where the token is: file:PATH or env:NAME"
    )
    command.add_argument(
        "--ca-file", metavar="PATH", default="", help="the authorities that are trusted for TLS"
    )
    command.add_argument("--force", action="store_true", help="replace FILE if it exists")


def _init(options: argparse.Namespace) -> int:
    from ledgerlake.client.auth import parse_authentication
    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.client.transport import TlsSettings
    from ledgerlake.inspect.new_config import Answers, config_text, look_at, stream_name
    from ledgerlake.options.config import folder_of
    from ledgerlake.stored.local_paths import path_from, reference_from
    from ledgerlake.stored.secrets import is_reference

    if options.token and not is_reference(options.token):
        raise UsageError(
            "--token is where the token is, file:PATH or env:NAME, so that the file holds no secret"
        )
    default_url = os.environ.get("LEDGERLAKE_SERVICE_URL", DEFAULT_SERVICE_URL)
    service_url = (
        options.service_url or _ask("The broker's service URL", default_url) or default_url
    )
    topic = options.topic or _ask("The topic to read", "")
    if not topic:
        raise UsageError("which topic? Give --topic NAME")
    name = stream_name(topic)
    file = Path(options.file or f"{name}.toml")
    # Before anything is asked of the broker.
    _check_free(file, options.force)
    settings = ClientSettings(
        service_url,
        give_up_after_s=GIVE_UP_AFTER_S,
        authentication=parse_authentication(
            "token" if options.token else None, options.token, "--token"
        ),
        tls=TlsSettings(ca_file=options.ca_file or None),
    )
    try:
        facts = look_at(settings, topic)
    except LedgerlakeError as error:
        # What failed, and what to do, is in the sentence already.
        hint = (
            "; most brokers create it for the first message of a client"
            if isinstance(error, TopicNotFoundError)
            else ""
        )
        raise type(error)(
            f"{error.message}{hint} ({file} was not written)", **error.attributes
        ) from None
    default_table = str(file.parent / "lake" / name)
    table = options.table or _ask("The folder of the table", default_table) or default_table
    folder = folder_of(str(file))
    answers = Answers(
        service_url,
        facts.topic,
        path_from(folder, table),
        reference_from(folder, options.token),
        options.ca_file and path_from(folder, options.ca_file),
    )
    _write(file, config_text(answers, facts, str(file)), options.force)
    if options.json:
        print(json.dumps({"file": str(file), **asdict(facts)}))
    else:
        print(f"{file} is written; try it with: ledgerlake check {file}")
    return 0


def _ask(question: str, default: str) -> str:
    """Ask on a terminal; elsewhere, and for an empty answer, return an empty text."""
    if not sys.stdin.isatty():
        return ""
    print(f"{question}{f' [{default}]' if default else ''}: ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip()


def _check_free(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise UsageError(f"{file} exists; name another file, or replace it with --force")


def _write(file: Path, text: str, force: bool) -> None:
    try:
        with open(file, "w" if force else "x", encoding="utf-8") as opened:
            opened.write(text)
    except FileExistsError:
        _check_free(file, force=force)
    except OSError as error:
        raise SetupError(
            f"{file} cannot be written ({error.strerror}); name another file"
        ) from None
