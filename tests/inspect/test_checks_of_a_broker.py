"""What ``check`` and ``init`` find at a broker; here one of our own, which does what the
test says.
"""

from __future__ import annotations

import json
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.cursor import DurableCursor
from ledgerlake.client.missing_topics import with_similar
from ledgerlake.devbroker.security import make_security
from ledgerlake.errors import ConsumerBusyError, TopicNotFoundError, TransportError
from ledgerlake.inspect.checks import Finding, check_config
from ledgerlake.inspect.new_config import LastEntriesFacts, look_at
from ledgerlake.inspect.positions import find_places
from ledgerlake.options.config import load_config, parse_config
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.publish.schedules import Schedules
from ledgerlake.source.batch_reader import LedgerlakeBatchReader
from ledgerlake.source.planner import Planner
from ledgerlake.source.value_schemas import find_value_schema
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import BEFORE_ALL, MessageId
from tests.encryption import encrypted, key_folder
from tests.live.pipelines import config_file, ledgerlake, sentence
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ledgerlake.options.source_options import SourceOptions

ORDER = pb.Schema(
    name="Order",
    type=pb.Schema.Avro,
    schema_data=json.dumps(
        {
            "type": "record",
            "name": "Order",
            "fields": [{"name": "id", "type": "int"}, {"name": "item", "type": "string"}],
        }
    ).encode(),
)


def stored(index: int, *, ahead_ms: int = 0, **metadata: Any) -> bytes:
    """An entry as a broker with PIP-70 stores it now, by a clock that is ``ahead_ms`` ahead."""
    now_ms = int(time.time() * 1000)
    broker = pb.BrokerEntryMetadata(broker_timestamp=now_ms + ahead_ms, index=index)
    entry = pb.MessageMetadata(
        producer_name="p", sequence_id=index, publish_time=now_ms, **metadata
    )
    return encode_entry(entry, b"value", broker)


def plain() -> bytes:
    return encode_entry(
        pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=1000), b"value"
    )


@pytest.mark.parametrize("starting", ["7:1", "7:0", "after 7:0", "index 1"])
@pytest.mark.parametrize("fails", [True, False])
def test_a_start_that_the_topic_no_longer_has_is_a_problem_if_a_loss_ends_the_run(
    peer: Peer, tmp_path: Path, starting: str, *, fails: bool
) -> None:
    peer.add(stored(10), stored(11), ledger_id=9)
    source = {"starting": starting, "fail_on_data_loss": fails}
    findings = found(peer, tmp_path, source=source)
    problems = [finding.text for finding in findings.values() if finding.state == "problem"]
    assert len(problems) == fails
    assert all("no longer has the messages to start at" in text for text in problems)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as peer:
        yield peer


def data_of(peer: Peer, folder: Path, **sections: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "source": {"service_url": peer.url, "topics": [TOPIC], "retry_timeout_s": 1},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "messages")},
    }
    for name, changes in sections.items():
        data[name] = {**data.get(name, {}), **changes}
    return data


def found(peer: Peer, folder: Path, **sections: Any) -> dict[str, Finding]:
    return {
        finding.check: finding
        for finding in check_config(parse_config(data_of(peer, folder, **sections)))
    }


def problem(findings: dict[str, Finding], check: str) -> str:
    """The sentence of the only check with a problem."""
    assert [name for name, finding in findings.items() if finding.state == "problem"] == [check]
    return findings[check].text


def test_nothing_is_wrong_and_nothing_is_left_behind(peer: Peer, tmp_path: Path) -> None:
    peer.add(stored(0), stored(1))
    states = {
        name: finding.state for name, finding in found(peer, tmp_path).items() if name != "disk"
    }
    assert set(states.values()) == {"ok"}
    assert set(states) >= {
        "broker",
        "topics",
        "reading",
        "broker metadata",
        "clock",
        "decryption",
        "checkpoint",
        "schema",
    }
    assert peer.subscriptions == {}
    assert list(tmp_path.iterdir()) == []


