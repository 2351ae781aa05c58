"""The lookup conversation, one answer at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.client.transport import parse_service_url
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
        request_id=1,
        response=Answer.Connect,
        broker_service_url="pulsar://b:6650",
        proxy_through_service_url=True,
    )
    assert step("t", answer, 0) == Owner("pulsar://b:6650", through_proxy=True)


def test_redirect_asks_the_other_broker_and_passes_authority_on() -> None:
    answer = Answer(
        request_id=1,
        response=Answer.Redirect,
        broker_service_url="pulsar://c:6650",
        authoritative=True,
    )
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
    [
        (pb.ServiceNotReady, True),
        (pb.TooManyRequests, True),
        (pb.AuthorizationError, False),
        (pb.TopicNotFound, False),
    ],
)
def test_a_refusal_says_whether_to_try_again(code: pb.ServerError, retryable: bool) -> None:
    with pytest.raises(BrokerError) as caught:
        step(
            "t",
            Answer(
                request_id=1,
                response=Answer.Failed,
                error=code,
                message="no\n\tat java.lang.Thread",
            ),
            0,
        )
    assert is_retryable(caught.value) is retryable
    assert "java" not in caught.value.message


def test_a_broker_that_cannot_check_permissions_now_is_asked_again() -> None:
    text = "Exception occurred while trying to authorize lookup"
    with pytest.raises(BrokerError, match="it cannot check permissions now") as caught:
        step(
            "t",
            Answer(request_id=1, response=Answer.Failed, error=pb.AuthorizationError, message=text),
            0,
        )
    assert is_retryable(caught.value)
    assert "needs the permission" not in caught.value.message


def test_a_missing_topic_has_its_own_error() -> None:
    with pytest.raises(TopicNotFoundError, match="does not exist"):
        step("t", Answer(request_id=1, response=Answer.Failed, error=pb.TopicNotFound), 0)


LETTERS = st.sampled_from([*"pulsar+ssl:/bz.-_[]@,?#%0169 ", "\x1b", "\n", "\u202e", "\x00"])


@given(
    url=st.text(LETTERS, max_size=30)
    | st.builds(
        "".join,
        st.tuples(
            st.sampled_from(["pulsar://", "pulsar+ssl://", "http://"]),
            st.text(LETTERS, max_size=12),
        ),
    ),
    use_tls=st.booleans(),
    redirects=st.booleans(),
)
def test_an_answer_leads_to_a_broker_with_the_scheme_of_the_service_url_or_is_refused(
    url: str, use_tls: bool, redirects: bool
) -> None:
    response = Answer.Redirect if redirects else Answer.Connect
    answer = Answer(
        request_id=1, response=response, broker_service_url=url, broker_service_url_tls=url
    )
    outcome, refusal = None, ""
    try:
        outcome = step("t", answer, 0, use_tls)
    except ProtocolError as error:
        refusal = error.message
    assert refusal.isprintable()
    if outcome is not None:
        (address,) = parse_service_url(outcome.broker_url)
        assert address.is_tls == use_tls


@pytest.mark.parametrize(
    "url",
    [
        "pulsar+ssl://a:1,b:2",
        "http://a:1",
        "a:6651",
        "pulsar+ssl://\x1b[31mevil:1",
        "pulsar+ssl://me:password@a:1",
        "pulsar+ssl://a:0",
        "pulsar+ssl://.a:1",
        "pulsar+ssl://a..b:1",
        f"pulsar+ssl://{'a' * 64}:1",
        "pulsar+ssl://a:65536",
        "pulsar+ssl://a\n:1",
        "pulsar+ssl://a:1/tenant",
    ],
)
def test_a_malformed_address_is_the_brokers_mistake(url: str) -> None:
    answer = Answer(request_id=1, response=Answer.Connect, broker_service_url_tls=url)
    with pytest.raises(ProtocolError, match="the broker named the address"):
        step("t", answer, 0, use_tls=True)


@pytest.mark.parametrize(
    "url",
    [
        "pulsar+ssl://[::1]:6651",
        "pulsar+ssl://b-0.b.svc:6651/",
        "pulsar+ssl://b",
        "pulsar+ssl://b_0.c.",
    ],
)
def test_an_address_of_each_form_is_taken(url: str) -> None:
    answer = Answer(request_id=1, response=Answer.Connect, broker_service_url_tls=url)
    assert step("t", answer, 0, use_tls=True) == Owner(url, through_proxy=False)
