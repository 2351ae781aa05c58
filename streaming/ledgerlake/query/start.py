"""Where a pipeline began, kept beside Spark's checkpoint: ``<checkpoint>/ledgerlake/start.json``; and where it is.

Spark asks a source for its first offset again when it restarts before the first batch was committed, and ``latest`` would
then mean another place. So the first start is resolved once, written down, and handed to the source as positions. The file
is an offset (see ``source.offsets``), and tells ``verify`` where the comparison begins.
"""

from __future__ import annotations

import json

from pyarrow import fs

from ledgerlake.errors import SetupError
from ledgerlake.files import load_json, resolve, save_json
from ledgerlake.source.offsets import Offset, from_json, to_json


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
    """The start as the source's ``startingOffsets``."""
    return json.dumps(to_json(start))


def committed_offset(checkpoint: str) -> Offset | None:
    """Where the query's last committed batch ended; None before the first.

    Raises:
        OffsetError: a newer release wrote it, or nobody of ours.
    """
    filesystem, root = resolve(checkpoint)
    found = filesystem.get_file_info(fs.FileSelector(f"{root}/commits", allow_not_found=True))
    numbers = [int(one.base_name) for one in found if one.base_name.isdigit()]
    if not numbers:
        return None
    with filesystem.open_input_stream(f"{root}/offsets/{max(numbers)}") as stream:
        # Spark writes a version, its own metadata, and then what the source said.
        return from_json(json.loads(bytes(stream.read()).decode().splitlines()[-1]))
