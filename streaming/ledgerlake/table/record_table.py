"""A Delta table of records: a column for each field of its topics' schemas, and ``pulsar``.

If a query makes its rows, the table also keeps the columns of the records that the query sees, so
that their types stay the same from run to run. They are a property of the table, the schema as
Arrow serializes it, in base64:

    ledgerlake.record.<stream> = "1 <base64>"

Each stream that writes the table has a query, topics and so columns of its own.

Its columns are what its log says. A field that a schema adds becomes a column before the
micro-batch that brings it is written. Columns are never removed, and their types never change, but
records in them get the fields that a schema adds. Records in maps do not, once the table is created
(see ``values.record_columns``). The property that names the columns with statistics does not get a
new column, because earlier files lack it (see ``ordered_files``).
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.errors import TableError, refuse_newer
from ledgerlake.table.creation import readable_schema
from ledgerlake.table.features import CLUSTERED
from ledgerlake.table.layout import file_schema, fits, has_record_shape, record_of, rows_of_table
from ledgerlake.table.metadata_commits import MetadataCommits
from ledgerlake.values.record_columns import PULSAR_COLUMN, united
from ledgerlake.values.record_rows import rows_schema

if TYPE_CHECKING:
    from collections.abc import Mapping

    from deltalake import DeltaTable
    from pyspark.sql import SparkSession

    from ledgerlake.stored.places import Place


# The property of a table with the columns that the query of a stream sees begins with this.
LEARNED = "ledgerlake.record."
_VERSION = 1


class RecordTable(MetadataCommits):
    """The table at ``path``; ``exists`` is False until it is checked or created. ``stream`` is the
    one that writes it, if a query makes its rows.
    """

    stream = ""

    def __init__(self, path: Place, partition_by: Mapping[str, str] | None = None) -> None:
        super().__init__(path, rows_schema(pa.struct([])), partition_by)
        self.exists = False
        self.learned = pa.struct([])

    @property
    def record(self) -> pa.StructType:
        """Return the columns of the record."""
        return record_of(self.schema)

    def examine(self) -> bool:
        """Examine as ``Table.examine``; the table's columns become this object's. Columns that are
        added after it, without ``check``, are noted and not written.
        """
        exists = super().examine()
        if exists:
            self._adopt(self._current())
        return exists

    def check(self, spark: SparkSession) -> bool:
        self.exists = super().check(spark)
        return self.exists

    def check_columns(self, record: pa.StructType) -> None:
        """Check that a table can have its columns and the columns of a record.

        Raises:
            SetupError: no Delta table can.
        """
        readable_schema(file_schema(rows_schema(united(self.record, record))))

    def add_columns(self, record: pa.StructType, learned: pa.StructType | None = None) -> None:
        """Add the columns that a record has and the table lacks; of a table that is not created
        yet, this only notes them.

        Args:
            learned: the columns that the table's query sees.

        Raises:
            SetupError: no Delta table can have these columns. Nothing was changed.
            TableError: the table cannot be changed.
        """
        self.check_columns(record)
        if learned is not None and not learned.equals(self.learned):
            self.learned = learned
            if self.exists:
                self._set_property(LEARNED + self.stream, learned_to_text(learned))
        if not self.exists:
            self.schema = rows_schema(united(self.record, record))
            return
        self._adopt(self._current())
        wanted = united(self.record, record, has_files=True)
        known = {field.name: field.type for field in self.record}
        missing = pa.schema([field for field in wanted if known.get(field.name) != field.type])
        if missing.names:
            self._add_fields(missing)
            self._adopt(self._load())

    def create(self, properties: dict[str, str] | None = None) -> None:
        own = (
            {LEARNED + self.stream: learned_to_text(self.learned)}
            if self.learned.num_fields
            else {}
        )
        super().create(own | (properties or {}))
        self.exists = True

    def _adopt(self, existing: DeltaTable) -> None:
        self.schema = rows_of_table(pa.schema(existing.schema()))
        name = LEARNED + self.stream
        text = existing.metadata().configuration.get(name)
        if text is not None:
            self.learned = learned_from_text(text, str(self.path), name)

    def _fitting(self, table: DeltaTable) -> DeltaTable:
        """Return the table with the columns of this process, which are added again if another
        writer took them away, as ``RESTORE`` of Delta does.
        """
        if self._changed(table):
            own, record, learned = self.schema, self.record, self.learned
            try:
                self._adopt(table)
                self.add_columns(record, learned)
            finally:
                # The files have these columns, and the table may have got others of their names.
                self.schema = own
            table = self._opened or self._current()
        return super()._fitting(table)

    def _changed(self, existing: DeltaTable) -> list[str]:
        """Return the columns whose files do not fit the table."""
        # Arrow makes the list of names anew each time that it is asked.
        types = {field.name: field.type for field in pa.schema(existing.schema())}
        own = file_schema(self.schema)
        return [field.name for field in own if not fits(types.get(field.name), field.type)]

    def _compare(self, existing: DeltaTable) -> None:
        self._check_keeps_transactions(existing)
        columns = pa.schema(existing.schema())
        if not has_record_shape(columns):
            raise TableError(
                f"the table at {self.path} has no column {PULSAR_COLUMN} with all the metadata of "
                "Pulsar, so it is no table of records; use another path, or set [delta] shape = "
                '"messages"'
            )
        changed = self._changed(existing)
        if changed:
            raise TableError(
                f"another writer changed the columns {', '.join(changed)} of the table at "
                f"{self.path}; start the pipeline again"
            )
        nullable = pa.schema([field.with_nullable(True) for field in columns])
        self._check_partitions(existing)
        reasons = self._reasons(existing, nullable)
        if reasons:
            raise TableError(
                f"the table at {self.path} has {', '.join(reasons)}, which a table of records "
                "cannot honour; "
                f"{'set cluster_by again, or ' if set(reasons) == CLUSTERED else ''}use another "
                "path"
            )


def learned_to_text(record: pa.StructType) -> str:
    """Return the columns that a query sees as the value of a property."""
    return f"{_VERSION} {base64.b64encode(pa.schema(list(record)).serialize()).decode()}"


def learned_from_text(text: str, place: str, name: str) -> pa.StructType:
    """Return the columns of a property of that name.

    Raises:
        OffsetError: a newer release wrote it.
        TableError: it is damaged.
    """
    version, _, content = text.partition(" ")
    try:
        refuse_newer(f"the table at {place}", int(version), _VERSION, "columns of version")
        return pa.struct(
            list(pa.ipc.read_schema(pa.py_buffer(base64.b64decode(content, validate=True))))
        )
    except (ValueError, binascii.Error, pa.ArrowException):
        raise TableError(
            f"the property {name} of the table at {place} is damaged; remove it: ALTER TABLE "
            f"delta.`{place}` UNSET TBLPROPERTIES ('{name}')"
        ) from None
