"""When the planner gives a batch its clock: on an idle topic that wants one, and if the broker
tells no time.
"""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.errors import BrokerError, DataLossError, TopicNotFoundError
from ledgerlake.options.declared import to_spark
from ledgerlake.options.source_options import parse_options
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import latest_offset as latest_offset_module
from ledgerlake.source import planner, topic_list
from ledgerlake.source.batch_limits import BacklogCounts, count_messages
from ledgerlake.source.bounds import latest_offset
from ledgerlake.source.latest_offset import LatestOffset
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.source.wakeup_files import WakeupTimes, save_wakeup_times
from ledgerlake.stored.offsets import PartitionOffset, from_json, to_json
from ledgerlake.stored.places import Place
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import BEFORE_ALL, Position
from tests.entries import BROKER_TIME_MS, batch, single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ledgerlake.source.planning import EntryRange
    from ledgerlake.stored.offsets import Offset

NOW_MS = 1_700_000_100_000
BARE = encode_entry(
    pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=NOW_MS + 10**9), b"v"
)


class Planning:
    """A planner over a peer, with the clock in the test's hand."""

    def __init__(
        self, peer: Peer, wakes: str, monkeypatch: pytest.MonkeyPatch, **more: str
    ) -> None:
        self.clock_ms = NOW_MS
        self.peer = peer
        self._wakes = Place(wakes)
        # Entries that come while the planner waits.
        self.arriving: list[bytes] = []
        monkeypatch.setattr(planner, "_clock_ms", lambda: self.clock_ms)
        monkeypatch.setattr(planner, "time", SimpleNamespace(sleep=self._sleep))
        options = {
            "service.url": peer.url,
            "topic": TOPIC,
            "startingOffsets": "earliest",
            "wakes": wakes,
        } | more
        self.reader = LedgerlakeStreamReader(parse_options(options))
        _readers.append(self.reader)
        self.offset: dict[str, Any] = self.reader.initialOffset()

    def _sleep(self, seconds: float) -> None:
        self.clock_ms += round(seconds * 1000)
        if self.arriving:
            self.peer.add(self.arriving.pop(0), first=len(self.peer.entries))

    def plan(self) -> int | None:
        """Plan a batch; the clock that it carries, if there is anything to do."""
        before, self.offset = self.offset, self.reader.latestOffset(self.offset, ReadAllAvailable())
        return None if before == self.offset else from_json(self.offset)[TOPIC].clock_ms

    def save_wakeup(self, batch_id: int, time_ms: int | None) -> None:
        """Write when the topic needs a batch, as a pipeline does."""
        save_wakeup_times(
            self._wakes, batch_id, WakeupTimes({} if time_ms is None else {TOPIC: time_ms})
        )


def begun(peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: str) -> Planning:
    """A planner that has planned the one entry of the topic."""
    peer.add(single(b"a"))
    planning = Planning(peer, str(tmp_path / "wakes"), monkeypatch, **more)
    planning.plan()
    return planning


_readers: list[LedgerlakeStreamReader] = []


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer() as broker:
        yield broker
        while _readers:
            _readers.pop().stop()


def test_an_idle_topic_gets_a_batch_when_its_time_has_come_and_only_one(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch)
    planning.save_wakeup(1, NOW_MS + 5000)
    assert planning.plan() is None
    planning.clock_ms += 5001
    assert planning.plan() == NOW_MS + 5001
    planning.clock_ms += 5000
    assert planning.plan() is None


def test_another_process_with_other_options_reads_the_same_ranges_for_an_offset(peer: Peer) -> None:
    peer.add(*[single(b"a")] * 9)
    readers = [pattern_reader(peer, minPartitions=number) for number in ("3", "1", "8")]
    _readers.extend(readers)
    start = readers[0].initialOffset()
    end = readers[0].latestOffset(start, ReadAllAvailable())
    found = [[partition.span for partition in reader.partitions(start, end)] for reader in readers]
    assert [len(spans) for spans in found] == [3, 3, 3]
    assert found[0] == found[1] == found[2]


def test_while_entries_come_the_broker_tells_the_time(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch)
    planning.save_wakeup(1, NOW_MS - 1)
    peer.add(single(b"b"), first=1)
    planning.arriving = [single(b"c"), single(b"d", index=100_000)]
    assert planning.plan() is None
    assert from_json(planning.offset)[TOPIC].position == peer.entries[3][0], (
        "the first entry that is late enough"
    )


def test_a_topic_to_which_nothing_comes_when_a_message_is_due_is_idle(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch)
    planning.save_wakeup(1, NOW_MS - 1)
    peer.add(single(b"b"), first=1)
    assert planning.plan() == NOW_MS
    assert from_json(planning.offset)[TOPIC].position == peer.entries[1][0]


def test_a_message_whose_time_the_broker_has_not_reached_cuts_the_trigger_short_once(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="10 s")
    planning.save_wakeup(1, NOW_MS - 1)
    before = planning.offset
    peer.add(single(b"b"), first=1)
    planning.arriving = [single(b"c") for _ in range(20)]
    assert planning.plan() is None
    assert planning.offset != before, "the entries are read"
    before, begun_ms = planning.offset, planning.clock_ms
    assert planning.plan() is None
    assert (planning.offset, planning.clock_ms) == (before, begun_ms + 1000), (
        "the next batch waits for the trigger"
    )


@pytest.mark.parametrize(
    "last",
    [
        encode_entry(pb.MessageMetadata(producer_name="p", sequence_id=1, publish_time=2**62), b""),
        b"x",
    ],
)
def test_a_last_entry_without_any_time_takes_no_clock_from_a_batch(
    last: bytes, peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatestOffset, "known_for_ms", 7)
    peer.add(BARE, last)
    assert Planning(peer, str(tmp_path / "wakes"), monkeypatch).plan() == NOW_MS - 7


def test_a_claim_of_more_messages_than_an_entry_can_have_ends_no_batch_with_a_limit(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        peer.add(
            batch([b"a"], index=number, num_messages_in_batch=1_000_000 if number % 3 else 1),
            first=number,
        )
    planning = Planning(peer, str(tmp_path / "wakes"), monkeypatch, maxRowsPerTrigger="10000")
    planning.plan()
    assert from_json(planning.offset)[TOPIC].position == peer.entries[-1][0]


def test_where_the_broker_tells_no_time_the_clock_does_also_while_entries_come(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatestOffset, "known_for_ms", 7)
    peer.add(BARE)
    path = str(tmp_path / "wakes")
    planning = Planning(peer, path, monkeypatch)
    assert planning.plan() == NOW_MS - 7, "the time at which the broker was asked for the end"
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: NOW_MS + 1}))
    peer.add(BARE, first=1)
    planning.clock_ms += 2
    assert planning.plan() == NOW_MS + 2
    planning.clock_ms += 1
    assert planning.plan() is None, "a position that did not move keeps its clock"


