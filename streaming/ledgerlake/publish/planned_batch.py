"""Tells two plans of one micro-batch apart.

Spark writes where a micro-batch ends into the checkpoint (``offsets/<batch>``) before it runs it. A
micro-batch that is run again has the same entry there. A checkpoint that is an older copy lacks the
entry, so Spark plans a micro-batch of the same number anew: with another entry, other rows, or the
same rows in other tasks.

A plan's number is where the ids of a task's messages begin (see ``topic_writer``), so a second plan
is taken for the first one if it begins among the ids that the first has sent. For n messages of a
task in a topic partition that is a chance of n in 2^30: one in a million for a thousand messages,
one in a thousand for a million. No division of these bits has a lower one, because n messages of
each plan leave 2^30 / n plans apart.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from pyarrow import fs

from ledgerlake.errors import TransportError, UsageError
from ledgerlake.stored.places import parse_place

# A plan's number has so many bits.
PLAN_BITS = 30


class PlannedBatch(NamedTuple):
    """A micro-batch, and a number from 1 to 2^30, which is a hash of its plan."""

    batch_id: int
    plan_number: int


def newest_planned(checkpoint: str | None) -> PlannedBatch | None:
    """Return the micro-batch that a query has planned last; None if its checkpoint is in a store
    that is not known here, whenever it is asked for.

    Raises:
        TransportError: the checkpoint cannot be read now. Ids without a plan would differ from the
            ids of the next attempt, which would be refused for good.
    """
    if checkpoint is None:
        return None
    try:
        place = parse_place(checkpoint, "checkpointLocation") / "offsets"
    except UsageError:
        return None
    try:
        files = place.filesystem().get_file_info(fs.FileSelector(place.root, allow_not_found=True))
        numbers = [int(file.base_name) for file in files if file.base_name.isdecimal()]
        if not numbers:
            return None
        with place.filesystem().open_input_stream((place / str(max(numbers))).root) as stream:
            entry = stream.read()
    except OSError as error:
        raise TransportError(
            f"the plan of a micro-batch in {place} cannot be read ({place.reason(error)}), and the "
            "ids of its messages follow from "
            "it; nothing was sent; start the query again when this process can read its checkpoint"
        ) from None
    digest = hashlib.sha256(entry).digest()
    return PlannedBatch(max(numbers), 1 + int.from_bytes(digest[:8], "big") % 2**PLAN_BITS)
