"""The command ``ledgerlake``. Exit 0: done, 1: a check found something, 2: bad usage or setup, 3: broker or table unreachable,
or a process was ended from outside: start it again.

An error is one sentence on standard error; ``--debug`` shows the traceback behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from ledgerlake.errors import LedgerlakeError, SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.client.cluster import ClientSettings

DEFAULT_SERVICE_URL = "pulsar://localhost:6650"
_STATE_FOLDER = "~/.local/share/ledgerlake/broker"


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options) or 0)
    except LedgerlakeError as error:
        return _report(error, error.exit_code, options.debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from ledgerlake.query.assemble import cause_of

        cause = cause_of(error)
        return _report(cause, cause.exit_code, options.debug)


def _report(error: LedgerlakeError, code: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"ledgerlake: {error.message}", file=sys.stderr)
    return code


class _Parser(argparse.ArgumentParser):
    """One sentence on a usage error, with the way to help."""

    def error(self, message: str) -> NoReturn:
        print(f"ledgerlake: {message}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ledgerlake", description="Apache Pulsar ledgers in, ordered Delta tables out.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(
        name: str, command: Callable[[argparse.Namespace], int | None], text: str, example: str
    ) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, epilog=f"example: {example}")
        one.add_argument("--json", action="store_true", help="print the result as JSON")
        one.add_argument("--debug", action="store_true", help="show the traceback of an error")
        one.set_defaults(command=command)
        return one

    run = add("run", _run, "run the pipeline of a configuration", "ledgerlake run orders.toml --once")
    run.add_argument("config", metavar="CONFIG", help="the TOML file")
    run.add_argument("--once", action="store_true", help="end when everything that is there now is in the table")
    run.add_argument(
        "--master", default="local[*,4]", help="Spark master (default: local[*,4]: a task is tried four times)"
    )

    run.add_argument(
        "--archive-classes",
        action="store_true",
        help="when it ends, leave an archive of the JVM's classes (200 MB) that makes later starts shorter",
    )

    demo = add(
        "demo", _demo, "live producers, the pipeline, the table and a verdict", "ledgerlake demo --messages 200000"
    )
    demo.add_argument("--messages", type=int, default=250_000, help="how many messages are produced (default: 250000)")

    peek = add(
        "peek",
        _peek,
        "show entries of a topic as the broker stored them",
        "ledgerlake peek orders --from earliest -n 5",
    )
    peek.add_argument("topic", metavar="TOPIC")
    peek.add_argument("-n", "--count", type=int, default=10, help="how many entries per partition (default: 10)")
    peek.add_argument("--from", dest="start", default="earliest", help="earliest or a message id (default: earliest)")
    _service_url(peek)

    positions = add(
        "positions",
        _positions,
        "where a time, a message's number or an id stands in a topic, with its neighbours",
        "ledgerlake positions orders --at 2026-05-01T08:00:00Z",
    )
    positions.add_argument("topic", metavar="TOPIC")
    asked = positions.add_mutually_exclusive_group(required=True)
    asked.add_argument(
        "--at", metavar="TIME", help="ISO with a zone, or milliseconds since 1970: by the broker's clock"
    )
    asked.add_argument("--index", metavar="N", help="the broker's number of a message, from 0")
    asked.add_argument("--id", help="a message id: as text, or serialised by any client as hex or base64")
    _service_url(positions)

    lag = add("lag", _lag, "how far the table is behind its topics", "ledgerlake lag orders.toml")
    lag.add_argument("config", metavar="CONFIG")

    verify = add(
        "verify",
        _verify,
        "compare the table with its topics; exit 1 when they differ",
        "ledgerlake verify orders.toml --json",
    )
    verify.add_argument("config", metavar="CONFIG")

    state = add(
        "state",
        _state,
        "show what waits: large messages that are not whole, delayed ones",
        "ledgerlake state orders.toml",
    )
    state.add_argument("config", metavar="CONFIG")

    cancel = add(
        "cancel",
        _cancel,
        "cancel delayed messages that wait, by message id or by key",
        "ledgerlake cancel orders.toml --key order-17",
    )
    cancel.add_argument("config", metavar="CONFIG")
    target = cancel.add_mutually_exclusive_group(required=True)
    target.add_argument("--id", help="the message's id, such as 12:345")
    target.add_argument("--key", help="every waiting message with this key")

    forget = add(
        "forget", _forget, "remove the pipeline's durable cursors from the broker", "ledgerlake forget orders.toml"
    )
    forget.add_argument("config", metavar="CONFIG")

    vacuum = add(
        "vacuum",
        _vacuum,
        "remove files that killed tasks left behind and that the tables do not use",
        "ledgerlake vacuum orders.toml --dry-run",
    )
    vacuum.add_argument("config", metavar="CONFIG")
    vacuum.add_argument(
        "--retention-hours", type=int, default=168, help="leave what is younger (default: 168, at least 1)"
    )
    vacuum.add_argument("--dry-run", action="store_true", help="only say which")

    broker = add("broker", _broker, "the embedded development broker", "ledgerlake broker start --data-dir /tmp/broker")
    broker.add_argument("action", choices=["start", "stop", "status", "env"])
    broker.add_argument(
        "--secure", action="store_true", help="start with TLS and tokens, and say where certificates and tokens are"
    )
    broker.add_argument("--data-dir", help=f"where it keeps everything (default: {_STATE_FOLDER})")
    return parser


def _service_url(parser: argparse.ArgumentParser) -> None:
    default = os.environ.get("LEDGERLAKE_SERVICE_URL", DEFAULT_SERVICE_URL)
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--service-url", default=default, help=f"default: $LEDGERLAKE_SERVICE_URL, now {default}")
    where.add_argument("--config", help="the TOML file that says how to reach the broker, in place of --service-url")


def _client_settings(options: argparse.Namespace) -> ClientSettings:
    from ledgerlake.client.cluster import ClientSettings
    from ledgerlake.query.config import load_config

    settings = (
        load_config(options.config).parsed_options().client if options.config else ClientSettings(options.service_url)
    )
    return replace(settings, give_up_after_s=5.0)


def _run(options: argparse.Namespace) -> int:
    from ledgerlake.decode.ready import make_ready
    from ledgerlake.query.assemble import Pipeline, check_reachable
    from ledgerlake.query.config import load_config
    from ledgerlake.query.progress import ProgressScreen
    from ledgerlake.query.session import end_and_archive, start_session

    config = load_config(options.config)
    check_reachable(config)
    # Where nothing was ever compiled this takes many seconds; the first batch finds it done.
    threading.Thread(target=make_ready, daemon=True).start()
    screen = ProgressScreen()
    stop = threading.Event()
    _stop_on_signals(stop)
    name = f"ledgerlake {config.stream.name}"
    spark = start_session(name, options.master, archives_classes=options.archive_classes)
    # Spark installs a handler of its own that ends the process in the middle of a batch.
    _stop_on_signals(stop)
    pipeline = Pipeline(spark, config, screen.totals.add)
    try:
        pipeline.start(options.once)
        assert pipeline.query is not None
        screen.start(pipeline.query)
        try:
            while not stop.is_set() and not pipeline.wait(0.5):
                pass
            pipeline.stop()
        finally:
            screen.stop()
    finally:
        pipeline.close()
    if options.archive_classes:
        archive = end_and_archive(spark)
        print(f"classes are archived in {archive} ({archive.stat().st_size / 1e6:,.0f} MB)", file=sys.stderr)
    if options.json:
        print(json.dumps(asdict(screen.totals)))
    return 0


def _stop_on_signals(stop: threading.Event) -> None:
    """Have SIGINT and SIGTERM set ``stop``; a second one ends at once."""

    def ask(signal_number: int, _frame: object) -> None:
        if stop.is_set():
            raise SystemExit(128 + signal_number)
        stop.set()

    signal.signal(signal.SIGINT, ask)
    signal.signal(signal.SIGTERM, ask)


def _demo(options: argparse.Namespace) -> int:
    from ledgerlake.demo import run_demo

    return run_demo(options.messages, as_json=options.json)


def _peek(options: argparse.Namespace) -> int:
    from ledgerlake.query.peek import entry_line, peek

    if options.count < 1:
        raise UsageError("--count must be at least 1")
    for entry in peek(_client_settings(options), options.topic, options.start, options.count):
        print(json.dumps(entry, default=str) if options.json else entry_line(entry))
    return 0


def _positions(options: argparse.Namespace) -> int:
    from ledgerlake.query.peek import entry_line
    from ledgerlake.query.positions import find_places
    from ledgerlake.source.options import AtIndex, AtTime, Bound, parse_index, parse_time_ms
    from ledgerlake.wire.message_id import parse_message_id

    if options.at is not None:
        bound: Bound = AtTime(parse_time_ms(options.at, "--at"))
    elif options.index is not None:
        bound = AtIndex(parse_index(options.index, "--index"))
    else:
        bound = parse_message_id(options.id)
    for place in find_places(_client_settings(options), options.topic, bound):
        if options.json:
            print(json.dumps(asdict(place), default=str))
            continue
        where = f"{place.message_id} ({place.serialised})" if place.message_id else "behind the last message"
        print(f"{place.topic_partition}: {where}")
        for word, entry in (("before", place.before), ("at", place.at), ("after", place.after)):
            print(f"  {word:<6}  {entry_line(entry) if entry else 'no entry'}")
    return 0


def _lag(options: argparse.Namespace) -> int:
    from ledgerlake.query.config import load_config
    from ledgerlake.query.lag import find_lags

    for lag in find_lags(load_config(options.config)):
        print(json.dumps(asdict(lag)) if options.json else lag.sentence())
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ledgerlake.query.config import load_config
    from ledgerlake.query.verify import verify

    verdict = verify(load_config(options.config))
    if options.json:
        print(json.dumps(asdict(verdict)))
    else:
        print(verdict.sentence())
    return 0 if verdict.clean else 1


def _state(options: argparse.Namespace) -> int:
    from ledgerlake.query.config import load_config
    from ledgerlake.query.open_sets import open_messages
    from ledgerlake.query.session import start_session
    from ledgerlake.query.waiting import waiting_messages

    config = load_config(options.config)
    spark = start_session(f"ledgerlake state {config.stream.name}")
    found, delayed = open_messages(spark, config), waiting_messages(spark, config)
    if options.json:
        print(json.dumps({"large": [asdict(one) for one in found], "delayed": [asdict(one) for one in delayed]}))
        return 0
    for line in [*(one.sentence() for one in found), *(one.sentence() for one in delayed)]:
        print(line)
    held_bytes = sum(one.held_bytes for one in found)
    print(f"{len(found):,} large messages are not whole, {held_bytes:,} bytes held")
    print(f"{sum(one.waiting for one in delayed):,} delayed messages wait")
    return 0


def _cancel(options: argparse.Namespace) -> int:
    from ledgerlake.query.assemble import cancel
    from ledgerlake.query.config import load_config

    config = load_config(options.config)
    by: Literal["id", "key"] = "id" if options.id is not None else "key"
    target = options.id if by == "id" else options.key
    names = cancel(config, by, target)
    result = {"by": by, "target": target, "topics": names}
    print(json.dumps(result) if options.json else f"cancel of {by} {target} stored in {', '.join(names)}")
    return 0


def _forget(options: argparse.Namespace) -> int:
    from ledgerlake.query.assemble import forget
    from ledgerlake.query.config import load_config

    config = load_config(options.config)
    names = forget(config)
    result = {"subscription": config.subscription, "topics": names}
    print(json.dumps(result) if options.json else f"removed {config.subscription} from {', '.join(names)}")
    return 0


def _vacuum(options: argparse.Namespace) -> int:
    from ledgerlake.query.config import load_config
    from ledgerlake.query.vacuum import vacuum

    for one in vacuum(load_config(options.config), options.retention_hours, dry_run=options.dry_run):
        if options.json:
            print(json.dumps(asdict(one)))
            continue
        print(f"{one.table}: {len(one.files):,} files {'would be ' if options.dry_run else ''}removed")
        for name in one.files:
            print(f"  {name}")
    return 0


def _broker(options: argparse.Namespace) -> int:
    from ledgerlake.broker import Broker

    broker = Broker(Path(options.data_dir or _STATE_FOLDER).expanduser(), secure=options.secure)
    if options.action == "start":
        address = broker.start(attached=False)
    elif options.action == "stop":
        stopped = broker.stop()
        print(json.dumps({"stopped": stopped}) if options.json else ("stopped" if stopped else "no broker was running"))
        return 0
    else:
        found = broker.status()
        if found is None:
            raise SetupError("no broker is running; start one with: ledgerlake broker start")
        address = found
    if options.json:
        print(json.dumps(asdict(address)))
    elif options.action == "env":
        print(f"export LEDGERLAKE_SERVICE_URL={address.service_url}")
        print(f"export LEDGERLAKE_ADMIN_URL={address.admin_url}")
    else:
        print(
            f"broker at {address.service_url}, admin {address.admin_url}, pid {address.pid}, data in {address.data_dir}"
        )
        if options.secure:
            print(f"certificates and tokens in {broker.security.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
