"""The tables of a pipeline, as planner and tasks know them: which messages a table takes, and how
its rows come from them.

A path with ``{tenant}``, ``{namespace}`` or ``{topic}`` names a table for each topic; a part of a
topic's name is there as ``client.topics.folder_name`` writes it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ledgerlake.client.topics import TopicSelection, folder_name
from ledgerlake.errors import UsageError
from ledgerlake.options.declared import option
from ledgerlake.options.json_fields import JSON_FIELDS
from ledgerlake.options.kinds import FUNCTION, LIST, PLACEHOLDER, TEXT, choice
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.stored.places import from_text, to_text
from ledgerlake.values.column_names import folded
from ledgerlake.values.row_query import RELATION, row_condition, row_query
from ledgerlake.wire.value_schema import ValueSchema

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ledgerlake.stored.places import Place
    from ledgerlake.values.row_query import Condition, RowQuery

# The name of the table of messages in checkpoints of all releases.
MESSAGES_TABLE = "messages"

# Schemas of the registry that say nothing of a value's fields.
_WITHOUT_FIELDS = (pb.Schema.NoSchema, pb.Schema.String)

# What does not decide which rows come into a table.
_NOT_DECISIVE = ("name", "section", "place", "iceberg_table", "cluster_by")

_UNKNOWN_YET = {"late", "delivered_at"}

_PARTS = ("tenant", "namespace", "topic")
_MOST_CLUSTERING_COLUMNS = 4

_ICEBERG_NAME = re.compile(r"\w+(\.\w+)+")

_NAMED = re.compile(
    r"(?P<expression>.+\S)\s+as\s+(?P<name>[A-Za-z_]\w*)", re.IGNORECASE | re.DOTALL
)
_COLUMN = re.compile(r"[A-Za-z_]\w*")
_CALL = re.compile(r"(?P<function>\w+)\(\s*(\w+\.)?(?P<column>\w+)\s*\)")


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """The keys that ``[delta]`` and each of ``[[tables]]`` have: what the rows of a table are, and
    how they are kept.
    """

    shape: str = option(
        choice("messages", "record"),
        "messages",
        "`messages` is one table for all topics, with values as bytes. `record` has a column for "
        "each field of the topics' schemas, and one struct column `pulsar` for everything else.",
        toml="*.shape",
    )
    json_fields: str = option(
        JSON_FIELDS,
        "",
        "The fields of JSON values in topics without a schema, or with one of bytes or texts.",
        toml="*.json_fields",
        shown_default="such values are one column",
    )
    sql: str = option(
        TEXT,
        "",
        "A query `select ... from messages where ...` that makes the rows, one message at a time.",
        toml="*.sql",
    )
    function: str = option(
        FUNCTION,
        "",
        "A function from Arrow batch to Arrow batch that makes the rows.",
        toml="*.function",
    )
    partition_by: tuple[str, ...] = option(
        LIST,
        (),
        "Columns by which the table is partitioned: names, or `EXPRESSION as NAME`.",
        toml="*.partition_by",
        shown_default="not partitioned",
    )
    cluster_by: tuple[str, ...] = option(
        LIST,
        (),
        "Columns by which upkeep clusters the files, up to four: names, or `pulsar.NAME`.",
        toml="*.cluster_by",
        shown_default="not clustered",
    )
    mode: str = option(
        choice("append", "latest"),
        "append",
        "`latest` keeps one row for each key, the latest message; a message without a value, or "
        "with an empty one, deletes it.",
        toml="*.mode",
    )
    iceberg_table: str = option(
        TEXT,
        "",
        "The name of an Iceberg table that follows the table, such as `shop.orders`; see "
        "`[iceberg]`.",
        toml="*.iceberg_table",
    )

    @property
    def of_rows(self) -> dict[str, Any]:
        """Return the values of these keys."""
        return {field.name: getattr(self, field.name) for field in fields(RowsConfig)}


@dataclass(frozen=True)
class TableOptions(RowsConfig):
    """A table of the configuration.

    Args:
        name: by which results and the checkpoint know it.
        section: what the configuration calls it, for errors.
        place: its folder, perhaps with placeholders.
        topics_pattern: the pattern of its topics; empty for all.
        schema: the name of the record that its messages have; empty for all.
        where: the condition that its messages meet; empty for all.
        is_default: it takes what no other table takes.
        from_template: its path had placeholders.
    """

    name: str
    section: str
    place: Place
    topics_pattern: str = ""
    schema: str = ""
    where: str = ""
    is_default: bool = False
    from_template: bool = False

    @property
    def keeps_latest(self) -> bool:
        """Return whether it has one row for each key, the latest message."""
        return self.mode == "latest"

    @property
    def has_record_shape(self) -> bool:
        """Return whether its rows are records."""
        return self.shape == "record"

    @property
    def is_template(self) -> bool:
        """Return whether each topic has a table of its own."""
        return PLACEHOLDER.search(self.place.uri) is not None

    @property
    def folder(self) -> Place:
        """Return the folder of a template in which the tables of all topics are."""
        above = PLACEHOLDER.split(self.place.uri)[0].rpartition("/")
        return replace(self.place, uri=above[0] or above[1])

    @property
    def drops_messages(self) -> bool:
        """Return whether messages of its topics may have no row in it, although nothing is
        wrong.
        """
        return self.takes_some or self.keeps_latest

    @property
    def takes_some(self) -> bool:
        """Return whether some messages of its topics may count for it, and others not."""
        return bool(self.schema or self.where or self.is_default) or self.computes_rows

    @property
    def computes_rows(self) -> bool:
        """Return whether a query or a function makes the rows."""
        return bool(self.sql or self.function)

    def takes_schema(self, name: str) -> bool:
        """Return whether messages by a schema may come into it.

        Args:
            name: the full name of the schema's record; empty if it has none.
        """
        return not self.schema or self.schema in (name, name.rpartition(".")[2])

    def value_schema(self, registered: ValueSchema) -> ValueSchema:
        """Return the schema by which values are read.

        Args:
            registered: what the registry has for them.
        """
        return (
            self._declared
            if self.json_fields and registered.kind in _WITHOUT_FIELDS
            else registered
        )

    @cached_property
    def _declared(self) -> ValueSchema:
        return ValueSchema(pb.Schema.Json, self.json_fields.encode())

    def of_topic(self, topic: str) -> TableOptions | None:
        """Return the table for the messages of a topic, without placeholders; None if it takes none
        of them.
        """
        if self.topics_pattern and not self._topics.includes(topic):
            return None
        if not self.is_template:
            return self
        parts = dict(zip(_PARTS, topic.partition("://")[2].split("/", 2), strict=True))
        uri = PLACEHOLDER.sub(lambda found: folder_name(parts[found[1]]), self.place.uri)
        return replace(
            self, name=table_name(uri), place=replace(self.place, uri=uri), from_template=True
        )

    def matches(self, place: Place) -> bool:
        """Return whether a place may be the table of a topic, by its placeholders."""
        parts = PLACEHOLDER.split(self.place.uri)[::2]
        return re.fullmatch("[A-Za-z0-9._=+-]+".join(map(re.escape, parts)), place.uri) is not None

    @property
    def specificity(self) -> int:
        """Return how closely the path names a table: the number of its characters beside
        placeholders.
        """
        return len(PLACEHOLDER.sub("", self.place.uri))

    @property
    def partition_columns(self) -> list[str]:
        """Return the names of the columns by which it is partitioned."""
        return [name for name, _ in map(self._partition_column, self.partition_by)]

    @property
    def partition_expressions(self) -> dict[str, str]:
        """Return the expressions that compute them; an empty one of a column that the rows have."""
        return dict(map(self._partition_column, self.partition_by))

    @property
    def computed_names(self) -> list[str]:
        """Return the names of the partition columns that an expression computes."""
        return [name for name, expression in self.partition_expressions.items() if expression]

    @property
    def computed_columns(self) -> RowQuery | None:
        """Return the query of the partition columns that the rows do not have by themselves."""
        named = [self._partition_column(text) for text in self.partition_by]
        selected = [f"({expression}\n) as {name}" for name, expression in named if expression]
        if not selected:
            return None
        return row_query(
            f"select {', '.join(selected)} from {RELATION}", f"{self.section} partition_by"
        )

    def condition(self) -> Condition | None:
        """Return the query of ``where``."""
        return row_condition(self.where, f"{self.section} where") if self.where else None

    def query(self) -> RowQuery | None:
        """Return the query of ``sql``."""
        return row_query(self.sql, f"{self.section} sql") if self.sql else None

    def check(self) -> None:
        """Check what can be checked without the messages.

        Raises:
            UsageError: a placeholder is unknown, an SQL text is none, or options contradict each
                other.
        """
        for found in PLACEHOLDER.finditer(self.place.uri):
            if found[1] not in _PARTS:
                known = ", ".join(f"{{{part}}}" for part in _PARTS)
                raise UsageError(
                    f"{self.section} path has the placeholder {found[0]}; known are {known}"
                )
        if self.sql and self.function:
            raise UsageError(f"{self.section} has sql and function; choose one")
        if (self.sql or self.function) and not self.has_record_shape:
            raise UsageError(f'{self.section} sql and function need shape = "record"')
        if self.json_fields and not self.has_record_shape:
            raise UsageError(f'{self.section} json_fields needs shape = "record"')
        if self.keeps_latest and self.partition_by:
            raise UsageError(f'{self.section} partition_by is not for mode = "latest"')
        self._check_clusters()
        self._check_iceberg()
        names = list(map(folded, self.partition_columns))
        if len(set(names)) < len(names):
            raise UsageError(f"{self.section} partition_by has one column twice")
        if not _UNKNOWN_YET.isdisjoint(names):
            raise UsageError(
                f"{self.section} partition_by names late or delivered_at, which are known only "
                "when a row is written; leave them out"
            )
        for query, key in (
            (self.condition(), "where"),
            (self.query(), "sql"),
            (self.computed_columns, "partition_by"),
        ):
            if query is not None and any(map(self._is_unknown_yet, query.references)):
                raise UsageError(
                    f"{self.section} {key} reads late or delivered_at, which are known only "
                    "when a row is written; leave them out"
                )

    def _check_clusters(self) -> None:
        if self.cluster_by and (self.partition_by or self.keeps_latest):
            raise UsageError(
                f'{self.section} cluster_by is not for partition_by, nor for mode = "latest"'
            )
        if (
            len(set(self.cluster_by)) < len(self.cluster_by)
            or len(self.cluster_by) > _MOST_CLUSTERING_COLUMNS
        ):
            raise UsageError(
                f"{self.section} cluster_by takes up to {_MOST_CLUSTERING_COLUMNS} columns, each "
                "once"
            )

    def _check_iceberg(self) -> None:
        if self.iceberg_table and not _ICEBERG_NAME.fullmatch(self.iceberg_table):
            raise UsageError(
                f"{self.section} iceberg_table is '{self.iceberg_table}'; write a namespace and a "
                "name, such as shop.orders"
            )
        if self.iceberg_table and re.search("[#?]", self.place.uri):
            raise UsageError(
                f"{self.section} iceberg_table needs a path without # and ?, which Iceberg's "
                "readers cannot open"
            )
        if self.iceberg_table and (self.is_template or self.keeps_latest):
            raise UsageError(
                f"{self.section} iceberg_table is not for a path with placeholders, nor for mode = "
                '"latest"'
            )

    @property
    def row_settings(self) -> str:
        """Return what decides which rows come into the table, as JSON for the checkpoint."""
        decisive = {
            name: value
            for name, value in asdict(self).items()
            if value and name not in _NOT_DECISIVE
        }
        return json.dumps(decisive, sort_keys=True)

    def fields(self) -> dict[str, Any]:
        """Return the fields as JSON has them; for ``from_fields``."""
        return {**asdict(self), "place": to_text(self.place)}

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> TableOptions:
        """Return the table of ``fields``."""
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**{**fields, **lists, "place": from_text(fields["place"])})

    def _is_unknown_yet(self, reference: tuple[str, ...]) -> bool:
        """Return whether a column is one that is known only when a row is written."""
        is_pulsars = "pulsar" in reference[:-1] if self.has_record_shape else True
        return is_pulsars and reference[-1].lower() in _UNKNOWN_YET

    @cached_property
    def _topics(self) -> TopicSelection:
        return TopicSelection(pattern=self.topics_pattern)

    def _partition_column(self, text: str) -> tuple[str, str]:
        """Return the name of a partition column, and the expression that computes it; an empty one
        if the rows have the column.
        """
        if _COLUMN.fullmatch(text.strip()):
            return text.strip(), ""
        found = _NAMED.fullmatch(text.strip())
        if found:
            return found["name"], found["expression"]
        call = _CALL.fullmatch(text.strip())
        if call:
            return f"{call['column']}_{call['function']}", text.strip()
        raise UsageError(
            f"{self.section} partition_by '{text}' needs a name; write {text.strip()} as NAME"
        )


def tables_of_topic(tables: Iterable[TableOptions], topic: str) -> list[TableOptions]:
    """Return the tables that messages of a topic may come into, without placeholders. Of several
    with one folder, the first has it.
    """
    return [table for table in (options.of_topic(topic) for options in tables) if table is not None]


def table_name(path: str) -> str:
    """Return the name of one of ``[[tables]]`` in results and in the checkpoint."""
    return f"table:{path}"
