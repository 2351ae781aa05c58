"""``ledgerlake completion`` prints the completion of this command for a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.cli.command import add_command

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from ledgerlake.cli.command import Commands

_SHELLS = ("bash", "zsh", "fish")


def add(commands: Commands) -> None:
    """Declare the command and its options."""
    command = add_command(
        commands,
        "completion",
        _completion,
        "print the completion of commands and options for a shell",
        'eval "$(ledgerlake completion bash)"',
    )
    command.add_argument("shell", choices=_SHELLS)


def _completion(options: argparse.Namespace) -> int:
    import shtab

    for action in _arguments(options.parser):
        if action.metavar in ("CONFIG", "FILE"):
            action.complete = shtab.FILE  # type: ignore[attr-defined]
    for line in shtab.complete(options.parser, options.shell).splitlines():
        print(line)
    return 0


def _arguments(whole: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield the arguments of all commands."""
    for action in whole._actions:
        if isinstance(action.choices, dict):
            for command in action.choices.values():
                yield from command._actions