def test_the_end_of_a_topic_is_known_since_the_broker_was_asked_for_it(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    times_s = iter([100.0, 100.5, 100.5])
    clock = SimpleNamespace(monotonic=lambda: next(times_s, 103.0))
    peer.add(BARE)
    cluster = Cluster(ClientSettings(peer.url))
    latest = LatestOffset(cluster, TOPIC)
    monkeypatch.setattr(latest_offset_module, "time", clock)
    latest.get()
    # Asked for at 100.5, after the first look at the clock, and known now, at 103.
    assert latest.known_for_ms == 2500
    latest.close()
    cluster.close()


def test_a_limited_batch_carries_the_clock_of_an_end_that_it_reaches(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatestOffset, "known_for_ms", 0)
    monkeypatch.setattr(latest_offset_module, "_POLL_FIRST_S", 0.0)
    for number in range(3):
        peer.add(BARE, first=number)
    planning = Planning(peer, str(tmp_path / "wakes"), monkeypatch, maxRowsPerTrigger="1")
    limit = planning.reader.getDefaultReadLimit()
    clocks_ms = []
    for number in range(3, 8):
        planning.offset = planning.reader.latestOffset(planning.offset, limit)
        clocks_ms.append(from_json(planning.offset)[TOPIC].clock_ms)
        # Entries come as fast as they are read.
        peer.add(BARE, first=number)
        planning.clock_ms += 1000
    # The first end that was known has entry 2; from then on the next one.
    assert clocks_ms[:2] == [None, None]
    assert clocks_ms[2] == NOW_MS
    assert clocks_ms[3] == NOW_MS, "the clock stays until the next end is reached"


def test_a_run_that_ends_without_a_time_by_the_broker_ends(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(BARE)
    planning = Planning(peer, "always", monkeypatch)
    planning.reader.prepareForTriggerAvailableNow()
    planning.clock_ms += 5000
    assert planning.plan() == NOW_MS
    assert planning.plan() is None


def test_a_stream_without_state_has_no_clock_in_its_offsets(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(BARE)
    options = {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"}
    reader = LedgerlakeStreamReader(parse_options(options))
    assert planned(reader, reader.initialOffset())[TOPIC].clock_ms is None
    reader.stop()


def test_the_last_batch_of_a_run_that_ends_carries_the_clock(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"a"))
    planning = Planning(peer, "always", monkeypatch)
    planning.reader.prepareForTriggerAvailableNow()
    planning.clock_ms += 5000
    assert planning.plan() == NOW_MS
    assert planning.plan() is None


def test_a_stream_for_any_sink_has_a_batch_every_second(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"a"))
    planning = Planning(peer, "always", monkeypatch)
    planning.plan()
    clocks_ms = []
    for _ in range(5):
        planning.clock_ms += 600
        clocks_ms.append(planning.plan())
    assert clocks_ms == [NOW_MS + 600, None, NOW_MS + 1800, None, NOW_MS + 3000]


def pattern_reader(peer: Peer, **more: str) -> LedgerlakeStreamReader:
    options = {
        "service.url": peer.url,
        "topicsPattern": "pe+r",
        "startingOffsets": "earliest",
        **more,
    }
    return LedgerlakeStreamReader(parse_options(options))


def planned(reader: LedgerlakeStreamReader, start: dict[str, Any]) -> dict[str, Any]:
    return from_json(reader.latestOffset(start, ReadAllAvailable()))


def test_a_batch_that_another_one_follows_at_once_only_notes_where_a_new_topic_begins(
    peer: Peer,
) -> None:
    peer.add(single(b"a", index=0), single(b"b", index=1))
    reader = pattern_reader(peer, trigger="1 hour")
    _readers.append(reader)
    noted = reader.latestOffset(to_json({}), ReadAllAvailable())
    assert from_json(noted) == {TOPIC: PartitionOffset(Position(7, -1), index=-1)}
    read = reader.latestOffset(noted, ReadAllAvailable())
    (partition,) = reader.partitions(noted, read)
    assert (partition.span.after, partition.span.end, partition.span.after_index) == (
        Position(7, -1),
        Position(7, 1),
        -1,
    )


@pytest.mark.parametrize("options", [{}, {"trigger": "1 hour", "readCompacted": "true"}])
def test_others_read_it_at_once(peer: Peer, options: dict[str, str]) -> None:
    peer.add(single(b"a", index=0), single(b"b", index=1))
    reader = pattern_reader(peer, **options)
    _readers.append(reader)
    (partition,) = reader.partitions(
        to_json({}), reader.latestOffset(to_json({}), ReadAllAvailable())
    )
    assert (partition.span.after, partition.span.end) == (BEFORE_ALL, Position(7, 1))


def test_a_deleted_topic_that_was_read_is_forgotten_and_is_new_when_it_comes_back(
    peer: Peer,
) -> None:
    peer.add(single(b"a"), single(b"b"))
    reader = pattern_reader(peer)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    assert from_json(end)[TOPIC].position == Position(7, 1)
    reader.stop()
    peer.is_deleted = True
    restarted = pattern_reader(peer)
    assert planned(restarted, end) == {}
    restarted.stop()
    peer.is_deleted = False
    peer.entries.clear()
    peer.add(single(b"c"), ledger_id=9)
    returned = pattern_reader(peer)
    empty: dict[str, Any] = to_json({})
    newer = returned.latestOffset(empty, ReadAllAvailable())
    (partition,) = returned.partitions(empty, newer)
    assert (partition.span.after, partition.span.end) == (BEFORE_ALL, Position(9, 0))
    returned.stop()


@pytest.mark.parametrize(
    ("start", "options", "index"),
    [
        pytest.param({}, {}, -1, id="new, no cursor"),
        pytest.param(
            {TOPIC: PartitionOffset(BEFORE_ALL)}, {}, -1, id="without a position, no cursor"
        ),
        pytest.param({}, {"pinnedBy": "s"}, None, id="new since the last run, pinned"),
        pytest.param(
            {TOPIC: PartitionOffset(BEFORE_ALL)},
            {"subscription": "s"},
            None,
            id="without a position, pinned",
        ),
    ],
)
def test_an_empty_topic_of_which_nothing_was_read_is_in_the_offset_with_its_first_ledger(
    peer: Peer, start: Offset, options: dict[str, str], index: int | None
) -> None:
    peer.first_ledger_id = 4
    reader = pattern_reader(peer, **options)
    _readers.append(reader)
    noted = reader.latestOffset(to_json(start), ReadAllAvailable())
    assert from_json(noted) == {TOPIC: PartitionOffset(Position(4, -1), index=index)}
    assert reader.latestOffset(noted, ReadAllAvailable()) == noted
    peer.add(single(b"a"), ledger_id=4)
    time.sleep(1.1)
    (partition,) = reader.partitions(noted, reader.latestOffset(noted, ReadAllAvailable()))
    assert (partition.span.after, partition.span.end) == (Position(4, -1), Position(4, 0))


def test_an_empty_topic_that_comes_while_a_pipeline_runs_had_no_messages_before(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.topics, peer.first_ledger_id = [], 4
    reader = pattern_reader(peer, pinnedBy="s")
    _readers.append(reader)
    assert planned(reader, reader.initialOffset()) == {}
    peer.topics = [TOPIC]
    assert planned(reader, to_json({})) == {TOPIC: PartitionOffset(Position(4, -1), index=-1)}


def test_a_deleted_topic_of_which_something_waits_is_still_woken(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    monkeypatch.setattr(planner, "_clock_ms", lambda: NOW_MS)
    reader = pattern_reader(peer, wakes=path)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()
    peer.is_deleted = True
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: NOW_MS + 5000}))
    restarted = pattern_reader(peer, wakes=path)
    start = restarted.latestOffset(end, ReadAllAvailable())
    assert from_json(start) == {TOPIC: PartitionOffset(BEFORE_ALL)}
    assert planned(restarted, start) == from_json(start)
    monkeypatch.setattr(planner, "_clock_ms", lambda: NOW_MS + 5001)
    later = planned(restarted, start)
    assert later == {TOPIC: PartitionOffset(BEFORE_ALL, clock_ms=NOW_MS + 5001)}
    restarted.stop()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_topic_that_was_deleted_while_something_waits_is_new_when_it_comes_back(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    reader = pattern_reader(peer, wakes=path, pinnedBy="s")
    _readers.append(reader)
    read = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: 2**60}))
    peer.is_deleted = True
    peer.disconnect()
    time.sleep(0.3)
    start = reader.latestOffset(read, ReadAllAvailable())
    (deleted_offset,) = from_json(start).values()
    assert deleted_offset.position == BEFORE_ALL
    peer.is_deleted = False
    peer.entries.clear()
    peer.add(single(b"c"), ledger_id=9)
    if restarts:
        reader = pattern_reader(peer, wakes=path, pinnedBy="s")
        _readers.append(reader)
    time.sleep(1.1)
    end = reader.latestOffset(start, ReadAllAvailable())
    (partition,) = reader.partitions(start, end)
    assert (partition.span.after, partition.span.end) == (BEFORE_ALL, Position(9, 0))


