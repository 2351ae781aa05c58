"""The tables of a configuration: their options, their names by topic, and the refused ones."""

from __future__ import annotations

from typing import Any

import pytest

from ledgerlake.api import parse_config
from ledgerlake.errors import UsageError
from ledgerlake.options.config import Config, DeltaConfig, TableConfig
from ledgerlake.options.declared import declared
from ledgerlake.options.table_options import TableOptions, tables_of_topic
from ledgerlake.stored.places import Place


def config(*tables: Any, **delta: Any) -> Config:
    return parse_config(
        {
            "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
            "stream": {"name": "s"},
            "delta": delta or {"path": "lake/rest"},
            "tables": list(tables),
        }
    )


def test_a_placeholder_is_a_part_of_the_topics_name_in_which_each_character_is_one_that_stores_take() -> (
    None
):
    table = TableOptions("t", "[[tables]]", Place("s3://b/{tenant}/{namespace}/{topic}"))
    names = [
        "a",
        "a b",
        "a=b",
        "ü",
        "..",
        "a%2Fb",
        "a+b",
        "-",
        "_delta_log",
        "o" * 300,
        "o" * 301,
        "ö" * 120,
    ]
    topics = [f"persistent://public/default/{name}" for name in names]
    places = [named.place.uri for topic in topics for named in tables_of_topic([table], topic)]
    assert places[0] == "s3://b/public/default/a"
    assert places[2] == "s3://b/public/default/a=3Db"
    assert places[3] == "s3://b/public/default/=C3=BC"
    assert places[4] == "s3://b/public/default/=2E."
    assert places[8] == "s3://b/public/default/=5Fdelta_log"
    assert len(set(places)) == len(places)
    assert max(len(place.rpartition("/")[2]) for place in places) < 255
    assert all(table.matches(Place(place)) for place in places)
    assert not table.matches(Place("s3://b/public/default/a/b"))


def test_options_travel_to_tasks_as_they_are() -> None:
    (table, rest) = config(
        {
            "path": "lake/a",
            "where": "key = 'a'",
            "partition_by": ["topic", "date(broker_timestamp)"],
        }
    ).table_options
    assert TableOptions.from_fields(table.fields()) == table
    assert table.partition_columns == ["topic", "broker_timestamp_date"]
    assert table.computed_names == ["broker_timestamp_date"]
    assert (rest.name, rest.is_default) == ("messages", True)


def test_the_main_table_is_that_of_delta_or_the_first_with_a_fixed_path() -> None:
    assert config({"path": "/lake/{topic}"}).main_table == "messages"
    tables = ({"path": "/lake/{topic}"}, {"path": "/lake/b"}, {"path": "/lake/c"})
    assert config(*tables, rejects_path="/lake/r").main_table == "table:/lake/b"