def test_a_misspelt_topic_is_answered_with_similar_ones(peer: Peer, tmp_path: Path) -> None:
    peer.topics = [
        f"persistent://public/default/{name}"
        for name in ("orders-partition-0", "visits", "__change_events")
    ]
    peer.missing_topics = {"persistent://public/default/order"}
    text = problem(found(peer, tmp_path, source={"topics": ["order"]}), "topics")
    assert text.endswith(
        "create it or correct its name; there is persistent://public/default/orders"
    )
    config = config_file(tmp_path, data_of(peer, tmp_path, source={"topics": ["order"]}))
    assert "; there is persistent://public/default/orders" in sentence(ledgerlake("run", config), 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda options: Schedules(options.client, "order"),
        lambda options: list(find_places(options.client, "order", MessageId(1, 0))),
        find_value_schema,
        lambda options: LedgerlakeBatchReader(options).partitions(),
        Planner,
    ],
    ids=["schedules", "positions", "schema", "batch read", "stream"],
)
def test_whatever_names_a_misspelt_topic_is_answered_with_similar_ones(
    peer: Peer, use: Callable[[SourceOptions], object]
) -> None:
    peer.topics = ["persistent://public/default/orders-partition-0"]
    peer.missing_topics = {"persistent://public/default/order"}
    options = parse_options({"service.url": peer.url, "topic": "order"})
    with pytest.raises(
        TopicNotFoundError, match=r"correct its name; there is persistent://public/default/orders$"
    ):
        use(options)


def test_all_missing_topics_are_named_at_once(peer: Peer, tmp_path: Path) -> None:
    peer.topics = [f"persistent://public/default/{name}" for name in ("orders", "visits", "peer")]
    peer.missing_topics = {f"persistent://public/default/{name}" for name in ("order", "visit")}
    text = problem(found(peer, tmp_path, source={"topics": ["order", "peer", "visit"]}), "topics")
    assert text.endswith(
        "create it or correct its name; there is persistent://public/default/orders; "
        "persistent://public/default/visit does not exist either; there is "
        "persistent://public/default/visits"
    )


def test_of_many_missing_topics_some_are_named(peer: Peer, tmp_path: Path) -> None:
    names = [f"order{number}" for number in range(8)]
    peer.missing_topics = {f"persistent://public/default/{name}" for name in names}
    text = problem(found(peer, tmp_path, source={"topics": names}), "topics")
    assert "order4 does not exist either" in text
    assert text.endswith("; 8 topics do not exist in all")


def test_if_the_broker_fails_no_further_topic_is_asked_for() -> None:
    cluster = MagicMock()
    gone = TopicNotFoundError("a does not exist")
    cluster.topic_partitions.side_effect = [gone, TransportError("no answer"), gone]
    cluster.topics_of.return_value = ["persistent://public/default/zzz"]
    topics = [f"persistent://public/default/{name}" for name in "abc"]
    assert with_similar(gone, cluster, topics).message == gone.message
    assert cluster.topic_partitions.call_count == 2


def test_a_namespace_without_topics_is_told(peer: Peer, tmp_path: Path) -> None:
    peer.topics = []
    peer.missing_topics = {"persistent://public/nowhere/orders"}
    text = problem(found(peer, tmp_path, source={"topics": ["public/nowhere/orders"]}), "topics")
    assert text.endswith("; the namespace public/nowhere has no topics, or does not exist")


def test_a_pattern_that_matches_nothing(peer: Peer, tmp_path: Path) -> None:
    data = data_of(peer, tmp_path)
    del data["source"]["topics"]
    data["source"]["topics_pattern"] = "no-.*"
    findings = {finding.check: finding for finding in check_config(parse_config(data))}
    assert findings["topics"].state == "warning"
    assert "routing" not in findings


def test_a_topic_that_may_not_be_read(peer: Peer, tmp_path: Path) -> None:
    peer.lookup = {
        "response": pb.CommandLookupTopicResponse.Failed,
        "error": pb.AuthorizationError,
        "message": "no",
    }
    text = problem(found(peer, tmp_path), "reading")
    assert "the role of the credentials needs the permission to consume" in text


def test_a_port_with_tls_that_is_reached_without(tmp_path: Path) -> None:
    security = make_security(tmp_path / "security")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(security.folder / "broker.pem", security.folder / "broker.key.pem")
    with Peer(tls=context) as peer:
        peer_url = peer.url.replace("pulsar+ssl://", "pulsar://")
        text = problem(found(peer, tmp_path, source={"service_url": peer_url}), "broker")
    assert "write pulsar+ssl:// for a port with TLS" in text