def test_a_topic_that_is_deleted_hides_no_new_partitions_of_the_others(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    names = [f"persistent://public/default/{name}" for name in ("a", "b")]
    options = {"service.url": peer.url, "topics": ",".join(names), "startingOffsets": "earliest"}
    reader = LedgerlakeStreamReader(parse_options(options | {"failOnDataLoss": "false"}))
    _readers.append(reader)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert sorted(from_json(start)) == names
    peer.missing_topics = {names[1]}
    peer.partitions = {names[0]: 2}
    for _ in range(2):
        time.sleep(0.3)
        start = reader.latestOffset(start, ReadAllAvailable())
    assert {f"{names[0]}-partition-0", f"{names[0]}-partition-1"} < set(from_json(start))
    assert (
        len([record for record in caplog.records if "is not there any more" in record.getMessage()])
        == 1
    )


@pytest.mark.parametrize("options", [{}, {"pinnedBy": "s"}, {"subscription": "s"}])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (pb.AuthorizationError, "Client is not authorized to subscribe"),
        (pb.NotAllowedError, "Exceed the maximum number of topics"),
        (pb.ConsumerBusy, "Topic reached max consumers limit"),
        (pb.ServiceNotReady, "Topic is temporarily unavailable"),
    ],
)
def test_a_new_topic_that_the_broker_refuses_ends_no_other_and_is_read_once_it_may_be(
    peer: Peer,
    options: dict[str, str],
    code: pb.ServerError,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    peer.topics = [TOPIC]
    reader = pattern_reader(peer, topicsPattern="pe+r.*", **options)
    _readers.append(reader)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    new = f"{TOPIC}-new"
    peer.topics = [TOPIC, new]
    peer.refuse_topics = {new: (code, words)}
    for _ in range(3):
        time.sleep(0.3)
        start = reader.latestOffset(start, ReadAllAvailable())
    assert set(from_json(start)) == {TOPIC}
    (warning,) = [
        record.getMessage()
        for record in caplog.records
        if "cannot be read yet" in record.getMessage()
    ]
    assert new in warning
    assert words in warning
    reader.stop()
    for is_fixed in (False, True):
        peer.add(single(b"b"), first=len(peer.entries))
        again = pattern_reader(peer, topicsPattern="pe+r.*", retryTimeoutMs="200", **options)
        _readers.append(again)
        if is_fixed:
            again.prepareForTriggerAvailableNow()
        before, start = start, again.latestOffset(start, ReadAllAvailable())
        assert set(from_json(start)) == {TOPIC}
        assert start != before
        if is_fixed:
            again.stop()
            again = pattern_reader(peer, topicsPattern="pe+r.*", retryTimeoutMs="200", **options)
            _readers.append(again)
            again.latestOffset(start, ReadAllAvailable())
        peer.refuse_topics = {} if is_fixed else peer.refuse_topics
    time.sleep(0.3)
    end = from_json(again.latestOffset(start, ReadAllAvailable()))
    assert end[new].position == Position(7, 2)


@pytest.mark.parametrize("code", [pb.AuthorizationError, pb.ServiceNotReady])
def test_a_new_topic_whose_last_message_the_broker_does_not_tell_ends_no_other(
    peer: Peer,
    code: pb.ServerError,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    peer.topics = [TOPIC]
    more = {"topicsPattern": "pe+r.*", "retryTimeoutMs": "200"}
    reader = pattern_reader(peer, **more)
    _readers.append(reader)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    new = f"{TOPIC}-new"
    peer.topics = [TOPIC, new]
    peer.refuse_last = {new: (code, "no word of it")}
    for _ in range(3):
        time.sleep(0.3)
        start = reader.latestOffset(start, ReadAllAvailable())
    assert set(from_json(start)) == {TOPIC}
    (warning,) = [text for text in caplog.messages if "cannot be read yet" in text]
    assert "no word of it" in warning
    again = pattern_reader(peer, **more)
    _readers.append(again)
    peer.add(single(b"b"), first=1)
    start = again.latestOffset(start, ReadAllAvailable())
    assert {name: one.position for name, one in from_json(start).items()} == {TOPIC: Position(7, 1)}
    peer.refuse_last = {}
    time.sleep(0.3)
    assert planned(again, start)[new].position == Position(7, 1)


def read_topic_and_other(peer: Peer, options: dict[str, str]) -> dict[str, Any]:
    """Read two topics of a pattern by a stream that ends then; return its offset."""
    peer.topics = [TOPIC, f"{TOPIC}-other"]
    peer.add(single(b"a"))
    reader = pattern_reader(peer, topicsPattern="pe+r.*", **options)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()
    return start


@pytest.mark.parametrize("options", [{}, {"pinnedBy": "s"}, {"subscription": "s"}])
@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_topic_that_was_read_and_that_the_broker_refuses_ends_the_start(
    peer: Peer, options: dict[str, str], is_fixed: bool
) -> None:
    start = read_topic_and_other(peer, options)
    peer.refuse_topics = {f"{TOPIC}-other": (pb.AuthorizationError, "not authorized")}
    # The driver of a pipeline begins with the topics of a first start.
    for given in [start] if "pinnedBy" in options else [start, None]:
        again = pattern_reader(peer, topicsPattern="pe+r.*", **options)
        _readers.append(again)
        if is_fixed:
            again.prepareForTriggerAvailableNow()
        with pytest.raises(BrokerError, match="not authorized"):
            again.latestOffset(given or again.initialOffset(), ReadAllAvailable())


@pytest.mark.parametrize("options", [{}, {"pinnedBy": "s"}, {"subscription": "s"}])
def test_a_topic_that_was_read_and_was_refused_when_the_end_was_fixed_is_read_by_that_run(
    peer: Peer, options: dict[str, str]
) -> None:
    start = read_topic_and_other(peer, options)
    peer.add(single(b"b"), first=1)
    peer.refuse_topics = {f"{TOPIC}-other": (pb.AuthorizationError, "not authorized")}
    once = pattern_reader(peer, topicsPattern="pe+r.*", **options)
    _readers.append(once)
    once.prepareForTriggerAvailableNow()
    peer.refuse_topics = {}
    end = once.latestOffset(start, ReadAllAvailable())
    assert {name: one.position for name, one in from_json(end).items()} == dict.fromkeys(
        [TOPIC, f"{TOPIC}-other"], Position(7, 1)
    )
    peer.add(single(b"later"), first=2)
    time.sleep(1.1)
    assert once.latestOffset(end, ReadAllAvailable()) == end


def test_a_topic_that_the_broker_denies_at_the_start_has_a_cursor_once_it_is_read(
    peer: Peer,
) -> None:
    peer.topics = [TOPIC]
    peer.add(single(b"a"))
    first = pattern_reader(peer, subscription="s")
    start = first.latestOffset(first.initialOffset(), ReadAllAvailable())
    first.stop()
    peer.add(single(b"b"), first=1)
    peer.missing_topics = {TOPIC}
    again = pattern_reader(peer, subscription="s")
    _readers.append(again)
    again.reportLatestOffset()
    peer.missing_topics = set()
    time.sleep(1.1)
    end = again.latestOffset(start, ReadAllAvailable())
    assert from_json(end)[TOPIC].position == Position(7, 1)
    again.latestOffset(end, ReadAllAvailable())
    assert peer.acknowledged == Position(7, 1)


def test_a_new_topic_whose_subscription_somebody_holds_makes_no_other_wait(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    peer.topics = [TOPIC]
    reader = pattern_reader(peer, topicsPattern="pe+r.*", subscription="s")
    _readers.append(reader)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    peer.topics = [TOPIC, f"{TOPIC}-new"]
    peer.subscriptions["s"] = True
    time.sleep(0.3)
    before_s = time.monotonic()
    assert set(from_json(reader.latestOffset(start, ReadAllAvailable()))) == {TOPIC}
    assert time.monotonic() - before_s < 20
    assert "another consumer holds this subscription" in caplog.text


@pytest.mark.parametrize("limit", [None, 1])
@pytest.mark.parametrize("waits", [False, True])
def test_a_topic_that_is_deleted_after_it_was_read_is_not_planned_again_by_a_run_with_a_fixed_end(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None, waits: bool
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    reader = pattern_reader(
        peer, wakes=path, pinnedBy="s", **({} if limit is None else {"maxRowsPerTrigger": "1"})
    )
    _readers.append(reader)
    reader.prepareForTriggerAvailableNow()
    noted = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    read = reader.latestOffset(noted, ReadAllAvailable())
    assert from_json(read)[TOPIC].position == Position(7, 0)
    if waits:
        save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: 2**60}))
    peer.is_deleted = True
    peer.disconnect()
    time.sleep(1.1)
    reader.reportLatestOffset()
    unread = (
        {TOPIC: PartitionOffset(BEFORE_ALL, clock_ms=from_json(read)[TOPIC].clock_ms)}
        if waits
        else {}
    )
    start = read
    for _ in range(3):
        start = reader.latestOffset(start, ReadAllAvailable())
        assert from_json(start) == unread


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "LOST_TOPIC_S", 0.3)
    monkeypatch.setattr(planner, "_ASK_AGAIN_S", 0.05)


