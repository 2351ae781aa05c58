"""Where a pipeline began, kept beside Spark's checkpoint: ``<checkpoint>/ledgerlake/start.json``.

Spark asks a source for its first offset again when it restarts before the first batch was committed, and ``latest`` would
then mean another place. So the first start is resolved once, written down, and handed to the source as positions. The file
is an offset (see ``source.offsets``), and tells ``verify`` where the comparison begins.
"""

from __future__ import annotations

import json

from ledgerlake.errors import SetupError
from ledgerlake.files import load_json, save_json
from ledgerlake.source.offsets import Offset, PartitionOffset, from_json, to_json
from ledgerlake.wire.message_id import BEFORE_ALL, MessageId


def load_start(checkpoint: str) -> Offset | None:
    """The recorded start, or None where the pipeline never ran.

    Raises:
        OffsetError: it was written by a newer release or is damaged.
    """
    found = load_json(f"{checkpoint}/ledgerlake/start.json")
    return None if found is None else from_json(found)


def save_start(checkpoint: str, start: Offset) -> None:
    """Record the start.

    Raises:
        SetupError: the checkpoint folder cannot be written.
    """
    try:
        save_json(f"{checkpoint}/ledgerlake/start.json", to_json(start))
    except OSError as error:
        raise SetupError(
            f"the checkpoint folder {checkpoint} cannot be written ({error.strerror or error}); choose another path"
        ) from None


def as_option(start: Offset) -> str:
    """The start as the source's ``startingOffsets``, which name the first message to read."""
    return json.dumps({name: _first_to_read(one) for name, one in start.items()})


def _first_to_read(offset: PartitionOffset) -> str:
    if offset.position == BEFORE_ALL:
        return "earliest"
    position, batch_index = offset.position, offset.batch_index
    return str(MessageId(position.ledger_id, position.entry_id + 1, -1 if batch_index is None else batch_index + 1))
