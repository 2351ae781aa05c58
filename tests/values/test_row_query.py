"""Queries of one row at a time: what they may say, and what they answer."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import date, datetime, timezone
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.values import row_query
from ledgerlake.values.row_query import Condition, RowQuery

TIMES = pa.timestamp("us", tz="UTC")
MESSAGES = pa.schema(
    [
        ("id", pa.int64()),
        ("name", pa.string()),
        ("price", pa.decimal128(10, 2)),
        ("tags", pa.list_(pa.string())),
        ("value", pa.binary()),
        (
            "pulsar",
            pa.struct(
                [
                    ("key", pa.string()),
                    ("at_time", TIMES),
                    ("properties", pa.map_(pa.string(), pa.string())),
                ]
            ),
        ),
    ]
)


def batch(*ids: int) -> pa.RecordBatch:
    rows = [
        {
            "id": number,
            "name": f"n{number}",
            "price": number,
            "tags": ["x"] * number,
            "value": b'{"n": %d}' % number,
            "pulsar": {
                "key": f"k{number}",
                "at_time": datetime(2026, 1, 1 + number, 23, tzinfo=timezone.utc),
                "properties": [("p", "q")],
            },
        }
        for number in ids
    ]
    return pa.RecordBatch.from_pylist(rows, schema=MESSAGES)


def answer(text: str, *ids: int) -> tuple[list[dict[str, Any]], list[int]]:
    query = RowQuery(text, "sql")
    found = query.of(batch(*ids))
    return found.values.to_pylist(), found.rows.tolist()


def test_a_query_selects_computes_and_filters_in_the_order_of_the_batch() -> None:
    text = "select id * 2 as twice, upper(name) as name from messages where id <> 3"
    assert answer(text, 5, 3, 1) == (
        [{"twice": 10, "name": "N5"}, {"twice": 2, "name": "N1"}],
        [0, 2],
    )
    assert answer(text, 3) == ([], [])


def test_a_star_has_all_columns_and_nothing_of_ours() -> None:
    columns = RowQuery("select * from messages", "sql").columns(MESSAGES)
    assert [field.name for field in columns] == MESSAGES.names
    assert [field.type for field in columns][:4] == [
        pa.int64(),
        pa.string(),
        pa.decimal128(10, 2),
        pa.list_(pa.string()),
    ]
    others = RowQuery(
        "select * exclude (value, pulsar), * replace (id + 1 as id) from messages", "sql"
    )
    with pytest.raises(SetupError, match="sql has two columns id"):
        others.columns(MESSAGES)


def test_times_are_utc_and_nested_values_can_be_reached() -> None:
    text = (
        "select date(pulsar.at_time) as day, pulsar.properties['p'] as p, decode(value)->>'$.n' as "
        "n, tags[1] as tag from messages"
    )
    assert answer(text, 1) == ([{"day": date(2026, 1, 2), "p": "q", "n": "1", "tag": "x"}], [0])


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("select id from other", "must read from messages alone"),
        ("select id from main.messages", "must read from messages alone"),
        ("select a.id from messages a, messages b", "must read from messages alone"),
        ("select id from (select * from messages)", "must read from messages alone"),
        ("select id from read_text('/etc/passwd')", "must read from messages alone"),
        ("select count(*) as n from messages", "the function count_star"),
        ("select id from messages group by id", "group by"),
        ("select distinct id from messages", "distinct"),
        ("select id from messages order by id", "order"),
        ("select id from messages limit 1", "limit"),
        ("select id from messages using sample 1", "a sample"),
        ("with x as (select 1) select id from messages", "with"),
        ("select row_number() over () as n from messages", "a window function"),
        ("select (select 1) as n from messages", "a query in a query"),
        ("select unnest(tags) as tag from messages", "the function unnest"),
        ("select id from messages where random() < 0.5", "the function random"),
        ("select now() as n from messages", "the function now"),
        ("select age(pulsar.at_time) as a from messages", "the function age"),
        ("select ago(interval 1 day) as a from messages", "the function ago"),
        ("select getvariable('x') as a from messages", "the function getvariable"),
        ("select id from messages group by all", "group by"),
        ("select #1 as a from messages", "a column by its number"),
        ("select __ledgerlake_row as a from messages", "has __ledgerlake_row"),
        (
            "select list_aggregate(tags, 'reservoir_quantile', 0.5) as a from messages",
            "reservoir_quantile",
        ),
        (
            "select json_contains(decode(value), '1') as a from messages",
            "the function json_contains",
        ),
        (
            "select damerau_levenshtein(name, name) as a from messages",
            "the function damerau_levenshtein",
        ),
        ("select decode(value)::json::variant::varchar as a from messages", "the type variant"),
        ("select try_cast(tags as variant[]) as a from messages", "the type variant"),
        ("select " + " || ".join(["name"] * 900) + " as a from messages", "nested too deeply"),
        ("select 1 as a union select 2", "must be one query"),
        ("select 1 as a from messages; select 2", "must be one query"),
        ("drop table messages", "cannot be read"),
        ("select id,\n  name frm\nmessages", "line 3"),
    ],
)
def test_what_does_not_depend_on_one_row_alone_is_refused(text: str, what: str) -> None:
    with pytest.raises(UsageError, match=f"(?s)^sql .*{what}"):
        RowQuery(text, "sql")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("select id,\n  nmae\nfrom messages", '"nmae" not found.*"name".*line 2'),
        (
            "select id + name as n from messages where id > tags",
            "does not fit the messages: Binder Error",
        ),
        (
            "select id + 1 from messages",
            r"a column without a name that a table can have; write \(id \+ 1\) as NAME",
        ),
        (
            "select interval 1 day as i from messages",
            "the column i of sql is INTERVAL, and no table has the values of INTERVAL as they are; "
            "cast them by ::varchar",
        ),
        (
            "select cast(id as uinteger) as u from messages",
            "the column u of sql is UINTEGER, and no table has .*; cast them by ::bigint",
        ),
    ],
)
def test_a_query_that_does_not_fit_names_column_and_line(text: str, what: str) -> None:
    with pytest.raises(SetupError, match=f"(?s){what}"):
        RowQuery(text, "sql").columns(MESSAGES)


@pytest.mark.parametrize(
    "rest",
    [
        "cents // 3 as third from messages",
        "upper(CENTS::varchar) as text from messages",
        "case when id > 1 then cents end as some from messages",
        "list_transform([1], lambda x: x + cents) as more from messages",
        "id as other from messages where cents > 100",
        "* replace (cents as id) from messages",
    ],
)
def test_a_query_that_uses_a_column_of_its_own_is_refused(rest: str) -> None:
    query = RowQuery(f"select id * 100 as cents, {rest}", "sql")
    with pytest.raises(SetupError, match=r"(?i)sql uses a column that it makes itself.*cents"):
        query.columns(MESSAGES)
    # A column of the messages is meant, as it is without the alias.
    named = MESSAGES.append(pa.field("cents", pa.int64()))
    if "*" not in rest:
        assert query.columns(named).names[0] == "cents"


def test_an_alias_may_be_the_name_of_a_column_or_of_a_parameter() -> None:
    text = (
        "select upper(name) as name, id as twice, list_transform(tags, lambda twice: twice || 'y') as "
        "tags from messages m where name <> 'n2' and m.id > 0"
    )
    assert answer(text, 1, 2)[0] == [{"name": "N1", "twice": 1, "tags": ["xy"]}]


def test_messages_of_which_a_value_cannot_be_computed_have_no_row_and_a_reason() -> None:
    query = RowQuery(
        "select id, cast(decode(value)->>'$.n' as int) / nullif(id, 2) as n from messages where id "
        "<> 4",
        "sql",
    )
    rows = batch(1, 2, 3, 4, 5).to_pylist()
    rows[2]["value"], rows[3]["value"] = b'{"n": "three"}', b'{"n": "four"}'
    found = query.of(pa.RecordBatch.from_pylist(rows, schema=MESSAGES))
    # The fourth message is left out by the condition.
    assert found.rows.tolist() == [0, 1, 4]
    assert found.values.to_pylist() == [
        {"id": 1, "n": 1.0},
        {"id": 2, "n": None},
        {"id": 5, "n": 1.0},
    ]
    assert list(found.bad) == [2]
    assert "Could not convert string 'three'" in found.bad[2]


@pytest.mark.parametrize(
    "value",
    [
        "cast(name as int)",
        "[cast(name as int)]",
        "{'a': {'b': [id, cast(name as int)]}}",
        "map(['a'], [cast(name as int)])",
        "coalesce([cast(name as int)], [1])",
        "list_transform([name], lambda x: cast(x as int))",
    ],
)
def test_a_batch_in_which_each_message_fails_is_not_halved_down_to_each_of_them(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = RowQuery(f"select {value} as n from messages", "sql")
    runs: list[str] = []
    run = row_query._run

    def counted(text: str, rows: pa.RecordBatch) -> pa.Table:
        runs.append(text)
        return run(text, rows)

    monkeypatch.setattr(row_query, "_run", counted)
    found = query.of(batch(*([1] * 2000)))
    assert len(found.bad) == 2000
    assert len(runs) < 50


GUARDED = pa.schema([("kind", pa.string()), ("v", pa.string()), ("n", pa.int64())])
_TESTS = st.sampled_from(
    [
        *("kind = 'n'", "kind <> 'n'", "kind is null", "n > 5", "v like '%a%'", "v is not null"),
        *("v::int > 5", "cast(v as int) % 2 = 0", "n * 9223372036854775807 > 0", "v::date > kind::date"),
        *("try_cast(v as int) > 1", "length(v) = 1", "kind in ('n', 's')", "kind::int in (1, n)"),
    ]
)  # fmt: skip
_CONDITIONS = st.recursive(
    _TESTS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["and", "or"]), inner).map(
            "({0[0]} {0[1]} {0[2]})".format
        ),
        st.tuples(inner, inner, inner).map("(case when {0[0]} then {0[1]} else {0[2]} end)".format),
        st.tuples(inner, inner).map("coalesce({0[0]}, {0[1]})".format),
        st.tuples(inner, inner).map("if({0[0]}, {0[1]}, false)".format),
        inner.map("(not {})".format),
    ),
    max_leaves=6,
)
_TEXTS = st.sampled_from([None, "n", "s", "7", "3", "hello", "a", "2026-01-01", "99999999999"])
_ROWS = st.lists(
    st.fixed_dictionaries(
        {"kind": _TEXTS, "v": _TEXTS, "n": st.sampled_from([None, 0, 1, 9, 2**62])}
    ),
    min_size=2,
    max_size=40,
)


def judged(query: RowQuery, rows: list[dict[str, Any]]) -> list[Any]:
    """Return what each row becomes: a value, None if the query leaves it out, or bad."""
    found = query.of(pa.RecordBatch.from_pylist(rows, schema=GUARDED))
    values = dict(zip(found.rows.tolist(), found.values.to_pylist(), strict=True))
    return ["bad" if row in found.bad else values.get(row) for row in range(len(rows))]


@settings(max_examples=60, deadline=None)
@given(_CONDITIONS, _CONDITIONS, _ROWS)
def test_a_row_becomes_the_same_alone_and_in_any_batch(
    condition: str, value: str, rows: list[dict[str, Any]]
) -> None:
    text = f"select n, {value} as holds from messages where {condition}"
    query = RowQuery(text, "sql")
    try:
        query.columns(GUARDED)
    except SetupError:
        # It fails for a message of nulls.
        return
    alone = [judged(query, [row])[0] for row in rows]
    assert judged(query, rows) == alone
    assert judged(query, rows[::-1]) == alone[::-1]


@pytest.mark.parametrize("guarded", ["kind = 'n' and v::int > 5", "kind <> 'n' or v::int > 5"])
def test_a_failing_row_does_not_touch_a_row_that_a_guard_keeps_from_failing(guarded: str) -> None:
    rows = [{"kind": "n", "v": "x", "n": 1}] + [{"kind": "s", "v": "x", "n": 1}] * 3000
    found = Condition(guarded, "where").of(pa.RecordBatch.from_pylist(rows, schema=GUARDED))
    assert list(found.bad) == [0]
    assert len(found.rows) == (3000 if "or" in guarded else 0)


def test_a_row_that_succeeds_alone_is_not_bad_whatever_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query = RowQuery("select cast(v as int) as m from messages", "sql")
    rows = [{"kind": "n", "v": text, "n": 1} for text in ("1", "x", "2")]
    every = f"select {row_query._ROW} from {row_query._NUMBERS}"
    monkeypatch.setattr(query, "_failing", every)
    assert judged(query, rows) == [{"m": 1}, "bad", {"m": 2}]


# Each value ends within what DuckDB quotes of it, or is no text.
_BROKEN = [
    *('{"n": "' + "x" * shift + letter * 50 for letter in "é東😀" for shift in range(4)),
    "é",
    "\\xé",
    "0é",
]


@pytest.mark.parametrize(
    "broken", [*(text.encode() for text in _BROKEN), b"\xff", b'{"n": "\xe6\x9d', b"\0\x80"]
)
@pytest.mark.parametrize(
    "text",
    [
        "select decode(value)->>'$.n' as n from messages",
        "select id, unhex(decode(value))::varchar as n from messages",
        "select decode(value)::bit::varchar as n from messages",
        "select decode(value)::date as n from messages",
        "select id from messages where decode(value)->>'$.n' = '1'",
    ],
)
def test_a_broken_value_in_any_encoding_does_not_touch_the_messages_beside_it(
    text: str, broken: bytes
) -> None:
    query = RowQuery(text, "sql")
    for good in (b'{"n": 1}', b"01", b"2026-01-01"):
        rows = batch(1, 2, 3).to_pylist()
        for row, value in zip(rows, (good, broken, good), strict=True):
            row["value"] = value
        alone = query.of(pa.RecordBatch.from_pylist(rows[:1], schema=MESSAGES))
        found = query.of(pa.RecordBatch.from_pylist(rows, schema=MESSAGES))
        assert {0, 2} & set(found.bad) == ({0, 2} if alone.bad else set())
        assert {0, 2} & set(found.rows.tolist()) == ({0, 2} if len(alone.rows) else set())


def test_the_reason_of_a_broken_value_is_what_duckdb_says_of_it() -> None:
    query = RowQuery("select decode(value)->>'$.n' as n from messages", "sql")
    rows = batch(1, 2).to_pylist()
    rows[1]["value"] = ('{"n": "' + "東" * 50).encode()
    found = query.of(pa.RecordBatch.from_pylist(rows, schema=MESSAGES))
    assert found.rows.tolist() == [0]
    assert "Malformed JSON at byte 157" in found.bad[1]


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_what_says_nothing_of_a_message_rejects_none(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = RowQuery("select id from messages", "sql")
    query.columns(MESSAGES)

    def fail(text: str, rows: pa.RecordBatch) -> pa.Table:
        raise error

    monkeypatch.setattr(row_query, "_run", fail)
    with pytest.raises(error):
        query.of(batch(1, 2))


def test_a_condition_gives_the_messages_for_which_it_holds() -> None:
    where = Condition("id > 1 -- and no more", "where")
    assert where.of(batch(1, 2, 3)).rows.tolist() == [1, 2]
    assert Condition("id > null", "where").of(batch(1)).rows.tolist() == []
    for text in ("id > 1) union (select 1", "true; drop table x", "id >"):
        with pytest.raises(UsageError):
            Condition(text, "where")
    with pytest.raises(SetupError, match="where is a value of string and no condition"):
        Condition("name", "where").columns(MESSAGES)


def test_a_field_may_be_called_as_the_row_number_or_as_a_function_of_the_session() -> None:
    fields = pa.schema([("__ledgerlake_row", pa.int64()), ("user", pa.string())])
    rows = pa.RecordBatch.from_pylist(
        [{"__ledgerlake_row": 0, "user": name} for name in "abc"], schema=fields
    )
    found = RowQuery("select * from messages where user <> 'b'", "sql").of(rows)
    assert found.rows.tolist() == [0, 2]
    assert found.values.to_pylist() == [{"__ledgerlake_row": 0, "user": name} for name in "ac"]
    for name in ("user", "current_timestamp", "current_date"):
        with pytest.raises(SetupError, match=f"sql has {name}"):
            RowQuery(f"select {name} as u from messages", "sql").columns(MESSAGES)


def test_a_whole_row_has_nothing_of_ours() -> None:
    found = answer("select to_json(messages) as row from messages", 1)[0]
    assert list(json.loads(found[0]["row"])) == MESSAGES.names


NAMING_MESSAGES = [
    "select to_json(messages) as row from messages",
    "select messages.name, MESSAGES.pulsar.key as k from messages where messages.id > 0",
    "select to_json(pulsar) as row, pulsar.name from messages as pulsar where pulsar.id > 0",
    "select to_json(m) as row, pulsar.key as k, M.id from messages m where m is not null",
    "select m.* exclude (m.tags, value) from messages m where list_contains(m.tags, 'x')",
    "select * replace (name || m.id as name) from messages m where hash(m) is not null",
    "select list_transform(tags, lambda messages: messages || id) as tags from messages",
]


@pytest.mark.parametrize("kind", [pa.int64(), pa.struct([("key", pa.int64()), ("id", pa.int64())])])
@pytest.mark.parametrize("text", NAMING_MESSAGES)
def test_no_field_that_a_schema_gets_changes_what_a_query_gives(
    text: str, kind: pa.DataType
) -> None:
    before, query = answer(text, 1, 2)[0], RowQuery(text, "sql")
    names = {name.lower() for name in re.findall(r"\w+", text)} | {"main", "the"}
    for name in sorted(names - {*MESSAGES.names, "row", "k"}):
        more = batch(1, 2).append_column(pa.field(name, kind), pa.nulls(2, kind))
        found = query.of(more).values.to_pylist()
        assert [_without(name, row) for row in found] == before, name


def _without(field: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row without a field, which the whole row and a star have."""
    return {
        name: value.replace(f',"{field}":null', "") if name == "row" else value
        for name, value in row.items()
        if name != field
    }


