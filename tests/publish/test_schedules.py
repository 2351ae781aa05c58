"""Schedules as the class and the command publish them."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ledgerlake.api import Schedules
from ledgerlake.client.cluster import Cluster
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.errors import BrokerError, UsageError
from ledgerlake.options.config import Config, parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.cancel import cancel
from ledgerlake.publish.schedules import move, moved
from ledgerlake.schedules.repetition import Repetition, occurrences
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.limits import MAX_TIME_MS
from tests.live.pipelines import ledgerlake
from tests.peer import TOPIC, Peer, _encode


def sent(peer: Peer) -> list[tuple[bytes, int, dict[str, str]]]:
    """Value, delivery time and properties of what the peer stored."""
    entries = [parse_entry(raw) for raw in peer.received]
    return [
        (
            bytes(entry.payload),
            entry.metadata.deliver_at_time,
            {pair.key: pair.value for pair in entry.metadata.properties},
        )
        for entry in entries
    ]


def test_a_schedule_is_a_delayed_message_with_its_id_and_a_cancel_names_it() -> None:
    noon = datetime(2026, 5, 2, 12, tzinfo=timezone.utc)
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules.put(
            "a", b"one", at=1_777_000_000_000, key="k", properties={"x": "y"}, expires=noon
        )
        schedules.put("a", b"two", at=noon)
        schedules.put("a", b"now")
        schedules.cancel("a")
        assert sent(peer) == [
            (
                b"one",
                1_777_000_000_000,
                {"x": "y", "ledgerlake.schedule": "a", "ledgerlake.expires": "1777723200000"},
            ),
            (b"two", 1_777_723_200_000, {"ledgerlake.schedule": "a"}),
            (b"now", 0, {"ledgerlake.schedule": "a"}),
            (b"", 0, {"ledgerlake.cancel": "schedule=a"}),
        ]
        has_value = [not parse_entry(raw).metadata.null_value for raw in peer.received]
        assert has_value == [True, True, True, False]


def test_a_producer_that_the_broker_has_closed_is_opened_again_before_the_next_message() -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules.put("a", b"one")
        peer.disconnect()
        schedules.put("a", b"two")
        assert [value for value, _, _ in sent(peer)] == [b"one", b"two"]
        peer.disconnect()
    # It is closed without an error: all is stored.


def test_a_refused_message_leaves_no_producer_at_the_broker() -> None:
    with Peer(largest_stored_bytes=1000) as peer, Schedules(peer.url, TOPIC) as schedules:
        for _ in range(3):
            with pytest.raises(BrokerError, match="NotAllowedError"):
                schedules.put("a", b"x" * 2000)
        schedules.put("a", b"small")
        assert peer.requests.count("CommandProducer") == 4
        assert peer.requests.count("CommandCloseProducer") == 3


@pytest.mark.parametrize(
    ("schedule_id", "arguments", "why"),
    [
        ("", {}, "1 to 200"),
        ("x" * 201, {}, "1 to 200"),
        ("a", {"at": datetime(2026, 5, 2)}, "at has no zone"),
        ("a", {"at": 0}, "at must be a datetime, or whole milliseconds"),
        ("a", {"at": 1_777_723_200}, "the year 2000"),
        ("a", {"at": 1_777_723_200_000.0}, "whole milliseconds .* not 1777723200000.0"),
        ("a", {"at": "2026-05-02T12:00:00Z"}, "must be a datetime"),
        ("a", {"expires": MAX_TIME_MS + 1}, "expires must be"),
        ("a", {"expires": 1_777_723_200_000.5}, "expires must be"),
        ("a", {"cron": "* * * * *", "until": 1_777_723_200}, "until must be"),
        *[
            (
                "a",
                {"cron": "0 9 * * *", "timezone": zone},
                r"ledgerlake.timezone is no time zone .*; did you mean 'Europe/Berlin'\?$",
            )
            for zone in ("europe/berlin", "Berlin", "Europe/Berln")
        ],
        ("a", {"cron": "0 9 * * *", "timezone": "+02:00"}, "such as Europe/Berlin$"),
        ("a", {"every": "PT1H", "jitter": "P2D"}, "ledgerlake.jitter is longer than a day"),
        (
            "a",
            {"at": 1_777_723_200_001, "expires": 1_777_723_200_000},
            "it expires before it is due",
        ),
        (
            "a",
            {"properties": {"ledgerlake.schedule": "b"}},
            "an argument of its own sets the property",
        ),
        ("a", {"properties": {"ledgerlake.occurrence": "1"}}, "Ledgerlake sets the property"),
        ("a", {"properties": {"ledgerlake.chunks": "1"}}, "Ledgerlake sets the property"),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_before_it_is_sent(
    schedule_id: str, arguments: dict[str, Any], why: str
) -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        with pytest.raises(UsageError, match=why):
            schedules.put(schedule_id, b"", **arguments)
        assert peer.received == []


@pytest.mark.parametrize(
    ("value", "arguments", "why"),
    [
        ("text", {}, r"the value is of type str, and must be bytes; pass text as text.encode\(\)"),
        (b"", {"key": 5}, "must be text"),
        (b"", {"properties": {"a": 5}}, "must be text"),
    ],
)
def test_a_value_key_or_property_of_another_type_is_refused_in_words(
    value: Any, arguments: dict[str, Any], why: str
) -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        with pytest.raises(UsageError, match=why):
            schedules.put("a", value, **arguments)
        assert peer.received == []


@pytest.mark.parametrize(
    "arguments", [{}, {"schedule_id": None}, {"schedule_id": "a", "all_schedules": True}]
)
def test_all_schedules_are_paused_and_resumed_only_if_that_is_said(
    arguments: dict[str, Any],
) -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        for tell in (schedules.pause, schedules.resume):
            with pytest.raises(UsageError, match="all_schedules=True"):
                tell(**arguments)
        assert peer.received == []


def test_text_that_is_no_unicode_is_refused_in_words() -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        with pytest.raises(UsageError, match="no Unicode text"):
            schedules.put("\ud800", b"")
        with pytest.raises(UsageError, match="no Unicode text"):
            schedules.put("a", b"", key="\udce9")
        with pytest.raises(UsageError, match="no Unicode text"):
            schedules.cancel("\ud800")
        assert peer.received == []
        said = ledgerlake(
            "schedule", TOPIC, "--service-url", peer.url, "--id", "a", "--in", "1 hour", "\udce9"
        )
    assert (said.returncode, "VALUE is not UTF-8 text" in said.stderr) == (2, True)


def test_new_partitions_of_the_topic_are_noticed_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def look_up(_: Cluster, topic: str, creates: bool = False) -> list[str]:
        asked.append(topic)
        return [f"{TOPIC}-partition-{number}" for number in range(len(asked))]

    monkeypatch.setattr(Cluster, "topic_partitions", look_up)
    with Schedules("pulsar://nowhere:1", TOPIC) as schedules:
        assert {schedules.partition_of(name) for name in "abc"} == {f"{TOPIC}-partition-0"}
        monkeypatch.setattr("ledgerlake.publish.schedules._PARTITIONS_KEPT_S", -1)
        schedules.partition_of("a")
        assert len(asked) == 2


def test_cancels_and_pauses_go_to_partitions_that_the_topic_has_just_got() -> None:
    with Peer(partitions={TOPIC: 1}) as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules.put("a", b"x", at=1_777_000_000_000)
        for count, tell in enumerate((schedules.cancel, schedules.pause, schedules.resume), 2):
            peer.partitions = {TOPIC: count}
            assert len(tell("a")) == count
        peer.partitions = {TOPIC: 5}
        assert len(schedules.pause(all_schedules=True)) == 5


def test_threads_share_schedules() -> None:
    failed: list[Exception] = []
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:

        def put(name: int) -> None:
            try:
                for number in range(20):
                    schedules.put(f"{name}-{number}", b"x")
            except Exception as error:
                failed.append(error)

        threads = [threading.Thread(target=put, args=(name,), daemon=True) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        ids = {properties["ledgerlake.schedule"] for _, _, properties in sent(peer)}
    assert (failed, len(ids)) == ([], 80)


def test_an_id_decides_the_topic_partition_as_javas_hash_of_it_does() -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules._partitions = [f"{TOPIC}-partition-{number}" for number in range(10)]
        # "hello".hashCode() is 99162322 in Java.
        assert schedules.partition_of("hello") == f"{TOPIC}-partition-2"


def test_the_command_schedules_by_time_or_by_span() -> None:
    with Peer() as peer:
        where = (TOPIC, "--service-url", peer.url, "--id", "a")
        said = ledgerlake(
            "schedule",
            *where,
            "--at",
            "2026-05-02T12:00:00Z",
            "--expires",
            "1777723200001",
            "x",
            "--json",
        )
        assert said.returncode == 0, said.stderr
        assert json.loads(said.stdout)["due"] == "2026-05-02T12:00:00.000Z"
        assert ledgerlake("schedule", *where, "--in", "1 hour", "y").returncode == 0
        assert sent(peer)[0] == (
            b"x",
            1_777_723_200_000,
            {"ledgerlake.schedule": "a", "ledgerlake.expires": "1777723200001"},
        )
        assert [value for value, *_ in sent(peer)] == [b"x", b"y"]
        assert ledgerlake("schedule", *where, "--in", "soon", "z").returncode == 2
        assert ledgerlake("schedule", *where, "--at", "1777723200", "z").returncode == 2
        assert (
            ledgerlake(
                "schedule", *where, "--in", "1 hour", "--expires", "1777723200000", "z"
            ).returncode
            == 2
        )
        assert len(peer.received) == 2


def test_a_schedule_that_repeats_has_its_rule_and_a_start_and_is_paused_by_its_id() -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        before_ms = int(time.time() * 1000)
        schedules.put("a", b"one", cron="0 9 * * MON", timezone="Europe/Berlin", catch_up="last")
        schedules.put(
            "a",
            b"two",
            every=timedelta(hours=1),
            at=1_800_000_000_000,
            count=3,
            jitter=timedelta(seconds=90),
        )
        schedules.pause("a")
        schedules.resume("a")
        (first, start_ms, rule), *others = sent(peer)
    assert before_ms <= start_ms <= int(time.time() * 1000)
    assert (first, rule) == (
        b"one",
        {
            "ledgerlake.schedule": "a",
            "ledgerlake.cron": "0 9 * * MON",
            "ledgerlake.timezone": "Europe/Berlin",
            "ledgerlake.catchup": "last",
        },
    )
    every = {
        "ledgerlake.schedule": "a",
        "ledgerlake.every": "PT3600.000S",
        "ledgerlake.count": "3",
        "ledgerlake.jitter": "PT90.000S",
    }
    assert others == [
        (b"two", 1_800_000_000_000, every),
        (b"", 0, {"ledgerlake.pause": "schedule=a"}),
        (b"", 0, {"ledgerlake.resume": "schedule=a"}),
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"cron": "0 25 * * *"}, "hour"),
        ({"every": "soon"}, "ISO-8601"),
        ({"every": timedelta(milliseconds=10)}, "second"),
        ({"cron": "* * * * *", "every": "PT1H"}, "one of them"),
        ({"count": 3}, "neither"),
        ({"cron": "* * * * *", "catch_up": "some"}, "all, last"),
        ({"cron": "* * * * *", "timezone": "Mars/Base"}, "time zone"),
        ({"every": "R5/2020-01-01T00:00:00Z/P1D"}, "no occurrence"),
        ({"every": "PT1H", "until": 1_700_000_000_000, "at": 1_699_000_000_000}, "no occurrence"),
    ],
)
def test_a_rule_that_cannot_be_used_is_refused_before_it_is_sent(
    arguments: dict[str, Any], why: str
) -> None:
    with Peer() as peer, Schedules(peer.url, TOPIC) as schedules:
        with pytest.raises(UsageError, match=why):
            schedules.put("a", b"", **arguments)
        assert peer.received == []


class PartitionedPeer(Peer):
    """A peer whose topic has three partitions, which notes to which one each id was sent."""

    def __enter__(self) -> Peer:
        self.routes: dict[str, list[str]] = defaultdict(list)
        self._topics_of: dict[tuple[int, int], str] = {}
        return super().__enter__()

    def _answer(self, connection: Any, consumers: Any, event: Any) -> None:
        if isinstance(event, pb.CommandPartitionedTopicMetadata):
            answer: dict[str, Any] = {
                "request_id": event.request_id,
                "partitions": 3,
                "response": 0,
            }
            connection.send(_encode("PARTITIONED_METADATA_RESPONSE", **answer))
            return
        if isinstance(event, pb.CommandProducer):
            self._topics_of[id(connection), event.producer_id] = event.topic
            event.producer_name = event.producer_name or "named"
        if isinstance(event, pb.CommandSend):
            properties = {
                pair.key: pair.value for pair in parse_entry(connection.payload).metadata.properties
            }
            partition = self._topics_of[id(connection), event.producer_id].rpartition("-")[2]
            self.routes[properties.get("ledgerlake.schedule", "other")].append(partition)
        super()._answer(connection, consumers, event)


def test_the_documents_python_client_sends_an_id_where_put_sends_it_and_a_cancel_goes_everywhere() -> (
    None
):
    page = (Path(__file__).parents[2] / "docs" / "schedules.md").read_text()
    (example,) = [
        code
        for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "import pulsar" in code
    ]
    names = ["visit-17", *(f"call-{number}" for number in range(20)), "rendez-vous-é", "\U0001f600"]
    partitioned = PartitionedPeer()
    with partitioned as peer, Schedules(peer.url, TOPIC) as schedules:
        example = example.replace("pulsar://localhost:6650", peer.url).replace(
            '"reminders"', f'"{TOPIC}"'
        )
        found: dict[str, Any] = {"due_ms": 2**40}
        exec(example, found)
        for name in names[1:]:
            found["producer"].send(
                b"", partition_key=name, properties={"ledgerlake.schedule": name}
            )
        found["client"].close()
        for name in names:
            schedules.put(name, b"")
        assert {
            name: len(set(routes)) for name, routes in partitioned.routes.items()
        } == dict.fromkeys(names, 1)
        assert {len(routes) for routes in partitioned.routes.values()} == {2}
        assert len(schedules.cancel("a")) == 3
        assert partitioned.routes["other"] == ["0", "1", "2"]


def test_a_cancel_goes_to_all_topics_of_a_configuration_or_to_one() -> None:
    other = "persistent://public/default/other"
    with Peer() as peer:
        config = parse_config(
            {
                "source": {"service_url": peer.url, "topics": [TOPIC, other]},
                "stream": {"name": "s", "checkpoint": "c"},
                "delta": {"path": "d"},
            }
        )
        assert cancel(config, "schedule", "a") == [TOPIC, other]
        assert cancel(config, "schedule", "a", "other") == [other]
        assert len(peer.received) == 3
        with pytest.raises(UsageError, match="reads no topic partition of third that"):
            cancel(config, "schedule", "a", "third")


@pytest.mark.parametrize("rule", [{"cron": "0 9 * * MON"}, {"every": "PT1H"}])
def test_a_message_that_repeats_and_needs_chunks_is_refused_before_it_is_sent(
    rule: dict[str, str],
) -> None:
    with Peer(max_message_bytes=100_000) as peer, Schedules(peer.url, TOPIC) as schedules:
        schedules.put("a", bytes(90_000), **rule)  # type: ignore[arg-type]
        with pytest.raises(
            UsageError, match=r"repeats.*not sent in chunks.* 300,000 bytes, and 99,\d{3} fit"
        ):
            schedules.put("a", bytes(300_000), **rule)  # type: ignore[arg-type]
        assert [len(value) for value, _, _ in sent(peer)] == [90_000]
        schedules.put("a", bytes(300_000), at=1_777_000_000_000)
        assert len(peer.received) == 6


def test_a_topic_partition_that_takes_no_message_keeps_no_cancel_from_the_others() -> None:
    topics = [TOPIC, *(f"persistent://public/default/{name}" for name in "abcdefgh")]
    refusing = {topics[1], topics[4]}
    with Peer(terminated_topics=refusing) as peer:
        config = parse_config(
            {
                "source": {"service_url": peer.url, "topics": topics},
                "stream": {"name": "s", "checkpoint": "c"},
                "delta": {"path": "d"},
            }
        )
        with pytest.raises(BrokerError, match="2 of 9 topic partitions did not store") as failure:
            cancel(config, "schedule", "a")
        assert (failure.value.code, failure.value.exit_code) == ("TopicTerminatedError", 2)
        assert all(topic in failure.value.message for topic in refusing)
        assert len(peer.received) == 7
        peer.partitions = {TOPIC: 9}
        peer.terminated_topics = {f"{TOPIC}-partition-{number}" for number in (1, 4)}
        with Schedules(peer.url, TOPIC) as schedules:
            for tell in (schedules.cancel, schedules.pause, schedules.resume):
                with pytest.raises(BrokerError, match="2 of 9 topic partitions did not store"):
                    tell("a")
        assert len(peer.received) == 28
        peer.terminated_topics = refusing
        with pytest.raises(BrokerError, match="already terminated"):
            cancel(config, "schedule", "a", topics[1])


def test_all_schedules_are_paused_on_each_topic_partition() -> None:
    with Peer(partitions={TOPIC: 2}) as peer, Schedules(peer.url, TOPIC) as schedules:
        assert len(schedules.pause(all_schedules=True)) == 2
        assert [properties for _, _, properties in sent(peer)] == [{"ledgerlake.pause": "all"}] * 2


def test_the_commands_repeat_pause_and_resume() -> None:
    with Peer() as peer:
        where = (TOPIC, "--service-url", peer.url)
        rule = ("--cron", "0 9 * * *", "--timezone", "Asia/Tokyo", "--from", "2100-05-02T12:00:00Z", "--until", "2101-01-01T00:00:00Z")  # fmt: skip
        said = ledgerlake("schedule", *where, "--id", "a", *rule, "x")
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith("schedule a repeats from 2100-05-03T00:00:00.000Z on, stored")
        for command, holds in (
            ("pause", "what it has due from now on\n"),
            ("resume", "until ledgerlake resume --all\n"),
        ):
            said = ledgerlake(command, *where, "--id", "a")
            assert said.stdout.startswith(f"{command} of schedule a stored as ")
            assert said.stdout.endswith(holds)
        assert json.loads(ledgerlake("pause", *where, "--all", "--json").stdout)["id"] is None
        assert [properties.get("ledgerlake.until") for _, _, properties in sent(peer)] == [
            "4133980800000",
            None,
            None,
            None,
        ]
        refused = ledgerlake(
            "schedule", *where, "--id", "a", "--in", "1 hour", "--from", "2026-05-02T12:00:00Z", "x"
        )
        assert refused.returncode == 2
        assert "--at" in refused.stderr


@pytest.mark.parametrize(
    ("rule", "first_ms"),
    [
        (("--every", "1 hour", "--from", "2026-05-02T12:00:00Z"), None),
        (("--every", "R/2100-01-01T00:00:00Z/PT1H"), 4_102_444_800_000),
        (("--cron", "0 9 * * *", "--from", "2100-01-01T10:00:00Z"), 4_102_563_600_000),
    ],
    ids=["from a past time", "an interval with a start", "cron"],
)
def test_the_command_prints_the_first_occurrence(
    rule: tuple[str, ...], first_ms: int | None
) -> None:
    """The pipeline counts a rule from when the broker stores the message at the earliest."""
    with Peer() as peer:
        where = (TOPIC, "--service-url", peer.url)
        before_ms = int(time.time() * 1000)
        said = ledgerlake("schedule", *where, "--id", "a", *rule, "x", "--json")
        text = ledgerlake("schedule", *where, "--id", "a", *rule, "x").stdout
    shown = json.loads(said.stdout)["repeats_from"]
    shown_ms = round(datetime.fromisoformat(shown.replace("Z", "+00:00")).timestamp() * 1000)
    if first_ms is None:
        assert before_ms <= shown_ms <= int(time.time() * 1000)
    else:
        assert shown_ms == first_ms
        assert text.startswith(f"schedule a repeats from {shown} on, stored in ")


@pytest.mark.parametrize(
    ("rule", "first_ms"),
    [
        (("--every", "1 hour"), None),
        (("--every", "1 hour", "--from", "2026-05-02T12:00:00Z"), None),
        (("--every", "1 hour", "--from", "2100-01-01T00:00:00Z"), 4_102_444_800_000),
        (("--every", "R/2100-01-01T00:00:00Z/PT1H"), 4_102_444_800_000),
        (("--cron", "0 0 1 1 *", "--from", "2100-01-01T00:00:00Z"), 4_102_444_800_000),
    ],
    ids=["from now", "from a past time", "from a future time", "an interval with a start", "cron"],
)
def test_the_command_prints_the_first_jitter_only_if_it_is_known(
    rule: tuple[str, ...], first_ms: int | None
) -> None:
    """The jitter is a hash of a time that is the broker's, if a duration counts from now."""
    with Peer() as peer:
        command = ("schedule", TOPIC, "--service-url", peer.url, "--id", "a", *rule, "x")
        jitter = ("--jitter", "10 minutes")
        before_ms = int(time.time() * 1000)
        shown = json.loads(ledgerlake(*command, *jitter, "--json").stdout)
        after_ms = int(time.time() * 1000)
        text = ledgerlake(*command, *jitter).stdout
    first = datetime.fromisoformat(shown["repeats_from"].replace("Z", "+00:00"))
    shown_ms = round(first.timestamp() * 1000)
    if first_ms is None:
        assert before_ms <= shown_ms <= after_ms
        assert shown["most_later_ms"] == 600_000
        assert re.match(
            r"schedule a repeats from \S+ on \(the first time up to 600 s later\), ", text
        )
    else:
        yearly = Repetition(cron="0 0 1 1 *", jitter_ms=600_000)
        due_ms = next(occurrences(yearly, "a", first_ms)).due_ms
        assert (shown_ms, shown["most_later_ms"]) == (due_ms, 0)
        assert text.startswith(f"schedule a repeats from {shown['repeats_from']} on, stored in ")


