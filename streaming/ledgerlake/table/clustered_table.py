"""A Delta table with liquid clustering: its log names the columns by which upkeep clusters its
files (see ``clusters`` and ``compaction``), and other writers' ``OPTIMIZE`` does likewise.

    protocol         writer version 7 with the features clustering and domainMetadata
    domainMetadata   delta.clustering: {"clusteringColumns": [["customer"]], "domainName":
                     "delta.clustering"}

delta-rs (1.6) reads such a table and commits nothing to it. So all commits are written here. Other
columns may be named from one run to the next; files that are clustered already stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.errors import TableError
from ledgerlake.table.features import CLUSTERED
from ledgerlake.table.layout import log_text
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.log_state import CLUSTERING_DOMAIN, clustering_columns
from ledgerlake.table.metadata_commits import MetadataCommits, protocol_change
from ledgerlake.table.ordered_files import bounded_paths
from ledgerlake.table.own_commits import OwnCommits
from ledgerlake.table.record_table import RecordTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from deltalake import DeltaTable

    from ledgerlake.stored.places import Place
    from ledgerlake.table.log_commit import Action
    from ledgerlake.table.ordered_files import DataFile


class _ClusteredCommits(OwnCommits, MetadataCommits):
    """The commits of a clustered table, for both shapes; ``cluster_by`` are its columns."""

    cluster_by: Sequence[str] = ()
    own_features = CLUSTERED

    def examine(self) -> bool:
        exists = super().examine()
        known = bounded_paths(self.schema)
        unknown = set(self.cluster_by) - set(known)
        if exists and unknown:
            raise TableError(
                f"cluster_by names {min(unknown)}, by which the table at {self.path} cannot be "
                f"clustered; it can be by {', '.join(known)}"
            )
        return exists

    def begin(self) -> None:
        super().begin()
        self._declare()

    def _declare(self) -> None:
        """Name the columns in the log, unless it has them.

        Raises:
            TableError: the log cannot be read or written, or other writers commit without pause.
        """
        columns = list(self.cluster_by)

        def actions(table: DeltaTable) -> list[Action]:
            if clustering_columns(self.path, table.version()) == columns:
                return []
            content = {
                "clusteringColumns": [name.split(".") for name in columns],
                "domainName": CLUSTERING_DOMAIN,
            }
            domain = {
                "domain": CLUSTERING_DOMAIN,
                "configuration": log_text(content),
                "removed": False,
            }
            return [*protocol_change(table, str(self.path), CLUSTERED), {"domainMetadata": domain}]

        self._change("CLUSTER BY", {"newClusteringColumns": ",".join(columns)}, actions)

    def _try_to_append(
        self,
        table: DeltaTable,
        files: list[DataFile],
        numbers: dict[str, int],
        metadata: dict[str, str] | None,
    ) -> int | None:
        now_ms = self._modified_ms = self._next_modified_ms(table)
        actions: list[Action] = [
            *(
                {"txn": {"appId": name, "version": number, "lastUpdated": now_ms}}
                for name, number in numbers.items()
            ),
            *({"add": _added(file, now_ms)} for file in files),
        ]
        version = table.version()
        commit = OwnCommit(
            self.path, "WRITE", {"mode": "Append"}, version, actions, metadata, is_blind=True
        )
        return version + 1 if commit.land(version + 1) else None


class ClusteredTable(_ClusteredCommits):
    """A clustered table of messages.

    Args:
        cluster_by: its columns; with a dot for one inside another.
    """

    def __init__(self, path: Place, schema: pa.Schema, cluster_by: Sequence[str]) -> None:
        super().__init__(path, schema)
        self.cluster_by = cluster_by


class ClusteredRecordTable(_ClusteredCommits, RecordTable):
    """A clustered table of records."""

    def __init__(self, path: Place, cluster_by: Sequence[str]) -> None:
        RecordTable.__init__(self, path)
        self.cluster_by = cluster_by


def _added(file: DataFile, now_ms: int) -> Action:
    return {
        "path": file.name,
        "partitionValues": {},
        "size": file.size_bytes,
        "modificationTime": now_ms,
        "dataChange": True,
        "stats": file.stats,
    }