def test_a_column_of_the_name_of_the_messages_is_behind_that_name() -> None:
    rows = batch(1).append_column("messages", pa.array([7]))
    query = RowQuery("select messages.messages as n, to_json(messages) as row from messages", "sql")
    (found,) = query.of(rows).values.to_pylist()
    assert found["n"] == json.loads(found["row"])["messages"] == 7


def test_what_fails_for_any_message_is_found_without_one() -> None:
    with pytest.raises(
        SetupError, match=r"fails for any message: .*Could not convert string 'abc'"
    ):
        RowQuery("select cast('abc' as int) as n from messages", "sql").columns(MESSAGES)


def test_a_value_of_any_depth_does_not_end_the_process() -> None:
    # The process of the tests would end too.
    command = [sys.executable, "-m", "tests.decode.deep_values"]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    tried = ended.stdout.splitlines()
    assert ended.returncode == 0, f"{tried[-1]} ended the process"
    assert len(tried) > 100


# Each type of DuckDB with its extreme values, and whether a table has them.
TEXTS = ["", "a\0b", "\U0010ffff" * 300, "\u00df"]
DATES = ["5877642-06-25 (BC)", "0001-01-01", "5881580-07-10", "infinity"]
TIMES_OF_DAY = ["00:00:00", "23:59:59.999999", "24:00:00"]
MOMENTS = [
    "290309-12-22 (BC) 00:00:00",
    "1970-01-01 00:00:00.000001",
    "294247-01-10 04:00:54.775806",
    "-infinity",
]
RECENT = ["1677-09-22 00:00:00", "2262-04-11 23:47:16.854775806"]
REALS = ["nan", "-inf", "-0.0", "1e-45"]
TYPES: dict[str, tuple[bool, list[str]]] = {
    "BOOLEAN": (True, ["true", "false"]),
    "TINYINT": (True, ["-128", "127"]),
    "SMALLINT": (True, ["-32768", "32767"]),
    "INTEGER": (True, [str(-(2**31)), str(2**31 - 1)]),
    "BIGINT": (True, [str(-(2**63)), str(2**63 - 1)]),
    "HUGEINT": (False, [str(-(2**127)), str(2**127 - 1), str(10**38)]),
    "UTINYINT": (False, ["0", "255"]),
    "USMALLINT": (False, ["0", "65535"]),
    "UINTEGER": (False, ["0", str(2**32 - 1)]),
    "UBIGINT": (False, ["0", str(2**64 - 1)]),
    "UHUGEINT": (False, ["0", str(2**128 - 1), str(10**38)]),
    "BIGNUM": (False, ["0", str(10**60)]),
    "FLOAT": (True, [*REALS, "3.4e38"]),
    "DOUBLE": (True, [*REALS, "1.7976931348623157e308", "5e-324"]),
    "DECIMAL(38, 0)": (True, ["9" * 38, "-" + "9" * 38]),
    "DECIMAL(38, 38)": (True, ["0." + "9" * 38, "-0." + "0" * 37 + "1"]),
    "DECIMAL(4, 1)": (True, ["999.9", "-999.9"]),
    "VARCHAR": (True, TEXTS),
    "JSON": (True, ['{"a":1.0}', "null"]),
    "BLOB": (True, ["", "\\xFF\\x00"]),
    "BIT": (False, ["0", "101", "1" * 70]),
    "UUID": (
        True,
        ["ffffffff-ffff-ffff-ffff-ffffffffffff", "00000000-0000-0000-0000-000000000000"],
    ),
    "DATE": (True, DATES),
    "TIME": (False, TIMES_OF_DAY),
    "TIME_NS": (False, TIMES_OF_DAY),
    "TIME WITH TIME ZONE": (False, ["00:00:00+15:59", "23:59:59.999999-15:59"]),
    "TIMESTAMP": (True, MOMENTS),
    "TIMESTAMP WITH TIME ZONE": (True, MOMENTS),
    "TIMESTAMP_S": (False, RECENT),
    "TIMESTAMP_MS": (False, RECENT),
    "TIMESTAMP_NS": (False, RECENT),
    "TIMESTAMPTZ_NS": (False, RECENT),
    "INTERVAL": (False, ["1 month 1 day 00:00:00.000001"]),
    "ENUM('a', 'b')": (False, ["a", "b"]),
    "UNION(n INTEGER, t VARCHAR)": (False, ["1", "a"]),
    "GEOMETRY": (False, ["POINT (1 1)"]),
    "STRUCT(a DATE, b TIMESTAMP)": (True, ["{'a': 0001-01-01, 'b': NULL}"]),
    "STRUCT(a UHUGEINT)": (False, [f"{{'a': {10**38}}}"]),
    "MAP(VARCHAR, DECIMAL(38, 0))": (True, [f"{{a={'9' * 38}}}"]),
    "MAP(VARCHAR, BIT)": (False, ["{a=101}"]),
    "MAP(UHUGEINT, VARCHAR)": (False, [f"{{{10**38}=a}}"]),
    "BIGINT[]": (True, [f"[{2**63 - 1}, NULL]", "[]"]),
    "HUGEINT[][]": (False, [f"[[{10**38}]]"]),
    "INTEGER[2]": (False, ["[1, 2]"]),
}