def test_the_command_says_how_to_create_a_topic_that_is_missing_if_it_was_not_told_to() -> None:
    missing = TOPIC + "s"
    with Peer(missing_topics={missing}, topics=[TOPIC]) as peer:
        command = ("schedule", missing, "--service-url", peer.url, "--id", "a", "--in", "1 hour")
        said = ledgerlake(*command, "x")
        told = ledgerlake(*command, "--create-topic", "x")
    assert said.returncode != 0
    assert said.stderr.strip().endswith(f"; --create-topic creates {missing}")
    assert told.returncode == said.returncode
    assert missing in told.stderr
    assert "--create-topic" not in told.stderr


def test_a_message_that_is_moved_keeps_what_was_stored_of_it() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p",
        sequence_id=7,
        publish_time=5,
        deliver_at_time=9,
        compression=pb.LZ4,
        uncompressed_size=40,
    )
    metadata.properties.add(key="ledgerlake.schedule", value="a")
    metadata.schema_version, metadata.partition_key = b"\0\1", "k"
    metadata.txnid_least_bits, metadata.txnid_most_bits = 3, 1
    metadata.replicated_from, metadata.replicate_to[:] = "another", ["third"]
    stored = encode_entry(metadata, b"compressed", pb.BrokerEntryMetadata(broker_timestamp=3))
    entry = parse_entry(moved(stored, 1_800_000_000_000, 2, "q"))
    assert bytes(entry.payload) == b"compressed"
    changed = {"producer_name": "q", "sequence_id": 2, "deliver_at_time": 1_800_000_000_000}
    assert {name: getattr(entry.metadata, name) for name in changed} == changed
    for name in (
        "compression",
        "uncompressed_size",
        "schema_version",
        "partition_key",
        "properties",
    ):
        assert getattr(entry.metadata, name) == getattr(metadata, name)
    # A broker would take it for a part of an open transaction, or for what another cluster has
    # sent.
    own = {"txnid_least_bits", "txnid_most_bits", "replicated_from", "replicate_to"}
    assert not own & {field.name for field, _ in entry.metadata.ListFields()}


