"""Commits that delta-rs does not make from Python: files of a table's log that are written here.

A commit is a file with one action a line, named by its version. It is created only if there is none
of that version; by this rule all writers agree on an order. It is created only if all files are
there that it adds to the table. Its ``commitInfo`` has ``ledgerlakeAttempt``, a random text by
which a process finds its own commit: a store may keep the file and answer with a failure.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any

from deltalake.exceptions import DeltaError
from pyarrow import fs

from ledgerlake.table.deletion_vectors import file_of
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_state import vectors_of
from ledgerlake.table.open_table import commit_file, open_delta, read_commit
from ledgerlake.table.retention import may_clean_log

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ledgerlake.stored.places import Place

Action = dict[str, Any]

ENGINE = "ledgerlake"

_ATTEMPT = "ledgerlakeAttempt"


class OwnCommit:
    """The content of a commit, and whether it landed.

    Args:
        operation, parameters: for the history.
        read_version: the version of the table from which the actions follow.
        more: further fields of ``commitInfo``.
        is_blind: the actions do not depend on what the table has, so a concurrent ``DELETE`` of
            another writer may pass.
    """

    def __init__(
        self,
        path: Place,
        operation: str,
        parameters: dict[str, Any],
        read_version: int,
        actions: Sequence[Action],
        more: dict[str, Any] | None = None,
        *,
        is_blind: bool = False,
    ) -> None:
        self._path = path
        self._attempt = uuid.uuid4().hex
        info = {
            "timestamp": int(time.time() * 1000),
            "operation": operation,
            "operationParameters": parameters,
            # The first commit reads none, and delta-rs refuses a whole history with a number below
            # 0.
            **({"readVersion": read_version} if read_version >= 0 else {}),
            "isBlindAppend": is_blind,
            "engineInfo": ENGINE,
            _ATTEMPT: self._attempt,
            **(more or {}),
        }
        # A file that gets another vector is removed and added again.
        present = {action["remove"]["path"] for action in actions if "remove" in action}
        added = [action["add"] for action in actions if "add" in action]
        vectors = {file_of(vector) for vector in vectors_of(added)} - {None}
        self._files = sorted({*({action["path"] for action in added} - present), *vectors})
        lines = [log_text(action) for action in ({"commitInfo": info}, *actions)]
        self._content = "".join(f"{line}\n" for line in lines).encode()

    def create(self, version: int) -> bool:
        """Create the commit's file; return False if there is one of that version already, which may
        be this one (``is_at``).

        Raises:
            FileNotFoundError: a file that it adds is gone: while a process is suspended, a vacuum
                may remove what no version names yet.
            OSError: the store does not do what it is asked; it may have done it all the same.
        """
        found = self._path.filesystem().get_file_info(
            [(self._path / name).root for name in self._files]
        )
        gone = [file.base_name for file in found if file.type == fs.FileType.NotFound]
        if gone:
            raise FileNotFoundError(f"{gone[0]}, which the commit adds, is gone")
        return commit_file(self._path, version).create_file(self._content)

    def is_in(self, actions: Sequence[Action]) -> bool:
        """Return whether the actions of a version belong to this commit."""
        return any(
            action.get("commitInfo", {}).get(_ATTEMPT) == self._attempt for action in actions
        )

    def is_at(self, version: int) -> bool:
        """Return whether a version is this commit.

        Raises:
            OSError, ValueError: it cannot be read, so nobody knows.
        """
        return self.is_in(read_commit(self._path, version))

    def land(self, version: int) -> bool:
        """Commit as that version; return False if another writer's commit came first.

        Raises:
            OSError: the store does not do what it is asked, and it is not known whether the commit
                landed. Or the log was cleaned meanwhile, so that a missing file is no free version.
        """
        before = commit_file(self._path, version - 1)
        before.check_exists()
        try:
            has_landed = self.create(version) or self.is_at(version)
        except OSError:
            with contextlib.suppress(FileNotFoundError, ValueError):
                if self.is_at(version):
                    return True
            raise
        if has_landed:
            before.check_exists()
        return has_landed


def write_checkpoint(path: Place) -> None:
    """Write the checkpoint of the log that delta-rs would write with its own commit, and clean the
    log. A failure does no harm: the next one does it.
    """
    with contextlib.suppress(DeltaError, OSError):
        newest = open_delta(path)
        newest.create_checkpoint()
        if may_clean_log(path, newest):
            newest.cleanup_metadata()