def other_topic(peer: Peer, **more: str) -> tuple[LedgerlakeStreamReader, dict[str, Any]]:
    """A stream that read a topic up to 7:1, where now there is one of the same name that ends at
    3:0.
    """
    reader = LedgerlakeStreamReader(
        parse_options(
            {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest", **more}
        )
    )
    _readers.append(reader)
    peer.entries.clear()
    peer.add(single(b"a"), single(b"b"))
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert from_json(start)[TOPIC].position == Position(7, 1)
    peer.entries.clear()
    peer.add(single(b"c"), ledger_id=3)
    time.sleep(0.2)
    return reader, start


@pytest.mark.usefixtures("lookups")
def test_a_topic_that_ends_before_what_was_read_is_another_one_and_an_error(peer: Peer) -> None:
    reader, start = other_topic(peer)
    with pytest.raises(
        DataLossError,
        match=r"read up to 7:1, .* ends before that, at 3:0: .* another topic.*failOnDataLoss",
    ):
        reader.latestOffset(start, ReadAllAvailable())
    reader.stop()
    once = LedgerlakeStreamReader(parse_options({"service.url": peer.url, "topic": TOPIC}))
    _readers.append(once)
    once.prepareForTriggerAvailableNow()
    with pytest.raises(DataLossError, match="read up to 7:1"):
        once.latestOffset(start, ReadAllAvailable())


@pytest.mark.usefixtures("lookups")
def test_or_it_is_read_from_its_beginning(peer: Peer, caplog: pytest.LogCaptureFixture) -> None:
    reader, start = other_topic(peer, failOnDataLoss="false")
    anew = reader.latestOffset(start, ReadAllAvailable())
    assert "another topic of that name" in caplog.text
    assert from_json(anew) == {TOPIC: PartitionOffset(BEFORE_ALL)}
    assert list(reader.partitions(start, anew)) == []
    end = reader.latestOffset(anew, ReadAllAvailable())
    (partition,) = reader.partitions(anew, end)
    assert (partition.span.after, partition.span.end) == (BEFORE_ALL, Position(3, 0))


@pytest.mark.usefixtures("lookups")
@pytest.mark.parametrize("names", [[TOPIC], [TOPIC, f"{TOPIC}-too"]])
def test_a_run_with_a_fixed_end_reads_another_topic_up_to_that_end(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    _, start = other_topic(peer)
    start = to_json(dict.fromkeys(names, from_json(start)[TOPIC]))
    options = {"service.url": peer.url, "topics": ",".join(names), "failOnDataLoss": "false"}
    once = LedgerlakeStreamReader(parse_options(options))
    _readers.append(once)
    once.prepareForTriggerAvailableNow()
    anew = once.latestOffset(start, ReadAllAvailable())
    peer.add(single(b"later"), ledger_id=3, first=1)
    time.sleep(1.1)
    noted = once.latestOffset(anew, ReadAllAvailable())
    end = once.latestOffset(noted, ReadAllAvailable())
    spans = [partition.span for partition in once.partitions(noted, end)]
    assert [(span.after, span.end) for span in spans] == [(Position(3, -1), Position(3, 0))] * len(
        names
    )
    assert once.latestOffset(end, ReadAllAvailable()) == end


@pytest.mark.parametrize("says", ["nothing", "-1 of its ledger", "it once"])
def test_a_broker_that_says_of_a_topic_what_it_may_say_has_the_same_topic(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    reader, start = other_topic(peer)
    ends = {"-1 of its ledger": Position(3, -1)}
    peer.last_position = ends.get(says)
    if says == "nothing":
        peer.entries.clear()
    if says == "it once":
        clock = SimpleNamespace(
            **vars(time) | {"sleep": lambda _: setattr(peer, "last_position", Position(7, 1))}
        )
        monkeypatch.setattr(planner, "time", clock)
    assert from_json(reader.latestOffset(start, ReadAllAvailable()))[TOPIC].position >= Position(
        7, 1
    )


@pytest.mark.usefixtures("lookups")
def test_a_topic_that_ends_in_the_ledger_that_was_read_and_before_that_entry_is_another_one(
    peer: Peer,
) -> None:
    reader, start = other_topic(peer)
    peer.entries.clear()
    peer.add(single(b"c"))
    with pytest.raises(
        DataLossError, match=r"read up to 7:1, and the topic ends before that, at 7:0"
    ):
        reader.latestOffset(start, ReadAllAvailable())


ADDED = ["nothing", "a time", "an index", "both"]


def added(what: str, number: int) -> bytes:
    """Return an entry with what a broker adds to it."""
    broker = pb.BrokerEntryMetadata()
    if what in ("a time", "both"):
        broker.broker_timestamp = NOW_MS + 1000 + number
    if what in ("an index", "both"):
        broker.index = number
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=NOW_MS - 1000 + number
    )
    return encode_entry(metadata, b"v", None if what == "nothing" else broker)


@pytest.mark.parametrize("then", ADDED)
@pytest.mark.parametrize("before", ADDED)
@pytest.mark.parametrize("is_same", [True, False])
def test_whatever_a_broker_adds_to_entries_before_and_then_only_another_entry_is_another_topic(
    peer: Peer, before: str, then: str, is_same: bool
) -> None:
    peer.add(added(before, 0))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"})
    )
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()
    peer.entries.clear()
    peer.add(added(then, 0 if is_same else 5), added(then, 6))
    _readers.append(reader)
    kinds = {before, then}
    # By the producer's time, which is always there.
    is_known = before in ("nothing", "an index")
    is_known |= kinds <= {"a time", "both"} or kinds <= {"an index", "both"}
    if is_same or not is_known:
        end = reader.latestOffset(start, ReadAllAvailable())
        assert [(p.span.after, p.span.end) for p in reader.partitions(start, end)] == [
            (Position(7, 0), Position(7, 1))
        ]
    else:
        with pytest.raises(
            DataLossError,
            match=r"read up to 7:0, and the topic has another entry there.*another topic",
        ):
            reader.latestOffset(start, ReadAllAvailable())


def test_an_entry_that_cannot_be_read_is_not_known_to_be_another_one(
    peer: Peer,
) -> None:
    peer.add(added("both", 0))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"})
    )
    _readers.append(reader)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()
    peer.entries.clear()
    peer.add(b"no entry", added("both", 6))
    end = from_json(reader.latestOffset(start, ReadAllAvailable()))
    assert end[TOPIC].position == Position(7, 1)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("nothing", "adds no entry metadata to .*: broker columns are null, order is by publish"),
        ("a time", "adds no index to .*: broker_index is null"),
        ("an index", "adds no timestamp to .*: broker_timestamp is null, order is by publish time"),
        ("both", ""),
    ],
)
def test_a_stream_says_once_which_metadata_the_broker_does_not_add(
    peer: Peer, caplog: pytest.LogCaptureFixture, what: str, said: str
) -> None:
    peer.add(added(what, 0))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"})
    )
    _readers.append(reader)
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.latestOffset(offset, ReadAllAvailable())
    assert len(caplog.messages) == bool(said)
    assert re.search(said, " ".join(caplog.messages))


