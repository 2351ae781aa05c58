"""What a start accepts as a number or a time span, a run can do: at both ends of each option."""

from __future__ import annotations

import time

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.config import parse_config
from ledgerlake.options.declared import declared
from ledgerlake.options.kinds import COUNT, DURATION, LIMIT, MILLISECONDS
from ledgerlake.options.source_options import SourceOptions, parse_options
from ledgerlake.source.stream_reader import LedgerlakeStreamReader
from ledgerlake.source.views import read_messages
from tests.entries import single
from tests.options.test_config import data
from tests.peer import TOPIC, Peer

NUMBERS = (COUNT, DURATION, LIMIT, MILLISECONDS)
ENDS = {
    COUNT.takes: ("1", "9" * 18),
    LIMIT.takes: ("0", "9" * 18),
    DURATION.takes: ("0 ms", "36500 days"),
    MILLISECONDS.takes: ("1", str(36500 * 86_400_000)),
}
# In a millisecond a broker answers nothing.
LEAST = {"pulsar.client.operationTimeoutMs": "1000"}

SOURCE = [
    (str(option.spark), LEAST.get(str(option.spark), text) if text == "1" else text)
    for _, option in declared(SourceOptions)
    if option.spark and option.kind in NUMBERS
    for text in ENDS[option.kind.takes]
]


@pytest.mark.parametrize(("name", "text"), SOURCE)
def test_a_stream_reads_at_both_ends_of_each_option(name: str, text: str) -> None:
    entries = [single(b"%d" % number, number) for number in range(3)]
    with Peer() as peer:
        peer.add(*entries)
        given = {"service.url": peer.url, "topic": TOPIC, "startingOffsets": "earliest", name: text}
        options = parse_options(given)
        reader = LedgerlakeStreamReader(options)
        offset = reader.initialOffset()
        values: list[bytes] = []
        deadline_s = time.monotonic() + 10
        while len(values) < len(entries) and time.monotonic() < deadline_s:
            end = reader.latestOffset(offset, reader.getDefaultReadLimit())
            for part in reader.partitions(offset, end):
                for rows in read_messages(options, part.span):
                    values += rows["value"].to_pylist()
            reader.commit(end)
            offset = end
        reader.stop()
    assert values == [b"0", b"1", b"2"]


@pytest.mark.parametrize(
    ("section", "key"),
    [("source", "max_rows_per_trigger"), ("delay", "max_repetitions_per_second")],
)
def test_a_number_that_64_bits_do_not_hold_is_refused(section: str, key: str) -> None:
    parse_config(data(**{section: {key: 10**18 - 1}}))
    with pytest.raises(UsageError, match=rf"\[{section}\] {key} must be a whole number.*10\^18"):
        parse_config(data(**{section: {key: 10**18}}))


def test_a_timeout_that_no_timer_can_have_is_refused() -> None:
    parse_config(data(source={"retry_timeout_s": 36500 * 86_400}))
    with pytest.raises(UsageError, match="retry_timeout_s is longer than 100 years"):
        parse_config(data(source={"retry_timeout_s": 36500 * 86_400 + 1}))
    with pytest.raises(UsageError, match="pollTimeoutMs' is longer than 100 years"):
        parse_options({"service.url": "pulsar://h:1", "topic": "t", "pollTimeoutMs": "9" * 18})
