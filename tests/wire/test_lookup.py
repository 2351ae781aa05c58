"""The lookup conversation, one answer at a time."""

from __future__ import annotations

import pytest

from ledgerlake.errors import BrokerError, ProtocolError, TopicNotFoundError, is_retryable
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.limits import MAX_LOOKUP_HOPS
from ledgerlake.wire.lookup import AskAgain, Owner, step

Answer = pb.CommandLookupTopicResponse


def test_connect_names_the_owner() -> None:
    answer = Answer(request_id=1, response=Answer.Connect, broker_service_url="pulsar://b:6650")
    assert step("t", answer, 0) == Owner("pulsar://b:6650", through_proxy=False)


def test_connect_through_the_service_address_keeps_the_owners_name() -> None:
    answer = Answer(
        request_id=1, response=Answer.Connect, broker_service_url="pulsar://b:6650", proxy_through_service_url=True
    )
    assert step("t", answer, 0) == Owner("pulsar://b:6650", through_proxy=True)


def test_redirect_asks_the_other_broker_and_passes_authority_on() -> None:
    answer = Answer(request_id=1, response=Answer.Redirect, broker_service_url="pulsar://c:6650", authoritative=True)
    assert step("t", answer, 2) == AskAgain("pulsar://c:6650", False, True, 3)


def test_endless_redirects_end() -> None:
    answer = Answer(request_id=1, response=Answer.Redirect, broker_service_url="pulsar://c:6650")
    with pytest.raises(ProtocolError, match="redirected more than"):
        step("t", answer, MAX_LOOKUP_HOPS)


def test_an_answer_without_address_is_the_brokers_mistake() -> None:
    with pytest.raises(ProtocolError, match="named no address"):
        step("t", Answer(request_id=1, response=Answer.Connect), 0)


@pytest.mark.parametrize(
    ("code", "retryable"),
    [(pb.ServiceNotReady, True), (pb.TooManyRequests, True), (pb.AuthorizationError, False), (pb.TopicNotFound, False)],
)
def test_a_refusal_says_whether_to_try_again(code: pb.ServerError, retryable: bool) -> None:
    with pytest.raises(BrokerError) as caught:
        step("t", Answer(request_id=1, response=Answer.Failed, error=code, message="no\n\tat java.lang.Thread"), 0)
    assert is_retryable(caught.value) is retryable
    assert "java" not in caught.value.message


def test_a_missing_topic_has_its_own_error() -> None:
    with pytest.raises(TopicNotFoundError, match="does not exist"):
        step("t", Answer(request_id=1, response=Answer.Failed, error=pb.TopicNotFound), 0)
