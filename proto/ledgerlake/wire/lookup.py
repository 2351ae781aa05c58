"""The lookup of the broker that owns a topic, as pure steps.

The answer to a LOOKUP is Connect (that broker owns the topic), Redirect (ask that broker), or
Failed. ``proxy_through_service_url`` means that the owner's address is not reachable from here:
connect to the service address again and name the owner in CONNECT.

The credentials are sent to the address in an answer. So it is checked here: it is the URL of one
broker, and it has TLS if the service url has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.errors import BrokerError, ConsumerBusyError, ProtocolError, TopicNotFoundError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import limits

if TYPE_CHECKING:
    from collections.abc import Callable

_HOST = r"(?:[A-Za-z0-9_-]{1,63}\.){0,30}[A-Za-z0-9_-]{1,63}\.?"
_BROKER_URL = re.compile(
    rf"(?P<scheme>pulsar(?:\+ssl)?)://(?:{_HOST}|\[[0-9a-fA-F:.]{{2,45}}\])(?::(?P<port>[0-9]{{1,5}}))?/?"
)
_MAX_PORT = 65535
_MAX_SHOWN_CHARACTERS = 200


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


def step(
    topic: str,
    response: pb.CommandLookupTopicResponse,
    hops: int,
    use_tls: bool = False,
    shown: Callable[[str], str] = str,
) -> Owner | AskAgain:
    """Return the next step of a lookup after an answer.

    Args:
        shown: returns what an error may show of an address.

    Raises:
        TopicNotFoundError, BrokerError: the broker refused.
        ProtocolError: the answer has no address or one that is refused (see ``check_broker_url``),
            or there were too many redirects.
    """
    if response.response == pb.CommandLookupTopicResponse.Failed or not response.HasField(
        "response"
    ):
        raise refused(f"look up {topic}", response.error, response.message)
    url = response.broker_service_url_tls if use_tls else response.broker_service_url
    if not url:
        raise ProtocolError(f"the broker named no address for {topic}")
    check_broker_url(url, use_tls, shown)
    if response.response == pb.CommandLookupTopicResponse.Connect:
        return Owner(url, response.proxy_through_service_url)
    if hops + 1 > limits.MAX_LOOKUP_HOPS:
        raise ProtocolError(
            f"the lookup of {topic} was redirected more than {limits.MAX_LOOKUP_HOPS} times"
        )
    return AskAgain(url, response.proxy_through_service_url, response.authoritative, hops + 1)


def check_broker_url(url: str, use_tls: bool, shown: Callable[[str], str] = str) -> None:
    """Check the address of a broker that another broker has named.

    Args:
        use_tls: whether the service url has TLS.
        shown: see ``step``.

    Raises:
        ProtocolError: it is not the URL of one broker, or one of the two URLs has TLS and the other
            has not.
    """
    matched = _BROKER_URL.fullmatch(url)
    named = ascii(shown(url)[:_MAX_SHOWN_CHARACTERS])
    scheme = "pulsar+ssl" if use_tls else "pulsar"
    if matched is None or not 0 < int(matched["port"] or 1) <= _MAX_PORT:
        raise ProtocolError(
            f"the broker named the address {named}; an address is {scheme}://host:port"
        )
    if matched["scheme"] != scheme:
        raise ProtocolError(
            f"the broker named the address {named}, but the service url begins with {scheme}://; "
            "check the broker's advertised listeners"
        )


def refused(attempt: str, code: int, text: str) -> BrokerError:
    """Return the typed error for a broker's error answer."""
    name = pb.ServerError.Name(code) if code in pb.ServerError.values() else str(code)
    detail = text.strip().splitlines()[0][:300] if text.strip() else "no reason given"
    if name == "TopicNotFound":
        return TopicNotFoundError(
            f"the broker could not {attempt}: the topic does not exist; create it or correct its "
            "name",
            code=name,
        )
    if name == ConsumerBusyError.code:
        if "limit" not in detail.lower():
            return ConsumerBusyError(
                f"could not {attempt}: another consumer holds this subscription; if a run of the "
                "same stream is active, leave it or end it"
            )
        detail += "; raise the limit of consumers, or end some"
    if name == "AuthorizationError" and "exception occurred" in detail.lower():
        # The broker's own check has failed, as without its metadata store.
        return BrokerError(
            f"the broker could not {attempt}, since it cannot check permissions now: {detail}"
        )
    mend = (
        f"; the role of the credentials needs {_permission(attempt)}"
        if name == "AuthorizationError"
        else ""
    )
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
