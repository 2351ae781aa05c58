"""The JVM connectors' options: options with the same meaning, options without effect, and the
errors for all others.
"""

from __future__ import annotations

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.source_options import SourceOptions, parse_options

NEEDED = {"service.url": "pulsar://localhost:6650", "topic": "t"}


def parsed(**options: str) -> SourceOptions:
    return parse_options(
        NEEDED | {name.replace("_", "."): value for name, value in options.items()}
    )


@pytest.mark.parametrize(
    "name", ["predefinedSubscription", "PREDEFINEDSUBSCRIPTION", "subscription"]
)
def test_a_predefined_subscription_is_the_durable_cursor(name: str) -> None:
    assert parsed(**{name: "s"}).subscription == "s"


@pytest.mark.parametrize(
    "action", [("FAIL", "fail"), ("DISCARD", "reject"), ("consume", "pass"), ("reject", "reject")]
)
def test_their_words_for_what_no_key_opens(action: tuple[str, str]) -> None:
    options = parsed(pulsar_reader_cryptoFailureAction=action[0])
    assert options.client.crypto.failure_action == action[1]


def test_a_compacted_read_by_their_name() -> None:
    assert parsed(pulsar_reader_readCompacted="true").first_client.read_compacted


def test_how_long_to_wait_for_an_entry_and_for_a_topic() -> None:
    options = parsed(pollTimeoutMs="5000", waitingForNonExistedTopic="TRUE")
    assert (options.client.poll_timeout_s, options.client.waits_for_topics) == (5.0, True)
    assert parsed().client.poll_timeout_s == 120.0


@pytest.mark.parametrize(
    "name",
    [
        "admin.url",
        "Admin.Url",
        "pulsar.admin.authParams",
        "pulsar.client.memoryLimitBytes",
        "pulsar.reader.receiverQueueSize",
    ],
)
def test_what_sets_up_their_machinery_changes_nothing(name: str) -> None:
    assert parse_options(NEEDED | {name: "x"}) == parse_options(NEEDED)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("subscriptionPrefix", "'subscription' names a durable cursor"),
        ("pulsar.client.tlsTrustStorePath", "'pulsar.client.tlsTrustCertsFilePath'"),
        ("pulsar.failover.primary.serviceUrl", "several brokers in 'service.url'"),
        ("pulsar.producer.batchingEnabled", "for writing"),
        ("maxOffsetsPerTrigger", "'maxRowsPerTrigger'"),
        ("kafka.bootstrap.servers", "'service.url'"),
        ("startingOffset", "did you mean 'startingOffsets'"),
    ],
)
def test_what_we_do_not_have_is_named_with_what_is_nearest(name: str, advice: str) -> None:
    with pytest.raises(UsageError, match=f"the source has no option '{name}'.*{advice}"):
        parse_options(NEEDED | {name: "x"})


def test_the_compat_view_is_typed_unless_told_otherwise() -> None:
    assert parsed(view="compat").is_typed
    assert not parsed(view="compat", schema="bytes").is_typed
    assert not parsed().is_typed
    with pytest.raises(UsageError, match="the option 'schema' is for view"):
        parsed(view="entries", schema="auto")
