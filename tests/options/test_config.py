"""The configuration file: everything wrong is one sentence that names the key."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.assembly.rules import Limits
from ledgerlake.errors import UsageError
from ledgerlake.options.config import SECTION_CLASSES, load_config, parse_config
from ledgerlake.options.declared import declared
from ledgerlake.options.kinds import CATALOG_SETTINGS, SETTINGS
from ledgerlake.options.spark_options import with_command_line
from ledgerlake.schedules.repetition import RepetitionLimit, RepetitionRate
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path


WITH_SECRETS = {
    str(option.section)
    for kind in SECTION_CLASSES
    for field, option in declared(kind)
    if not field.repr
}


def data(**sections: dict[str, Any]) -> dict[str, Any]:
    configuration: dict[str, Any] = {
        "source": {"service_url": "pulsar://h:1", "topics": ["orders"]},
        "stream": {"name": "orders"},
        "delta": {"path": "lake/orders"},
    }
    for name, changes in sections.items():
        configuration[name] = {**configuration.get(name, {}), **changes}
    return configuration


def test_defaults_follow_the_name_and_the_path() -> None:
    config = parse_config(data(), "/srv")
    assert config.stream.checkpoint == "/srv/checkpoints/orders"
    assert config.delta.rejects_path == "/srv/lake/orders_rejects"
    assert config.subscription == "ledgerlake-orders"
    assert config.source.topics.names == ("persistent://public/default/orders",)


def test_tables_may_be_named_by_a_catalog_alone() -> None:
    config = parse_config(data(delta={"path": "", "table": "shop.orders"}))
    assert config.delta.rejects_table == "shop.orders_rejects"
    located = config.with_table_paths("/lake/orders", "/lake/rejects")
    assert (located.messages_place, located.rejects_place) == (
        Place("/lake/orders"),
        Place("/lake/rejects"),
    )
    with pytest.raises(UsageError, match="the same folder"):
        config.with_table_paths("/lake/orders", "/lake/orders")


def test_variables_are_read_with_the_configuration_and_files_when_they_are_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAKE_KEY", "the-id")
    storage = {
        "access_key_id": "env:LAKE_KEY",
        "secret_access_key": "file:/run/lake",
        "session_token": "env:NOT_SET",
    }
    auth = {"method": "token", "token": "env:LAKE_KEY"}
    config = parse_config(data(delta={"path": "s3://lake/orders"}, storage=storage, auth=auth))
    settings = config.storage
    assert (settings.access_key_id, settings.secret_access_key) == ("the-id", "file:/run/lake")
    assert settings.session_token == "env:NOT_SET"
    assert config.source.auth_params == "secret:the-id"
    basic = {"method": "basic", "user": "u", "password": "env:LAKE_KEY"}
    assert parse_config(data(auth=basic)).source.auth_params == "secret:u:the-id"


def test_certificates_without_tls_are_refused_and_not_ignored() -> None:
    with pytest.raises(UsageError, match=r"not pulsar\+ssl://, so nothing would be encrypted"):
        parse_config(data(tls={"ca_file": "ca.pem"}))


def test_settings_of_spark_which_may_be_secret_are_in_no_repr() -> None:
    config = parse_config(data(spark={"settings": {"spark.hadoop.fs.s3a.secret.key": "hidden"}}))
    assert "hidden" not in repr(config)


def test_limits_of_open_messages_are_read_in_their_units() -> None:
    limits = parse_config(data(chunks={"max_pending": 7, "expire_after": "90 s"})).chunks.limits
    assert (limits.max_pending, limits.expire_after_ms) == (7, 90_000)
    assert parse_config(data()).chunks.limits == Limits()


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"source": {"topic": ["x"]}}, "[source] has no key 'topic'; did you mean 'topics'?"),
        (
            {"chunks": {"max_pendng": 1}},
            "[chunks] has no key 'max_pendng'; did you mean 'max_pending'?",
        ),
        (
            {"stream": {"max_rows_per_trigger": 1}},
            "[stream] has no key 'max_rows_per_trigger'; it belongs to [source]",
        ),
        ({"source": {"name": "orders"}}, "[source] has no key 'name'; it belongs to [stream]"),
        ({"chunks": {"max_pending": 0}}, "[chunks] max_pending must be a whole number above 0"),
        ({"chunks": {"expire_after": "soon"}}, "[chunks] expire_after 'soon' is not a duration"),
        ({"chunks": {"max_message_bytes": 2**31}}, "[chunks] max_message_bytes is more than"),
        ({"sorce": {}}, "there is no section [sorce]; did you mean 'source'?"),
        ({"source": {"topics": "x"}}, "[source] topics must be a list of texts"),
        ({"source": {"topics": []}}, "[source] needs topics or topics_pattern, and not both"),
        ({"source": {"starting": "soon"}}, "[source] starting: 'soon' is not a message id"),
        (
            {"source": {"max_rows_per_trigger": 0}},
            "[source] max_rows_per_trigger must be a whole number above 0",
        ),
        (
            {"source": {"require_broker_metadata": "yes"}},
            "[source] require_broker_metadata must be true or false",
        ),
        ({"source": {"service_url": "localhost"}}, "write pulsar://host:6650"),
        ({"stream": {"name": "a b"}}, "[stream] name 'a b' may hold"),
        ({"stream": {"trigger": "often"}}, "[stream] trigger 'often' is not a duration"),
        ({"delta": {"rejects_path": "lake/orders/"}}, "are the same folder"),
        ({"delta": {"path": 5}}, "[delta] path must be a text"),
        (
            {"delta": {"path": "$HOME/lake"}},
            "[delta] path cannot be '$HOME/lake'; variables are not replaced here",
        ),
        ({"delta": {"path": ""}}, "[delta] needs path, or table"),
        (
            {"delta": {"path": "", "table": "t", "rejects_path": "r"}},
            "[delta] rejects_path needs path",
        ),
        ({"delta": {"rejects_table": "r"}}, "[delta] rejects_table needs table"),
        (
            {"delta": {"table": "shop.orders`"}},
            "[delta] table 'shop.orders`' is not TABLE, SCHEMA.TABLE or CATALOG",
        ),
        (
            {"delta": {"writer": "spark", "partition_by": ["topic"]}},
            'cluster_by and partition_by are not for writer = "spark"',
        ),
        (
            {"source": {"message_payload_processor": "m:f"}, "delay": {"payloads": "reread"}},
            '[delay] payloads = "reread" is not for [source] message_payload_processor',
        ),
        (
            {"delta": {"path": "dbfs:/lake"}},
            "[delta] path cannot be 'dbfs:/lake': dbfs: is not supported",
        ),
        (
            {"delta": {"path": "s3://lake/a", "rejects_path": "s3a://lake/a/b"}},
            "lies in the folder of [delta] path",
        ),
        (
            {"delay": {"storage": "hdfs://h/delayed"}},
            "[delay] storage cannot be 'hdfs://h/delayed'",
        ),
        (
            {"stream": {"checkpoint": "gs://lake/c"}},
            "[stream] checkpoint cannot be 'gs://lake/c'; it has to be on a disk, on a volume or "
            "in S3",
        ),
        (
            {"storage": {"endpoint": "http://h"}},
            "[storage] has no key 'endpoint'; did you mean 'endpoint_url'?",
        ),
        ({"spark": {"mastr": "local"}}, "[spark] has no key 'mastr'; did you mean 'master'?"),
        ({"spark": {"settings": "a=b"}}, "[spark] settings must be a table"),
        (
            {"spark": {"settings": {"a": {"b": []}}}},
            "[spark] settings a.b must be a text, a number, true or false",
        ),
    ],
)
def test_what_is_wrong_is_named(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(data(**sections))
    assert expected in caught.value.message


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"delta": {"rejects_path": "lake/orders/rejects"}},
            "[delta] rejects_path lies in the folder of [delta] path",
        ),
        (
            {"delta": {"rejects_path": "lake"}},
            "[delta] path lies in the folder of [delta] rejects_path",
        ),
        (
            {"stream": {"checkpoint": "lake/orders/checkpoint"}},
            "[stream] checkpoint lies in the folder of [delta] path",
        ),
        (
            {"stream": {"checkpoint": "./lake//orders/"}},
            "[delta] path and [stream] checkpoint are the same folder",
        ),
        (
            {"stream": {"checkpoint": "lake"}},
            "[delta] path lies in the folder of [stream] checkpoint",
        ),
        (
            {"stream": {"checkpoint": "lake/orders/_delta_log/x"}},
            "[stream] checkpoint lies in the folder of",
        ),
        (
            {"delay": {"storage": "lake/orders/waiting"}},
            "[delay] storage lies in the folder of [delta] path",
        ),
        (
            {"delay": {"storage": "lake/orders_rejects"}},
            "[delta] rejects_path and [delay] storage are the same",
        ),
        (
            {
                "delta": {"path": "file:///lake/orders"},
                "stream": {"checkpoint": "/lake/orders//checkpoint"},
            },
            "[stream] checkpoint lies in the folder of [delta] path; choose one beside it",
        ),
    ],
)
def test_a_folder_within_another_is_refused(sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_config(data(**sections))
    assert expected in caught.value.message


def test_links_count_as_the_folders_that_they_lead_to(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "lake").symlink_to("disk")
    delta = {"path": str(tmp_path / "lake" / "orders"), "rejects_path": str(tmp_path / "rejects")}
    with pytest.raises(UsageError, match="are the same folder"):
        parse_config(
            data(delta=delta)
            | {"tables": [{"path": str(tmp_path / "disk" / "orders"), "topics_pattern": "a"}]}
        )


def test_a_path_may_begin_in_the_users_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_config(data(delta={"path": "~/lake/orders"}))
    assert config.messages_place.root == str(tmp_path / "lake" / "orders")


@pytest.mark.parametrize(
    "sections",
    [
        {"stream": {"checkpoint": "lake/orders/_checkpoint"}},
        {"stream": {"checkpoint": "lake/orders/.ledgerlake/checkpoint"}},
        {"stream": {"checkpoint": "lake/orders-checkpoint"}},
        {"delay": {"storage": "checkpoints/orders/waiting"}},
        {"delta": {"path": "s3://lake/orders"}},
    ],
)
def test_folders_beside_each_other_and_hidden_ones_are_fine(sections: dict[str, Any]) -> None:
    parse_config(data(**sections))


def test_a_missing_key_is_named() -> None:
    with pytest.raises(UsageError, match=r"\[stream\] name is missing"):
        parse_config({key: value for key, value in data().items() if key != "stream"})


@pytest.mark.parametrize(
    ("text", "expected_ms"),
    [
        ("1 second", 1000),
        ("200 ms", 200),
        ("5 min", 300000),
        ("2 minutes", 120000),
        ("3 milliseconds", 3),
        ("1h", 3600000),
    ],
)
def test_a_duration_has_a_unit(text: str, expected_ms: int) -> None:
    assert parse_config(data(stream={"trigger": text})).stream.trigger_ms == expected_ms


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("stream", "trigger"),
        ("chunks", "expire_after"),
        ("delay", "time_step_per_segment"),
        ("upkeep", "retention"),
        ("iceberg", "interval"),
        ("iceberg", "retention"),
    ],
)
def test_no_duration_is_longer_than_clocks_and_timers_can_have(section: str, key: str) -> None:
    parse_config(data(**{section: {key: "36500 days"}}))
    shown = r"\.\.\." if section in WITH_SECRETS else "999999999999 days"
    with pytest.raises(
        UsageError, match=rf"\[{section}\] {key} '{shown}' is longer than 100 years"
    ):
        parse_config(data(**{section: {key: "999999999999 days"}}))


def test_a_file_that_is_not_there_or_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent\.toml cannot be read"):
        load_config(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("[source\n")
    with pytest.raises(UsageError, match=r"bad\.toml is not TOML"):
        load_config(tmp_path / "bad.toml")
    (tmp_path / "key.toml").write_text("[source]\ntopic = 1\n")
    with pytest.raises(UsageError, match=r"key\.toml: \[source\] has no key 'topic'"):
        load_config(tmp_path / "key.toml")


def test_delays_are_held_unless_told_otherwise() -> None:
    options = parse_config(data()).pipeline_delay
    assert (options.enabled, options.folder, options.reread) == (True, None, False)


def test_how_delayed_messages_wait_can_be_told() -> None:
    delay = {
        "storage": "s3://bucket/delayed",
        "payloads": "reread",
        "time_step_per_segment": "1 hour",
        "max_buckets": 1,
    }
    options = parse_config(data(delay=delay)).pipeline_delay
    assert (options.folder, options.reread) == (Place("s3://bucket/delayed"), True)
    assert (options.settings.time_step_per_segment_ms, options.settings.max_buckets) == (
        3_600_000,
        1,
    )


def test_repetition_has_a_limit_and_can_be_forbidden() -> None:
    assert parse_config(data()).pipeline_delay.repetition_limit == RepetitionLimit(
        1_000, 4 * 1024 * 1024
    )
    forbidden = parse_config(
        data(delay={"max_repetitions_per_second": 0})
    ).pipeline_delay.repetition_limit
    assert not forbidden.allows(RepetitionRate(1, 1))


def test_what_waits_is_delivered_while_no_more_is_held_back() -> None:
    config = parse_config(data(delay={"enabled": False}, deliver={"topic": "due"}))
    assert (config.delay.enabled, config.deliver is not None) == (False, True)


@pytest.mark.parametrize(
    "deliver", ["due", "due-partition-0", "due-partition-3", "persistent://public/default/due"]
)
@pytest.mark.parametrize(
    "read",
    [
        {"topics": ["orders", "due"]},
        {"topics": ["due-partition-0"]},
        {"topics": ["due-partition-0", "due-partition-1"]},
        {"topics_pattern": "public/default/d.*"},
        {"topics_pattern": "public/default/due"},
    ],
)
def test_due_messages_go_to_no_topic_of_which_a_part_is_read(
    read: dict[str, Any], deliver: str
) -> None:
    """Else each of them would come again, and not be delayed any more."""
    source = {"service_url": "pulsar://localhost:6650"}
    with pytest.raises(UsageError, match=r"is one of those that are read"):
        parse_config({**data(deliver={"topic": deliver}), "source": source | read})
    for other in ("due-partition-00", "due2", "persistent://public/other/due"):
        if read.get("topics_pattern") != "public/default/d.*" or "other" in other:
            parse_config({**data(deliver={"topic": other}), "source": source | read})


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("delay", {"payloads": "gone"}, r"\[delay\] payloads cannot be 'gone'"),
        (
            "delay",
            {"time_step_per_segment": "soon"},
            r"\[delay\] time_step_per_segment 'soon' is not a duration",
        ),
        (
            "delay",
            {"max_repetitions_per_second": -1},
            r"\[delay\] max_repetitions_per_second must be a whole number, or 0",
        ),
        ("delay", {"max_buckets": 0}, r"\[delay\] max_buckets must be a whole number above 0"),
        ("deliver", {}, r"\[deliver\] topic is missing"),
        ("deliver", {"topic": "due", "starting": "now"}, r"\[deliver\] starting cannot be 'now'"),
        ("deliver", {"topic": "orders"}, r"is one of those that are read"),
    ],
)
def test_what_cannot_be_said_of_delays_is_refused(
    section: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        parse_config(data(**{section: values}))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param(
            "name = 'Gr\xfc\xdfe'".encode("latin-1"),
            "is not UTF-8 from byte 10 on",
            id="another encoding",
        ),
        pytest.param(
            b"a = pulsar://host",
            "line 1, column 5.; texts stand in quotes",
            id="a text without quotes",
        ),
        pytest.param(b"a = " + b"9" * 5000, "is not TOML", id="a number without end"),
        pytest.param(b"a = " + b"[" * 5000, "is not TOML", id="an array in an array in an array"),
    ],
)
def test_a_file_that_cannot_be_read_as_toml_is_refused(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "orders.toml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=expected):
        load_config(path)


def test_settings_of_spark_may_be_written_with_or_without_quotes_around_their_names() -> None:
    settings = {
        "spark.executor.memory": "4g",
        "spark": {"executor": {"cores": 2}, "speculation": True},
    }
    spark = parse_config(data(spark={"master": "spark://h:7077", "settings": settings})).spark
    assert spark.master == "spark://h:7077"
    assert spark.session_settings == {
        "spark.driver.memory": "2g",
        "spark.executor.memory": "4g",
        "spark.executor.cores": "2",
        "spark.speculation": "true",
    }


def test_packages_and_memory_are_settings_of_spark() -> None:
    spark = parse_config(data(spark={"packages": ["g:a:1", "g:b:2"], "memory": "6g"})).spark
    assert spark.session_settings == {
        "spark.driver.memory": "6g",
        "spark.jars.packages": "g:a:1,g:b:2",
    }


def test_the_command_line_stands_above_the_configuration_of_spark() -> None:
    spark = parse_config(data(spark={"master": "local[1]", "settings": {"a.b": 1, "a.c": 2}})).spark
    changed = with_command_line(spark, "local[2]", ["a.b=x=y", "spark.driver.memory=1g"])
    assert changed.master == "local[2]"
    assert changed.session_settings == {"spark.driver.memory": "1g", "a.b": "x=y", "a.c": "2"}
    assert with_command_line(spark, None, []) == spark


@pytest.mark.parametrize("text", ["spark.executor.memory", "=4g", ""])
def test_what_is_no_setting_of_spark_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--conf '{text}' is not KEY=VALUE"):
        with_command_line(parse_config(data()).spark, None, [text])


@pytest.mark.parametrize(
    ("auth", "sentence"),
    [
        ({"method": "tokn"}, r"\[auth\] method is not known; did you mean 'token'\?"),
        (
            {"method": "token", "token": "/run/secrets/token"},
            r"\[auth\] token is a path; write file:PATH",
        ),
    ],
)
def test_a_mistake_in_the_identity_is_told_by_its_key(auth: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_config(data(auth=auth))


KNOWN: dict[str, list[dict[str, Any]]] = {
    "auth": [
        {"method": "token"},
        {"method": "basic"},
        {"method": "oauth2"},
        {"method": "oauth2", "private_key": "x"},
    ],
    "metrics": [{}, {"token": "x"}],
    "storage": [{}, {"endpoint_url": "http://h:1"}],
    "iceberg": [{}],
}
WRONG_VALUES: list[Any] = [
    "hunter2",
    "a.hunter2.b",
    "http://hunter2",
    "x\nhunter2",
    ["hunter2"],
    {"type": "hunter2"},
]


@pytest.mark.parametrize(
    ("section", "key"),
    [
        (str(option.section), str(option.key))
        for kind in SECTION_CLASSES
        for _, option in declared(kind)
        if option.section in KNOWN
    ],
)
def test_no_error_of_a_section_with_secrets_repeats_a_value(section: str, key: str) -> None:
    assert WITH_SECRETS - {"spark", "None"} == KNOWN.keys()
    source = {"service_url": "pulsar+ssl://h:6651", "topics": ["a"]}
    for value in WRONG_VALUES:
        for others in KNOWN[section]:
            for wrong in (others | {key: value}, value):
                assert "hunter2" not in refusal({**data(source=source), section: wrong})


SECRETS = [
    (str(option.section), str(option.key))
    for kind in SECTION_CLASSES
    for field, option in declared(kind)
    if not field.repr
    and option.kind not in (SETTINGS, CATALOG_SETTINGS)
    and option.section is not None
]


@pytest.mark.parametrize("blank", ["", "  ", "\n"])
@pytest.mark.parametrize(("section", "key"), SECRETS)
def test_a_blank_secret_is_refused_and_does_not_count_as_left_out(
    section: str, key: str, blank: str
) -> None:
    assert refusal(data(**{section: {**KNOWN[section][0], key: blank}})) == (
        f"[{section}] {key} is blank; write the secret, file:PATH or env:NAME, or leave it out"
    )


def refusal(configuration: dict[str, Any]) -> str:
    """Why a configuration is refused; empty if it is not."""
    try:
        parse_config(configuration)
    except UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    ("spark", "sentence"),
    [
        ({"master": "lokal"}, r"\[spark\] master 'lokal' is none of Spark's; write for example"),
        ({"master": "locals"}, r"\[spark\] master 'locals' is none"),
        ({"memory": "2 gigs"}, r"\[spark\] memory '2 gigs' is no size; write for example '2g'"),
    ],
)
def test_a_master_or_a_memory_that_spark_would_refuse_with_a_stack_trace_is_told_before(
    spark: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        parse_config(data(spark=spark))


@pytest.mark.parametrize(
    "master",
    ["local", "local[2]", "local[*,4]", "local-cluster[2,1,1024]", "yarn", "k8s://https://h"],
)
def test_masters_of_spark_are_accepted(master: str) -> None:
    assert parse_config(data(spark={"master": master, "memory": "1500M"})).spark.master == master
