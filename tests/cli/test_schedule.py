"""What the commands for schedules print."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from ledgerlake.cli import main, schedule
from ledgerlake.decode.messages import TopicPartition
from ledgerlake.errors import UsageError
from ledgerlake.inspect import delayed_messages as waiting_rows
from ledgerlake.inspect.delayed_messages import WaitingEntry
from ledgerlake.options import config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish import schedules
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import MessageId
from ledgerlake.wire.schedules import PAUSE_PROPERTY, RESUME_PROPERTY, SENDER_PROPERTIES

SOURCE = TopicPartition("persistent://public/default/t", -1)
LATER_MS = 4_000_000_000_000


def entry(**properties: str) -> bytes:
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=1, publish_time=1, deliver_at_time=9
    )
    for name, value in {"ledgerlake.schedule": "a", **properties}.items():
        metadata.properties.add(key=name, value=value)
    return encode_entry(metadata, b"v", pb.BrokerEntryMetadata(broker_timestamp=3))


def rescheduling(
    monkeypatch: pytest.MonkeyPatch,
    entries: list[WaitingEntry],
    processor: str | None = None,
    *,
    delays: bool = True,
) -> Namespace:
    """The options of a command, of whose id these entries wait."""
    stream = SimpleNamespace(
        stream=SimpleNamespace(name="orders"),
        source=SimpleNamespace(message_payload_processor=processor),
        delay=SimpleNamespace(enabled=delays),
    )
    monkeypatch.setattr(config, "load_config", lambda _: stream)
    monkeypatch.setattr(schedule, "start_spark", lambda *_: None)
    monkeypatch.setattr(waiting_rows, "scheduled_entries", lambda *_: entries)
    monkeypatch.setattr(schedules, "move", lambda *_: MessageId(7, 1))
    return Namespace(
        config="orders.toml", id="a", topic=None, at="2030-05-02T09:00:00Z", span=None, json=False
    )


@pytest.mark.parametrize(
    ("waiting", "says"),
    [(entry(), "is due"), (entry(**{"ledgerlake.every": "PT1M"}), "repeats from")],
    ids=["once", "again and again"],
)
def test_a_message_that_is_moved_is_due_or_repeats_from_then_on(
    waiting: bytes, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = rescheduling(monkeypatch, [WaitingEntry(SOURCE, LATER_MS, waiting)])
    assert schedule._reschedule(options) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"schedule a {says} 2030-05-02T09:00:00.000Z")
    assert printed.err == ""


def test_of_a_message_that_is_moved_the_command_says_what_was_due_and_is_delivered_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = WaitingEntry(SOURCE, 9, entry(**{"ledgerlake.every": "PT1M"}))
    assert schedule._reschedule(rescheduling(monkeypatch, [waits])) == 0
    assert "may be delivered too, from 1970-01-01T00:00:00.009Z on" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("processor", "delays", "why"),
    [
        ("own.formats:lines", True, "send the message anew under its id"),
        (None, False, "enabled = false"),
    ],
    ids=["the user's function made it", "nothing waits"],
)
def test_a_message_that_cannot_be_moved_is_refused_before_spark_starts(
    processor: str | None, delays: bool, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = rescheduling(monkeypatch, [], processor, delays=delays)
    monkeypatch.setattr(schedule, "start_spark", None)
    with pytest.raises(UsageError, match=why):
        schedule._reschedule(options)


def test_of_an_id_that_waits_on_several_topics_one_has_to_be_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = TopicPartition("persistent://public/default/u", -1)
    options = rescheduling(
        monkeypatch, [WaitingEntry(source, LATER_MS, entry()) for source in (SOURCE, other)]
    )
    with pytest.raises(
        UsageError, match=r"default/t and .*default/u wait under the id a; name one with --topic"
    ):
        schedule._reschedule(options)
    options.topic = "u"
    assert schedule._reschedule(options) == 0
    assert "default/u" in capsys.readouterr().out


def test_an_id_that_waits_on_a_partition_is_found_by_the_name_of_it_and_of_its_topic(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = TopicPartition("persistent://public/default/t", 3)
    options = rescheduling(monkeypatch, [WaitingEntry(source, LATER_MS, entry())])
    for options.topic in ("t", "t-partition-3"):
        assert schedule._reschedule(options) == 0
        assert "default/t-partition-3" in capsys.readouterr().out
    options.topic = "t-partition-2"
    with pytest.raises(UsageError, match="no message with the id a waits"):
        schedule._reschedule(options)


def test_an_error_names_the_options_and_not_the_properties_that_they_set() -> None:
    said = [
        schedule._with_option_names(f"the schedule is refused: {message}")
        for message in (
            "ledgerlake.cron is a nickname",
            "ledgerlake.catchup is neither all, last nor none",
            "ledgerlake.until and ledgerlake.count need ledgerlake.cron or ledgerlake.every",
            "ledgerlake.expires is for a message that does not repeat",
        )
    ]
    assert [text.removeprefix("the schedule is refused: ") for text in said] == [
        "--cron is a nickname",
        "--catch-up is neither all, last nor none",
        "--until and --count need --cron or --every",
        "--expires is for a message that does not repeat",
    ]


def test_each_property_that_a_schedule_has_is_named_by_an_option_of_the_command() -> None:
    parser = ArgumentParser()
    schedule.add(parser.add_subparsers())
    (commands,) = (one.choices for one in parser._actions if isinstance(one.choices, dict))
    options = commands["schedule"]._option_string_actions
    told = {PAUSE_PROPERTY, RESUME_PROPERTY}
    for name in set(SENDER_PROPERTIES) - told:
        assert schedule._with_option_names(name) in options


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("15 minutes", timedelta(minutes=15)),
        ("24 hours", timedelta(days=1)),
        ("2 days", "P2D"),
        ("1d", "P1D"),
        ("1 week", "P1W"),
        ("2 Months", "P2M"),
        ("P1M", "P1M"),
        ("R5/PT1H", "R5/PT1H"),
        (None, None),
    ],
)
def test_a_span_is_written_as_everywhere_and_days_are_dates(
    text: str | None, taken: timedelta | str | None
) -> None:
    assert schedule._span("--every", text) == taken


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("5 fortnights", "is not a duration"),
        ("999999999999 days", "is longer than 100 years"),
        ("40000 days", "is longer than 100 years"),
        ("9999999 weeks", "is longer than 100 years"),
        ("999999 Months", "is longer than 100 years"),
    ],
)
def test_a_span_that_is_none_names_its_option(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=f"--jitter '{text}' {why}"):
        schedule._span("--jitter", text)


@pytest.mark.parametrize("option", ["--at", "--from", "--until", "--expires"])
@pytest.mark.parametrize("time", ["1796134815", "1999-12-31T23:59:59Z", "1796134815000000"])
def test_a_time_that_no_message_can_have_is_refused_by_the_name_of_its_option(
    capsys: pytest.CaptureFixture[str], option: str, time: str
) -> None:
    start = [] if option == "--at" else ["--every", "1 hour"]
    assert main(["schedule", "t", "v", "--id", "a", *start, option, time]) != 0
    said = capsys.readouterr().err
    assert f"{option}: '{time}' is no time from 2000-01-01 to 9999-12-30" in said
    assert "datetime" not in said
