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
from typing import NoReturn

from ledgerlake.cli import (
    broker,
    bundle,
    cancel,
    demo,
    forget,
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
from ledgerlake.errors import LedgerlakeError

# In the order in which help lists them.
_COMMANDS = (
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
)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except LedgerlakeError as error:
        return _report(error, options.debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from ledgerlake.pipeline.failures import cause_of

        return _report(cause_of(error), options.debug)


def _report(error: LedgerlakeError, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"ledgerlake: {error.message}", file=sys.stderr)
    return error.exit_code


class _Parser(argparse.ArgumentParser):
    """A parser that answers a usage error with one sentence and the way to help."""

    def error(self, message: str) -> NoReturn:
        print(f"ledgerlake: {message}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    whole = _Parser(prog="ledgerlake", description="Apache Pulsar ledgers in, ordered Delta tables out.")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=_Parser)
    for command in _COMMANDS:
        command.add(commands)
    return whole