def test_a_message_is_not_moved_behind_its_expiry() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=7, publish_time=5, deliver_at_time=9
    )
    metadata.properties.add(key="ledgerlake.expires", value="100")
    with pytest.raises(UsageError, match="expires before"):
        moved(encode_entry(metadata, b""), 101, 2, "q")


def test_a_message_is_not_moved_behind_its_last_occurrence() -> None:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, deliver_at_time=50
    )
    names = {"schedule": "a", "every": "PT1H", "until": "4000000000000"}
    for name, value in names.items():
        metadata.properties.add(key=f"ledgerlake.{name}", value=value)
    moved(encode_entry(metadata, b""), 4_000_000_000_000, 2, "q")
    with pytest.raises(UsageError, match="no occurrence"):
        moved(encode_entry(metadata, b""), 4_000_000_000_001, 2, "q")


def _waiting_entry(**properties: str) -> bytes:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, deliver_at_time=9
    )
    for name, value in {"schedule": "a", **properties}.items():
        metadata.properties.add(key=f"ledgerlake.{name}", value=value)
    return encode_entry(metadata, b"v", pb.BrokerEntryMetadata(broker_timestamp=3))


def _stream(url: str, **changes: dict[str, Any]) -> Config:
    source = {"service_url": url, "topics": [TOPIC], **changes.pop("source", {})}
    own = {"stream": {"name": "s", "checkpoint": "c"}, "delta": {"path": "d"}}
    return parse_config({"source": source, **own, **changes})


