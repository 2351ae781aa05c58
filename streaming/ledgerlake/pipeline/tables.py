"""The tables of a pipeline: the one of rejects, and the tables of messages. Some are made when
a topic needs them.

A table is ready once its columns are known. One that is partitioned by a field of a record, or
whose query reads one, has to wait for the first schema. Until then it does not exist.

The main table is the one of ``[delta]``, or else the first of ``[[tables]]`` that has a fixed path.
It is committed last, so a micro-batch that it contains is in all tables.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.client.topics import split_partition
from ledgerlake.decode import schema
from ledgerlake.errors import CheckpointError, SetupError, TableAccessError, TableError
from ledgerlake.operators.results import TableBatch
from ledgerlake.operators.transforms import RowTransform, messages_schema, united_columns
from ledgerlake.options.config import REJECTS_TABLE, is_inside, places_of
from ledgerlake.options.table_options import tables_of_topic
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.table.clustered_table import ClusteredRecordTable, ClusteredTable
from ledgerlake.table.delta_table import Table
from ledgerlake.table.latest_table import LatestRecordTable, LatestTable
from ledgerlake.table.open_table import existing_table
from ledgerlake.table.ordered_files import bounded_paths
from ledgerlake.table.record_table import RecordTable
from ledgerlake.table.spark_table import open_table
from ledgerlake.values.record_columns import check_width, record_of, united
from ledgerlake.wire.value_schema import NO_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from pyspark.sql import SparkSession

    from ledgerlake.errors import LedgerlakeError
    from ledgerlake.options.config import Config
    from ledgerlake.options.table_options import TableOptions
    from ledgerlake.stored.places import Place
    from ledgerlake.table.batch_commit import BatchCommit

_log = logging.getLogger(__name__)


class MessagesTable:
    """A table of messages, and how its columns follow from the schemas of its topics.

    Args:
        options: without placeholders.
        stream: the name of the stream that writes it.

    Raises:
        UsageError, SetupError, TableError: the options, or the table that is there, do not fit.
    """

    def __init__(self, options: TableOptions, stream: str, writer: str, staging: Place) -> None:
        self.options = options
        self.watermark_us: dict[str, int] = {}
        # The topic partitions whose times were looked up.
        self._looked_up: set[str] = set()
        self._transform = RowTransform(options)
        self._learned = pa.struct([])
        self._noted: list[pa.StructType] = []
        self._records: RecordTable | None = None
        self._misfit = ""
        self.table: Table
        if options.has_record_shape:
            self.table = self._records = _record_table(options)
            self._records.stream = stream
            if options.json_fields:
                self.note_record(record_of(options.value_schema(NO_SCHEMA)))
            return
        rows = messages_schema(self._transform.columns(pa.struct([])))
        if options.keeps_latest:
            self.table = LatestTable(options.place, rows)
        elif options.cluster_by:
            self.table = ClusteredTable(options.place, rows, options.cluster_by)
        else:
            self.table = open_table(
                options.place, rows, writer, staging, options.partition_expressions
            )

    def look_up_times(self, topic_partitions: Iterable[str]) -> None:
        """Know how far the times of topic partitions have come in the table. A topic partition is
        looked up once in a run: from then on only this run writes it.

        Raises:
            TableError: the table cannot be read.
        """
        unknown = [name for name in topic_partitions if name not in self._looked_up]
        if unknown:
            self.watermark_us |= self.table.effective_times_us(unknown)
            self._looked_up.update(unknown)

    @property
    def obstacle(self) -> str:
        """Return why the table can take no rows yet; empty if it can."""
        if self._records is None:
            return ""
        if self._transform.computes_rows and not self._learned.num_fields:
            return self._misfit or "no schema of the topics of this table is known yet"
        missing = set(self.options.partition_columns) - set(self._records.record.names)
        if missing:
            return (
                self._misfit
                or f"the table has no column {min(missing)} yet, by which it is partitioned"
            )
        unknown = set(self.options.cluster_by) - set(bounded_paths(self._records.schema))
        if unknown:
            return (
                self._misfit
                or f"the table has no column {min(unknown)} yet, by which it is clustered"
            )
        return ""

    @property
    def needs_schemas(self) -> bool:
        """Return whether the schemas of its topics have to be known."""
        return self._records is not None or bool(self.options.schema)

    def note_record(self, record: pa.StructType) -> None:
        """Note the record of a schema; ``add_columns`` makes columns of it."""
        self._noted.append(record)

    def keep_columns(self) -> None:
        """Take the columns of the table as it is, and add none."""
        self._noted.clear()
        self.add_columns(is_start=False)

    def add_columns(self, *, is_start: bool) -> None:
        """Add the columns that the noted records need. Producers decide about schemas, so those
        that do not fit are left out, and the rejects tell. They stop a start only if none fits, nor
        do the columns that the table has.

        Raises:
            SetupError: the options of the table fit none of them, at a start.
            TableError: the table cannot be changed.
        """
        noted, self._noted = self._noted, []
        if self._records is None:
            return
        known = self._records.learned if self._transform.computes_rows else self._record
        if is_start and self.options.json_fields:
            self._check_declared(known)
        if not self._learned.num_fields:
            # The columns of earlier runs come first, so their types win in whatever order schemas
            # are learned.
            noted.insert(0, known)
        misfit = self._add_fitting(self._records, noted)
        if misfit is None:
            return
        is_news, self._misfit = misfit.message != self._misfit, misfit.message
        if (
            is_start
            and not self.options.from_template
            and (self.obstacle or not self._learned.num_fields)
        ):
            raise misfit
        if is_news:
            _log.warning(
                "messages by a schema do not fit the table at %s: %s",
                self.table.path,
                misfit.message,
            )

    def _add_fitting(self, table: RecordTable, records: list[pa.StructType]) -> SetupError | None:
        """Add the columns of the records that fit, in their order, by one commit; return why the
        last other one does not.

        Raises:
            TableError: the table cannot be changed.
        """
        learned, misfit = self._fitting(table, self._learned, records)
        if not learned.equals(self._learned):
            added = learned if self._transform.computes_rows else None
            table.add_columns(self._columns(table, learned), added)
            self._learned = learned
        return misfit

    def _fitting(
        self, table: RecordTable, learned: pa.StructType, records: list[pa.StructType]
    ) -> tuple[pa.StructType, SetupError | None]:
        """Return the learned columns with the columns of the records that fit, and the error of the
        last record that does not fit. Nothing is changed. Many records are tried together, since
        each trial takes as long as the table is wide.
        """
        together = united(learned, _union(records))
        if together.equals(learned):
            return learned, None
        try:
            table.check_columns(self._columns(table, together))
        except SetupError as error:
            if len(records) == 1:
                return learned, error
        else:
            return together, None
        half = len(records) // 2
        learned, first = self._fitting(table, learned, records[:half])
        learned, second = self._fitting(table, learned, records[half:])
        return learned, second or first

    def _check_declared(self, known: pa.StructType) -> None:
        """Check that declared fields have the types that they had when the table was made.

        Raises:
            SetupError: one has not.
        """
        try:
            united_columns(
                known,
                record_of(self.options.value_schema(NO_SCHEMA)),
                f"{self.options.section} json_fields",
            )
        except SetupError as error:
            what = error.message.partition(";")[0]
            raise SetupError(
                f"{what}; set the type back, or remove json_fields and take the fields out of the "
                "bytes by a query"
            ) from None

    def _columns(self, table: RecordTable, learned: pa.StructType) -> pa.StructType:
        """Return the columns that the table needs for learned ones.

        Raises:
            SetupError: the query does not fit them, or the columns are too many together.
        """
        known = table.learned if self._transform.computes_rows else table.record
        wanted = united(known, learned)
        if not wanted.equals(known):
            check_width(wanted)
        if self._transform.computes_rows:
            return united_columns(
                table.record, self._transform.columns(learned), self.options.section
            )
        return self._transform.columns(united(self._record, learned, has_files=table.exists))

    def settings(self) -> TableBatch:
        """Return what tasks need to know."""
        if self._records is not None:
            record, columns = self._record, self._records.record
        else:
            record = pa.struct([])
            columns = pa.struct(
                [field for field in self.table.schema if field.name not in schema.MESSAGES.names]
            )
        known = TableBatch.of(self.watermark_us, record, columns)
        return replace(known, section=self.options.section, obstacle=self.obstacle)

    @property
    def _record(self) -> pa.StructType:
        """Return the columns into which values are decoded."""
        assert self._records is not None
        if self._transform.computes_rows:
            return self._learned
        return pa.struct(
            [
                field
                for field in self._records.record
                if field.name not in self.options.computed_names
            ]
        )


def _union(records: list[pa.StructType]) -> pa.StructType:
    """Return the columns of all records. Halves are united, because the columns of one after
    another would be gone through once for each record.
    """
    if len(records) < 2:
        return records[0] if records else pa.struct([])
    half = len(records) // 2
    return united(_union(records[:half]), _union(records[half:]))


def _record_table(options: TableOptions) -> RecordTable:
    if options.keeps_latest:
        return LatestRecordTable(options.place)
    if options.cluster_by:
        return ClusteredRecordTable(options.place, options.cluster_by)
    return RecordTable(options.place, options.partition_expressions)


class Tables:
    """The tables of a pipeline: ``rejects``, and the tables of messages for the topics that were
    named.

    Args:
        staging: where tasks put files for tables that delta-spark writes.
    """

    def __init__(self, config: Config, staging: Place) -> None:
        self._config = config
        self._staging = staging
        self._options = config.table_options
        self._places = places_of(config)
        self._by_name: dict[str, MessagesTable] = {}
        # Why topics have no table, by its name.
        self._obstacles: dict[str, str] = {}
        # Why topics have no table although there is one in its folder, by the name of that one.
        self._taken: dict[str, str] = {}
        self._checked: set[str] = set()
        self._existing: set[str] = set()
        self._begun: set[str] = set()
        # The topic partitions that all tables know as the stream's.
        self._joined: set[str] = set()
        self.rejects = open_table(
            config.rejects_place, schema.REJECTS, config.delta.writer, staging / REJECTS_TABLE
        )
        self.main_name = config.main_table
        self.add_for_topics(())

    @property
    def main(self) -> MessagesTable:
        """Return the main table."""
        return self._by_name[self.main_name]

    @property
    def messages(self) -> list[MessagesTable]:
        """Return the tables of messages that are known, the main one last."""
        others = [table for name, table in self._by_name.items() if name != self.main_name]
        return [*others, self.main]

    @property
    def by_name(self) -> dict[str, Table]:
        """Return all tables by the names that the checkpoint has for them."""
        return {name: table.table for name, table in self._by_name.items()} | {
            REJECTS_TABLE: self.rejects
        }

    @property
    def for_tasks(self) -> tuple[TableOptions, ...]:
        """Return the options for tasks, which put files for delta-spark into another folder."""
        places = [
            options.place if options.is_template else self._by_name[options.name].table.folder
            for options in self._options
        ]
        return tuple(
            replace(options, place=place)
            for options, place in zip(self._options, places, strict=True)
        )

    def add_for_topics(self, topics: Iterable[str]) -> None:
        """Add the tables that messages of these topics may come into. A topic has no table, and its
        messages are rejects, if its table would share a folder, or if the content of its folder
        cannot be opened.

        Raises:
            SetupError: the options of a table do not fit.
            TableError: one exists and cannot be opened.
        """
        names = list(topics)
        for options in self._options:
            for table in [options] if not options.is_template else map(options.of_topic, names):
                if table is not None and table.name not in self._obstacles:
                    self._expect(table)

    def _expect(self, options: TableOptions) -> None:
        """Know a table, or why the topic has none.

        Args:
            options: without placeholders.

        Raises:
            As ``add_for_topics``.
        """
        known = self._by_name.get(options.name)
        if known is not None:
            if options.section != known.options.section and options.name not in self._taken:
                self._taken[options.name] = (
                    f"the folder {options.place} of {options.section} is that of "
                    f"{known.options.section}"
                )
                _log.warning("a topic gets no table: %s", self._taken[options.name])
            return
        obstacle = self._shared_folder(options) if options.from_template else ""
        if obstacle:
            self._leave_out(options.name, obstacle)
            return
        try:
            self._by_name[options.name] = MessagesTable(
                options,
                self._config.stream.name,
                self._config.delta.writer,
                self._staging / "messages",
            )
        except TableError as error:
            if not self._is_in_the_way(error, options):
                raise
            self._leave_out(options.name, error.message)

    def settings(self, tables: Iterable[MessagesTable]) -> dict[str, TableBatch]:
        """Return what tasks need to know of tables, and of those that no topic can have."""
        obstacles = {
            name: TableBatch(obstacle=obstacle) for name, obstacle in self._obstacles.items()
        }
        owners = {
            name: self._by_name[name].options.section
            for name in self._taken.keys() & self._by_name.keys()
        }
        taken = {name: TableBatch(section=section) for name, section in owners.items()}
        return obstacles | taken | {table.options.name: table.settings() for table in tables}

    def of_topic(self, topic: str) -> list[MessagesTable]:
        """Return the tables that messages of a topic may come into."""
        wanted = tables_of_topic(self._options, topic)
        found = [(options.section, self._by_name.get(options.name)) for options in wanted]
        return [
            table
            for section, table in found
            if table is not None and table.options.section == section
        ]

    def topics_of(self, name: str, topics: Iterable[str]) -> list[str]:
        """Return the topics that alone come into a table; none of a table with a fixed path.

        Args:
            topics: among which to look.
        """
        table = self._by_name.get(name)
        if table is None or not table.options.from_template:
            return []
        return [topic for topic in topics if table in self.of_topic(topic)]

    def leave_out_missing(self, topics: Iterable[str]) -> None:
        """Make no table for a topic that is none of these, unless a micro-batch has
        messages of it.
        """
        kept = {table.options.name for topic in topics for table in self.of_topic(topic)}
        for name, table in list(self._by_name.items()):
            if table.options.from_template and name not in self._existing | kept:
                del self._by_name[name]
                self._checked.discard(name)

    def check(self, spark: SparkSession) -> list[Table]:
        """Check the tables that were not checked yet; return all that exist. A topic has no table,
        and its messages are rejects, if the content of its folder does not belong to this stream.

        Raises:
            TableError, SetupError: as ``Table.check``.
        """
        for name, table in self.by_name.items():
            if name not in self._checked and self._exists(
                name, table, lambda table: table.check(spark)
            ):
                self._existing.add(name)
            self._checked.add(name)
        return [table for name, table in self.by_name.items() if name in self._existing]

    def examine(self) -> list[Table]:
        """Check as ``check``, but change nothing; return all that exist.

        Raises:
            TableError, SetupError: as ``check``.
        """

        def examine(table: Table) -> bool:
            exists = table.examine()
            table.check_writable()
            return exists

        return [table for name, table in self.by_name.items() if self._exists(name, table, examine)]

    def keep_columns(self) -> None:
        """Take the tables of messages as they are, to read them. No right to write is needed.

        Raises:
            TableError, SetupError: as ``check``.
        """
        for name, messages in [*self._by_name.items()]:
            if self._exists(name, messages.table, lambda table: table.examine()):
                self._existing.add(name)
            messages.keep_columns()

    def _exists(self, name: str, table: Table, check: Callable[[Table], bool]) -> bool:
        """Return whether a table exists, and leave out that of a topic whose folder is not this
        stream's.

        Args:
            check: returns whether it exists.

        Raises:
            TableError, SetupError: as ``check``.
        """
        try:
            return check(table)
        except (TableError, SetupError) as error:
            if name == REJECTS_TABLE or not self._is_in_the_way(error, self._by_name[name].options):
                raise
            del self._by_name[name]
            self._leave_out(name, error.message)
            return False

    def _is_in_the_way(self, error: LedgerlakeError, options: TableOptions) -> bool:
        """Return whether the cause of an error is foreign content in the folder of a topic's table.
        Anybody may choose the name of a topic, and the name decides about the folder.
        """
        if not options.from_template or error.retryable:
            return False
        if isinstance(error, SetupError) and not self._is_above_writable(options.place):
            return False
        if str(options.place) in Checkpoint(self._config.checkpoint_place).tables().values():
            return False
        try:
            if existing_table(options.place) is None:
                return True
            return (
                Table(options.place, schema.MESSAGES).last_batch_of(self._config.stream.name)
                is None
            )
        except TableAccessError:
            return False
        except TableError:
            # It cannot be opened, so only the checkpoint could know it.
            return True

    def _is_above_writable(self, place: Place) -> bool:
        """Return whether the folder above all tables of a template can be written, which only this
        machine is asked.
        """
        folders = [
            options.folder
            for options in self._options
            if options.is_template and options.matches(place)
        ]
        try:
            for folder in folders:
                folder.check_writable()
        except OSError:
            return False
        return place.is_local

    def _leave_out(self, name: str, obstacle: str) -> None:
        _log.warning("a topic gets no table: %s", obstacle)
        self._obstacles[name] = obstacle

    @property
    def obstacles(self) -> list[str]:
        """Return why topics have no table."""
        return [*self._obstacles.values(), *self._taken.values()]

    def exists(self, name: str) -> bool:
        """Return whether a table exists."""
        return name in self._existing

    def check_writers(self, topic_partitions: Iterable[str], existing: Collection[Table]) -> None:
        """Check that no other stream writes the messages of topic partitions to the tables that may
        take them, unless the stream may take them over.

        Args:
            existing: the tables that exist.

        Raises:
            CheckpointError: another stream does.
        """
        there = set(existing) if self._config.delta.fail_on_second_stream else set()
        tables = self.by_name
        for name, names in self._by_table(topic_partitions).items():
            if tables[name] in there:
                tables[name].check_writers(self._config.stream.name, names)

    def begin_stream(self, topic_partitions: Iterable[str]) -> None:
        """Record in the tables that exist that the stream writes the messages of topic partitions,
        and look up how far their times have come there.

        Raises:
            CheckpointError: as ``check_writers``; the tables were not changed.
            TableError: a commit did not land.
        """
        names = set(topic_partitions)
        existing = {name: table for name, table in self.by_name.items() if self.exists(name)}
        self.check_writers(names, existing.values())
        takes_over = not self._config.delta.fail_on_second_stream
        for name, taken in self._by_table(names).items():
            if name in existing:
                existing[name].begin_stream(self._config.stream.name, taken, takes_over=takes_over)
                # After another stream was told that it writes them no more.
                if name != REJECTS_TABLE:
                    self._by_name[name].look_up_times(taken)
        self._joined |= names

    def _by_table(self, topic_partitions: Iterable[str]) -> dict[str, list[str]]:
        """Return by name of the table the topic partitions whose messages may come into it."""
        names = sorted(topic_partitions)
        taken: dict[str, list[str]] = {name: [] for name in self._by_name}
        for topic_partition in names:
            for table in self.of_topic(split_partition(topic_partition)[0]):
                taken[table.options.name].append(topic_partition)
        return taken | {REJECTS_TABLE: names}

    @property
    def places(self) -> dict[str, str]:
        """Return by name the places of the tables that exist, for the checkpoint."""
        return {name: str(table.path) for name, table in self.by_name.items() if self.exists(name)}

    def add_columns(self, *, is_start: bool) -> None:
        """Add the columns that the known schemas need.

        Raises:
            SetupError, TableError: as ``MessagesTable.settle``.
        """
        for table in self._by_name.values():
            table.add_columns(is_start=is_start)

    def create(self) -> None:
        """Create the tables that are missing and ready.

        Raises:
            TableError: one cannot be created.
        """
        for name, table in self.by_name.items():
            is_ready = name == REJECTS_TABLE or not self._by_name[name].obstacle
            if name not in self._existing and is_ready:
                table.create(self._config.upkeep.table_properties)
                self._existing.add(name)

    def begin(self) -> None:
        """Begin to write to the tables that exist.

        Raises:
            TableError: a table cannot be read.
        """
        for name, table in self.by_name.items():
            if name in self._existing and name not in self._begun:
                table.begin()
                self._begun.add(name)

    def open_for(self, batch: BatchCommit) -> bool:
        """Open the tables that a micro-batch needs and that are not open yet; its topics are
        expected, and their schemas are learned. Return whether one was opened.

        Raises:
            CheckpointError: a table has rows of this stream by a later checkpoint, or another
                stream writes messages of the micro-batch's topics there.
            TableError: a table cannot be made or read.
        """
        for name in self._existing - self._begun:
            if (self.by_name[name].last_writer(batch.stream) or 0) > batch.checkpoint:
                raise CheckpointError(
                    f"the table at {self.by_name[name].path} has rows of the stream {batch.stream} "
                    "by a later checkpoint, so this "
                    "one is an older copy; restore the newest one, or move the table away"
                )
        self.create()
        begun = len(self._begun)
        self.begin()
        has_begun = len(self._begun) > begun
        if has_begun:
            self._joined.clear()
        # A topic partition that left the configuration is read no further.
        with_messages, topics = set(batch.with_messages), self._config.source.topics
        joining = {
            name for name in batch.ranges if name in with_messages or topics.includes(name)
        } - self._joined
        if joining:
            self.begin_stream(joining)
        return has_begun

    def _shared_folder(self, options: TableOptions) -> str:
        """Return why a topic can have no table, because its folder would be in another one of the
        configuration; empty if it can.
        """
        taken = {name: table.path for name, table in self.by_name.items()} | self._places
        for name, place in taken.items():
            if is_inside(options.place, place) or is_inside(place, options.place):
                return (
                    f"the folder {options.place} of {options.section} and {place} ({name}) "
                    "would share a folder"
                )
        return ""