def test_another_topic_with_the_ledger_that_was_read_is_read_from_its_beginning_if_losses_are_allowed(
    peer: Peer,
) -> None:
    peer.add(single(b"a", 0), single(b"b", 1), single(b"c", 2))
    start = to_json({TOPIC: PartitionOffset(Position(7, 1), None, NOW_MS, 40)})
    options = {"service.url": peer.url, "topic": TOPIC, "failOnDataLoss": "false"}
    reader = LedgerlakeStreamReader(parse_options(options))
    _readers.append(reader)
    anew = reader.latestOffset(start, ReadAllAvailable())
    end = reader.latestOffset(anew, ReadAllAvailable())
    (partition,) = reader.partitions(anew, end)
    assert (partition.span.after, partition.span.end) == (BEFORE_ALL, Position(7, 2))


def test_a_topic_that_is_replaced_while_the_stream_runs_is_noticed_and_an_unchanged_one_is_not_read_for_that(
    peer: Peer,
) -> None:
    peer.add(single(b"a", 0), single(b"b", 1))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"})
    )
    _readers.append(reader)
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.latestOffset(offset, ReadAllAvailable())
    opened = peer.requests.count("CommandSubscribe")
    for _ in range(3):
        time.sleep(0.1)
        reader.latestOffset(offset, ReadAllAvailable())
    assert peer.requests.count("CommandSubscribe") == opened
    peer.entries.clear()
    peer.add(*(single(b"new", index) for index in range(10, 14)))
    peer.disconnect()
    time.sleep(1.0)
    with pytest.raises(
        DataLossError, match=r"read up to 7:1, and the topic has another entry there"
    ):
        reader.latestOffset(offset, ReadAllAvailable())


