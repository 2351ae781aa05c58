"""The command ``ledgerlake``: one module for each of its commands.

Exit codes, the same for all:

    0  done
    1  a check found something, or messages are lost
    2  bad usage or setup
    3  broker or table unreachable, or a process was ended from outside: start it again

An error is one sentence on standard error; ``--debug`` shows the traceback behind it.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any, NoReturn

from ledgerlake.cli import (
    broker,
    bundle,
    cancel,
    check,
    completion,
    demo,
    forget,
    init,
    lag,
    peek,
    positions,
    rejects,
    run,
    schedule,
    state,
    upkeep,
    vacuum,
    verify,
    waiting,
)
from ledgerlake.errors import LedgerlakeError, SetupError
from ledgerlake.runtime.guarded_output import guarded_output

# In the order in which help lists them.
_COMMANDS = (
    init,
    check,
    run,
    demo,
    peek,
    positions,
    lag,
    verify,
    state,
    waiting,
    rejects,
    schedule,
    cancel,
    forget,
    upkeep,
    vacuum,
    bundle,
    broker,
    completion,
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    with guarded_output():
        return _run(arguments)


def _run(arguments: list[str] | None) -> int:
    options = parser().parse_args(arguments)
    if not options.debug:
        # delta-rs warns of each place without credentials that it has looked at.
        os.environ.setdefault("RUST_LOG", "error")
    try:
        return int(options.command(options))
    except LedgerlakeError as error:
        return _report(error, options.debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ModuleNotFoundError as error:
        package, install = (error.name or "").partition(".")[0], "pip install 'ledgerlake[spark]'"
        return _report(
            SetupError(f"the package {package} is missing; install it with: {install}"),
            options.debug,
        )
    except Exception as error:
        from ledgerlake.pipeline.failures import cause_of

        return _report(cause_of(error), options.debug)


def _report(error: LedgerlakeError, debug: bool) -> int:
    if debug:
        import traceback

        from ledgerlake.stored.secrets import said

        for line in traceback.format_exc().splitlines():
            print(said(line), file=sys.stderr)
    print(f"ledgerlake: {error.message}", file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    """A parser that answers a usage error with one sentence and the way to help. It names the
    command or option that is nearest to one that does not exist.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        namespace, unknown = super().parse_known_args(args, namespace)
        options = [argument for argument in unknown if argument.startswith("-")]
        if options:
            names = tuple(name for name in self._option_string_actions if name.startswith("--"))
            self._refuse("option", options[0], names)
        if unknown:
            self.error(f"there is no place for the argument {unknown[0]}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self._refuse("command", value, tuple(action.choices))
        super()._check_value(action, value)

    def _refuse(self, kind: str, name: str, known: tuple[str, ...]) -> NoReturn:
        # Commands that are right need not wait for the import.
        from ledgerlake.options.declared import nearest

        self.error(f"there is no {kind} {name}{nearest(name, known)}")

    def _print_message(self, message: str, file: Any = None) -> None:
        # Standard output takes one line at a time (see ``guarded_output``).
        for line in message.splitlines(keepends=True):
            super()._print_message(line, file)

    def error(self, message: str) -> NoReturn:
        mark = "" if message.endswith("?") else ";"
        print(f"ledgerlake: {message}{mark} see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


class _Version(argparse.Action):
    """Prints the version; finding it takes time that other commands need not wait for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"ledgerlake {version('ledgerlake')}")
        except PackageNotFoundError:
            print("ledgerlake, not installed as a package")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = _Parser(
        prog="ledgerlake", description="Apache Pulsar ledgers in, ordered Delta tables out."
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version")
    # For the command that prints completions.
    whole.set_defaults(parser=whole)
    commands = whole.add_subparsers(
        title="commands", required=True, metavar="COMMAND", parser_class=_Parser
    )
    for command in _COMMANDS:
        command.add(commands)
    return whole
