"""Certificates and tokens of an embedded broker: of nobody else."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from ledgerlake.devbroker.security import make_security
from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", [".", "token.secret", "admin.token", "ca.pem"])
def test_secrets_that_others_can_write_to_are_not_believed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "security"
    make_security(folder)
    (folder / name).chmod(0o620)
    with pytest.raises(SetupError, match=r"can write to .*; remove .*, and it is made again"):
        make_security(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
@pytest.mark.parametrize("name", [".", "token.secret", "admin.token"])
def test_secrets_of_another_user_are_not_believed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "security"
    make_security(folder)
    os.chown(folder / name, 65534, 65534)
    with pytest.raises(SetupError, match=r"can write to .*; remove .*, and it is made again"):
        make_security(folder)