def test_the_entries_that_were_read_are_looked_at_together_and_one_that_is_gone_says_nothing(
    peer: Peer,
) -> None:
    names = [f"{TOPIC}-{number}" for number in range(20)]
    peer.add(single(b"a", 0), single(b"b", 1))
    start = {name: PartitionOffset(Position(7, 1), None, 1_700_000_000_001, 1) for name in names}
    start[names[3]] = PartitionOffset(Position(5, 9), None, 1_700_000_000_000, 0)
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topics": ",".join(names)})
    )
    _readers.append(reader)
    end = from_json(reader.latestOffset(to_json(start), ReadAllAvailable()))
    assert {offset.position for offset in end.values()} == {Position(7, 1)}


@pytest.mark.parametrize("ledger_id", [60, 7, 3])
def test_a_partition_that_was_read_to_its_end_and_deleted_and_made_again_is_read_from_its_beginning(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, ledger_id: int
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    peer.partitions = {TOPIC: 1}
    peer.add(single(b"a", 0), single(b"b", 1))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"})
    )
    _readers.append(reader)
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    peer.is_deleted = True
    peer.entries.clear()
    peer.disconnect()
    time.sleep(0.3)
    assert reader.latestOffset(offset, ReadAllAvailable()) == offset
    peer.is_deleted = False
    peer.add(single(b"new", 0), ledger_id=ledger_id)
    deadline_s = time.monotonic() + 5.0
    while (
        anew := reader.latestOffset(offset, ReadAllAvailable())
    ) == offset and time.monotonic() < deadline_s:
        time.sleep(0.1)
    end = reader.latestOffset(anew, ReadAllAvailable())
    (partition,) = reader.partitions(anew, end)
    assert [row["value"] for part in reader.read(partition) for row in part.to_pylist()] == [b"new"]


def test_a_start_that_the_topic_has_not_reached_yet_is_no_other_topic(peer: Peer) -> None:
    peer.add(single(b"a"), ledger_id=3)
    offset = json.dumps(to_json({TOPIC: PartitionOffset(Position(3, 5))}))
    reader = LedgerlakeStreamReader(
        parse_options({"service.url": peer.url, "topic": TOPIC, "startingOffsets": offset})
    )
    _readers.append(reader)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start


@pytest.mark.parametrize("limits", [{}, {"maxRowsPerTrigger": "1"}])
def test_what_a_deleted_topic_is_known_to_have_had_is_planned_and_found_lost(
    peer: Peer, limits: dict[str, str]
) -> None:
    peer.add(single(b"a"))
    reader = pattern_reader(peer, **limits)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    peer.add(single(b"b"), first=1)
    time.sleep(0.3)
    known = reader.reportLatestOffset()
    assert known is not None
    assert from_json(known)[TOPIC].position == Position(7, 1)
    peer.is_deleted = True
    end = reader.latestOffset(start, ReadAllAvailable())
    assert from_json(end)[TOPIC].position == Position(7, 1)
    (partition,) = reader.partitions(start, end)
    with pytest.raises(DataLossError, match="the topic was deleted"):
        list(reader.read(partition))
    reader.stop()


