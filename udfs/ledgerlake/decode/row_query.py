"""Queries of one row at a time over Arrow batches: ``select ... from messages where ...``.

DuckDB runs them, in the process that has the batch. A query gives at most one row for each message,
in their order, and depends on that message alone. So it may select, compute and filter; it may not
join, group, sort or limit, and may not call functions of the clock, of chance or of the session.
DuckDB's own parser says what is in a query, and its catalog which functions there are.

DuckDB reads no file and no network for a query, and its settings are locked. Times are UTC.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import first_line
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.errors import SetupError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import duckdb
    from numpy.typing import NDArray

RELATION = "messages"

# The number of a row in its batch, which a query selects too.
_ROW = "__ledgerlake_row"

# The nodes of a parsed query that are no expression of one row, and what they are called.
_FORBIDDEN_NODES = {"SUBQUERY": "a query in a query", "WINDOW": "a window function", "PARAMETER": "a parameter"}
_FORBIDDEN_PARTS = {
    "group_expressions": "group by",
    "having": "having",
    "qualify": "qualify",
    "sample": "a sample",
}

# Functions that DuckDB counts as constant within a query, or as macros, and that give the same for
# the same row at any time.
_CHANGING = {
    "current_database",
    "current_date",
    "current_localtime",
    "current_localtimestamp",
    "current_schema",
    "current_schemas",
    "current_setting",
    "get_current_time",
    "get_current_timestamp",
    "getvariable",
    "in_search_path",
    "now",
    "today",
    "transaction_timestamp",
    "txid_current",
    "version",
}
_STEADY_MACROS = re.compile(
    r"(list|array)_\w+|date_add|days_in_month|fdiv|if|json|map_contains_(entry|value)|md5_number_(lower|upper)|nullif|split_part"
)
# Names without brackets that DuckDB reads as functions.
_CHANGING_NAMES = re.compile(
    r"current_(catalog|date|role|schema|time|timestamp|user)|localtime(stamp)?|session_user|user"
)

# What DuckDB's errors say of the place: a line, or the name that it does not find.
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)
_UNKNOWN = re.compile(r'"([^"]+)" not found')

_MOST_CHARACTERS = 400

_LOCAL_TIMESTAMP = pa.timestamp("us")

_NAME = re.compile(r"[^ ,;{}()\n\t=.]+")


@dataclass(frozen=True)
class Answer:
    """The rows of a query: its columns as one struct column, and the number of each row's message in
    the batch.
    """

    values: pa.StructArray
    rows: NDArray[np.int64]


class RowQuery:
    """A query of one row at a time.

    Args:
        text: the query.
        where: the name of the option, for errors.

    Raises:
        UsageError: it is no such query; the message has the line.
    """

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._text = text
        node = _parsed(text, where)
        _check(node, where)
        self._numbered = _with_row_number(node)

    def columns(self, messages: pa.Schema) -> pa.StructType:
        """Return the columns of the answer.

        Args:
            messages: the columns of the batches.

        Raises:
            SetupError: the query does not fit those columns, or a column has a type that no table can
                have; the message has the line or the column.
        """
        import duckdb

        nothing = _numbered(messages.empty_table())
        try:
            # The query as it was written, so that the error has its lines.
            _run(self._text, nothing)
            answer = _run(self._numbered, nothing)
        except duckdb.Error as error:
            raise SetupError(f"{self._where} does not fit the messages: {_with_line(error, self._text)}") from None
        return pa.struct(list(self._fields(answer.schema)))

    def of(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        """Run the query over a batch.

        Args:
            columns: the columns of the answer, from ``columns``.

        Raises:
            ValueError: a value of a message cannot be computed.
        """
        import duckdb

        try:
            answer = _run(self._numbered, _numbered(pa.Table.from_batches([messages])))
            rows = answer[_ROW].to_numpy()
            values = [_one_chunk(answer[field.name]).cast(field.type) for field in columns]
        except (duckdb.Error, pa.ArrowException) as error:
            raise ValueError(first_line(error)) from None
        struct = pa.StructArray.from_arrays(values, fields=list(columns)) if values else _no_columns(len(rows))
        return Answer(struct, rows)

    def _fields(self, answer: pa.Schema) -> Iterator[pa.Field]:
        """Yield the columns of the answer with types that a table can have."""
        seen: set[str] = set()
        for field in answer:
            if field.name == _ROW:
                continue
            if field.name.lower() in seen:
                raise SetupError(f"{self._where} has two columns {field.name}; name one of them otherwise")
            seen.add(field.name.lower())
            if not _NAME.fullmatch(field.name):
                raise SetupError(f"{self._where} has a column without a name of its own; write {field.name} as NAME")
            kind = table_type(field.type)
            if kind is None:
                raise SetupError(
                    f"the column {field.name} of {self._where} is {field.type}, which no table can have; cast it to "
                    "another type"
                )
            yield pa.field(field.name, kind)


def condition(text: str, where: str) -> RowQuery:
    """Return the query that gives the messages for which a condition holds.

    Raises:
        UsageError: as ``RowQuery``.
    """
    return RowQuery(f"select 1 as holds from {RELATION} where ({text}\n)", where)


def _parsed(text: str, where: str) -> dict[str, Any]:
    """Return the one select of a query, as DuckDB parses it."""
    parsed = json.loads(_value("select json_serialize_sql(?)", text))
    if parsed["error"]:
        line = text.encode()[: int(parsed.get("position", 0))].count(b"\n") + 1
        raise UsageError(f"{where} cannot be read: {parsed['error_message']} (line {line})")
    statements = parsed["statements"]
    if len(statements) != 1 or statements[0]["node"]["type"] != "SELECT_NODE":
        raise UsageError(f"{where} must be one query: select ... from {RELATION} where ...")
    node: dict[str, Any] = statements[0]["node"]
    return node


def _check(node: dict[str, Any], where: str) -> None:
    source = node["from_table"]
    names = [source.get(part, "") for part in ("catalog_name", "schema_name", "table_name")]
    if source["type"] != "BASE_TABLE" or names != ["", "", RELATION] or source["column_name_alias"]:
        raise UsageError(f"{where} must read from {RELATION} alone")
    found = [name for part, name in _FORBIDDEN_PARTS.items() if node[part] or source.get(part)]
    found += [modifier["type"].removesuffix("_MODIFIER").lower() for modifier in node["modifiers"]]
    if node["cte_map"]["map"]:
        found.append("with")
    found += filter(None, map(_forbidden, _nodes([node["select_list"], node["where_clause"]])))
    if found:
        raise UsageError(
            f"{where} has {found[0]}; it may select and filter by what one message has, and by functions that always give the same"
        )


def _forbidden(node: dict[str, Any]) -> str | None:
    """Return what an expression has that does not depend on its row alone; None if nothing."""
    kind = node.get("class")
    if kind in _FORBIDDEN_NODES:
        return _FORBIDDEN_NODES[kind]
    if kind == "COLUMN_REF" and len(node["column_names"]) == 1:
        name = node["column_names"][0]
        return name if _CHANGING_NAMES.fullmatch(name.lower()) else None
    if kind == "FUNCTION":
        name = node["function_name"].lower()
        is_of_now = name == "age" and len(node.get("arguments") or node.get("children") or ()) == 1
        return f"the function {name}" if name not in _steady_functions() or is_of_now else None
    return None


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all nodes of a part of a parsed query."""
    stack = [tree]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


