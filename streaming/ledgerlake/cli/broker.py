"""``ledgerlake broker`` starts and stops the embedded development broker."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command
from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from ledgerlake.cli.command import Commands

_STATE_FOLDER = "~/.local/share/ledgerlake/broker"

# By Pulsar's default, a topic goes with its messages after a minute without producer and
# subscription.
_SETTINGS = {"brokerDeleteInactiveTopicsEnabled": "false"}


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "broker",
        _broker,
        "the embedded development broker",
        "ledgerlake broker start --data-dir ~/broker",
    )
    command.add_argument("action", choices=["start", "stop", "status", "env"])
    command.add_argument(
        "--secure",
        action="store_true",
        help="start with TLS and tokens, and say where certificates and tokens are",
    )
    command.add_argument(
        "--port",
        type=_port,
        help="start at this port for clients; default: that of the last start, and at first 6650, "
        "or 6651 with --secure, if it is free",
    )
    command.add_argument(
        "--http-port",
        type=_port,
        help="start with this port for the admin address; default: that of the last start, and at "
        "first 8080 if it is free",
    )
    command.add_argument("--data-dir", help=f"where it keeps everything (default: {_STATE_FOLDER})")


def _broker(options: argparse.Namespace) -> int:
    from ledgerlake.devbroker import Broker

    folder = Path(options.data_dir or _STATE_FOLDER).expanduser()
    broker = Broker(
        folder,
        settings=_SETTINGS,
        secure=options.secure,
        usual_ports=True,
        port=options.port,
        http_port=options.http_port,
    )
    none_runs = f"no broker is running with its data in {broker.data_dir}"
    if options.action == "start":
        address = broker.start(attached=False)
    elif options.action == "stop":
        stopped = broker.stop()
        print(
            json.dumps({"stopped": stopped})
            if options.json
            else ("stopped" if stopped else none_runs)
        )
        return 0
    else:
        running = broker.status()
        if running is None:
            raise SetupError(
                f"{none_runs}; start one with: ledgerlake broker start{_data_dir(options.data_dir)}"
            )
        address = running
    if options.json:
        print(json.dumps(asdict(address)))
    elif options.action == "env":
        print(f"export LEDGERLAKE_SERVICE_URL={address.service_url}")
        print(f"export LEDGERLAKE_ADMIN_URL={address.admin_url}")
    else:
        print(
            f"broker at {address.service_url}, admin {address.admin_url}, pid {address.pid}, data "
            f"in {address.data_dir}"
        )
        if options.secure:
            print(f"certificates and tokens in {broker.security.folder}")
        if not address.service_url.endswith((":6650", ":6651")):
            print(_env_hint(options.data_dir))
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"'{text}' is not a port; write 1 to 65535")
    return int(text)


def _env_hint(data_dir: str | None) -> str:
    """Say how other commands find a broker that is not at Pulsar's own port."""
    return (
        "commands without --service-url look for a broker at port 6650; to name this one: "
        f'eval "$(ledgerlake broker env{_data_dir(data_dir)})"'
    )


def _data_dir(data_dir: str | None) -> str:
    """Return the option that names the folder again."""
    return "" if data_dir is None else f" --data-dir {shlex.quote(data_dir)}"