_ONCE, _REPEATED = _waiting_entry(), _waiting_entry(every="PT1S")
_FUTURE = "2100-01-01T00:00:00Z"
LATER_MS = 4_000_000_000_000


@pytest.mark.parametrize(
    ("changes", "entry", "why"),
    [
        pytest.param({}, _ONCE, None, id="as it is"),
        pytest.param({}, _REPEATED, None, id="repeats"),
        pytest.param({"source": {"ending": _FUTURE}}, _ONCE, None, id="ends later"),
        pytest.param(
            {"source": {"topics": ["other"]}}, _ONCE, "does not read the topic", id="left"
        ),
        pytest.param({"delay": {"enabled": False}}, _ONCE, "enabled = false", id="no delay"),
        pytest.param(
            {"source": {"ending": "2020-01-01T00:00:00Z"}}, _ONCE, r"\[source\] ending", id="ended"
        ),
        pytest.param({"source": {"ending": "3:4"}}, _ONCE, r"\[source\] ending", id="ends at 3:4"),
        pytest.param(
            {"source": {"message_payload_processor": "own:lines"}},
            _ONCE,
            "message_payload_processor",
            id="processor",
        ),
        pytest.param({"delay": {"max_repetitions_per_second": 0}}, _ONCE, None, id="none, once"),
        pytest.param(
            {"delay": {"max_repetitions_per_second": 0}},
            _REPEATED,
            "max_repetitions_per_second",
            id="none may repeat",
        ),
        pytest.param(
            {"delay": {"max_repeated_bytes_per_second": 1}},
            _REPEATED,
            "max_repeated_bytes_per_second",
            id="too many bytes",
        ),
    ],
)
def test_a_message_is_moved_only_if_the_stream_reads_it_and_lets_it_wait(
    changes: dict[str, Any], entry: bytes, why: str | None
) -> None:
    with Peer() as peer:
        config = _stream(peer.url, **changes)
        if why is None:
            move(config, TopicPartition(TOPIC, -1), entry, LATER_MS, LATER_MS)
            assert len(peer.received) == 1
            return
        with pytest.raises(UsageError, match=why):
            move(config, TopicPartition(TOPIC, -1), entry, LATER_MS, LATER_MS)
        assert peer.received == []


def test_a_message_that_was_due_is_not_moved_and_one_that_repeats_is() -> None:
    """The stream delivers what was due when the new message is stored."""
    with Peer() as peer:
        source, config = TopicPartition(TOPIC, -1), _stream(peer.url)
        with pytest.raises(
            UsageError,
            match=r"was due at 1970-01-01T00:00:00\.009Z.* delivers it .*, or rejects it if it has "
            "expired;",
        ):
            move(config, source, _ONCE, 9, LATER_MS)
        assert peer.received == []
        move(config, source, _REPEATED, 9, LATER_MS)
        assert len(peer.received) == 1


def test_a_cancel_that_a_stream_does_not_read_is_refused() -> None:
    with Peer() as peer:
        with pytest.raises(UsageError, match=r"\[source\] ending"):
            cancel(_stream(peer.url, source={"ending": "3:4"}), "schedule", "a")
        assert peer.received == []
        # What waits from before still waits, and can be cancelled.
        assert cancel(_stream(peer.url, delay={"enabled": False}), "schedule", "a") == [TOPIC]