@cache
def _steady_functions() -> frozenset[str]:
    """Return the functions of one row that always give the same."""
    found = _connection().execute("select function_name, function_type, stability from duckdb_functions()").fetchall()
    others = {name for name, kind, stability in found if stability == "VOLATILE" or kind in ("aggregate", "window")}
    steady = {name for name, kind, _ in found if kind == "scalar"} - _CHANGING
    return (
        frozenset(steady | {name for name, kind, _ in found if kind == "macro" and _STEADY_MACROS.fullmatch(name)})
        - others
    )


def _with_row_number(node: dict[str, Any]) -> str:
    """Return a query that selects the number of the row too, and leaves it out of each star."""
    for star in _nodes(node["select_list"]):
        if star.get("class") == "STAR":
            star["exclude_list"] = [*star["exclude_list"], _ROW]
    number = {
        "class": "COLUMN_REF",
        "type": "COLUMN_REF",
        "alias": "",
        "query_location": 0,
        "query_location_length": 0,
        "column_names": [_ROW],
    }
    numbered = {**node, "select_list": [*node["select_list"], number]}
    statement = {"error": False, "statements": [{"node": numbered, "named_param_map": []}]}
    return _value("select json_deserialize_sql(?::json)", json.dumps(statement))


def _numbered(messages: pa.Table) -> pa.Table:
    return messages.append_column(_ROW, pa.array(np.arange(messages.num_rows)))


_of_thread = threading.local()


def _connection() -> duckdb.DuckDBPyConnection:
    """Return the connection of this thread."""
    found = getattr(_of_thread, "connection", None)
    if found is None:
        # The import takes a while, and only tables with a query need it.
        import duckdb

        found = duckdb.connect(config={"threads": 1, "enable_external_access": False})
        found.execute("set TimeZone = 'UTC'")
        found.execute("set lock_configuration = true")
        _of_thread.connection = found
    return found


def _value(query: str, argument: str) -> str:
    """Return the one text of DuckDB's answer."""
    ((text,),) = _connection().execute(query, [argument]).fetchall()
    return str(text)


def _run(text: str, messages: pa.Table) -> pa.Table:
    connection = _connection()
    connection.register(RELATION, messages)
    try:
        return connection.sql(text).to_arrow_table()
    finally:
        connection.unregister(RELATION)


def _with_line(error: Exception, query: str) -> str:
    """Return the first line of DuckDB's error, what it proposes, and the line of the query."""
    text = str(error)
    first, *others = [line.strip() for line in text.splitlines() if line.strip()]
    shown = [first.rstrip("!"), *(line for line in others if line.startswith(("Candidate", "Did you mean")))]
    line, unknown = _LINE.search(text), _UNKNOWN.search(text)
    if line:
        shown.append(f"line {line[1]}")
    elif unknown and unknown[1] in query:
        shown.append(f"line {query[: query.index(unknown[1])].count(chr(10)) + 1}")
    return "; ".join(shown)[:_MOST_CHARACTERS]


def table_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of a table for values of a type; None if there is none."""
    if pa.types.is_list(kind):
        items = table_type(kind.value_type)
        return None if items is None else pa.list_(items)
    if pa.types.is_map(kind):
        keys, items = table_type(kind.key_type), table_type(kind.item_type)
        return None if keys is None or items is None else pa.map_(keys, items)
    if pa.types.is_struct(kind):
        parts = [(field.name, table_type(field.type)) for field in kind]
        return None if any(part is None for _, part in parts) else pa.struct(parts)
    if pa.types.is_timestamp(kind):
        return TIMESTAMP if kind.tz is not None else _LOCAL_TIMESTAMP if kind == _LOCAL_TIMESTAMP else None
    is_plain = pa.types.is_signed_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal128(kind)
    is_plain = is_plain or pa.types.is_boolean(kind) or pa.types.is_date32(kind)
    return kind if is_plain or kind in (pa.string(), pa.binary()) else None


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])


def _no_columns(count: int) -> pa.StructArray:
    return pa.nulls(count, pa.struct([]))
