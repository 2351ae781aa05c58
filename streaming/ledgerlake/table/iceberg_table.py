"""An Iceberg table that has the files of a Delta table, for engines that read Iceberg alone.

The Delta table is the only one that is written. The Iceberg table follows it: a snapshot has the
files of one version of the Delta table, and its summary says which one:

    ledgerlake.delta-version = "4711"
    ledgerlake.delta-table   = the id of the Delta table, also a property of the Iceberg table

So a step is the difference between the two, whatever was committed in between: appends, merges of
small files, deletions of whole files. It is one commit of Iceberg's catalog, which refuses a second
one from the same snapshot. If a process ends before it knows whether its commit landed, the next
step reads it from the snapshot. No file is copied, and nothing is added twice.

Files carry no field ids of Iceberg's, so their columns are found by name
(``schema.name-mapping.default``). Iceberg's partitions are not used: the files have the partition
columns of Delta too, and their bounds do the same for readers.

The metadata of old snapshots is removed here; ``pyiceberg`` only forgets them.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ledgerlake.errors import SetupError, TableError
from ledgerlake.stored.secrets import (
    blanked,
    parts_of,
    read_variable,
    resolve_secret,
    secrets_of_address,
)
from ledgerlake.table.features import CLUSTERED, PARTITIONED, special_features
from ledgerlake.table.open_table import existing_table
from ledgerlake.table.ordered_files import text_after, text_before

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from deltalake import DeltaTable
    from pyiceberg.catalog import Catalog
    from pyiceberg.io.pyarrow import DataFileStatistics
    from pyiceberg.manifest import DataFile, ManifestFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.snapshots import Snapshot

    from ledgerlake.stored.places import Place

_VERSION = "ledgerlake.delta-version"
_TABLE = "ledgerlake.delta-table"
_NAME_MAPPING = "schema.name-mapping.default"

_PROPERTIES = {
    # A commit that was refused is planned anew here: another process may have added the same files.
    "commit.retry.num-retries": "0",
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "20",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
}

# Settings whose values no error hides.
_SHOWN_SETTINGS = ("type", "uri", "warehouse")

# How many old snapshots are there before they are removed together.
_SNAPSHOTS_AT_ONCE = 20

# How many footers of new files are read at once.
_FOOTERS_AT_ONCE = 8


class IcebergTable:
    """The Iceberg table of one Delta table.

    Args:
        place: of the Delta table.
        name: of the Iceberg table, with its namespace.
        catalog: the name of the catalog, for ``pyiceberg``'s own configuration.
        settings: properties of the catalog; a secret may be ``env:NAME``.
        retention_ms: how long older snapshots can be read.
    """

    def __init__(
        self, place: Place, name: str, catalog: str, settings: Mapping[str, str], retention_ms: int
    ) -> None:
        self.place = place
        self.name = name
        self._catalog_name = catalog
        self._settings = dict(settings)
        self._retention_ms = retention_ms
        self._catalog: Catalog | None = None
        self._followed: int | None = None
        self._delta: DeltaTable | None = None
        self._opened_with: dict[str, str] | None = None

    def follow(self) -> int | None:
        """Bring the Iceberg table to the current version of the Delta table; return that version,
        None if it has nothing new or does not exist.

        Raises:
            SetupError: a secret cannot be read.
            TableError: a table cannot be read or written, or the Delta table has what Iceberg has
                not.
        """
        with self._explained("cannot follow the table"):
            delta = self._current()
            if delta is None or delta.version() == self._followed:
                return None
            self._check(delta)
            table = self._open(delta)
            known = _version_of(table.current_snapshot())
            if known is not None and known > delta.version():
                # Another process has got further since, or the Delta table was restored from a
                # copy.
                self._delta = None
                delta = self._current()
            if delta is None or known == delta.version():
                return None
            self._step(table, delta)
            self._followed = delta.version()
        return self._followed

    def named_files(self) -> set[str]:
        """Return the names of the data files that readers of the Iceberg table may still need. They
        belong to its current snapshot, or to an earlier one within the retention, and are in the
        folder of the Delta table.

        Raises:
            SetupError: a secret cannot be read.
            TableError: the Iceberg table cannot be read.
        """
        from pyiceberg.exceptions import NoSuchTableError

        with self._explained("cannot say which files it has of the table"):
            try:
                table = self._load_catalog().load_table(self.name)
            except NoSuchTableError:
                return set()
            old = {snapshot.snapshot_id for snapshot in self._old_snapshots(table)}
            snapshots = [
                snapshot for snapshot in table.snapshots() if snapshot.snapshot_id not in old
            ]
            return {file.file_path.rpartition("/")[2] for file in _files(table, snapshots)}

    @contextlib.contextmanager
    def _explained(self, failure: str) -> Iterator[None]:
        try:
            yield
        except (SetupError, TableError):
            raise
        # Catalogs have errors of many libraries.
        except Exception as error:
            # A secret that is cut would not be found.
            text = blanked(str(error), [*self._secrets()]) or type(error).__name__
            reason = self.place.reason(ValueError(text))
            raise TableError(
                f"the Iceberg table {self.name} {failure} at {self.place}: {reason}"
            ) from None

    def _current(self) -> DeltaTable | None:
        keys = self.place.delta_options()
        if keys != self._opened_with:
            # Both libraries keep the keys with which they opened a table.
            self._delta = self._catalog = None
        if self._delta is None:
            self._delta, self._opened_with = existing_table(self.place), keys
        else:
            self._delta.update_incremental()
        return self._delta

    def _check(self, delta: DeltaTable) -> None:
        """Check that plain files tell all of the Delta table.

        Raises:
            TableError: they do not.
        """
        features = [
            feature
            for feature in special_features(delta)
            if feature not in {PARTITIONED, *CLUSTERED}
        ]
        if pa.table(delta.deletion_vectors()).num_rows:
            features.append("deletion vectors")
        if features:
            raise TableError(
                f"the Iceberg table {self.name} cannot follow the table at {self.place}, because "
                f"that has {', '.join(features)}; remove iceberg_table, or what the table has"
            )

    def _open(self, delta: DeltaTable) -> Table:
        """Open the Iceberg table, which is made if it does not exist.

        Raises:
            TableError: it belongs to something else.
        """
        catalog = self._opened_catalog()
        from pyiceberg.exceptions import NoSuchTableError

        identity = str(delta.metadata().id)
        try:
            table = catalog.load_table(self.name)
        except NoSuchTableError:
            catalog.create_namespace_if_not_exists(self.name.rpartition(".")[0])
            properties = {**_PROPERTIES, _TABLE: identity}
            table = catalog.create_table_if_not_exists(
                self.name, schema=_columns(delta), properties=properties
            )
        snapshot = table.current_snapshot()
        is_own = table.properties.get(_TABLE) == identity and (
            snapshot is None or _version_of(snapshot) is not None
        )
        if not is_own:
            raise TableError(
                f"the Iceberg table {self.name} was not made from the table at {self.place}, or "
                "another writer has changed it since; "
                "drop it, and it is made again, or name another one"
            )
        return table

    def _opened_catalog(self) -> Catalog:
        if self._catalog is None:
            self._catalog = self._load_catalog()
        return self._catalog

    def _load_catalog(self) -> Catalog:
        from pyiceberg.catalog import load_catalog

        settings = {
            name: resolve_secret(value) if value.startswith("env:") else value
            for name, value in self._settings.items()
        }
        return load_catalog(self._catalog_name, **_store_settings(self.place) | settings)

    def _secrets(self) -> Iterator[str]:
        for name, text in self._settings.items():
            value = read_variable(text).strip()
            if name not in _SHOWN_SETTINGS or value != text:
                yield from parts_of(value)
            if name == "uri" or "://" in value:
                yield from secrets_of_address(value)

    def _step(self, table: Table, delta: DeltaTable) -> None:
        """Commit the difference between the tables as one snapshot."""
        wanted = {
            self._uri(name): name for name in pa.table(delta.get_add_actions())["path"].to_pylist()
        }
        present = {
            file.file_path: file for file in _files(table, filter(None, [table.current_snapshot()]))
        }
        summary = {_VERSION: str(delta.version()), _TABLE: str(delta.metadata().id)}
        removed = [present[uri] for uri in present.keys() - wanted.keys()]
        new = [wanted[uri] for uri in sorted(wanted.keys() - present.keys())]
        with table.transaction() as transaction:
            self._add_columns(transaction, delta)
            update = transaction.update_snapshot(summary)
            with update.overwrite() if removed else update.merge_append() as snapshot:
                for file in removed:
                    snapshot.delete_data_file(file)
                for added in self._described(
                    transaction, new, set(delta.metadata().partition_columns)
                ):
                    snapshot.append_data_file(added)
        self._remove_old(table)

    def _add_columns(self, transaction: Transaction, delta: DeltaTable) -> None:
        """Add the columns that the Iceberg table lacks, and their names in files.

        Raises:
            TableError: the Delta table has a column with another type by now, as after a
                ``RESTORE``.
        """
        from pyiceberg.exceptions import ValidationError

        try:
            with transaction.update_schema() as update:
                update.union_by_name(_columns(delta))
        except (ValidationError, ValueError) as error:
            raise TableError(
                f"the Iceberg table {self.name} cannot follow the table at {self.place}, because "
                f"that has other columns by now ({self.place.reason(error)}); "
                "drop it, and it is made again, or name another one"
            ) from None
        mapping = transaction.table_metadata.schema().name_mapping.model_dump_json()
        if transaction.table_metadata.properties.get(_NAME_MAPPING) != mapping:
            transaction.set_properties({_NAME_MAPPING: mapping})

    def _described(
        self, transaction: Transaction, names: list[str], partition_columns: set[str]
    ) -> Iterator[DataFile]:
        """Yield Iceberg's entries of files, with the bounds in their footers.

        Raises:
            TableError: a file lacks a partition column, since another writer made it.
        """
        from pyiceberg.io import pyarrow as files
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat

        table = transaction.table_metadata
        columns = files.compute_statistics_plan(table.schema(), table.properties)
        none = files.MetricsMode(files.MetricModeTypes.NONE)
        ids = _IdsOfPaths(files.parquet_path_to_id_mapping(table.schema()))

        def describe(name: str) -> DataFile:
            place = self.place / name
            with place.filesystem().open_input_file(place.root) as file:
                size_bytes, footer = file.size(), pq.read_metadata(file)
            missing = partition_columns - set(footer.schema.to_arrow_schema().names)
            if missing:
                raise TableError(
                    f"the Iceberg table {self.name} cannot follow the table at {self.place}, "
                    f"because another writer's file {name} lacks "
                    f"the partition column {min(missing)}; remove iceberg_table"
                )
            left_out = {
                number: replace(columns[number], mode=none)
                for number in _without_bounds(footer, ids)
            }
            statistics = files.data_file_statistics_from_parquet_metadata(
                footer, columns | left_out, ids
            )
            return DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=self._uri(name),
                file_format=FileFormat.PARQUET,
                partition=statistics.partition(table.spec(), table.schema()),
                file_size_in_bytes=size_bytes,
                spec_id=table.default_spec_id,
                **_serialized(statistics),
            )

        with ThreadPoolExecutor(_FOOTERS_AT_ONCE) as executor:
            yield from executor.map(describe, names)

    def _uri(self, name: str) -> str:
        place = self.place / name
        return f"file://{place.root}" if place.is_local else place.uri

    def _remove_old(self, table: Table) -> None:
        """Forget old snapshots, and remove what only they have. A failure leaves files that nothing
        names.
        """
        old = self._old_snapshots(table)
        if len(old) < _SNAPSHOTS_AT_ONCE:
            return
        before = {manifest for snapshot in old for manifest in _metadata_files(table, snapshot)}
        table.maintenance.expire_snapshots().by_ids(
            [snapshot.snapshot_id for snapshot in old]
        ).commit()
        table.refresh()
        kept = {file for snapshot in table.snapshots() for file in _metadata_files(table, snapshot)}
        for file in before - kept:
            with contextlib.suppress(OSError):
                table.io.delete(file)

    def _old_snapshots(self, table: Table) -> list[Snapshot]:
        """Return the snapshots that were replaced before the retention. The current one is none of
        them, however old it is, nor is one that has a name.
        """
        limit_ms = time.time() * 1000 - self._retention_ms
        named = {reference.snapshot_id for reference in table.metadata.refs.values()}
        in_order = sorted(table.snapshots(), key=lambda snapshot: snapshot.timestamp_ms)
        return [
            snapshot
            for snapshot, next_one in pairwise(in_order)
            if next_one.timestamp_ms < limit_ms and snapshot.snapshot_id not in named
        ]


def _serialized(statistics: DataFileStatistics) -> dict[str, Any]:
    """Return statistics with bounds of texts that are computed here. Bounds by ``pyiceberg`` may
    have half of a pair of surrogates, which it then cannot write.
    """
    for column in statistics.column_aggregates.values():
        if isinstance(column.current_max, str) and column.trunc_length is not None:
            column.current_min = text_before(column.current_min, column.trunc_length)
            column.current_max = text_after(column.current_max, column.trunc_length)
            column.trunc_length = None
    return statistics.to_serialized_dict()


def _without_bounds(footer: pq.FileMetaData, ids: dict[str, int]) -> Iterator[int]:
    """Yield the columns of a file if a row group lacks their bounds, or has bounds that Python
    cannot have. Our files have bounds of the columns that readers need, and Parquet leaves out the
    bounds of long texts.
    """
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for position in range(group.num_columns):
            column = group.column(position)
            if not _has_bounds(column):
                yield ids[column.path_in_schema]


def _has_bounds(column: pq.ColumnChunkMetaData) -> bool:
    statistics = column.statistics if column.is_stats_set else None
    if statistics is None:
        return False
    if not statistics.has_min_max:
        # A column of nulls has none, and needs none.
        return bool(statistics.has_null_count and statistics.null_count == column.num_values)
    try:
        return statistics.min is not None and statistics.max is not None
    except (OverflowError, ValueError, pa.ArrowException):
        return False


class _IdsOfPaths(dict[str, int]):
    """The field ids of columns by their paths in Parquet files. Delta's own writers name the inner
    parts of maps and arrays otherwise than pyarrow.
    """

    def __missing__(self, path: str) -> int:
        name = path.replace(".entries.", ".key_value.").replace(".list.item", ".list.element")
        if name == path:
            raise KeyError(path)
        return self[name]


def _version_of(snapshot: Snapshot | None) -> int | None:
    """Return the version of the Delta table that a snapshot has; None if it has none."""
    version = None if snapshot is None or snapshot.summary is None else snapshot.summary[_VERSION]
    return None if version is None else int(version)


def _columns(delta: DeltaTable) -> pa.Schema:
    return pa.schema(delta.schema())


def _files(table: Table, snapshots: Iterable[Snapshot]) -> Iterator[DataFile]:
    """Yield the files of some snapshots, which share most of their manifests."""
    manifests = {
        manifest.manifest_path: manifest
        for snapshot in snapshots
        for manifest in _manifests(table, snapshot)
    }
    for manifest in manifests.values():
        for entry in manifest.fetch_manifest_entry(table.io):
            yield entry.data_file


def _manifests(table: Table, snapshot: Snapshot) -> list[ManifestFile]:
    return snapshot.manifests(table.io)


def _metadata_files(table: Table, snapshot: Snapshot) -> Iterator[str]:
    """Yield the files that say which data files a snapshot has."""
    yield snapshot.manifest_list
    for manifest in _manifests(table, snapshot):
        yield manifest.manifest_path


def _store_settings(place: Place) -> dict[str, Any]:
    """Return what ``pyiceberg`` needs to open files of S3, from ``[storage]``."""
    settings = place.settings.resolved()
    values = {
        "s3.endpoint": settings.endpoint_url,
        "s3.region": settings.region,
        "s3.access-key-id": settings.access_key_id,
        "s3.secret-access-key": settings.secret_access_key,
        "s3.session-token": settings.session_token,
    }
    return {name: value for name, value in values.items() if value}
