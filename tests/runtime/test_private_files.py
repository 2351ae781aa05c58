"""What no other user of the machine may enter or change, also with a umask that allows all."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ledgerlake.devbroker.security import make_security
from ledgerlake.errors import SetupError
from ledgerlake.runtime.java import cache_folder, locked
from ledgerlake.runtime.private_files import is_private, make_private_folder, make_trusted_folder
from ledgerlake.runtime.session import start_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS = stat.S_IRWXG | stat.S_IRWXO


@pytest.fixture(params=[0o000, 0o002, 0o022], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_nobody_else_enters_a_private_folder(umask: int, tmp_path: Path) -> None:
    folder = make_private_folder("a-", str(tmp_path))
    assert mode(folder) == 0o700
    assert is_private(folder)
    folder.chmod(0o710)
    assert not is_private(folder)
    folder.rmdir()


def test_a_socket_fits_into_the_path_of_a_private_folder(tmp_path: Path) -> None:
    parent = tmp_path / ("x" * 100)
    parent.mkdir()
    folder = make_private_folder("ledgerlake-1234567-", str(parent))
    assert len(f"{folder}/.00000000-0000-0000-0000-000000000000.sock") < 108
    folder.rmdir()


_DAEMON = """
import os, stat
from pyspark import daemon
from ledgerlake.workers import worker_daemon
tell = daemon.write_with_length

def look(path, stream):
    made = os.umask(0)
    os.umask(made)
    print(oct(stat.S_IMODE(os.stat(path).st_mode)), oct(made), flush=True)
    os._exit(0)

daemon.write_with_length = look
worker_daemon.prepare = lambda: True
worker_daemon.main()
"""


@pytest.mark.parametrize("rights", [0o777, 0o1777, 0o755, 0o700])
def test_nobody_else_connects_to_what_runs_code(umask: int, rights: int) -> None:
    # The path of a socket is short, and pytest's folders are not.
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(rights)
        environment = {
            "PYTHON_WORKER_FACTORY_SOCK_DIR": folder,
            "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        }
        command = [sys.executable, "-c", _DAEMON]
        ended = subprocess.run(
            command, env=os.environ | environment, check=True, capture_output=True, text=True
        )
    socket_rights, restored = (int(number, 8) for number in ended.stdout.split())
    assert rights == 0o700 or not socket_rights & OTHERS
    assert restored == umask


def test_nobody_else_writes_to_the_cache(
    umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path / "cache"))
    with locked(cache_folder() / "jars"):
        (tmp_path / "cache" / "jars" / "a.jar").write_bytes(b"")
        subprocess.run(["mkdir", str(tmp_path / "cache" / "jars" / "b")], check=True)
    made = [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]
    assert len(made) == 5
    assert [path for path in made if mode(path) & OTHERS_WRITE] == []


@pytest.mark.parametrize("rights", [0o1777, 0o777])
def test_a_folder_that_others_may_write_to_is_refused_as_a_cache_and_stays_as_it_is(
    rights: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    tmp_path.chmod(rights)
    with pytest.raises(
        SetupError, match=r"take their right \(chmod go-w\), or set LEDGERLAKE_CACHE"
    ):
        cache_folder()
    assert mode(tmp_path) == rights


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
@pytest.mark.parametrize(("owner", "rights"), [(65534, 0o755), (65534, 0o777)])
def test_a_cache_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, rights: int
) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(rights)
    os.chown(folder, owner, owner)
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(folder))
    with pytest.raises(
        SetupError, match=r"other users of this machine can write to .*, whose content is trusted"
    ):
        cache_folder()
    with pytest.raises(SetupError):
        make_trusted_folder(folder)
    monkeypatch.delenv("LEDGERLAKE_CACHE")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(folder))
    with pytest.raises(SetupError, match="set NUMBA_CACHE_DIR to a folder of your own"):
        start_session("test")
    # spark-submit has started a JVM.
    monkeypatch.setenv("PYSPARK_GATEWAY_PORT", "1")
    monkeypatch.setenv("PYSPARK_GATEWAY_SECRET", "hush")
    with pytest.raises(SetupError, match="set NUMBA_CACHE_DIR to a folder of your own"):
        start_session("test")


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Check a folder that code is loaded from, as a start does."""

    def started(folder: Path) -> None:
        monkeypatch.setenv("LEDGERLAKE_CACHE", str(folder))
        cache_folder("jars")

    return started


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("below", ["cache", "deeper/cache"])
def test_a_folder_that_others_can_replace_is_refused(
    check: Callable[[Path], None], tmp_path: Path, below: str, is_there: bool
) -> None:
    scratch = tmp_path / "scratch"
    (scratch / below if is_there else scratch).mkdir(parents=True)
    (tmp_path / "link").symlink_to(scratch / below)
    (tmp_path / "back").symlink_to(tmp_path / "link")
    check(scratch / below)
    scratch.chmod(0o777)
    for path in (scratch / below, tmp_path / "link", tmp_path / "back"):
        with pytest.raises(
            SetupError,
            match=rf"can replace .*, because they can change {scratch}; .* \(chmod go-w\)",
        ):
            check(path)
    scratch.chmod(0o1777)
    check(tmp_path / "back")


def test_a_link_that_others_can_replace_is_refused(
    check: Callable[[Path], None], tmp_path: Path
) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "link").symlink_to(tmp_path / "own")
    check(tmp_path / "scratch" / "link" / "cache")
    (tmp_path / "scratch").chmod(0o777)
    with pytest.raises(SetupError, match=r"can change .*scratch"):
        check(tmp_path / "scratch" / "link" / "cache")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders to other users")
@pytest.mark.parametrize("below", [".", "cache"])
def test_a_group_of_ones_own_may_write_and_another_group_or_user_may_not(
    check: Callable[[Path], None], tmp_path: Path, below: str
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o775)
    check(home / below)
    for user, group, rights in ((0, 65534, 0o775), (65534, 0, 0o755), (65534, 0, 0o1777)):
        os.chown(home, user, group)
        home.chmod(rights)
        with pytest.raises(SetupError, match=r"can (write to|change) .*home"):
            check(home / below)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives links to other users")
def test_a_link_of_another_user_is_refused(check: Callable[[Path], None], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    check(link / "cache")
    os.chown(link, 65534, 65534, follow_symlinks=False)
    with pytest.raises(SetupError, match=f"can change {link}"):
        check(link / "cache")


def test_a_brokers_secrets_are_private_from_their_first_byte(umask: int, tmp_path: Path) -> None:
    seen: dict[str, int] = {}
    folder = tmp_path / "security"
    making = threading.Thread(target=make_security, args=(folder,))
    making.start()
    while making.is_alive():
        for path in folder.glob("*"):
            seen[path.name] = seen.get(path.name, 0) | mode(path)
    making.join()
    seen |= {path.name: seen.get(path.name, 0) | mode(path) for path in folder.iterdir()}
    assert {"token.secret", "admin.token", "broker.key.pem", "client.key.pem"} <= set(seen)
    assert [name for name, rights in seen.items() if rights & OTHERS] == []
    assert mode(folder) == 0o700