@pytest.mark.parametrize(("required", "state"), [(False, "warning"), (True, "problem")])
def test_entries_without_the_brokers_metadata(
    peer: Peer, tmp_path: Path, required: bool, state: str
) -> None:
    peer.add(plain())
    findings = found(peer, tmp_path, source={"require_broker_metadata": required})
    assert findings["broker metadata"].state == state
    assert "brokerEntryMetadataInterceptors" in findings["broker metadata"].text
    assert findings["clock"].state == "skipped"


def test_a_broker_whose_clock_is_ahead(peer: Peer, tmp_path: Path) -> None:
    peer.add(stored(0, ahead_ms=3_600_000))
    clock = found(peer, tmp_path)["clock"]
    assert clock.state == "warning"
    assert "set the clocks of both machines by NTP" in clock.text


def test_an_encrypted_topic(peer: Peer, tmp_path: Path) -> None:
    peer.add(encrypted(stored(0), "first"))
    text = problem(found(peer, tmp_path), "decryption")
    assert "are encrypted for first, and no key here opens them" in text
    other = key_folder(tmp_path / "other", "second")
    assert "no key here opens them" in problem(
        found(peer, tmp_path, source={"crypto_key_folder": other}), "decryption"
    )
    ours = key_folder(tmp_path / "ours", "first")
    assert found(peer, tmp_path, source={"crypto_key_folder": ours})["decryption"].state == "ok"
    assert (
        found(peer, tmp_path, source={"crypto_failure_action": "pass"})["decryption"].state
        == "warning"
    )


def test_a_subscription_is_seen_without_being_made(peer: Peer) -> None:
    cluster = Cluster(ClientSettings(peer.url, give_up_after_s=0.0))
    cursor = DurableCursor(cluster, TOPIC, "ledgerlake-orders")
    assert not cursor.exists()
    assert peer.subscriptions == {}
    for is_held in (False, True):
        peer.subscriptions["ledgerlake-orders"] = is_held
        assert cursor.exists()


