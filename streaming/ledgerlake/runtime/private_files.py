"""Folders and files that no other user of this machine may change, whatever the umask is.

private folder    nobody else may enter it: Unix sockets, which ask for no secret, temporary
                  files and native libraries of the JVM
trusted folder    nobody else may write to it: code is loaded from it
"""

from __future__ import annotations

import atexit
import fcntl
import os
import stat
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRITE_OF_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_ALL_OF_OTHERS = stat.S_IRWXG | stat.S_IRWXO

# The path of a Unix socket has 107 bytes at most, and Spark names one by 43 of them.
_MOST_FOLDER_BYTES = 64


@cache
def session_folder(pid: int) -> Path:
    """Return the private folder of a process for the sockets and temporary files of its sessions.

    Args:
        pid: the process, since a fork needs its own.

    Raises:
        SetupError: it cannot be made.
    """
    folder = make_private_folder(f"ledgerlake-{pid}-")
    atexit.register(_remove_sockets, pid, folder)
    return folder


def _remove_sockets(pid: int, folder: Path) -> None:
    """Remove the sockets that PySpark leaves, so that the JVM can remove the folder."""
    if os.getpid() == pid:
        for path in folder.glob(".*.sock"):
            path.unlink(missing_ok=True)


def make_private_folder(prefix: str, parent: str | None = None) -> Path:
    """Make a folder that no other user may enter, and lock it until this process ends, so that a
    cleaner of temporary folders leaves it alone.

    Raises:
        SetupError: it cannot be made, or others may enter it.
    """
    parent = tempfile.gettempdir() if parent is None else parent
    if len(os.fsencode(parent)) + len(prefix) + 10 > _MOST_FOLDER_BYTES:
        parent = "/tmp"
    try:
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        status = os.fstat(descriptor)
    except OSError as error:
        raise SetupError(
            f"no private folder can be made in {parent} ({error.strerror}); set TMPDIR to a folder "
            "that can be written to"
        ) from None
    if status.st_uid != os.geteuid() or status.st_mode & _ALL_OF_OTHERS:
        raise SetupError(
            f"other users can enter {folder}; set TMPDIR to a folder on a local file system"
        )
    return folder


def is_private(folder: str | Path) -> bool:
    """Return whether a folder is this user's, and no other user may enter it."""
    try:
        status = os.stat(folder)
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & _ALL_OF_OTHERS


def is_trusted(path: str | Path) -> bool:
    """Return whether this user or root owns a file or folder, and nobody else may write to it."""
    try:
        status = os.stat(path)
    except OSError:
        return False
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & _WRITE_OF_OTHERS


def make_trusted_folder(folder: Path) -> None:
    """Make a folder, if it is missing, to which no other user may write.

    Raises:
        SetupError: it belongs to another user, or others may write to it.
        OSError: it cannot be made.
    """
    with only_owner_writes():
        folder.mkdir(parents=True, exist_ok=True)
    check_trusted_folder(folder)


def check_trusted_folder(folder: Path, variable: str = "LEDGERLAKE_CACHE") -> None:
    """Check that no other user may write to a folder, if it is there. Of root's, root has decided
    which groups may write.

    Args:
        variable: the environment variable that names the folder, for the error.

    Raises:
        SetupError: it belongs to another user, or others may write to it.
    """
    try:
        status = folder.stat()
    except OSError:
        return
    is_of_root = status.st_uid == 0 != os.geteuid()
    rights_of_others = stat.S_IWOTH if is_of_root else _WRITE_OF_OTHERS
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & rights_of_others:
        raise SetupError(
            f"other users of this machine can write to {folder}, and code is loaded from it; take "
            f"their right (chmod go-w), or set {variable} to a folder of your own"
        )


@contextmanager
def only_owner_writes() -> Iterator[None]:
    """Let nobody else write to the files and folders that are made here."""
    before = os.umask(_WRITE_OF_OTHERS)
    os.umask(before | _WRITE_OF_OTHERS)
    try:
        yield
    finally:
        os.umask(before)


@contextmanager
def only_owner_reads() -> Iterator[None]:
    """Let nobody else read or write the files, folders and sockets that are made here."""
    before = os.umask(_ALL_OF_OTHERS)
    try:
        yield
    finally:
        os.umask(before)
