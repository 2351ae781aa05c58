"""The lookup of the broker that owns a topic, as pure steps.

The answer to a LOOKUP is Connect (that broker owns the topic), Redirect (ask that broker), or
Failed. ``proxy_through_service_url`` means that the owner's address is not reachable from here:
connect to the service address again and name the owner in CONNECT.
"""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.errors import BrokerError, ProtocolError, TopicNotFoundError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import limits


@dataclass(frozen=True)
class Owner:
    """The broker that serves a topic: its URL, and whether it is reached through the service
    address.
    """

    broker_url: str
    through_proxy: bool


@dataclass(frozen=True)
class AskAgain:
    """The next LOOKUP: the broker to ask, and whether its answer must be authoritative."""

    broker_url: str
    through_proxy: bool
    authoritative: bool
    hops: int


def step(topic: str, response: pb.CommandLookupTopicResponse, hops: int, use_tls: bool = False) -> Owner | AskAgain:
    """Return the next step of a lookup after an answer.

    Raises:
        TopicNotFoundError, BrokerError: the broker refused.
        ProtocolError: the answer has no address, or there were too many redirects.
    """
    if response.response == pb.CommandLookupTopicResponse.Failed or not response.HasField("response"):
        raise refused(f"look up {topic}", response.error, response.message)
    url = response.broker_service_url_tls if use_tls else response.broker_service_url
    if not url:
        raise ProtocolError(f"the broker named no address for {topic}")
    if response.response == pb.CommandLookupTopicResponse.Connect:
        return Owner(url, response.proxy_through_service_url)
    if hops + 1 > limits.MAX_LOOKUP_HOPS:
        raise ProtocolError(f"the lookup of {topic} was redirected more than {limits.MAX_LOOKUP_HOPS} times")
    return AskAgain(url, response.proxy_through_service_url, response.authoritative, hops + 1)


def refused(attempt: str, code: int, text: str) -> BrokerError:
    """Return the typed error for a broker's error answer."""
    name = pb.ServerError.Name(code) if code in pb.ServerError.values() else str(code)
    detail = text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
    if name == "TopicNotFound":
        return TopicNotFoundError(
            f"the broker could not {attempt}: the topic does not exist; create it or correct its name", code=name
        )
    mend = f"; the role of the credentials needs {_permission(attempt)}" if name == "AuthorizationError" else ""
    return BrokerError(f"the broker could not {attempt}: {name}: {detail}{mend}", code=name)


def _permission(attempt: str) -> str:
    """Return what an attempt needs, which its first words tell."""
    if attempt.startswith("open a producer"):
        return "the permission to produce"
    if attempt.startswith(("hold the subscription", "move the subscription", "open a reader")):
        return "the permission to consume"
    if attempt.startswith("list the topics"):
        return "a permission on the namespace"
    return "the permission to consume, or to produce"