def test_a_stream_that_runs_is_no_problem_and_neither_is_its_port_and_its_end_is_not_awaited(
    peer: Peer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    peer.subscriptions["ledgerlake-orders"] = True
    Checkpoint(Place(str(tmp_path / "checkpoint"))).save_start({TOPIC: PartitionOffset(BEFORE_ALL)})
    with socket.create_server(("127.0.0.1", 0)) as server:
        findings = found(peer, tmp_path, metrics={"port": server.getsockname()[1]})
    assert findings["checkpoint"].state == "warning"
    assert "the subscription of the stream orders, so it runs now" in findings["checkpoint"].text
    assert findings["metrics"] == Finding("metrics", "skipped", "see checkpoint")
    assert "problem" not in [finding.state for finding in findings.values()]
    assert "waiting up to" not in caplog.text


@pytest.mark.parametrize(
    ("known", "is_left_out"),
    [([TOPIC], True), ([TOPIC, f"{TOPIC}-new"], False), ([], False)],
    ids=["the other was read", "both were read", "a first start"],
)
def test_a_refused_topic_is_a_warning_if_a_start_leaves_it_out(
    peer: Peer, tmp_path: Path, known: list[str], *, is_left_out: bool
) -> None:
    new = f"{TOPIC}-new"
    peer.add(stored(0))
    peer.refuse_topics = {new: (pb.AuthorizationError, "not authorized")}
    if known:
        Checkpoint(Place(str(tmp_path / "checkpoint"))).save_start(
            dict.fromkeys(known, PartitionOffset(BEFORE_ALL))
        )
    findings = found(peer, tmp_path, source={"topics": [TOPIC, new]})
    if not is_left_out:
        assert "not authorized" in problem(findings, "reading")
        return
    assert all(finding.state != "problem" for finding in findings.values())
    says = f"a run leaves out {new}, which it has not read yet, and tries again: "
    for name in ("reading", "checkpoint"):
        assert findings[name].state == "warning"
        assert says in findings[name].text
        assert "not authorized" in findings[name].text
    peer.refuse_topics[TOPIC] = peer.refuse_topics[new]
    assert "not authorized" in problem(
        found(peer, tmp_path, source={"topics": [TOPIC, new]}), "reading"
    )


def test_a_refused_topic_is_told_beside_a_damaged_checkpoint(peer: Peer, tmp_path: Path) -> None:
    peer.refuse_topics = {TOPIC: (pb.AuthorizationError, "not authorized")}
    start = tmp_path / "checkpoint/ledgerlake/start.json"
    start.parent.mkdir(parents=True)
    start.write_text("{")
    findings = found(peer, tmp_path)
    assert "not authorized" in findings["reading"].text
    assert "damaged" in findings["tables"].text


def test_a_stream_of_that_name_runs_with_another_checkpoint(peer: Peer, tmp_path: Path) -> None:
    peer.subscriptions["ledgerlake-orders"] = True
    text = problem(found(peer, tmp_path), "checkpoint")
    assert text.startswith("a stream of the name orders runs now, with another checkpoint than")
    assert text.endswith("set another [stream] name")


def test_a_run_that_waits_for_another_one_says_so_once(
    peer: Peer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ledgerlake.client.cursor.BUSY_FOR_S", 0.5)
    peer.subscriptions["ledgerlake-orders"] = True
    cursor = DurableCursor(Cluster(ClientSettings(peer.url)), TOPIC, "ledgerlake-orders")
    with pytest.raises(ConsumerBusyError):
        cursor.ensure(from_earliest=True)
    (message,) = [record.message for record in caplog.records]
    assert message.startswith(
        f"another consumer holds the subscription ledgerlake-orders of {TOPIC}; waiting up to"
    )


def test_a_subscription_of_a_checkpoint_that_is_lost(peer: Peer, tmp_path: Path) -> None:
    peer.add(stored(0), stored(1))
    peer.subscriptions["ledgerlake-orders"] = False
    assert found(peer, tmp_path)["checkpoint"].state == "ok"
    peer.acknowledged = peer.entries[0][0]
    text = problem(found(peer, tmp_path), "checkpoint")
    assert "there is no checkpoint at" in text
    assert "ledgerlake forget CONFIG" in text


def test_a_schema_gives_columns_and_the_table_is_not_made(peer: Peer, tmp_path: Path) -> None:
    peer.schema = ORDER
    assert (
        f"the columns of {tmp_path}/messages are id, item, and pulsar"
        in found(peer, tmp_path, delta={"shape": "record"})["schema"].text
    )
    assert list(tmp_path.iterdir()) == []


def of_tables(peer: Peer, folder: Path, *tables: dict[str, str]) -> list[Finding]:
    """The findings on a configuration without a default table."""
    data = data_of(peer, folder) | {
        "delta": {"rejects_path": str(folder / "rejects")},
        "tables": [{"shape": "record", **table} for table in tables],
    }
    return list(check_config(parse_config(data)))


def test_each_table_of_records_is_told_with_its_columns(peer: Peer, tmp_path: Path) -> None:
    peer.schema = ORDER
    findings = of_tables(
        peer,
        tmp_path,
        {"path": f"{tmp_path}/all"},
        {"path": f"{tmp_path}/items", "sql": "select item as thing from messages"},
    )
    assert [finding.text for finding in findings if finding.check == "schema"] == [
        f"the columns of {tmp_path}/items are thing, and pulsar",
        f"the columns of {tmp_path}/all are id, item, and pulsar",
    ]
    assert all(finding.check != "routing" for finding in findings)


@pytest.mark.parametrize(
    ("selection", "why"),
    [
        (
            {"topics_pattern": "ordersss"},
            "its topics_pattern persistent://public/default/ordersss matches no topic that is read",
        ),
        ({"schema": "Ordre"}, "no schema of its topics has the record Ordre; they have Order"),
    ],
)
def test_a_table_that_no_topic_reaches_and_topics_that_reach_no_table_are_warnings(
    peer: Peer, tmp_path: Path, selection: dict[str, str], why: str
) -> None:
    peer.schema = ORDER
    wrong = {"path": f"{tmp_path}/wrong", **selection}
    lost = (
        f"no table takes messages of {TOPIC}, so they are rejects (no_table); correct the tables, "
        "or set [delta] path for the others"
    )
    expected = [
        Finding("routing", "warning", text)
        for text in (f"[[tables]] {tmp_path}/wrong gets no message: {why}", lost)
    ]
    alone = of_tables(peer, tmp_path, wrong)
    assert [finding for finding in alone if finding.check in ("routing", "schema")] == expected
    beside = of_tables(peer, tmp_path, wrong, {"path": f"{tmp_path}/right"})
    assert [finding for finding in beside if finding.check == "routing"] == expected[:1]


def test_topics_without_a_schema_yet_are_not_lost_to_a_table_that_names_one(
    peer: Peer, tmp_path: Path
) -> None:
    named = {"path": f"{tmp_path}/named", "schema": "Order"}
    elsewhere = {**named, "topics_pattern": "ordersss"}
    lost = f"no table takes messages of {TOPIC}, so"
    for table, is_lost in ((named, False), (elsewhere, True)):
        findings = of_tables(peer, tmp_path, table)
        texts = [finding.text for finding in findings if finding.check == "routing"]
        assert texts[0].startswith(f"[[tables]] {tmp_path}/named gets no message: ")
        assert [text.startswith(lost) for text in texts[1:]] == [True] * is_lost


def test_a_schema_that_no_table_of_records_can_have(peer: Peer, tmp_path: Path) -> None:
    fields = [{"name": "pulsar", "type": "int"}]
    definition = json.dumps({"type": "record", "name": "Order", "fields": fields})
    peer.schema = pb.Schema(name="Order", type=pb.Schema.Avro, schema_data=definition.encode())
    text = problem(found(peer, tmp_path, delta={"shape": "record"}), "schema")
    assert text.startswith(f"messages of {TOPIC} would be rejects: a schema has a field pulsar")
    assert 'set [delta] shape = "messages"' in text


def test_a_query_that_does_not_fit_the_schema(peer: Peer, tmp_path: Path) -> None:
    peer.schema = ORDER
    query = "select price from messages"
    assert "price" in problem(
        found(peer, tmp_path, delta={"shape": "record", "sql": query}), "schema"
    )


def test_a_topic_of_due_messages(peer: Peer, tmp_path: Path) -> None:
    assert found(peer, tmp_path, deliver={"topic": "due"})["deliver"].state == "ok"
    peer.missing_topics = {"persistent://public/default/due"}
    assert found(peer, tmp_path, deliver={"topic": "due"})["deliver"].state == "warning"


def test_a_topic_of_due_messages_that_gets_decrypted_ones(peer: Peer, tmp_path: Path) -> None:
    source = {"crypto_key_folder": key_folder(tmp_path / "keys", "first")}
    finding = found(peer, tmp_path, deliver={"topic": "due"}, source=source)["deliver"]
    assert finding.state == "warning"
    assert "are published to persistent://public/default/due in plain text" in finding.text
    assert (
        found(peer, tmp_path, deliver={"topic": "due"}, source={"crypto_key_reader": "m:f"})[
            "deliver"
        ]
        == finding
    )


def test_init_looks_at_the_topic(peer: Peer, tmp_path: Path) -> None:
    peer.schema = ORDER
    peer.add(*(stored(number) for number in range(150)))
    peer.add(
        encrypted(stored(150, deliver_at_time=int(time.time() * 1000) + 60_000), "first"), first=150
    )
    facts = look_at(ClientSettings(peer.url), TOPIC)
    assert (facts.partitions, facts.messages) == (0, 151)
    assert (facts.schema, facts.fields) == ("Avro", ("id", "item"))
    assert facts.last_entries == LastEntriesFacts(True, ("first",), True)
    file = tmp_path / "orders.toml"
    result = ledgerlake("init", str(file), "--topic", TOPIC, "--service-url", peer.url, "--json")
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["messages"], told["last_entries"]["has_delayed"]) == (151, True)
    assert load_config(file).delta.shape == "record"


def test_init_looks_at_a_topic_without_messages(peer: Peer) -> None:
    facts = look_at(ClientSettings(peer.url), TOPIC)
    assert (facts.messages, facts.last_entries.has_broker_metadata, facts.schema, facts.fields) == (
        0,
        None,
        "",
        (),
    )


def test_init_knows_no_number_of_messages_without_the_brokers_index(peer: Peer) -> None:
    peer.add(plain())
    facts = look_at(ClientSettings(peer.url), TOPIC)
    assert (facts.messages, facts.last_entries.has_broker_metadata) == (None, False)
