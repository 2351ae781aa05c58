"""Where compiled kernels are kept: Numba's folders, if nobody else can write to them.

Numba runs what it finds in an index, a pickle. So a folder is used only if this user or root owns
it and nobody else may write to it or replace it, and files are made in such a way, whatever the
umask is. Folders are tried in Numba's order: NUMBA_CACHE_DIR, ``__pycache__`` beside the module,
the user's cache folder. The umask itself stays as it is, since it is of all threads.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import uuid
import warnings
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar

from numba import njit
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

from ledgerlake.runtime.private_files import changeable_on_way_to, is_trusted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOLDER_RIGHTS = 0o755
_FILE_RIGHTS = 0o644


class _UntrustedFolderError(PermissionError):
    """A folder that another user owns or may write to."""


def keep(functions: list[Callable[..., Any]]) -> list[Any]:
    """Return the functions, to be compiled at their first call and kept.

    Raises:
        RuntimeError: there is no folder for them.
    """
    dispatchers = []
    for function in functions:
        dispatcher = njit(nogil=True)(function)
        dispatcher._cache = _KernelCache(function)
        dispatchers.append(dispatcher)
    return dispatchers


class _TrustedLocator:
    """Mixed into each of Numba's locators, which all call this before a folder is used. Numba tries
    its next locator after an OSError.
    """

    def ensure_cache_path(self) -> None:
        folder = Path(self.get_cache_path())  # type: ignore[attr-defined]
        for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
            missing.mkdir(_FOLDER_RIGHTS, exist_ok=True)
        _check(folder)
        # It may be read-only.
        tempfile.TemporaryFile(dir=folder).close()


def _check(folder: Path) -> None:
    """Check a folder, and the way to it. The sources are beside ``__pycache__``, and who can change
    them needs no cache.

    Raises:
        _UntrustedFolderError: another user owns it, or may write to it or replace it.
    """
    untrusted = None if is_trusted(folder) else folder
    if untrusted is None and folder.name != "__pycache__":
        untrusted = changeable_on_way_to(folder)
    if untrusted is not None:
        _warn(untrusted)
        raise _UntrustedFolderError(f"other users can write to {untrusted}")


@cache
def _warn(folder: Path) -> None:
    """Warn of a folder, once."""
    warnings.warn(
        f"other users can write to {folder}, so no compiled code is kept there; remove it, or set "
        "NUMBA_CACHE_DIR to a folder of your own",
        RuntimeWarning,
        stacklevel=2,
    )


class _Implementation(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes: ClassVar[list[type]] = [
        type(locator.__name__, (_TrustedLocator, locator), {})
        for locator in CompileResultCacheImpl._locator_classes
    ]


class _IndexFile(IndexDataCacheFile):  # type: ignore[misc]
    @contextlib.contextmanager
    def _open_for_write(self, filepath: str) -> Iterator[IO[bytes]]:
        new = Path(f"{filepath}.{uuid.uuid4().hex[:16]}.new")
        try:
            with open(
                new, "wb", opener=lambda path, flags: os.open(path, flags, _FILE_RIGHTS)
            ) as file:
                yield file
            new.replace(filepath)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


class _KernelCache(FunctionCache):  # type: ignore[misc]
    _impl_class = _Implementation

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        folder = Path(self.cache_path)
        # A locator for code in a zip checks nothing before it reads; others may be the user's own.
        if folder.exists():
            try:
                _check(folder)
            except _UntrustedFolderError as error:
                raise RuntimeError(str(error)) from None
        self._cache_file = _IndexFile(
            self.cache_path, self._impl.filename_base, self._impl.locator.get_source_stamp()
        )

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep machine code, if the folder still takes it."""
        with contextlib.suppress(OSError):
            super().save_overload(sig, data)
