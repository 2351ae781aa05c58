"""A filesystem in memory that pyarrow takes for one: files appear when they are closed, moves are
atomic.

What a killed process had open is gone. A disk may be full for a while.
"""

from __future__ import annotations

import errno
import io
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow import fs

from tests.simulation.world import Killed

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(eq=False)
class Disk:
    """Files by path. Spark's state is kept as an object beside them, since nothing else
    reads it.
    """

    world: World
    files: dict[str, Any] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    is_full: bool = False

    def __post_init__(self) -> None:
        # Arrow's object and this one would keep each other, and what the disk has, for ever.
        self.filesystem = fs.PyFileSystem(_Handler(weakref.proxy(self)))

    def write(self, path: str, data: Any) -> None:
        """Put a file there in one step.

        Raises:
            OSError: the disk is full.
        """
        self._reach(path)
        self._put(path, data)

    def create(self, path: str, data: Any) -> bool:
        """Put a file there in one step, unless it is there.

        Raises:
            OSError: the disk is full.
        """
        if path in self.files:
            return False
        self._reach(path)
        # Another process may have made it meanwhile.
        if path in self.files:
            return False
        self._put(path, data)
        return True

    def check_exists(self, path: str) -> None:
        self.world.access(f"look at {path}")
        if path not in self.files:
            raise FileNotFoundError(path)

    def _reach(self, path: str) -> None:
        verdict = self.world.access(f"write {path}")
        if self.is_full or verdict == "full":
            raise OSError(errno.ENOSPC, "No space left on device")

    def _put(self, path: str, data: Any) -> None:
        self.files[path] = data
        self.world.access(f"written {path}")

    def below(self, folder: str) -> dict[str, Any]:
        """All files below a folder."""
        return {path: data for path, data in self.files.items() if path.startswith(folder + "/")}

    def replace(self, folder: str, content: dict[str, Any]) -> None:
        """Have a folder hold exactly this."""
        for path in self.below(folder):
            del self.files[path]
        self.files |= content

    def remove(self, path: str) -> None:
        self.world.access(f"remove {path}")
        if path not in self.files:
            raise FileNotFoundError(path)
        del self.files[path]


class _Output(io.BytesIO):
    """A file that is being written."""

    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__()
        self._disk = disk
        self._path = path

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            try:
                self._disk.write(self._path, data)
            except Killed:
                return


class _Handler(fs.FileSystemHandler):
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def get_type_name(self) -> str:
        return "simulated"

    def normalize_path(self, path: str) -> str:
        return path

    def get_file_info(self, paths: list[str]) -> list[fs.FileInfo]:
        return [self._info(path) for path in paths]

    def _info(self, path: str) -> fs.FileInfo:
        data = self._disk.files.get(path)
        if data is not None:
            return fs.FileInfo(path, fs.FileType.File, size=len(data))
        is_folder = path in self._disk.folders or any(
            file.startswith(path + "/") for file in self._disk.files
        )
        return fs.FileInfo(path, fs.FileType.Directory if is_folder else fs.FileType.NotFound)

    def get_file_info_selector(self, selector: fs.FileSelector) -> list[fs.FileInfo]:
        start = selector.base_dir.rstrip("/") + "/"
        below = [
            path for path in [*self._disk.files, *self._disk.folders] if path.startswith(start)
        ]
        if not below and selector.base_dir.rstrip("/") not in self._disk.folders:
            if selector.allow_not_found:
                return []
            raise FileNotFoundError(selector.base_dir)
        if selector.recursive:
            return [self._info(path) for path in sorted(set(below))]
        names = {path[len(start) :].split("/")[0] for path in below}
        return [self._info(start + name) for name in sorted(names)]

    def create_dir(self, path: str, recursive: bool) -> None:
        self._disk.world.access(f"folder {path}")
        self._disk.folders.add(path.rstrip("/"))

    def delete_dir(self, path: str) -> None:
        self._disk.world.access(f"remove {path}/")
        for one in self._disk.below(path.rstrip("/")):
            del self._disk.files[one]
        self._disk.folders -= {
            folder
            for folder in self._disk.folders
            if (folder + "/").startswith(path.rstrip("/") + "/")
        }

    def delete_dir_contents(self, path: str, missing_dir_ok: bool = False) -> None:
        for one in self._disk.below(path.rstrip("/")):
            del self._disk.files[one]

    def delete_root_dir_contents(self) -> None:
        raise NotImplementedError

    def delete_file(self, path: str) -> None:
        self._disk.remove(path)

    def move(self, src: str, dest: str) -> None:
        self._disk.world.access(f"move {dest}")
        if src not in self._disk.files:
            raise FileNotFoundError(src)
        self._disk.files[dest] = self._disk.files.pop(src)
        self._disk.world.access(f"moved {dest}")

    def copy_file(self, src: str, dest: str) -> None:
        self._disk.files[dest] = self._disk.files[src]

    def open_input_stream(self, path: str) -> Any:
        return self.open_input_file(path)

    def open_input_file(self, path: str) -> Any:
        data = self._disk.files.get(path)
        if data is None:
            raise FileNotFoundError(path)
        return pa.BufferReader(data)

    def open_output_stream(self, path: str, metadata: Any) -> Any:
        return pa.PythonFile(_Output(self._disk, path), mode="w")

    def open_append_stream(self, path: str, metadata: Any) -> Any:
        raise NotImplementedError
