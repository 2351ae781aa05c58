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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.pipeline.spark_log import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

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


@dataclass(frozen=True)
class Move:
    """The former and the present name of the folder that was moved with the checkpoint in it. It
    may be the folder of a whole project, whose tables lie beside the checkpoint.
    """

    old: str
    new: str

    def name_among(self, path: str, paths: Collection[Any]) -> str:
        """Return the present name of a path, if only that is one of some paths; else the path,
        which may not have been moved.
        """
        name = f"{self.new}/{path.removeprefix(f'{self.old}/')}"
        is_moved = path.startswith(f"{self.old}/") and path not in paths and name in paths
        return name if is_moved else path


def move_of(checkpoint: Place) -> Move:
    """Return how a local checkpoint was moved since its state was written.

    Raises:
        As ``former_place``.
    """
    former = former_place(checkpoint) if checkpoint.is_local else None
    new = checkpoint.root
    return move_between(new if former is None else former.removeprefix("file:"), new)


def move_between(former: str, now: str) -> Move:
    """Return the move that gave a checkpoint its present name."""
    old, new = former.split("/"), now.split("/")
    while old and new and old[-1] == new[-1]:
        old, new = old[:-1], new[:-1]
    return Move("/".join(old), "/".join(new))


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
