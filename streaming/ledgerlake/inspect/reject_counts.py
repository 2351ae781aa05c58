"""What the table of rejects has, by reason and topic: how many, when, and the last one. Rejects
that were replayed (see ``replay.replay``) do not count: as many of a message and a reason as there
are rows of ``replayed``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import QueryBuilder
from deltalake.exceptions import TableNotFoundError

from ledgerlake.reasons import Reason
from ledgerlake.stored.offsets import moment_text
from ledgerlake.table.open_table import no_table, not_readable, open_delta

if TYPE_CHECKING:
    from collections.abc import Collection
    from datetime import datetime

    from ledgerlake.options.config import Config

_QUERY = """
    select
        reason, topic, count(*) as rejects, min(broker_timestamp) as first, max(broker_timestamp) as last,
        first_value(message_id order by broker_timestamp desc nulls last, ledger_id desc, entry_id desc) as message_id,
        first_value(detail order by broker_timestamp desc nulls last, ledger_id desc, entry_id desc) as detail
    from (
        select *, row_number() over (partition by topic, partition, message_id, reason) as number
        from rejects where reason <> 'replayed'
    ) as rejected left join (
        select topic as t, partition as p, message_id as m, detail as r, count(*) as marks
        from rejects where reason = 'replayed' group by topic, partition, message_id, detail
    ) as done on topic = t and partition = p and message_id = m and reason = r
    where number > coalesce(marks, 0)
    group by reason, topic order by rejects desc, reason, topic
"""


@dataclass(frozen=True)
class RejectCount:
    """The rejects of a topic for one reason. ``first`` and ``last`` are the broker's times, None if
    it gives none; ``message_id`` and ``detail`` belong to the last one.
    """

    reason: Reason
    topic: str
    rejects: int
    first: datetime | None
    last: datetime | None
    message_id: str
    detail: str | None

    def sentence(self) -> str:
        when = (
            ""
            if self.last is None
            else f", the last one stored by the broker at {moment_text(self.last)}"
        )
        what = f": {self.detail}" if self.detail else ""
        return f"{self.rejects:,} {self.reason} of {self.topic}{when} ({self.message_id}{what})"


def count_rejects(config: Config, reasons: Collection[str] = ()) -> list[RejectCount]:
    """Return the counts, the largest first.

    Args:
        reasons: only those; all of them if there are none.

    Raises:
        TableError: the table cannot be read.
    """
    place = config.rejects_place
    try:
        counted = QueryBuilder().register("rejects", open_delta(place)).execute(_QUERY)
        rows = pa.table(counted).to_pylist()
    except TableNotFoundError:
        raise no_table(place) from None
    # Errors while the answer comes have no type of their own.
    except Exception as error:
        raise not_readable(place, error) from None
    return [RejectCount(**row) for row in rows if not reasons or row["reason"] in reasons]
