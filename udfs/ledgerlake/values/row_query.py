"""Queries of one row at a time over Arrow batches: ``select ... from messages where ...``.

DuckDB runs them, in the process that has the batch. A query gives at most one row for each message,
in their order, and depends on that message alone. So it may select, compute and filter; it may not
join, group, sort or limit, and may not call functions of the clock, of chance or of the session.
DuckDB's own parser tells the parts of a query, and its catalog the existing functions.

DuckDB reads no file and no network for a query, and its settings are locked. Times are UTC.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ledgerlake.decode.columns import first_line
from ledgerlake.decode.schema import TIMESTAMP
from ledgerlake.errors import SetupError, UsageError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.values.column_names import folded
from ledgerlake.wire.limits import MAX_QUERY_MAP_ENTRIES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    import duckdb
    from duckdb.sqltypes import DuckDBPyType
    from numpy.typing import NDArray

RELATION = "messages"

# Names that a query cannot use: the batch, and the number of a row in it.
_BATCH = "__ledgerlake_batch"
_NUMBERS = "__ledgerlake_numbers"
_ROW = "__ledgerlake_row"
_OURS = "__ledgerlake"

# The name of the messages in the query that runs. No table has a column with a space in its name.
# So the name that the query gives them cannot be taken for a column, whatever a schema has.
_WHOLE_ROW = "the messages"

# The nodes of a parsed query that are no expression of one row, and what they are called.
_FORBIDDEN_NODES = {
    "SUBQUERY": "a query in a query",
    "WINDOW": "a window function",
    "PARAMETER": "a parameter",
    "POSITIONAL_REFERENCE": "a column by its number",
}
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
# What calls itself for each level of a value: some hundred bytes of compressed JSON would end the
# process. All other functions and types were tried with such values (see
# ``tests.decode.deep_values``).
_RECURSING = {"json_contains"}
_RECURSING_TYPE = "variant"

# What takes memory that DuckDB does not count, for two texts as much as the product of their
# lengths: two gigabytes for 16,000 characters. ``levenshtein`` takes as much as they are long.
_UNCOUNTED = {"damerau_levenshtein"}

# An aggregate of a list that draws a sample.
_SAMPLING = "reservoir_quantile"

# Names without brackets that DuckDB reads as functions, unless a column has that name.
_SESSION_NAMES = re.compile(
    r"current_(catalog|date|role|schema|time|timestamp|user)|localtime(stamp)?|session_user|user"
)

_CLAIM = (
    "it may select and filter by what one message has, and by functions that always give the "
    "same, for any message"
)

# What DuckDB's errors say of the place: a line, or the name that it does not find.
_LINE = re.compile(r"^LINE (\d+):", re.MULTILINE)
_UNKNOWN = re.compile(r'"([^"]+)" not found')

_MOST_CHARACTERS = 400

# Tasks need the queries of their tables again and again.
_MOST_QUERIES = 1000

# So many messages of a batch that fail get a reason of their own.
_MOST_REASONS = 20

# What DuckDB may keep of a batch; it does not count what a function takes for one value.
_MEMORY = "1GB"

_LOCAL_TIMESTAMP = pa.timestamp("us")

# The types of DuckDB whose values a table has as they are, and those that have values of other
# types. All others reach Arrow with other values, or as bytes of DuckDB's own form.
_EXACT = {
    "boolean",
    "tinyint",
    "smallint",
    "integer",
    "bigint",
    "float",
    "double",
    "decimal",
    "varchar",
    "uuid",
    "blob",
    "date",
    "timestamp",
    "timestamp with time zone",
}
_NESTED = {"list", "map", "struct", "tuple"}
_CASTS = {
    **dict.fromkeys(("utinyint", "usmallint", "uinteger"), "::bigint"),
    **dict.fromkeys(("ubigint", "hugeint", "uhugeint"), "::decimal(38, 0) or ::varchar"),
    **dict.fromkeys(("timestamp_s", "timestamp_ms"), "::timestamp"),
    "timestamp_ns": "::varchar, or ::timestamp, which rounds",
    "timestamptz_ns": "::varchar, or ::timestamptz, which rounds",
    "array": "::integer[], or another list",
}
_OTHER_CAST = "::varchar"

_NAME = re.compile(r"[^ ,;{}()\n\t=.]+")


@dataclass(frozen=True)
class Answer:
    """The rows of a query: its columns as one struct column, and the number of each row's message
    in the batch. ``bad`` has the reason for each message without a value that can be computed; it
    has no row.
    """

    values: pa.StructArray
    rows: NDArray[np.int64]
    bad: dict[int, str] = field(default_factory=dict)


def joined(first: Answer, second: Answer, count: int) -> Answer:
    """Return the answers of two halves of a batch; the first half has ``count`` messages."""
    values = pa.concat_arrays([first.values, second.values])
    bad = first.bad | {row + count: reason for row, reason in second.bad.items()}
    return Answer(values, np.concatenate([first.rows, second.rows + count]), bad)


def _beside(
    bad: dict[int, str], messages: pa.RecordBatch, run: Callable[[pa.RecordBatch], Answer]
) -> Answer:
    """Return the answer for all messages; those that are not bad are run."""
    kept = np.setdiff1d(np.arange(messages.num_rows), list(bad))
    answer = run(messages.take(pa.array(kept, pa.int64())))
    more = {int(kept[row]): reason for row, reason in answer.bad.items()}
    return Answer(answer.values, kept[answer.rows], bad | more)


class RowQuery:
    """A query of one row at a time.

    ``references`` are the columns that it names, each by its parts.

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
        parts = list(_nodes([node["select_list"], node["where_clause"]]))
        _name_messages(node, parts)
        self.references = [
            tuple(part["column_names"]) for part in parts if part.get("class") == "COLUMN_REF"
        ]
        self._reads_all = (_WHOLE_ROW,) in self.references or any(
            part.get("class") == "STAR" for part in parts
        )
        self._numbered, self._failing = _numbered(node), _failing(node)
        self._nameless = _nameless(node)
        self._columns: dict[pa.Schema, pa.StructType] = {}

    def columns(self, messages: pa.Schema) -> pa.StructType:
        """Return the columns of the answer.

        Args:
            messages: the columns of the batches.

        Raises:
            SetupError: the query does not fit those columns, fails for any message, or has a column
                that no table can have; the message has the line or the column.
        """
        if messages not in self._columns:
            self._check_session_names(messages)
            answer, types = self._answer(messages)
            # The last column is the number of the row.
            columns = zip(list(answer.schema)[:-1], types, strict=False)
            self._columns[messages] = pa.struct(list(self._fields(columns, messages.names)))
        return self._columns[messages]

    def of(self, messages: pa.RecordBatch) -> Answer:
        """Run the query over a batch.

        Raises:
            SetupError: as ``columns``.
        """
        columns = self.columns(messages.schema)
        large = self._large_maps(messages)
        if not large:
            return self._judged(messages, columns)
        return _beside(large, messages, lambda kept: self._judged(kept, columns))

    def _judged(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        try:
            return self._run(messages, columns)
        except Unreadable:
            return self._without_bad(messages, columns)

    def _large_maps(self, messages: pa.RecordBatch) -> dict[int, str]:
        """Return the messages with a map that is too large for a query, in a column that it reads,
        and the reasons.
        """
        named = {part.lower() for reference in self.references for part in reference[:2]}
        found: dict[int, str] = {}
        for column, values in zip(messages.schema, messages.columns, strict=True):
            if not _has_map(column.type) or not (self._reads_all or column.name.lower() in named):
                continue
            entries = _most_entries(values)
            for row in np.flatnonzero(entries > MAX_QUERY_MAP_ENTRIES).tolist():
                found[row] = (
                    f"{column.name} has a map of {entries[row]:,} entries, and a query takes "
                    f"{MAX_QUERY_MAP_ENTRIES:,} at most; a table without a query takes more"
                )
        return found

    def _run(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        with reading():
            answer = _run(self._numbered, messages)
            rows = answer.column(answer.num_columns - 1).to_numpy()
            values = [
                _one_chunk(answer.column(place)).cast(kind.type)
                for place, kind in enumerate(columns)
            ]
        if len(rows) and ((np.diff(rows) <= 0).any() or rows[-1] >= messages.num_rows):
            raise AssertionError(f"{self._where} does not give each message once, in their order")
        struct = (
            pa.StructArray.from_arrays(values, fields=list(columns))
            if values
            else _no_columns(len(rows))
        )
        return Answer(struct, rows)

    def _without_bad(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        """Run the query over the messages for which it does not fail."""
        bad = self._failing_rows(messages)
        if not len(bad):
            return self._halved(messages, columns)
        reasons = dict.fromkeys(bad.tolist(), "a value cannot be computed")
        for row in bad[:_MOST_REASONS].tolist():
            alone = self._halved(messages.slice(row, 1), columns).bad
            if not alone:
                return self._halved(messages, columns)
            reasons[row] = alone[0]
        return _beside(reasons, messages, lambda kept: self._halved(kept, columns))

    def _failing_rows(self, messages: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the rows for which an expression fails; none if it is not by an expression, but by
        too little memory, for example.
        """
        try:
            with reading():
                found: NDArray[np.int64] = _run(self._failing, messages).column(0).to_numpy()
                return found
        except Unreadable:
            return np.empty(0, dtype=np.int64)

    def _halved(self, messages: pa.RecordBatch, columns: pa.StructType) -> Answer:
        """Run the query; if it fails for all messages together, halve them until it fails for
        single ones.
        """
        try:
            return self._run(messages, columns)
        except Unreadable as failure:
            if messages.num_rows <= 1:
                return Answer(
                    pa.array([], columns),
                    np.empty(0, dtype=np.int64),
                    {0: first_line(failure.error)},
                )
        half = messages.num_rows // 2
        first, second = messages.slice(0, half), messages.slice(half)
        return joined(self._halved(first, columns), self._halved(second, columns), half)

    def _answer(self, messages: pa.Schema) -> tuple[pa.Table, list[DuckDBPyType]]:
        """Return the answer for no message, and DuckDB's types of its columns.

        Raises:
            SetupError: as ``columns``.
        """
        nothing = _batch_of(messages, 0)
        try:
            with reading():
                # The query as it was written, so that the error has its lines.
                _run_as_written(self._text, nothing)
                answer = _with_types(self._numbered, nothing)
        except Unreadable as failure:
            said = _with_line(failure.error, self._text)
            raise SetupError(f"{self._where} does not fit the messages: {said}") from None
        try:
            with reading():
                _run_as_written(self._nameless, nothing)
        except Unreadable as failure:
            said = _with_line(failure.error, self._text)
            raise SetupError(
                f"{self._where} uses a column that it makes itself, and a field of that name would "
                f"take its place; write what it stands for again: {said}"
            ) from None
        try:
            with reading():
                _run(self._numbered, _batch_of(messages, 1))
        except Unreadable as failure:
            said = _with_line(failure.error, self._text)
            raise SetupError(f"{self._where} fails for any message: {said}") from None
        return answer

    def _check_session_names(self, messages: pa.Schema) -> None:
        known = {name.lower() for name in messages.names}
        for reference in self.references:
            name = reference[0].lower()
            if len(reference) == 1 and _SESSION_NAMES.fullmatch(name) and name not in known:
                raise SetupError(f"{self._where} has {name}; {_CLAIM}")

    def _fields(
        self, columns: Iterable[tuple[pa.Field, DuckDBPyType]], known: Sequence[str]
    ) -> Iterator[pa.Field]:
        """Yield the columns of the answer with types that a table can have.

        Args:
            columns: each with DuckDB's type.
            known: the names of the messages' columns.
        """
        seen: set[str] = set()
        for column, its_type in columns:
            if column.name.startswith(_OURS) and column.name not in known:
                raise SetupError(
                    f"{self._where} selects more than the messages have; write * in place of "
                    "columns(...)"
                )
            if folded(column.name) in seen:
                raise SetupError(
                    f"{self._where} has two columns {column.name}; name one of them otherwise"
                )
            seen.add(folded(column.name))
            if not _NAME.fullmatch(column.name):
                raise SetupError(
                    f"{self._where} has a column without a name that a table can have; write "
                    f"{column.name} as NAME"
                )
            changed = _changed_type(its_type)
            if changed is not None:
                raise SetupError(
                    f"the column {column.name} of {self._where} is {its_type}, and no table has "
                    f"the values of {changed} as they are; "
                    f"cast them by {_CASTS.get(changed.id, _OTHER_CAST)}"
                )
            kind = table_type(column.type)
            if kind is None:
                raise SetupError(
                    f"the column {column.name} of {self._where} is {its_type}, which no table can "
                    "have; cast it to another type"
                )
            yield pa.field(column.name, kind)


class Condition(RowQuery):
    """The query of the messages for which a condition holds.

    Raises:
        UsageError: as ``RowQuery``.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(f"select 1 as holds from {RELATION} where ({text}\n)", where)
        self._value = RowQuery(f"select ({text}\n) as holds from {RELATION}", where)

    def columns(self, messages: pa.Schema) -> pa.StructType:
        """Return the one column of the answer.

        Raises:
            SetupError: the condition does not fit the messages, or is no condition.
        """
        if messages not in self._columns:
            kind = self._value.columns(messages).field(0).type
            if not pa.types.is_boolean(kind):
                raise SetupError(
                    f"{self._where} is a value of {kind} and no condition; compare it with "
                    "something"
                )
        return super().columns(messages)


@lru_cache(maxsize=_MOST_QUERIES)
def row_query(text: str, where: str) -> RowQuery:
    """Return a query; one that this process has had is not parsed again.

    Raises:
        UsageError: as ``RowQuery``.
    """
    return RowQuery(text, where)


@lru_cache(maxsize=_MOST_QUERIES)
def row_condition(text: str, where: str) -> Condition:
    """Return a condition, as ``row_query``.

    Raises:
        UsageError: as ``RowQuery``.
    """
    return Condition(text, where)


def _parsed(text: str, where: str) -> dict[str, Any]:
    """Return the one select of a query, as DuckDB parses it."""
    try:
        with reading():
            parsed = json.loads(_value("select json_serialize_sql(?)", text))
    except Unreadable:
        raise UsageError(
            f"{where} has a wrong text, or is nested too deeply; write it shorter"
        ) from None
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
    if node["aggregate_handling"] != "STANDARD_HANDLING":
        found.append("group by")
    parts = [node["select_list"], node["where_clause"]]
    found += filter(None, map(_forbidden, _nodes(parts)))
    found += [_SAMPLING] if f'"{_SAMPLING}"' in json.dumps(parts) else []
    if found:
        raise UsageError(f"{where} has {found[0]}; {_CLAIM}")


def _forbidden(node: dict[str, Any]) -> str | None:
    """Return what an expression has that does not depend on its row alone; None if nothing."""
    kind = node.get("class")
    if kind in _FORBIDDEN_NODES:
        return _FORBIDDEN_NODES[kind]
    if kind == "COLUMN_REF":
        return next((name for name in node["column_names"] if name.lower().startswith(_OURS)), None)
    if kind == "FUNCTION":
        name = node["function_name"].lower()
        is_of_now = name == "age" and len(node.get("arguments") or node.get("children") or ()) == 1
        return f"the function {name}" if name not in _steady_functions() or is_of_now else None
    if kind == "TYPE" and node["type_name"].lower() == _RECURSING_TYPE:
        return f"the type {_RECURSING_TYPE}"
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
    found = (
        _connection()
        .execute("select function_name, function_type, stability from duckdb_functions()")
        .fetchall()
    )
    others = {
        name
        for name, kind, stability in found
        if stability == "VOLATILE" or kind in ("aggregate", "window")
    }
    steady = (
        {name for name, kind, _ in found if kind == "scalar"} - _CHANGING - _RECURSING - _UNCOUNTED
    )
    return (
        frozenset(
            steady
            | {
                name
                for name, kind, _ in found
                if kind == "macro" and _STEADY_MACROS.fullmatch(name)
            }
        )
        - others
    )


def _name_messages(node: dict[str, Any], parts: Iterable[dict[str, Any]]) -> None:
    """Give the messages another name in a query, and wherever it names them: alone, as the whole
    row, or before a column. DuckDB takes a name alone for a column rather than for the whole row.

    Args:
        parts: all nodes of the query's expressions.
    """
    name = (node["from_table"]["alias"] or RELATION).lower()
    node["from_table"]["alias"] = _WHOLE_ROW
    for part in parts:
        if part.get("class") == "COLUMN_REF" and part["column_names"][0].lower() == name:
            part["column_names"][0] = _WHOLE_ROW
        elif part.get("class") == "STAR":
            is_of_all = not part["relation_name"] and not part["columns"]
            if is_of_all or part["relation_name"].lower() == name:
                part["relation_name"] = _WHOLE_ROW
        elif "column" in part and part["table"].lower() == name:
            # A column that a star leaves out or names otherwise.
            part["table"] = _WHOLE_ROW


def _numbered(node: dict[str, Any]) -> str:
    """Return a query that selects the number of the row too. The number stands in a relation of its
    own, so no star and no whole row has it.
    """
    selected = [*node["select_list"], _parsed(f"select {_NUMBERS}.{_ROW}", "")["select_list"][0]]
    condition = node["where_clause"]
    if condition is not None:
        text = f"select 1 where {_when(condition, 'true', 'false')}"
        condition = _parsed(text, "")["where_clause"]
    parts = {"select_list": selected, "from_table": _source(), "where_clause": condition}
    return _text({**node, **parts})


def _nameless(node: dict[str, Any]) -> str:
    """Return the query without names of its own. DuckDB takes a name for a column of the messages,
    if they have it, and else for one that the query makes: with a new field, the same query would
    give other values. A query that needs a name of its own does not fit without it.
    """
    return _text({**node, "select_list": [{**part, "alias": ""} for part in node["select_list"]]})


def _when(condition: dict[str, Any], value: str, other: str) -> str:
    """Return the text of a value for the rows that meet a condition, and of another for all others.

    DuckDB computes a condition in a ``case`` for each row in the order in which it is written, and
    ends at what decides it, as after ``where``. Elsewhere it computes all parts of ``and`` and
    ``or``. It does not take a ``case`` apart, as it does a ``where``. So the query and
    ``_failing`` compute the same for a row.
    """
    return f"case when ({_expression(condition)}) then {value} else {other} end"


def _failing(node: dict[str, Any]) -> str:
    """Return a query of the numbers of the rows for which an expression fails. ``try`` judges each
    row alone, and makes null of a failure; nothing else makes null of a hash. DuckDB knows without
    computing it that a list or a struct is not null, but it must compute all parts for a hash.
    """
    expressions = [
        part for part in node["select_list"] if part["class"] not in ("STAR", "COLUMN_REF")
    ]
    for star in _nodes(node["select_list"]):
        expressions += [
            replaced["value"]
            for replaced in star.get("replace_list") or ()
            if star["class"] == "STAR"
        ]
    computed = f"hash({', '.join(['1', *map(_expression, expressions)])})"
    if node["where_clause"] is not None:
        computed = _when(node["where_clause"], computed, "0")
    text = f"select {_NUMBERS}.{_ROW} from {RELATION} where try({computed}) is null"
    return _text({**_parsed(text, ""), "from_table": _source()})


def _source() -> dict[str, Any]:
    """Return the relations of a query: the messages, and beside them the numbers of the rows."""
    source = _parsed(f"select 1 from {_BATCH} as m positional join {_NUMBERS}", "")
    joined: dict[str, Any] = source["from_table"]
    joined["left"]["alias"] = _WHOLE_ROW
    return joined


def _expression(node: dict[str, Any]) -> str:
    """Return the text of an expression."""
    template = _parsed("select 1", "")
    return _text({**template, "select_list": [{**node, "alias": ""}]}).removeprefix("SELECT ")


def _text(node: dict[str, Any]) -> str:
    """Return the text of a parsed query."""
    statement = {"error": False, "statements": [{"node": node, "named_param_map": []}]}
    return _value("select json_deserialize_sql(?::json)", json.dumps(statement))


def _batch_of(columns: pa.Schema, rows: int) -> pa.RecordBatch:
    """Return a batch of nulls."""
    nullable = pa.schema([column.with_nullable(True) for column in columns])
    return pa.RecordBatch.from_arrays(
        [pa.nulls(rows, column.type) for column in columns], schema=nullable
    )


_of_thread = threading.local()


def _connection() -> duckdb.DuckDBPyConnection:
    """Return the connection of this thread."""
    found = getattr(_of_thread, "connection", None)
    if found is None:
        # The import takes a while, and only tables with a query need it.
        import duckdb

        found = duckdb.connect(
            config={"threads": 1, "enable_external_access": False, "memory_limit": _MEMORY}
        )
        found.execute("set TimeZone = 'UTC'")
        found.execute("set lock_configuration = true")
        _of_thread.connection = found
    return found


def _value(query: str, argument: str) -> str:
    """Return the one text of DuckDB's answer."""
    ((text,),) = _connection().execute(query, [argument]).fetchall()
    return str(text)


def _changed_type(kind: DuckDBPyType) -> DuckDBPyType | None:
    """Return a type, which may be within another one, whose values are others in a table; None if
    there is none.
    """
    waiting: list[Any] = [kind]
    while waiting:
        kind = waiting.pop()
        if kind.id in _NESTED:
            waiting += [part for _, part in kind.children]
        elif kind.id not in _EXACT:
            return kind
    return None


def _run(text: str, messages: pa.RecordBatch) -> pa.Table:
    """Run a query of ``_numbered`` or ``_failing``."""
    return _with_types(text, messages)[0]


def _with_types(text: str, messages: pa.RecordBatch) -> tuple[pa.Table, list[DuckDBPyType]]:
    """Run a query as ``_run``; return DuckDB's types of its columns too."""
    numbers = pa.table({_ROW: np.arange(messages.num_rows)})
    return _with_relations({_BATCH: pa.Table.from_batches([messages]), _NUMBERS: numbers}, text)


def _run_as_written(text: str, messages: pa.RecordBatch) -> None:
    _with_relations({RELATION: pa.Table.from_batches([messages])}, text)


def _with_relations(
    relations: Mapping[str, pa.Table], text: str
) -> tuple[pa.Table, list[DuckDBPyType]]:
    connection = _connection()
    for name, rows in relations.items():
        connection.register(name, rows)
    try:
        answer = connection.sql(text)
        return answer.to_arrow_table(), answer.types
    except UnicodeDecodeError as error:
        # DuckDB quotes a value in its error, and cuts it within a character.
        raise ValueError(error.object.decode(errors="replace")) from None
    except Exception as error:
        if _has_ended(error):
            # The next query must not fail for this value.
            del _of_thread.connection
        raise
    finally:
        if hasattr(_of_thread, "connection"):
            for name in relations:
                connection.unregister(name)


def _has_ended(error: Exception) -> bool:
    """Return whether a connection takes no more queries after an error of its own."""
    import duckdb

    return isinstance(error, duckdb.FatalException | duckdb.InternalException)


def _with_line(error: Exception, query: str) -> str:
    """Return the first line of DuckDB's error, what it proposes, and the line of the query."""
    text = str(error)
    first, *others = [line.strip() for line in text.splitlines() if line.strip()]
    shown = [
        first.rstrip("!"),
        *(line for line in others if line.startswith(("Candidate b", "Did you mean"))),
    ]
    line, unknown = _LINE.search(text), _UNKNOWN.search(text)
    if line:
        shown.append(f"line {line[1]}")
    elif unknown and unknown[1] in query:
        shown.append(f"line {query[: query.index(unknown[1])].count(chr(10)) + 1}")
    return "; ".join(shown)[:_MOST_CHARACTERS]


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_map(part.type) for part in kind)
    return bool(pa.types.is_map(kind) or (pa.types.is_list(kind) and _has_map(kind.value_type)))


def _most_entries(values: pa.Array) -> NDArray[np.int64]:
    """Return how many entries the largest map in each row has, at any depth."""
    most = np.zeros(len(values), np.int64)
    if not _has_map(values.type):
        return most
    if pa.types.is_struct(values.type):
        for part in values.flatten():
            most = np.maximum(most, _most_entries(part))
        return most
    offsets, is_map = values.offsets.to_numpy(), pa.types.is_map(values.type)
    if is_map:
        most += np.diff(offsets)
    inner = _most_entries(values.items if is_map else values.values)[: offsets[-1]]
    filled = np.flatnonzero(np.diff(offsets))
    if len(filled):
        most[filled] = np.maximum(most[filled], np.maximum.reduceat(inner, offsets[filled]))
    return most


def table_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of a column of a table for values of a type; None if there is none."""
    if pa.types.is_list(kind):
        items = table_type(kind.value_type)
        return None if items is None else pa.list_(items)
    if pa.types.is_map(kind):
        keys, items = table_type(kind.key_type), table_type(kind.item_type)
        return None if keys is None or items is None else pa.map_(keys, items)
    if pa.types.is_struct(kind):
        parts = [(part.name, table_type(part.type)) for part in kind]
        return None if not parts or any(part is None for _, part in parts) else pa.struct(parts)
    if pa.types.is_timestamp(kind):
        return (
            TIMESTAMP
            if kind.tz is not None
            else _LOCAL_TIMESTAMP
            if kind == _LOCAL_TIMESTAMP
            else None
        )
    is_plain = (
        pa.types.is_signed_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal128(kind)
    )
    is_plain = is_plain or pa.types.is_boolean(kind) or pa.types.is_date32(kind)
    return kind if is_plain or kind in (pa.string(), pa.binary()) else None


def _one_chunk(column: pa.ChunkedArray) -> pa.Array:
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])
    )


def _no_columns(count: int) -> pa.StructArray:
    return pa.array([{}] * count, pa.struct([]))
