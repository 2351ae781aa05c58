"""A table whose commits are all written here (see ``log_commit``), since delta-rs makes none of the
kind that it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.table.delta_table import Table
from ledgerlake.table.log_commit import write_checkpoint
from ledgerlake.table.properties import checkpoint_interval

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from ledgerlake.table.batch_commit import BatchCommit
    from ledgerlake.table.ordered_files import DataFile

_ATTEMPTS = 20


class OwnCommits(Table):
    """How files come into such a table; a subclass makes the commit."""

    def _check_present(self, batch: BatchCommit, files: list[DataFile]) -> None:
        """Leave it to the commit, which checks all files that it adds (see ``log_commit``)."""

    def _try_to_append(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> int | None:
        """Commit as the version after that of ``table``; return it, None if another writer came
        first.

        Raises:
            OSError: the store does not do what it is asked.
            TableError: the table cannot be read.
        """
        raise NotImplementedError

    def _append_to(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> None:
        """Commit files.

        Raises:
            OSError: the store does not do what it is asked, or others commit without pause.
            TableError: the table cannot be read, or was changed so that the files do not fit.
        """
        for _ in range(_ATTEMPTS):
            before = table.version()
            version = self._try_to_append(table, files, numbers, metadata)
            if version is not None:
                self._keep_up_log(table, version)
                return
            table = self._fitting(self._load())
            self._check_not_there(before, table.version(), numbers)
        raise OSError("other writers commit to the table without pause")

    def _keep_up_log(self, table: DeltaTable, version: int) -> None:
        """Write a checkpoint of the log after a commit, if one is due."""
        if version % checkpoint_interval(table) == 0:
            write_checkpoint(self.path)
