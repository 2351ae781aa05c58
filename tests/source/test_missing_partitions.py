"""Partitions that a topic's metadata names and that are not there: everything reads the others, and
a stream reads them from their beginning once they come.
"""

from __future__ import annotations

import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.topics import TopicSelection
from ledgerlake.errors import UsageError
from ledgerlake.inspect.checks import check_config
from ledgerlake.inspect.lag import find_lags
from ledgerlake.inspect.new_config import look_at
from ledgerlake.inspect.peek import peek
from ledgerlake.inspect.positions import find_places
from ledgerlake.options.config import Config, parse_config
from ledgerlake.options.source_options import parse_options
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.forget import forget
from ledgerlake.source import topic_list
from ledgerlake.source.batch_reader import LedgerlakeBatchReader
from ledgerlake.source.planner import Planner
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.source.value_schemas import find_value_schema
from ledgerlake.stored.offsets import PartitionOffset, from_json
from ledgerlake.wire.message_id import Position
from ledgerlake.wire.value_schema import NO_SCHEMA
from tests.entries import single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

NAMES = [f"{TOPIC}-partition-{number}" for number in range(3)]
OTHERS = [NAMES[0], NAMES[2]]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as broker:
        broker.add(single(b"a", index=0), single(b"b", index=1))
        broker.partitions = {TOPIC: 3}
        yield broker


def options_of(peer: Peer, **more: str) -> dict[str, str]:
    return {"service.url": peer.url, "topic": TOPIC, "retryTimeoutMs": "2000", **more}


def config_of(peer: Peer, folder: Path) -> Config:
    return parse_config(
        {
            "source": {"service_url": peer.url, "topics": [TOPIC], "retry_timeout_s": 2},
            "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
            "delta": {"path": str(folder / "messages")},
        }
    )


def batch_read(peer: Peer, _folder: Path) -> list[str]:
    reader = LedgerlakeBatchReader(parse_options(options_of(peer)))
    return [partition.span.topic_partition for partition in reader.partitions()]


def batch_read_from_an_id(peer: Peer, _folder: Path) -> list[str]:
    more = {"startingOffsets": "7:0", "endingOffsets": "7:1"}
    reader = LedgerlakeBatchReader(parse_options(options_of(peer, **more)))
    return [partition.span.topic_partition for partition in reader.partitions()]


def stream_start(bound: str) -> Callable[[Peer, Path], list[str]]:
    def start(peer: Peer, _folder: Path) -> list[str]:
        with closing(Planner(parse_options(options_of(peer, startingOffsets=bound)))) as planner:
            assert set(planner.latest_offsets()) == set(planner.initial())
            return list(planner.initial())

    return start


def shown_by_peek(peer: Peer, _folder: Path) -> list[str]:
    rows = peek(ClientSettings(peer.url), TOPIC, "earliest", 1)
    return [f"{row['topic']}-partition-{row['partition']}" for row in rows]


def shown_by_positions(peer: Peer, _folder: Path) -> list[str]:
    return [
        place.topic_partition for place in find_places(ClientSettings(peer.url), TOPIC, "earliest")
    ]


def shown_by_lag(peer: Peer, folder: Path) -> list[str]:
    config = config_of(peer, folder)
    Checkpoint(config.checkpoint_place).save_start(
        {name: PartitionOffset(Position(7, 0)) for name in NAMES}
    )
    return [lag.topic_partition for lag in find_lags(config)]


def forgotten(peer: Peer, folder: Path) -> list[str]:
    peer.subscriptions["ledgerlake-orders"] = False
    return forget(config_of(peer, folder))


EVERYTHING = {
    "batch read": batch_read,
    "batch read between ids": batch_read_from_an_id,
    "stream from earliest": stream_start("earliest"),
    "stream from latest": stream_start("latest"),
    "stream from an id": stream_start("7:1"),
    "peek": shown_by_peek,
    "positions": shown_by_positions,
    "lag": shown_by_lag,
    "forget": forgotten,
}


@pytest.mark.parametrize("missing", [NAMES[1:2], NAMES[:2], NAMES], ids=["one", "two", "all"])
@pytest.mark.parametrize("read", EVERYTHING.values(), ids=EVERYTHING)
def test_the_others_are_read(
    peer: Peer, tmp_path: Path, read: Callable[[Peer, Path], list[str]], missing: list[str]
) -> None:
    peer.missing_topics = set(missing)
    assert read(peer, tmp_path) == [name for name in NAMES if name not in missing]