class Ended:
    """A stream up to message 4, of ten in a ledger."""

    def __init__(self, peer: Peer, **options: str) -> None:
        self.peer = peer
        self.offset: dict[str, Any] | None = None
        self._options = parse_options(
            {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"} | options
        )

    def run(self, *, is_fixed: bool, **options: str) -> list[bytes]:
        """Start the stream again and read what there is."""
        given = to_spark(self._options) | options
        reader = LedgerlakeStreamReader(parse_options(given))
        values: list[bytes] = []
        try:
            self.offset = self.offset or reader.initialOffset()
            if is_fixed:
                reader.prepareForTriggerAvailableNow()
            while (end := reader.latestOffset(self.offset, ReadAllAvailable())) != self.offset:
                for part in reader.partitions(self.offset, end):
                    for rows in reader.read(part):
                        values += rows["value"].to_pylist()
                self.offset = end
        finally:
            reader.stop()
        return values

    def remove_all(self) -> None:
        """Remove what there is; other messages follow."""
        self.peer.entries.clear()
        self.peer.first_ledger_id = 8
        self.peer.add(*(single(b"%d" % n, n) for n in range(20, 25)), ledger_id=8)


ENDINGS = [
    {"endingIndex": "4"},
    {"endingTime": str(BROKER_TIME_MS + 5)},
    {"endingOffsets": "7:4"},
    {"endingOffsets": "before 7:5"},
]


@pytest.mark.parametrize("is_fixed", [False, True], ids=["goes on", "once"])
@pytest.mark.parametrize("came_first", [5, 10], ids=["reached later", "there"])
@pytest.mark.parametrize("ending", ENDINGS, ids=str)
def test_a_stream_that_has_reached_its_end_loses_nothing_if_what_follows_is_removed(
    peer: Peer, ending: dict[str, str], came_first: int, is_fixed: bool
) -> None:
    stream = Ended(peer, **ending)
    peer.add(*(single(b"%d" % n, n) for n in range(came_first)))
    values = stream.run(is_fixed=is_fixed)
    peer.add(*(single(b"%d" % n, n) for n in range(came_first, 10)), first=came_first)
    assert values + stream.run(is_fixed=is_fixed) == [b"%d" % n for n in range(5)]
    reached = stream.offset
    stream.remove_all()
    assert stream.run(is_fixed=is_fixed) == []
    assert stream.offset == reached


@pytest.mark.parametrize(
    "later", [{"endingIndex": "7"}, {"endingTime": str(BROKER_TIME_MS + 8)}], ids=str
)
def test_a_later_end_than_the_one_that_was_reached_is_one_to_read_to(
    peer: Peer, later: dict[str, str]
) -> None:
    (name,) = later
    ending = next(ending for ending in ENDINGS if name in ending)
    stream = Ended(peer, **ending)
    peer.add(*(single(b"%d" % n, n) for n in range(10)))
    stream.run(is_fixed=True)
    reached = stream.offset
    assert stream.run(is_fixed=True, **later) == [b"5", b"6", b"7"]
    stream.offset = reached
    stream.remove_all()
    with pytest.raises(DataLossError, match="after 7:4 and before 8"):
        stream.run(is_fixed=True, **later)


@pytest.mark.parametrize("limit", [{"maxRowsPerTrigger": "10"}, {"maxBytesPerTrigger": "100"}])
def test_the_part_of_an_entry_before_the_end_of_a_stream_counts_for_the_limit(
    peer: Peer, limit: dict[str, str]
) -> None:
    peer.add(batch([b"x"] * 8, index=7), batch([b"y"] * 100, index=107), first=0)
    options = {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"} | limit
    reader = LedgerlakeStreamReader(parse_options(options | {"endingOffsets": "7:1:89"}))
    _readers.append(reader)
    offset, counts = reader.initialOffset(), []
    while (end := reader.latestOffset(offset, reader.getDefaultReadLimit())) != offset:
        parts = reader.partitions(offset, end)
        counts.append(sum(rows.num_rows for part in parts for rows in reader.read(part)))
        offset = end
    assert counts == [8, 90]


def test_a_batch_of_too_few_messages_waits_until_enough_have_come_or_the_delay_is_over(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [NOW_MS]
    monkeypatch.setattr(planner, "_clock_ms", lambda: clock[0])
    options = {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"}
    reader = LedgerlakeStreamReader(
        parse_options(options | {"minRowsPerTrigger": "3", "maxTriggerDelay": "30 s"})
    )
    _readers.append(reader)
    offset = reader.initialOffset()

    def plan() -> bool:
        nonlocal offset
        time.sleep(0.15)
        before, offset = offset, reader.latestOffset(offset, ReadAllAvailable())
        return before != offset

    peer.add(single(b"a"))
    assert plan()
    peer.add(single(b"b", index=1), single(b"c", index=2), first=1)
    assert not plan()
    peer.add(single(b"d", index=3), first=3)
    assert plan()
    peer.add(single(b"e", index=4), first=4)
    assert not plan()
    clock[0] += 30_000
    assert plan()
    peer.add(single(b"f", index=5), first=5)
    time.sleep(1.1)
    reader.prepareForTriggerAvailableNow()
    assert plan()


def test_messages_without_an_index_are_counted_by_reading_them(peer: Peer) -> None:
    cluster = Cluster(ClientSettings(peer.url))
    try:
        peer.add(BARE, BARE, BARE)
        end = latest_offset(cluster, TOPIC)
        assert end.index is None
        start = PartitionOffset(BEFORE_ALL)
        assert count_messages(cluster, TOPIC, start, end, 10) == 3
        assert count_messages(cluster, TOPIC, start, end, 2) == 2
    finally:
        cluster.close()


def test_messages_are_counted_by_reading_them_if_the_broker_began_to_count_again(
    peer: Peer,
) -> None:
    cluster = Cluster(ClientSettings(peer.url))
    try:
        peer.add(single(b"b", index=40), ledger_id=8)
        start = latest_offset(cluster, TOPIC)
        peer.add(single(b"c", index=0), single(b"d", index=1), ledger_id=9)
        assert count_messages(cluster, TOPIC, start, latest_offset(cluster, TOPIC), 10) == 2
    finally:
        cluster.close()


def test_of_a_backlog_that_grows_only_what_came_is_read_to_count_it(peer: Peer) -> None:
    sent = []

    def send(position: Position, frame: bytes) -> bytes:
        sent.append(position)
        return frame

    peer.rewrite = send
    cluster = Cluster(ClientSettings(peer.url))
    counts = BacklogCounts(cluster, 100)
    try:
        for count in range(1, 6):
            peer.add(BARE, first=count)
            sent.clear()
            assert counts.total({}, {TOPIC: PartitionOffset(Position(7, count))}) == count
            assert set(sent) == {Position(7, count)}
        assert (
            counts.total(
                {TOPIC: PartitionOffset(Position(7, 4))}, {TOPIC: PartitionOffset(Position(7, 5))}
            )
            == 1
        )
    finally:
        cluster.close()


def test_what_a_deleted_topic_had_is_not_waited_for(peer: Peer) -> None:
    peer.is_deleted = True
    cluster = Cluster(ClientSettings(peer.url))
    try:
        assert BacklogCounts(cluster, 5).total({}, {TOPIC: PartitionOffset(Position(7, 1))}) == 5
    finally:
        cluster.close()


def test_what_is_due_does_not_wait_for_more(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    planning = Planning(peer, path, monkeypatch, minRowsPerTrigger="100")
    planning.plan()
    peer.add(single(b"b", index=1), first=1)
    time.sleep(0.15)
    before = planning.offset
    planning.plan()
    assert planning.offset == before
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: NOW_MS + 5000}))
    planning.clock_ms += 5001
    planning.plan()
    assert from_json(planning.offset)[TOPIC].position > from_json(before)[TOPIC].position


def test_what_is_due_does_not_wait_for_the_trigger(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="10 s")
    assert planning.clock_ms == NOW_MS, "the first batch is planned at once"
    planning.save_wakeup(1, NOW_MS + 2500)
    assert [planning.plan() for _ in range(3)] == [None, None, NOW_MS + 2501]


@pytest.mark.parametrize("machine_is_ahead_ms", [-3_600_000, 3_600_000])
def test_the_clock_of_the_broker_decides_what_is_due_and_not_that_of_the_machine(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine_is_ahead_ms: int
) -> None:
    def broker_ms() -> int:
        return int(time.time() * 1000) + machine_is_ahead_ms

    peer.clock_ms = broker_ms
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    options = {
        "service.url": peer.url,
        "topic": TOPIC,
        "startingOffsets": "earliest",
        "wakes": path,
        "trigger": "10 s",
    }
    reader = LedgerlakeStreamReader(parse_options(options))
    _readers.append(reader)
    offset = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    due_ms = broker_ms() + 600
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: due_ms}))
    clock_ms = None
    while clock_ms is None and broker_ms() < due_ms + 5_000:
        offset = reader.latestOffset(offset, ReadAllAvailable())
        clock_ms = from_json(offset)[TOPIC].clock_ms
    assert clock_ms is not None
    assert due_ms < clock_ms <= broker_ms()


def test_messages_that_a_batch_has_left_due_are_planned_for_at_once_and_each_time(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="10 s")
    planning.save_wakeup(1, NOW_MS + 100)
    assert planning.plan() == NOW_MS + 101
    planning.save_wakeup(2, -(NOW_MS + 100))
    assert [planning.plan() for _ in range(3)] == [NOW_MS + 102, NOW_MS + 103, NOW_MS + 104]
    assert planning.clock_ms == NOW_MS + 101, "no trigger is waited for"
    planning.save_wakeup(3, None)
    assert planning.plan() is None