# What no cast makes of a text: ``row`` makes tuples, ``variant`` is refused, types are no values of
# rows.
NOT_CAST = {
    "NULL",
    "TUPLE",
    "VARIANT",
    "TYPE",
    "LIST",
    "ARRAY",
    "STRUCT",
    "MAP",
    "UNION",
    "ENUM",
    "DECIMAL",
}


def test_all_types_of_duckdb_are_tried() -> None:
    found = duckdb.execute(
        "select distinct logical_type from duckdb_types() where database_name = 'system'"
    ).fetchall()
    assert {name for (name,) in found} <= {*TYPES, *NOT_CAST}


def named(texts: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [{"name": text} for text in texts], schema=pa.schema([("name", pa.string())])
    )


@pytest.mark.parametrize("kind", TYPES)
def test_a_value_of_any_type_is_the_same_in_the_table_or_its_query_is_refused(kind: str) -> None:
    is_had, texts = TYPES[kind]
    # Within another value, DuckDB writes a text of JSON otherwise than other texts.
    shown = "JSON::VARCHAR" if kind == "JSON" else kind
    with duckdb.connect(config={"threads": 1}) as connection:
        connection.execute("set TimeZone = 'UTC'")
        connection.register("messages", pa.Table.from_batches([named(texts)]))
        for form in ("name::{}", "[name::{}]", "{{'a': name::{}}}", "map {{'a': name::{}}}"):
            query = RowQuery(f"select {form.format(kind)} as n from messages", "sql")
            if not is_had:
                with pytest.raises(
                    SetupError, match=r"the column n of sql is .*no table has .* cast them by ::"
                ):
                    query.of(named(texts))
                continue
            found = query.of(named(texts))
            assert not found.bad
            connection.register("answer", pa.table({"n": found.values.field("n")}))
            expected = connection.execute(
                f"select ({form.format(shown)})::varchar from messages"
            ).fetchall()
            assert connection.execute("select n::varchar from answer").fetchall() == expected


