"""The clocks of brokers, as far as a client can know them.

Pulsar has no command that asks for the time. But a broker says of a consumer when it connected, by
its own clock (CONSUMER_STATS). That was before the answers came, so from then on the broker's clock
shows at least that time and what has passed since. The result is never ahead of the broker's clock,
and behind it by two round trips. The clock of this machine does not count.

Clocks drift, and a broker's may be set. So each broker is asked again after a minute, and after a
new connection.
"""

from __future__ import annotations

import logging
import re
import time
import weakref
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import LedgerlakeError, TopicNotFoundError
from ledgerlake.wire.message_id import AFTER_ALL

if TYPE_CHECKING:
    from ledgerlake.client.cluster import Cluster
    from ledgerlake.client.session import Session

_log = logging.getLogger(__name__)

_LASTS_S = 60.0

# With nanoseconds, or whatever the broker's release and runtime write.
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)")


@dataclass(frozen=True)
class _Reading:
    """A broker's clock when this machine's monotonic clock showed ``read_s``; None if the broker
    did not tell. ``asked_s`` is when it was last asked, maybe in vain.
    """

    clock_ms: int | None
    read_s: float
    asked_s: float

    def now_ms(self, now_s: float) -> int | None:
        return None if self.clock_ms is None else self.clock_ms + int((now_s - self.read_s) * 1000)


class BrokerClocks:
    """The clocks of the brokers of a cluster; see the module."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._of_sessions: weakref.WeakKeyDictionary[Session, _Reading] = (
            weakref.WeakKeyDictionary()
        )
        self._of_topics: dict[str, _Reading] = {}
        self._is_told = False

    def now_ms(self, topic_partition: str, session: Session | None) -> int | None:
        """Return the least time that the clock of the broker of a topic partition may show, in
        milliseconds since 1970; None if the broker does not tell.

        Args:
            session: the open session with that broker, if there is one.
        """
        known = (
            self._of_topics.get(topic_partition)
            if session is None
            else self._of_sessions.get(session)
        )
        if known is None or time.monotonic() - known.asked_s > _LASTS_S:
            known = self._ask(topic_partition)
            if session is not None:
                self._of_sessions[session] = known
        self._of_topics[topic_partition] = known
        return known.now_ms(time.monotonic())

    def _ask(self, topic_partition: str) -> _Reading:
        """Ask the broker of a topic partition for its time; if that fails, use the last reading."""
        reader = EntryReader(self._cluster, topic_partition, AFTER_ALL, read_compacted=False)
        try:
            clock_ms, read_s = milliseconds_of(reader.connected_since()), time.monotonic()
            return _Reading(clock_ms, read_s, read_s)
        except LedgerlakeError as error:
            now_s = time.monotonic()
            known = replace(
                self._of_topics.get(topic_partition, _Reading(None, now_s, now_s)), asked_s=now_s
            )
            if (
                known.clock_ms is None
                and not isinstance(error, TopicNotFoundError)
                and not self._is_told
            ):
                self._is_told = True
                _log.warning(
                    "the broker of %s does not tell its time, and the clock of this machine says "
                    "when messages are due: %s",
                    topic_partition,
                    error,
                )
            return known
        finally:
            reader.close()


def milliseconds_of(moment: str) -> int | None:
    """Return a broker's text of a moment in milliseconds since 1970, rounded down; None if it is
    none.
    """
    parts = _MOMENT.fullmatch(moment)
    if parts is None:
        return None
    second, fraction, zone = parts.groups()
    try:
        seconds = datetime.fromisoformat(second + zone.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
    return int(seconds) * 1000 + int((fraction or "").ljust(3, "0")[:3])
