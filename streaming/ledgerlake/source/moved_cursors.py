"""The cursors of a pipeline that were moved from outside (see ``source.loss``): the driver passes them
to the tasks of a micro-batch in a local property of their job, as
``{topic partition: [ledger, entry]}``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from ledgerlake.wire.message_id import BEFORE_ALL, Position

if TYPE_CHECKING:
    from pyspark import SparkContext

_PROPERTY = "ledgerlake.movedCursors"


def tell_tasks(context: SparkContext, moved: dict[str, Position]) -> None:
    """Pass the cursors that were moved from outside, with their positions, to the tasks of the next
    jobs.
    """
    positions = {name: [position.ledger_id, position.entry_id] for name, position in moved.items()}
    context.setLocalProperty(_PROPERTY, json.dumps(positions))


def moved_cursor(topic_partition: str) -> Position:
    """Return the position of a moved cursor that ``tell_tasks`` passed to this task; ``BEFORE_ALL``
    if the cursor was not moved.
    """
    from pyspark import TaskContext

    task = TaskContext.get()
    text = task.getLocalProperty(_PROPERTY) if task is not None else None
    ids = json.loads(text).get(topic_partition) if text else None
    return BEFORE_ALL if ids is None else Position(*ids)