@pytest.mark.parametrize(
    ("missing", "state", "words"),
    [
        (NAMES[1:2], "ok", "(2 topic partitions)"),
        (NAMES, "warning", f"no partition of {TOPIC} is there; a run waits for the first one"),
    ],
    ids=["one", "all"],
)
def test_check_has_no_problem(
    peer: Peer, tmp_path: Path, missing: list[str], state: str, words: str
) -> None:
    peer.missing_topics = set(missing)
    findings = {one.check: one for one in check_config(config_of(peer, tmp_path))}
    assert findings["topics"].state == state
    assert words in findings["topics"].text
    assert [one.text for one in findings.values() if one.state == "problem"] == []


def test_a_topic_has_its_schema_without_any_partition(peer: Peer) -> None:
    peer.missing_topics = set(NAMES)
    assert find_value_schema(parse_options(options_of(peer))) == NO_SCHEMA
    assert (look_at(ClientSettings(peer.url), TOPIC)).messages == 0


@pytest.mark.parametrize("more", [{}, {"subscription": "s"}, {"pinnedBy": "s"}], ids=str)
@pytest.mark.parametrize("missing", [NAMES[1:2], NAMES], ids=["one", "all"])
def test_a_stream_reads_it_from_its_beginning_once_it_comes(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], missing: list[str]
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.missing_topics = set(missing)
    reader = LedgerlakeStreamReader(
        parse_options(options_of(peer, startingOffsets="latest", **more))
    )
    try:
        start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
        assert set(from_json(start)) == {name for name in NAMES if name not in missing}
        peer.missing_topics = set()
        time.sleep(0.2)
        end = reader.latestOffset(start, ReadAllAvailable())
        spans = [partition.span for partition in reader.partitions(start, end)]
        assert [span.topic_partition for span in spans] == missing
        assert {(span.after, span.end) for span in spans} == {(Position(-1, -1), Position(7, 1))}
    finally:
        reader.stop()


def test_a_stream_that_has_read_it_starts_again_without_it(
    peer: Peer, caplog: pytest.LogCaptureFixture
) -> None:
    options = parse_options(options_of(peer, startingOffsets="earliest"))
    first = LedgerlakeStreamReader(options)
    start = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    first.stop()
    peer.missing_topics = {NAMES[1]}
    again = LedgerlakeStreamReader(options)
    try:
        assert set(from_json(again.latestOffset(start, ReadAllAvailable()))) == set(OTHERS)
        assert f"{NAMES[1]} was deleted while no process read it" in caplog.text
    finally:
        again.stop()


def test_a_partition_that_was_there_is_not_asked_about_again(peer: Peer) -> None:
    peer.missing_topics = {NAMES[1]}
    cluster = Cluster(ClientSettings(peer.url))
    topics = topic_list.TopicList(cluster, TopicSelection((TOPIC,)))
    asked = []
    for _ in range(2):
        before = peer.requests.count("CommandPartitionedTopicMetadata")
        topics.refresh(may_wait=False)
        asked.append(peer.requests.count("CommandPartitionedTopicMetadata") - before)
        assert topics.names == set(OTHERS)
    assert asked == [4, 2]
    cluster.close()


def test_a_producer_makes_it(peer: Peer) -> None:
    peer.missing_topics = set(NAMES)
    cluster = Cluster(ClientSettings(peer.url))
    assert cluster.topic_partitions(TOPIC) == NAMES
    cluster.close()


@pytest.mark.parametrize("number", [1, 3])
def test_a_start_of_its_own_is_for_a_partition_that_may_come(peer: Peer, number: int) -> None:
    peer.missing_topics = {NAMES[1]}
    bounds: dict[str, Any] = {"startingOffsets": f'{{"{TOPIC}-partition-{number}": "7:0"}}'}
    with closing(Planner(parse_options(options_of(peer, **bounds)))) as planner:
        if number == 1:
            assert set(planner.initial()) == set(OTHERS)
        else:
            with pytest.raises(UsageError, match="has no partition 3 to start or to end at"):
                planner.initial()