@pytest.mark.parametrize(
    "kind", [kind for kind, (is_had, _) in TYPES.items() if not is_had and kind[-1] not in ")]"]
)
def test_the_cast_that_a_refusal_names_gives_the_same_value_or_a_reject(kind: str) -> None:
    texts = TYPES[kind][1]
    with pytest.raises(SetupError) as refused:
        RowQuery(f"select name::{kind} as n from messages", "sql").of(named(texts))
    cast = re.search(r"cast them by (::\w+(\(38, 0\))?)", refused.value.message)
    assert cast is not None
    found = RowQuery(f"select name::{kind}{cast[1]} as n from messages", "sql").of(named(texts))
    assert sorted([*found.rows.tolist(), *found.bad]) == list(range(len(texts)))
    for row, value in zip(found.rows.tolist(), found.values.field("n").to_pylist(), strict=True):
        ((expected,),) = duckdb.execute(f"select ?::{kind}::varchar", [texts[row]]).fetchall()
        assert str(value) in (expected, f"{expected}000")


def test_a_value_in_which_duckdb_fails_by_itself_is_the_only_one_that_is_bad() -> None:
    query = RowQuery("select repeat(value, n)::varchar as y from messages", "sql")
    columns = pa.schema([("value", pa.binary()), ("n", pa.int64())])
    # Four characters for each byte: more than a text of DuckDB may have.
    values = [(b"a", 1), (b"\xff" * 2**20, 2**10 + 1), (b"b", 2)]
    rows = [{"value": value, "n": count} for value, count in values]
    for _ in range(2):
        answer = query.of(pa.RecordBatch.from_pylist(rows, columns))
        assert answer.values.to_pylist() == [{"y": "a"}, {"y": "bb"}]
        assert (answer.rows.tolist(), [*answer.bad]) == ([0, 2], [1])
