"""Options: case, hints, and refusals before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.bounds import AtIndex, AtTime, Before, Bound
from ledgerlake.options.source_options import parse_options
from ledgerlake.wire.message_id import AFTER_ALL, BEFORE_ALL, MessageId, Position, to_bytes

NOON_MS = 1_777_636_800_000
MINIMUM = {"service.url": "pulsar://h:1", "topic": "t"}


def refusal(**options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        parse_options({**MINIMUM, **options})
    return caught.value.message


def test_the_least_that_is_needed() -> None:
    options = parse_options(MINIMUM)
    assert (options.client.service_url, options.topics.names) == (
        "pulsar://h:1",
        ("persistent://public/default/t",),
    )
    assert (options.view, options.max_rows_per_trigger, options.subscription) == (
        "messages",
        None,
        None,
    )


def test_names_are_case_insensitive() -> None:
    options = parse_options(
        {"SERVICE.URL": "pulsar://h:1", "TOPICS": "a, b,a", "MAXROWSPERTRIGGER": "5"}
    )
    assert options.topics.names == (
        "persistent://public/default/a",
        "persistent://public/default/b",
    )
    assert options.max_rows_per_trigger == 5


def test_an_unknown_option_names_the_nearest() -> None:
    assert (
        refusal(startingOfset="latest")
        == "the source has no option 'startingOfset'; did you mean 'startingOffsets'?"
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"service.url": "http://x"}, "write pulsar://host:6650"),
        ({"topics": "a"}, "exactly one of the options 'topic', 'topics' and 'topicsPattern'"),
        ({"topic": "a,b"}, "use 'topics' for several"),
        ({"view": "rows"}, "it is messages, entries or compat"),
        ({"maxRowsPerTrigger": "0"}, "a number above 0"),
        ({"maxBytesPerTrigger": "1k"}, "a number above 0"),
        ({"requireBrokerMetadata": "yes"}, "true or false"),
        ({"startingOffsets": "soon"}, "the option 'startingOffsets': 'soon' is not a message id"),
        ({"startingOffsets": "{oops"}, "is not JSON"),
    ],
)
def test_a_wrong_value_is_named_with_what_it_may_be(options: dict[str, str], expected: str) -> None:
    assert expected in refusal(**options)


def test_starts_differ_by_topic_partition() -> None:
    options = parse_options(
        {**MINIMUM, "startingOffsets": '{"t-partition-1": "3:4:5", "t-partition-0": "earliest"}'}
    )
    assert options.starting_of("persistent://public/default/t-partition-1", "latest") == MessageId(
        3, 4, 5
    )
    assert options.starting_of("persistent://public/default/t-partition-0", "latest") == "earliest"
    assert options.starting_of("persistent://public/default/t-partition-2", "latest") == "latest"


@pytest.mark.parametrize(
    ("text", "time_ms"),
    [
        ("1777626000123", 1_777_626_000_123),
        ("2026-05-01T09:00:00.123Z", 1_777_626_000_123),
        ("2026-05-01T11:00:00.123+02:00", 1_777_626_000_123),
    ],
)
def test_a_start_by_time_is_iso_with_a_zone_or_milliseconds(text: str, time_ms: int) -> None:
    assert parse_options({**MINIMUM, "startingTime": text}).starting == AtTime(time_ms)
    name = "persistent://public/default/t"
    assert parse_options(
        {**MINIMUM, "startingTime": json.dumps({"t": text})}
    ).starting_by_topic == {name: AtTime(time_ms)}
    if not text.isdigit():
        assert parse_options({**MINIMUM, "startingOffsets": text}).starting == AtTime(time_ms)


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"endingOffsets": "2026-05-01T09:00:00.123Z"}, AtTime(1_777_626_000_123)),
        ({"endingTime": str(NOON_MS)}, AtTime(NOON_MS)),
        ({"endingIndex": "17"}, AtIndex(17)),
        ({"endingOffsets": "Index 17"}, AtIndex(17)),
        ({"endingOffsets": "before 1:2:3"}, Before(MessageId(1, 2, 3))),
        ({"endingOffsets": "CAEQAhgDMAA="}, MessageId(1, 2)),
    ],
)
def test_an_end_is_an_id_a_time_or_an_index(options: dict[str, str], bound: Bound) -> None:
    assert parse_options({**MINIMUM, **options}).ending_of("persistent://public/default/t") == bound


def test_a_bound_of_a_topic_is_that_of_its_partitions_unless_they_have_their_own() -> None:
    options = parse_options({**MINIMUM, "startingIndex": '{"t": 5, "t-partition-1": 7}'})
    assert options.starting_of("persistent://public/default/t-partition-0", "latest") == AtIndex(5)
    assert options.starting_of("persistent://public/default/t-partition-1", "latest") == AtIndex(7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"startingTime": "2026-05-01T09:00:00"},
            "has no zone; write for example 2026-05-01T09:00:00Z",
        ),
        ({"startingTime": "2026-05-01"}, "has no zone; write for example 2026-05-01T00:00:00Z"),
        ({"startingTime": "yesterday"}, "'yesterday' is no time"),
        ({"startingTime": "1777636800"}, "'1777636800' is no time from 2000-01-01 to 9999-12-30"),
        ({"endingTime": '{"t": 1777636800}'}, "'1777636800' is no time from 2000-01-01"),
        ({"endingTime": "1777636800000000"}, "'1777636800000000' is no time from 2000-01-01"),
        ({"startingTime": str(NOON_MS), "startingOffsets": "latest"}, "exclude each other"),
        ({"endingTime": str(NOON_MS), "endingIndex": "5"}, "exclude each other"),
        (
            {"endingOffsets": "after 1:2"},
            "cannot be 'after 1:2'; write the id alone, or before and the id",
        ),
        (
            {"startingOffsets": "before 1:2"},
            "cannot be 'before 1:2'; write the id alone, or after and the id",
        ),
        ({"startingIndex": "-5"}, "'-5' is no message number"),
        ({"startingOffsets": "index x"}, "'x' is no message number"),
        *[
            (
                {option: json.dumps({"tt": text})},
                f"'{option}' names .*/tt, which is not read; the nearest .* is .*/t$",
            )
            for option, text in [
                ("startingOffsets", "earliest"),
                ("startingTime", str(NOON_MS)),
                ("startingIndex", "5"),
                ("endingOffsets", "before 1:2"),
                ("endingTime", str(NOON_MS)),
                ("endingIndex", "5"),
            ]
        ],
        ({"startingOffsets": '{"version": "earliest"}'}, "names .*/version, which is not read"),
        (
            {"startingOffsets": '{"t": "1:2", "persistent://public/default/t": "1:3"}'},
            "names .*/t twice",
        ),
        ({"endingOffsets": '{"t": "1:2", "t": "1:3"}'}, "names .*/t twice"),
    ],
)
def test_bounds_that_cannot_be_are_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options({**MINIMUM, **options})


@pytest.mark.parametrize(("place", "word"), [(BEFORE_ALL, "earliest"), (AFTER_ALL, "latest")])
def test_the_earliest_and_latest_id_of_a_client_are_these_words(place: Position, word: str) -> None:
    serialised = to_bytes(MessageId(place.ledger_id, place.entry_id))
    by_topic = json.dumps({"t": [byte - 256 if byte > 127 else byte for byte in serialised]})
    for text in (serialised.hex(), by_topic):
        options = parse_options({**MINIMUM, "startingOffsets": text, "endingOffsets": text})
        assert options.starting_of("persistent://public/default/t", "cursor") == word
        assert options.ending_of("persistent://public/default/t") == word


def test_a_topic_may_have_the_name_of_a_field_of_an_offset() -> None:
    options = {**MINIMUM, "topic": "version", "startingOffsets": '{"version": "earliest"}'}
    assert (
        parse_options(options).starting_of("persistent://public/default/version", "latest")
        == "earliest"
    )


def test_a_bound_of_a_topic_holds_if_one_of_its_partitions_is_read() -> None:
    options = {**MINIMUM, "topic": "t-partition-3", "startingIndex": '{"t": 5}'}
    assert parse_options(options).starting_of(
        "persistent://public/default/t-partition-3", "latest"
    ) == AtIndex(5)


def test_a_start_at_the_cursor_needs_one() -> None:
    assert "needs the option 'subscription'" in refusal(startingOffsets="cursor")
    assert (
        parse_options(MINIMUM | {"startingOffsets": "cursor", "subscription": "s"}).starting
        == "cursor"
    )
    assert "which is where a read begins" in refusal(endingOffsets="cursor")


def test_an_sni_proxy_is_one_address_for_a_service_with_tls() -> None:
    secured = MINIMUM | {
        "service.url": "pulsar+ssl://h",
        "pulsar.client.proxyServiceUrl": "pulsar+ssl://proxy:4443",
    }
    assert parse_options(secured).client.tls.proxy_url == "pulsar+ssl://proxy:4443"
    assert "cannot be 'HTTP'; it is SNI" in refusal(**{"pulsar.client.proxyProtocol": "HTTP"})
    assert "is one address" in refusal(**{"pulsar.client.proxyServiceUrl": "pulsar://p"})
    assert "needs a 'service.url' with pulsar+ssl" in refusal(
        **{"pulsar.client.proxyServiceUrl": "pulsar+ssl://p"}
    )


@pytest.mark.parametrize(
    "text",
    ["\u00b23", "9" * 5000, "\u0661", "-1"],
    ids=["superscript", "without end", "another script", "below 0"],
)
@pytest.mark.parametrize(
    "name", ["maxRowsPerTrigger", "startingIndex", "startingTime", "maxTriggerDelay"]
)
def test_what_is_no_number_is_refused(name: str, text: str) -> None:
    assert name in refusal(**{name: f"{text}s" if name == "maxTriggerDelay" else text})


@pytest.mark.parametrize("text", ["[" * 5000, '{"t": ' * 5000])
def test_a_start_that_is_nested_without_end_is_refused(text: str) -> None:
    assert "startingOffsets" in refusal(startingOffsets=text)


@pytest.mark.parametrize(
    "pattern", ["(" * 3000, "a{99999999999999}"], ids=["nested without end", "repeated without end"]
)
def test_a_pattern_beyond_what_can_be_compiled_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match="no regular expression"):
        parse_options({"service.url": "pulsar://h:1", "topicsPattern": pattern})
