"""Folders and files that no other user of this machine may change, whatever the umask is.

private folder    nobody else may enter it: Unix sockets, which ask for no secret, temporary
                  files and native libraries of the JVM
trusted folder    nobody else may write to it: code or secrets are read from it

Who may write to a folder can replace its content. So each folder on the way to a trusted one counts
too, as for OpenSSH's keys: root or this user owns it, and nobody else may write to it, or it is
sticky, as ``/tmp`` is. A group that is this user's alone may write.
"""

from __future__ import annotations

import atexit
import fcntl
import grp
import os
import pwd
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
    return status.st_uid in _owners() and not status.st_mode & _WRITE_OF_OTHERS


def make_trusted_folder(folder: Path) -> None:
    """Make a folder, if it is missing, to which no other user may write.

    Raises:
        SetupError: as ``check_trusted_folder``.
        OSError: it cannot be made.
    """
    with only_owner_writes():
        folder.mkdir(parents=True, exist_ok=True)
    check_trusted_folder(folder)


def check_trusted_folder(
    folder: Path, cure: str = "set LEDGERLAKE_CACHE to a folder of your own"
) -> None:
    """Check that no other user may write to a folder, which may be missing, or replace it.

    Args:
        cure: what else helps, for the error.

    Raises:
        SetupError: it belongs to another user, or others may write to it or replace it.
    """
    if os.path.exists(folder) and _others_can_write(folder.stat()):
        raise SetupError(
            f"other users of this machine can write to {folder}, whose content is trusted; take "
            f"their right (chmod go-w), or {cure}"
        )
    changeable = changeable_on_way_to(folder)
    if changeable is not None:
        raise SetupError(
            f"other users of this machine can replace {folder}, whose content is trusted, because "
            f"they can change {changeable}; take their right (chmod go-w), make that folder sticky "
            f"(chmod +t), or {cure}"
        )


def changeable_on_way_to(path: Path) -> Path | None:
    """Return a folder or link through which other users may replace a file or folder, which may be
    missing; None if they cannot replace it.
    """
    folders, links = _way_to(path)
    for link in links:
        if link.lstat().st_uid not in _owners():
            return link
    return next((one for one in folders if _others_can_write(one.stat(), is_on_way=True)), None)


def _others_can_write(status: os.stat_result, *, is_on_way: bool = False) -> bool:
    """Return whether another user owns a folder, or may write to it.

    Args:
        is_on_way: whether only its present entries count, which nobody else replaces if it is
            sticky.
    """
    if status.st_uid not in _owners():
        return True
    if is_on_way and status.st_mode & stat.S_ISVTX:
        return False
    # Of root's folders, root has decided which groups may write.
    is_of_root = status.st_uid == 0 != os.geteuid()
    rights = stat.S_IWOTH if is_of_root or _is_own_group(status.st_gid) else _WRITE_OF_OTHERS
    return bool(status.st_mode & rights)


def _owners() -> set[int]:
    """Return the users that are trusted: this one, and root, which may have another number in a
    container. Who owns the root folder can do everything.
    """
    return {0, os.geteuid(), os.stat("/").st_uid}


def _way_to(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders that are there in which parts of a path are looked up, and the links among
    these parts.
    """
    folders: set[Path] = set()
    links: set[Path] = set()
    paths = [Path(os.path.abspath(path)), Path(os.path.realpath(path))]
    while paths:
        path = paths.pop()
        for part in (path, *path.parents):
            folders.add(part.parent)
            if os.path.islink(part) and part not in links:
                links.add(part)
                paths.append(Path(os.path.abspath(part.parent / part.readlink())))
    return [folder for folder in sorted(folders) if os.path.exists(folder)], sorted(links)


def _is_own_group(number: int) -> bool:
    """Return whether a group is this user's alone: it has the user's name, and no other member."""
    try:
        name = pwd.getpwuid(os.geteuid()).pw_name
        group = grp.getgrgid(number)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


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