@pytest.mark.parametrize(
    ("tables", "delta", "what"),
    [
        (
            [{"path": "x", "wher": "true"}],
            {},
            r"\[\[tables\]\] has no key 'wher'; did you mean 'where'\? \(table 1\)",
        ),
        ([{"where": "true"}], {}, r"\[\[tables\]\] path is missing \(table 1\)"),
        ([{"path": "x"}, {"path": "x"}], {}, "there twice"),
        ([{"path": "x/{topic}", "where": "key = 'a'"}, {"path": "x/{topic}"}], {}, "there twice"),
        ([{"path": "x", "where": "late"}], {}, "reads late or delivered_at"),
        ([{"path": "x", "json_fields": {"a": "int"}}], {}, 'needs shape = "record"'),
        ([{"path": "x", "shape": "record", "json_fields": {}}], {}, "must be a table of fields"),
        (
            [{"path": "x", "shape": "record", "json_fields": "a int"}],
            {},
            "must be a table of fields",
        ),
        (
            [{"path": "x", "shape": "record", "json_fields": {"a": "number"}}],
            {},
            "json_fields a has the type 'number'",
        ),
        (
            [{"path": "x", "shape": "record", "json_fields": {"a": {"b": []}}}],
            {},
            r"json_fields a b has the type \[\]",
        ),
        ([{"path": "x", "iceberg_table": "orders"}], {}, "write a namespace and a name"),
        (
            [{"path": "x/{topic}", "iceberg_table": "a.b"}, {"path": "y"}],
            {},
            "not for a path with placeholders",
        ),
        ([{"path": "x", "iceberg_table": "a.b", "mode": "latest"}], {}, "nor for mode"),
        (
            [{"path": "x", "iceberg_table": "a.b"}, {"path": "y", "iceberg_table": "a.b"}],
            {},
            "two tables have",
        ),
        (
            [{"path": "x", "cluster_by": ["key"], "partition_by": ["topic"]}],
            {},
            "cluster_by is not for partition_by",
        ),
        ([{"path": "x", "cluster_by": ["key"], "mode": "latest"}], {}, "nor for mode"),
        ([{"path": "x", "cluster_by": ["key", "key"]}], {}, "each once"),
        ([{"path": "x#y", "iceberg_table": "a.b"}], {}, "needs a path without # and"),
        ([{"path": "x", "partition_by": ["late"]}], {}, "known only when a row is written"),
        (
            [{"path": "x", "partition_by": ["1 as one, 2 as two"]}],
            {},
            "partition_by cannot be read",
        ),
        ([{"path": "lake/rest/x"}], {}, r"lies in the folder of \[delta\] path"),
        (
            [{"path": "lake/{topik}"}],
            {},
            r"placeholder \{topik\}; known are \{tenant\}, \{namespace\}, \{topic\}",
        ),
        ([{"path": "lake/{topic}"}], {"rejects_path": "r"}, "a path without placeholders"),
        (
            [],
            {"path": "lake/{topic}"},
            r"\[delta\] path is '.*/lake/\{topic\}', and only .* takes a placeholder",
        ),
        (
            [{"path": "x"}],
            {"path": "y", "rejects_path": "{tenant}/r"},
            r"\[delta\] rejects_path is '.*/\{tenant\}/r'",
        ),
        ([{"path": "x"}], {"table": "shop.orders"}, "table is not for a pipeline with"),
        ([{"path": "x"}], {"shape": "record"}, "needs rejects_path, or path"),
        ([{"path": "x", "sql": "select id from messages"}], {}, 'need shape = "record"'),
        (
            [
                {
                    "path": "x",
                    "shape": "record",
                    "sql": "select 1 as a from messages",
                    "function": "a:b",
                }
            ],
            {},
            "choose one",
        ),
        (
            [{"path": "/x", "where": "now() > event_time"}],
            {},
            r"\[\[tables\]\] /x where has the function now",
        ),
        ([{"path": "x", "partition_by": ["a + 1"]}], {}, "needs a name; write a [+] 1 as NAME"),
        ([{"path": "x", "partition_by": ["topic", "Topic"]}], {}, "one column twice"),
        ([{"path": "x", "topics_pattern": "("}], {}, "no regular expression"),
    ],
)
def test_what_cannot_be_is_refused_with_the_table(
    tables: list[Any], delta: dict[str, Any], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        config(*tables, **delta)


def test_one_pair_of_brackets_is_no_list_of_tables() -> None:
    with pytest.raises(UsageError, match="two brackets"):
        parse_config(
            {
                "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
                "stream": {"name": "s"},
                "delta": {"path": "p"},
                "tables": {"path": "x"},
            }
        )


@pytest.mark.parametrize(
    ("settings", "what"),
    [({"uri": "sqlite:///c.db"}, "lack the type"), ({"type": "sql", "name": "x"}, "take no name")],
)
def test_settings_of_an_iceberg_catalog_are_checked(settings: dict[str, str], what: str) -> None:
    data = {
        "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
        "stream": {"name": "s"},
        "delta": {"path": "lake", "iceberg_table": "a.b"},
        "iceberg": {"settings": settings},
    }
    with pytest.raises(UsageError, match=what):
        parse_config(data)


SAID: dict[str, Any] = {
    "shape": "record",
    "json_fields": {"a": "int"},
    "sql": "select 1 as x from messages",
    "function": "a:b",
    "partition_by": ["topic"],
    "cluster_by": ["topic"],
    "mode": "latest",
    "iceberg_table": "a.b",
}


@pytest.mark.parametrize("key", sorted({str(option.key) for _, option in declared(TableConfig)}))
def test_an_option_of_a_table_is_refused_beside_the_tables_if_delta_has_none(key: str) -> None:
    if key not in {option.key for _, option in declared(DeltaConfig)} - {"path"}:
        # Only one of the tables has it.
        assert key not in SAID
        return
    with pytest.raises(
        UsageError, match=rf"\[delta\] {key} is for the table at \[delta\] path, which is missing"
    ):
        config({"path": "a"}, rejects_path="r", **{key: SAID[key]})
