"""Adapts the state of a checkpoint that was moved, or restored in another place.

    <checkpoint>/state/<operator>/_metadata/v2/<batch>        a line with the version, then JSON;
                                                              ``stateSchemaFilePaths`` of each store
                                                              names the files of its schema by
                                                              absolute URIs
    <checkpoint>/state/<operator>/_stateSchema/<store>/<file> such a file

Spark reads the schema from those files, which are in the place where the checkpoint was when they
were written. All other names in a checkpoint are relative. So these names are rewritten for the
current place of the checkpoint before Spark starts.

Source: OperatorStateMetadataV2 of Spark 4.2.
"""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.pipeline.spark_log import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ledgerlake.stored.places import Place

_VERSION = "v2"


def adopt_state(checkpoint: Place) -> None:
    """Rewrite the state's metadata so that it names only files of this checkpoint.

    Raises:
        CheckpointError: a file of the metadata is damaged.
        OSError: one cannot be read or replaced.
    """
    for file, metadata in _metadata(checkpoint):
        adopted = _with_schema_files(metadata, lambda name: _here(checkpoint, name))
        if adopted != metadata:
            _replace(file, f"{_VERSION}\n{json.dumps(adopted, separators=(',', ':'))}")


def former_place(checkpoint: Place) -> str | None:
    """Return the place of the checkpoint when its state was written; None if it is still there.

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
    files = folder.filesystem().get_file_info(fs.FileSelector(folder.root, allow_not_found=True))
    return sorted(file.base_name for file in files)


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
    """Return Spark's name of a state file in this checkpoint."""
    place = f"file:{checkpoint.root}" if checkpoint.is_local else checkpoint.hadoop_uri
    return f"{place}/state/{name.rpartition('/state/')[2]}"


def _replace(file: Place, text: str) -> None:
    filesystem = file.filesystem()
    folder, _, name = file.root.rpartition("/")
    new_path = f"{folder}/.{name}.{uuid.uuid4().hex}.new" if file.is_local else file.root
    with filesystem.open_output_stream(new_path) as stream:
        stream.write(text.encode())
    if file.is_local:
        # Hadoop's checksum of the old content; a file without one is read unchecked.
        checksum = f"{folder}/.{name}.crc"
        if filesystem.get_file_info(checksum).type == fs.FileType.File:
            filesystem.delete_file(checksum)
        filesystem.move(new_path, file.root)
