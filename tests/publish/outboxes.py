"""What tests of the republisher share: an outbox with messages, and a target that tells nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ledgerlake.decode import schema
from ledgerlake.publish.outbox import Outbox
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import DataFile

if TYPE_CHECKING:
    from pathlib import Path


ROWS = 3000


class NoTargetReader:
    """A target that does not tell the messages that were sent before."""

    def __init__(self, *_: Any) -> None:
        pass

    def ends(self, targets: list[str]) -> dict[str, None]:
        return dict.fromkeys(targets)

    def last_numbers(self, *_: Any) -> dict[str, int]:
        return {}


def filled(
    folder: Path,
    rows: int = ROWS,
    event_ms: int | None = None,
    others: dict[int, bytes | None] | None = None,
    properties: dict[str, str] | None = None,
) -> Outbox:
    """An outbox with one file of messages whose values are their numbers, but for the ``others``;
    None is no value.
    """
    outbox = Outbox(Place(str(folder)))
    outbox.begin(None, None)
    columns: dict[str, pa.Array] = {
        field.name: pa.nulls(rows, field.type) for field in schema.MESSAGES
    }
    columns["value"] = pa.array(
        [(others or {}).get(number, b"%d" % number) for number in range(rows)], pa.binary()
    )
    columns["message_id"] = pa.array([f"1:{number}" for number in range(rows)])
    columns["deliver_at"] = pa.array([1_000_000] * rows, schema.MESSAGES.field("deliver_at").type)
    columns["is_null"] = columns["value"].is_null()
    if event_ms is not None:
        columns["event_time"] = pa.array([event_ms * 1000] * rows, pa.int64()).cast(
            schema.TIMESTAMP
        )
    if properties is not None:
        columns["properties"] = pa.array(
            [list(properties.items())] * rows, columns["properties"].type
        )
    pq.write_table(pa.table(columns, schema=schema.MESSAGES), folder / "part.parquet")
    outbox.add(BatchCommit("s", "q", 0, 1), {"t": [DataFile("part.parquet", 4, rows, "{}")]})
    outbox.commit(0)
    return outbox