def test_a_run_with_a_fixed_end_goes_on_while_messages_are_left_due(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch)
    planning.clock_ms += 5000
    planning.reader.prepareForTriggerAvailableNow()
    planning.save_wakeup(1, NOW_MS + 100)
    assert planning.plan() == NOW_MS + 5000
    planning.save_wakeup(2, -(NOW_MS + 100))
    assert planning.plan() == NOW_MS + 5001
    planning.save_wakeup(3, NOW_MS + 5001)
    assert planning.plan() is None


def test_a_run_with_a_fixed_end_ends_though_the_topic_is_gone_of_which_a_message_repeats(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer.add(single(b"a"))
    path = str(tmp_path / "wakes")
    clock = [NOW_MS]
    monkeypatch.setattr(planner, "_clock_ms", lambda: clock[0])
    reader = pattern_reader(peer, wakes=path)
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    reader.stop()
    peer.is_deleted = True
    restarted = pattern_reader(peer, wakes=path)
    _readers.append(restarted)
    restarted.prepareForTriggerAvailableNow()
    save_wakeup_times(Place(path), 1, WakeupTimes({TOPIC: NOW_MS - 1000}))
    first = restarted.latestOffset(end, ReadAllAvailable())
    assert from_json(first)[TOPIC].clock_ms == NOW_MS
    clock[0] += 5000
    save_wakeup_times(Place(path), 2, WakeupTimes({TOPIC: NOW_MS + 1000}))
    assert restarted.latestOffset(first, ReadAllAvailable()) == first


def test_messages_that_are_not_delayed_wait_for_the_trigger_but_no_call_waits_for_long(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="2500 ms")
    peer.add(single(b"b", index=1), first=1)
    clocks_ms, before = [], planning.offset
    while planning.offset == before:
        time.sleep(0.1)
        planning.plan()
        clocks_ms.append(planning.clock_ms)
    assert clocks_ms == [NOW_MS + 1000, NOW_MS + 2000, NOW_MS + 2500]


def test_an_idle_pipeline_asks_the_broker_no_more_often_than_its_trigger_says(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="5 s")
    asked = len(peer.requests)
    for _ in range(4):
        # The end is asked for again when an answer is this old.
        time.sleep(0.15)
        planning.plan()
        assert planning.reader.reportLatestOffset() == planning.offset
    assert len(peer.requests) == asked
    planning.plan()
    assert len(peer.requests) > asked


def test_a_run_with_a_fixed_end_waits_for_no_trigger(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planning = begun(peer, tmp_path, monkeypatch, trigger="10 s")
    peer.add(single(b"b", index=1), first=1)
    time.sleep(0.15)
    planning.reader.prepareForTriggerAvailableNow()
    before = planning.offset
    planning.plan()
    assert planning.offset != before
    assert planning.clock_ms == NOW_MS


def pin_of(
    peer: Peer, start: Position, index: int | None = None, **options: str
) -> Position | None:
    """From where on a cursor is planned to have kept everything, of a range behind ``start``."""
    base_options = {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest"}
    reader = LedgerlakeStreamReader(parse_options(base_options | options))
    try:
        end = to_json({TOPIC: PartitionOffset(Position(9, 5))})
        (partition,) = reader.partitions(to_json({TOPIC: PartitionOffset(start, index=index)}), end)
        span: EntryRange = partition.span
        return span.pinned_from
    finally:
        reader.stop()


def test_a_range_without_an_index_says_whether_a_cursor_has_kept_it(peer: Peer) -> None:
    start = Position(7, 3)
    assert pin_of(peer, start) is None
    peer.acknowledged = start
    assert pin_of(peer, start, subscription="s") == BEFORE_ALL
    peer.acknowledged = Position(9, -1)
    assert pin_of(peer, start, subscription="s") == BEFORE_ALL
    peer.acknowledged = Position(9, 4)
    assert pin_of(peer, start, subscription="s") == Position(9, 4)


def test_a_range_behind_an_index_says_it_too_since_what_follows_may_have_none(peer: Peer) -> None:
    start = Position(7, 3)
    assert pin_of(peer, start, 3) is None
    assert pin_of(peer, start, 3, pinnedBy="s") == BEFORE_ALL
    peer.acknowledged = Position(9, 4)
    assert pin_of(peer, start, 3, subscription="s") == Position(9, 4)


def test_a_cursor_that_is_moved_while_a_stream_runs_is_noticed_where_a_range_goes_into_another_ledger(
    peer: Peer,
) -> None:
    options = {
        "service.url": peer.url,
        "topic": TOPIC,
        "startingOffsets": "earliest",
        "subscription": "s",
    }
    reader = LedgerlakeStreamReader(parse_options(options))
    _readers.append(reader)

    def pin(start: Position, end: Position) -> Position | None:
        (partition,) = reader.partitions(
            *(to_json({TOPIC: PartitionOffset(position)}) for position in (start, end))
        )
        span: EntryRange = partition.span
        return span.pinned_from

    peer.acknowledged = Position(7, 3)
    assert pin(Position(7, 3), Position(8, 1)) == BEFORE_ALL
    peer.acknowledged = Position(9, 4)
    assert pin(Position(8, 1), Position(8, 5)) == BEFORE_ALL, (
        "in one ledger nothing can be lost, and nobody is asked"
    )
    assert pin(Position(8, 5), Position(9, 6)) == Position(9, 4)


def test_what_a_deleted_topic_is_known_to_have_had_is_not_forgotten_while_its_batch_waits_for_more(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.0)
    clock = [NOW_MS]
    monkeypatch.setattr(planner, "_clock_ms", lambda: clock[0])
    options = {
        "service.url": peer.url,
        "topic": TOPIC,
        "startingOffsets": "earliest",
        "failOnDataLoss": "false",
    }
    reader = LedgerlakeStreamReader(
        parse_options(options | {"minRowsPerTrigger": "3", "maxTriggerDelay": "30 s"})
    )
    _readers.append(reader)
    peer.add(single(b"a"))
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    peer.add(single(b"b", index=1), first=1)
    time.sleep(0.15)
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    peer.is_deleted, peer.missing_topics = True, {TOPIC}
    peer.disconnect()
    for _ in range(4):
        time.sleep(0.6)
        assert reader.latestOffset(start, ReadAllAvailable()) == start
    clock[0] += 30_000
    assert planned(reader, start)[TOPIC].position == Position(7, 1)


def test_a_named_topic_that_is_deleted_is_an_error_however_long_the_trigger_is(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_list, "_REFRESH_S", 0.2)
    planning = begun(peer, tmp_path, monkeypatch, trigger="5 s")
    peer.missing_topics = {TOPIC}
    time.sleep(0.25)
    assert [planning.plan() for _ in range(4)] == [None] * 4
    with pytest.raises(TopicNotFoundError):
        planning.plan()
    assert planning.clock_ms == NOW_MS + 5000
