"""Names, addresses and pauses."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.client.backoff import Backoff
from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.client.topics import (
    TopicSelection,
    full_name,
    full_pattern,
    partition_name,
    split_partition,
)
from ledgerlake.client.transport import Address, parse_service_url
from ledgerlake.errors import TransportError, UsageError
from ledgerlake.options.source_options import parse_options
from tests.peer import Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.mark.parametrize(
    "name", ["orders", "public/default/orders", "persistent://public/default/orders", " orders "]
)
def test_short_topic_names_are_made_whole(name: str) -> None:
    assert full_name(name) == "persistent://public/default/orders"


@pytest.mark.parametrize("name", ["", "a/b", "a/b/c/d", "http://a/b/c", "a b"])
def test_what_is_no_topic_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="not a topic name"):
        full_name(name)


def test_a_partition_knows_its_topic() -> None:
    name = partition_name("persistent://a/b/c", 12)
    assert split_partition(name) == ("persistent://a/b/c", 12)
    assert split_partition("persistent://a/b/c") == ("persistent://a/b/c", -1)


@pytest.mark.parametrize("topic", ["persistent://a/b/c", "persistent://a/b/c-partition-1"])
@pytest.mark.parametrize("number", [0, 999_999, 1_000_000, 2**31 - 1])
def test_what_pulsar_takes_for_a_partition_is_one_whatever_its_number(
    topic: str, number: int
) -> None:
    assert split_partition(partition_name(topic, number)) == (topic, number)


@pytest.mark.parametrize("number", ["00", "01", "-1", "2147483648", "²", "٣", ""])
def test_what_pulsar_does_not_take_for_a_partition_is_a_topic_of_its_own(number: str) -> None:
    name = f"persistent://a/b/c-partition-{number}"
    assert split_partition(name) == (name, -1)


PARTITIONS = {
    "orders": 3,
    "orders-partition-1": 0,
    "returns": 1,
    "plain": 0,
    "plain-partition-0": 0,
}
NAMED = {*PARTITIONS, "orders-partition-0", "orders-partition-2", "returns-partition-0"}
SPELLINGS = ["{}", "public/default/{}", "persistent://public/default/{}", " {} "]


@pytest.fixture(scope="module")
def partitioned() -> Iterator[Peer]:
    with Peer(partitions={full_name(name): PARTITIONS[name] for name in PARTITIONS}) as peer:
        yield peer


@given(st.lists(st.tuples(st.sampled_from(sorted(NAMED)), st.sampled_from(SPELLINGS)), min_size=1))
def test_each_topic_partition_is_read_once_whatever_names_select_it(
    partitioned: Peer, named: list[tuple[str, str]]
) -> None:
    names = ",".join(spelling.format(name) for name, spelling in named)
    selection = parse_options({"service.url": partitioned.url, "topics": names}).topics
    cluster = Cluster(ClientSettings(partitioned.url, give_up_after_s=2))
    found = cluster.all_partitions(selection)
    cluster.close()
    assert len(found) == len(set(found))
    assert set(found) == {
        full_name(partition)
        for name, _ in named
        for partition in [f"{name}-partition-{n}" for n in range(PARTITIONS.get(name, 0))] or [name]
    }


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("pulsar://h", [Address("h", 6650, False)]),
        ("pulsar://h:1", [Address("h", 1, False)]),
        ("pulsar://[::1]:2/", [Address("::1", 2, False)]),
        ("pulsar+ssl://h", [Address("h", 6651, True)]),
        (
            "pulsar+ssl://a:1,b,[::1]:3",
            [Address("a", 1, True), Address("b", 6651, True), Address("::1", 3, True)],
        ),
    ],
)
def test_service_urls(url: str, expected: list[Address]) -> None:
    assert parse_service_url(url) == expected
    assert [parse_service_url(address.url) for address in expected] == [
        [address] for address in expected
    ]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "h:6650",
        "http://h:1",
        "pulsar://",
        "pulsar://h:99999",
        "pulsar://h:x",
        "pulsar://a,",
        "pulsar+tls://a",
    ],
)
def test_what_is_no_service_url_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"write pulsar://host:6650|port above"):
        parse_service_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "pulsar://me:hush@host:6650",
        "http://me:hush@host",
        "pulsar://a:1,me:hush@b:1",
        "pulsar://hush@host",
        "pulsar://me:/hush@host:6650",
        "pulsar:me:hush@h",
    ],
)
def test_a_password_in_a_service_url_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UsageError, match="holds no user and no password") as raised:
        parse_service_url(url)
    assert "hush" not in str(raised.value)


ERROR = TransportError("no broker listens at pulsar://h:6650")


def test_pauses_double_up_to_the_most_and_end() -> None:
    backoff = Backoff(first_s=1, most_s=5, give_up_after_s=20)
    assert [backoff.failed(now_s, ERROR) for now_s in (0, 1, 3, 7, 12, 17, 22)] == [
        1,
        2,
        4,
        5,
        5,
        5,
        None,
    ]


def test_success_starts_over() -> None:
    backoff = Backoff(first_s=1, most_s=5, give_up_after_s=20)
    assert [backoff.failed(0, ERROR), backoff.failed(19, ERROR)] == [1, 2]
    backoff.succeeded()
    assert backoff.failed(100, ERROR) == 1


def test_what_fails_for_long_is_said_each_quarter_of_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    backoff = Backoff()
    for now_s in range(40):
        backoff.failed(now_s, ERROR)
    assert caplog.messages == [f"{ERROR}; trying again since {seconds} s" for seconds in (15, 30)]
    backoff.succeeded()
    backoff.failed(40, ERROR)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("orders-.*", ["orders-1", "orders-", "orders-1-partition-0"], ["orders", "my-orders-1"]),
        ("persistent://public/default/a|b", ["a", "b", "a-partition-11"], ["ab"]),
        (".*", ["x"], ["__change_events", "__transaction_buffer_snapshot-partition-1"]),
    ],
)
def test_a_pattern_matches_the_whole_local_name_of_a_topic(
    pattern: str, matching: list[str], others: list[str]
) -> None:
    selection = TopicSelection(pattern=full_pattern(pattern))
    assert selection.namespace == "public/default"
    assert all(selection.matches(f"persistent://public/default/{name}") for name in matching)
    assert not any(selection.matches(f"persistent://public/default/{other}") for other in others)


def test_a_pattern_names_its_namespace() -> None:
    assert TopicSelection(pattern=full_pattern("t/n/a.*")).namespace == "t/n"


@pytest.mark.parametrize("read", [full_name, full_pattern])
@pytest.mark.parametrize(
    "name", ["non-persistent://public/default/a", " non-persistent://a", "non-persistent://t/n/a.*"]
)
def test_a_topic_that_is_not_stored_is_refused_at_once(
    read: Callable[[str], str], name: str
) -> None:
    with pytest.raises(
        UsageError, match=r"brokers store no entries of .*name a persistent:// topic"
    ):
        read(name)


@pytest.mark.parametrize("pattern", ["a(", "a/b", "a/b/c/d", "", "http://t/n/a"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="pattern"):
        full_pattern(pattern)
