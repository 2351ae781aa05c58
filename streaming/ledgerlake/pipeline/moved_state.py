"""The state of a checkpoint that was moved, or restored at another place.

    <checkpoint>/state/<operator>/_metadata/v2/<batch>        a line with the version, then JSON; ``stateSchemaFilePaths`` of each
                                                              store names the files of its schema by absolute URIs
    <checkpoint>/state/<operator>/_stateSchema/<store>/<file> such a file

Spark reads the schema where those names say, which is where the checkpoint was when they were
written. All other names in a checkpoint are relative. So the names are written anew, for the place
where the checkpoint is now, before Spark starts.

Source: OperatorStateMetadataV2 of Spark 4.2.
"""

from __future__ import annotations

import json
import os
import uuid
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.pipeline.spark_log import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.stored.places import Place

_VERSION = "v2"


def adopt_state(checkpoint: Place) -> None:
    """Let the state's metadata name files of this checkpoint alone.

    Raises:
        CheckpointError: a file of the metadata is damaged.
        OSError: one cannot be read or replaced.
    """
    for file, metadata in _metadata(checkpoint):
        adopted = _with_schema_files(metadata, lambda name: _here(checkpoint, name))
        if adopted != metadata:
            _replace(file, f"{_VERSION}\n{json.dumps(adopted, separators=(',', ':'))}")


def former_place(checkpoint: Place) -> str | None:
    """Return where the checkpoint was when its state was written, or None if it is there still.

    Raises:
        CheckpointError: a file of the metadata is damaged.
        OSError: one cannot be read.
    """
    for _, metadata in _metadata(checkpoint):
        for store in metadata["stateStoreInfo"]:
            for name in store["stateSchemaFilePaths"]:
                if _here(checkpoint, name) != name:
                    return str(name).rpartition("/state/")[0]
    return None


def _metadata(checkpoint: Place) -> Iterator[tuple[Place, dict[str, Any]]]:
    for operator in _names(checkpoint / "state"):
        folder = checkpoint / f"state/{operator}/_metadata/{_VERSION}"
        for name in filter(str.isdigit, _names(folder)):
            file = folder / name
            try:
                metadata = json.loads(_read(file).partition("\n")[2])
                _with_schema_files(metadata, str)
            except (ValueError, TypeError, KeyError):
                raise damaged(checkpoint, file.uri.removeprefix(f"{checkpoint.uri}/")) from None
            yield file, metadata


def _names(folder: Place) -> list[str]:
    found = folder.filesystem().get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
    return sorted(entry.base_name for entry in found)


def _read(file: Place) -> str:
    with file.filesystem().open_input_stream(file.root) as stream:
        return bytes(stream.read()).decode()


def _with_schema_files(metadata: dict[str, Any], renamed: Callable[[str], str]) -> dict[str, Any]:
    stores = [
        store | {"stateSchemaFilePaths": [renamed(name) for name in store["stateSchemaFilePaths"]]}
        for store in metadata["stateStoreInfo"]
    ]
    return metadata | {"stateStoreInfo": stores}


def _here(checkpoint: Place, name: str) -> str:
    """Return what Spark calls a file of the state in this checkpoint."""
    place = f"file:{os.path.abspath(checkpoint.root)}" if checkpoint.is_local else checkpoint.hadoop_uri
    return f"{place}/state/{name.rpartition('/state/')[2]}"


def _replace(file: Place, text: str) -> None:
    filesystem = file.filesystem()
    folder, _, name = file.root.rpartition("/")
    new = f"{folder}/.{name}.{uuid.uuid4().hex}.new" if file.is_local else file.root
    with filesystem.open_output_stream(new) as stream:
        stream.write(text.encode())
    if file.is_local:
        # Hadoop's checksum of the old content; a file without one is read unchecked.
        checksum = f"{folder}/.{name}.crc"
        if filesystem.get_file_info(checksum).type == fs.FileType.File:
            filesystem.delete_file(checksum)
        filesystem.move(new, file.root)
