"""What shells complete, and the version."""

from __future__ import annotations

import subprocess
from importlib.metadata import version

import pytest

from tests.live.pipelines import ledgerlake


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_the_commands_and_their_options(shell: str) -> None:
    result = ledgerlake("completion", shell)
    assert result.returncode == 0
    for word in ("rejects", "replay", "waiting"):
        assert word in result.stdout


def test_bash_completes_a_command() -> None:
    script = ledgerlake("completion", "bash").stdout
    asked = "COMP_WORDS=(ledgerlake rej); COMP_CWORD=1; _shtab_ledgerlake; echo ${COMPREPLY[@]}"
    result = subprocess.run(
        ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["rejects"]


def test_the_version_is_the_packages() -> None:
    assert ledgerlake("--version").stdout == f"ledgerlake {version('ledgerlake')}\n"
