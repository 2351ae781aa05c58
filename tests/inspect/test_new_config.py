"""The configuration that ``init`` writes is one that ``run`` takes, whatever the topic is like."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.errors import UsageError
from ledgerlake.inspect.new_config import (
    Answers,
    LastEntriesFacts,
    TopicFacts,
    config_text,
    fields_of_json,
    stream_name,
)
from ledgerlake.options.config import load_config, read_config
from tests.live.pipelines import ledgerlake, sentence
from tests.peer import Peer

if TYPE_CHECKING:
    from pathlib import Path

    from ledgerlake.options.config import Config

TOPIC = "persistent://public/default/orders"
ANSWERS = Answers("pulsar://broker:6650", TOPIC, "lake/orders")


def written(facts: TopicFacts, answers: Answers = ANSWERS) -> tuple[str, Config]:
    text = config_text(answers, facts, "/srv/orders.toml")
    return text, read_config(text.encode(), "/srv/orders.toml")


def of_last(**facts: Any) -> TopicFacts:
    """A topic whose last entries are so."""
    return TopicFacts(TOPIC, last_entries=LastEntriesFacts(**facts))


def test_an_empty_topic_gets_the_defaults() -> None:
    text, config = written(TopicFacts(TOPIC))
    assert config.source.topics.names == (TOPIC,)
    assert (config.starting, config.stream.name, config.delta.shape) == (
        "earliest",
        "orders",
        "messages",
    )
    assert config.messages_place.uri == "/srv/lake/orders"
    assert "no partitions,\n# 0 messages and no schema" in text
    assert "broker metadata" not in text


def test_a_schema_with_fields_gets_columns() -> None:
    text, config = written(TopicFacts(TOPIC, 3, 12345, "Avro", ("id", "price")))
    assert config.delta.shape == "record"
    assert "3 partitions,\n# 12,345 messages and a schema of the kind Avro" in text
    assert "the columns id, price, and pulsar" in text


def test_json_without_a_schema_gets_its_fields_as_a_hint_that_is_right() -> None:
    values = [
        b'{"id": 1, "on": true, "price": 2, "tags": ["a"], "page": {"url": "u", "none": null}}',
        b'{"id": 2, "on": null, "price": 2.5, "tags": [], "page": null, "late": "y"}',
    ]
    fields = fields_of_json(values)
    assert fields == (
        '{ id = "long", on = "boolean", price = "double", tags = ["string"], page = { url = '
        '"string" }, late = "string" }'
    )
    text, config = written(of_last(json_fields=fields))
    assert config.delta.shape == "messages"
    lines = [line for line in text.splitlines() if not line.startswith("shape")]
    followed = "\n".join(
        line.removeprefix("# ") if line.startswith(("# shape", "# json_fields")) else line
        for line in lines
    )
    hinted = read_config(followed.encode(), "orders.toml")
    assert hinted.delta.shape == "record"
    assert hinted.table_options[0].json_fields


@pytest.mark.parametrize(
    "values",
    [
        [],
        [b"1"],
        [b'{"a": 1}', b"text"],
        [b'["a"]'],
        [b"{}"],
        [b"\xff"],
        [b'{"a": 1}', b'{"a": "x"}'],
        [b'{"no-name": 1}'],
        [b'{"id": 1, "ID": 2}'],
        [b'{"pulsar": 1}'],
        [b'{"a": {"Pulsar": 1}}'],
        [b'{"a": ' * 900 + b"1" + b"}" * 900],
        [b'{"a": ' * 100_000],
        [json.dumps(dict.fromkeys((f"field_{number}" for number in range(1000)), 1)).encode()],
    ],
)
def test_other_values_get_no_hint(values: list[bytes]) -> None:
    assert fields_of_json(values) == ""
    assert "json_fields" not in written(TopicFacts(TOPIC))[0]


def test_a_large_backlog_is_read_in_parts() -> None:
    assert written(TopicFacts(TOPIC, messages=999_999))[1].source.max_bytes_per_trigger is None
    assert (
        written(TopicFacts(TOPIC, messages=1_000_000))[1].source.max_bytes_per_trigger
        == 1_000_000_000
    )


def test_an_encrypted_topic_gets_a_folder_of_keys() -> None:
    text, config = written(of_last(encrypted_for=("shop",)))
    assert config.source.crypto_key_folder == "/srv/keys"
    assert "shop.pem" in text


def test_delayed_messages_are_pointed_out() -> None:
    text, config = written(of_last(has_delayed=True))
    assert config.delay.enabled
    assert "[delay]" in text
    assert "[delay]" not in written(TopicFacts(TOPIC))[0]


@pytest.mark.parametrize(
    ("has", "word"), [(True, "# require_broker_metadata = true"), (False, "publish_time")]
)
def test_the_file_says_whether_the_broker_adds_its_metadata(has: bool, word: str) -> None:
    assert word in written(of_last(has_broker_metadata=has))[0]


def test_credentials_are_kept_by_reference() -> None:
    answers = replace(
        ANSWERS, service_url="pulsar+ssl://broker:6651", token="file:/run/token", ca_file="ca.pem"
    )
    _, config = written(TopicFacts(TOPIC), answers)
    assert config.source.client.authentication.parameters == "file:/run/token"
    assert config.source.client.tls.ca_file == "/srv/ca.pem"


@given(st.text(max_size=30), st.text(max_size=30))
def test_no_name_from_outside_leaves_its_place_in_the_file(field: str, key: str) -> None:
    facts = TopicFacts(
        TOPIC,
        schema="Json",
        fields=(field or "x",),
        last_entries=LastEntriesFacts(encrypted_for=(key,), has_broker_metadata=True),
    )
    _, config = written(facts)
    assert (config.delta.shape, config.source.require_broker_metadata) == ("record", False)


@pytest.mark.parametrize(
    ("topic", "name"),
    [("orders", "orders"), ("t/n/a:b c", ""), ("_x", "x"), ("t/n/größe", "gr-e"), ("€", "stream")],
)
def test_the_stream_is_named_after_the_topic(topic: str, name: str) -> None:
    if not name:
        with pytest.raises(UsageError, match="is not a topic name"):
            stream_name(topic)
    else:
        assert stream_name(topic) == name


def test_without_a_broker_nothing_is_written(tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    said = sentence(
        ledgerlake("init", str(file), "--topic", "orders", "--service-url", "pulsar://127.0.0.1:1"),
        3,
    )
    assert "start it or correct the service url" in said
    assert not file.exists()


def test_a_file_that_is_there_stays(tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    file.write_text("mine")
    assert "--force" in sentence(ledgerlake("init", str(file), "--topic", "orders"), 2)
    assert file.read_text() == "mine"


def test_a_secret_is_not_taken_as_it_is() -> None:
    said = sentence(ledgerlake("init", "--topic", "orders", "--token", "hunter2"), 2)
    assert "file:PATH or env:NAME" in said
    assert "hunter2" not in said


def asked(tmp_path: Path, answers: bytes) -> str:
    """What ``init`` says on a terminal where these answers are typed."""
    ours, theirs = pty.openpty()
    os.write(ours, answers)
    command = [sys.executable, "-m", "ledgerlake.cli", "init"]
    environment = {
        name: value for name, value in os.environ.items() if name != "LEDGERLAKE_SERVICE_URL"
    }
    result = subprocess.run(
        command,
        stdin=theirs,
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=environment,
    )
    os.close(ours)
    os.close(theirs)
    return result.stderr


def test_a_person_at_a_terminal_is_asked(tmp_path: Path) -> None:
    with Peer() as peer:
        said = asked(tmp_path, f"{peer.url}\nvisits\n\n".encode())
    assert said.startswith(
        "The broker's service URL [pulsar://localhost:6650]: The topic to read: "
    )
    assert "The folder of the table [lake/visits]: " in said
    assert 'path = "lake/visits"' in (tmp_path / "visits.toml").read_text()


def test_paths_on_the_command_line_begin_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "token").write_text("t")
    given = ["--table", "lake/o", "--token", "file:token", "--topic", "orders"]
    with Peer() as peer:
        url = ["--service-url", peer.url]
        assert ledgerlake("init", "conf/orders.toml", *given, *url).returncode == 0
        assert ledgerlake("init", "conf/o2.toml", "--topic", "o2", *url).returncode == 0
    config = load_config("conf/orders.toml")
    assert config.messages_place.root == f"{tmp_path}/lake/o"
    assert config.source.client.authentication.parameters == f"file:{tmp_path}/token"
    assert load_config("conf/o2.toml").messages_place.root == f"{tmp_path}/conf/lake/o2"


def test_a_person_is_told_what_is_wrong_with_broker_or_topic_before_the_next_question(
    tmp_path: Path,
) -> None:
    said = asked(tmp_path, b"pulsar://127.0.0.1:1\nvisits\n\n")
    assert "no broker listens at pulsar://127.0.0.1:1" in said
    assert "(visits.toml was not written)" in said
    assert "The folder of the table" not in said
