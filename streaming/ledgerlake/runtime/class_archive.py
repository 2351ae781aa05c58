"""An archive of the classes that a session's JVM loads (class data sharing): a start that finds one
maps them, parsed and verified, where it would read them from jars.

A JVM for which there is none can list the classes that it loads. Another JVM makes the archive from
the list: it takes 180 MB of disk, a minute of a slow core, and up to a gigabyte of memory. So in
the background an archive is made with the lowest priority, and only if so much memory is free.

A JVM goes on without an archive of another Java or of other jars, but it checks the jars' sizes and
times; all those are in the name, so that each has its own. Archives that no start has used for a
month are removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.runtime.java import cache_folder
from ledgerlake.runtime.private_files import make_trusted_folder

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

# Settings of a session: where its archive is, or would be, and the list that its JVM writes.
ARCHIVE_SETTING = "spark.ledgerlake.classArchive"
LIST_SETTING = "spark.ledgerlake.classList"

# A start loads most classes by then, and the JVM has compiled what runs often.
_DELAY_S = 60.0
_POLL_S = 0.5

_NEEDED_BYTES = 1500 * 1024 * 1024
_ARCHIVE_UMASK = 0o022
_CGROUP = Path("/sys/fs/cgroup")

_DAY_S = 24 * 60 * 60
_UNUSED_S = 30 * _DAY_S

# Part of the hash in an archive's name. Change it if other classes are left out of the list.
_CONTENT = "2"

_MADE_BY_THE_JVM = (b"@lambda-form-invoker", b"java/lang/invoke/BoundMethodHandle$Species")

# The ends of the names of files that are no archive yet.
_LIST, _IN_WORK = ".list", ".in-work"


def archive_path(java: str, jars: list[str]) -> Path:
    """Return where the archive for this Java, this PySpark and these jars is, or would be."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent))
    files = [Path(java).resolve(), *sorted(home.glob("jars/*.jar")), *map(Path, jars)]
    # In whole seconds, as a JVM compares them; an image keeps no more.
    parts = [
        f"{file} {status.st_size} {int(status.st_mtime)}"
        for file in files
        for status in [file.stat()]
    ]
    name = hashlib.sha256("\n".join([_CONTENT, *parts]).encode()).hexdigest()[:16]
    return cache_folder("classes") / f"{name}.jsa"


def archive_settings(archive: Path, *, lists_classes: bool) -> tuple[str, dict[str, str]]:
    """Return the JVM's option and the settings of a session: it uses its archive, if that is there,
    or else lists the classes for it, if that is wanted and the folder can be written to.
    """
    if archive.exists():
        # An image may be read-only.
        with contextlib.suppress(OSError):
            os.utime(archive)
        return f'"-XX:SharedArchiveFile={archive}"', {ARCHIVE_SETTING: str(archive)}
    if not (lists_classes and _is_writable(archive.parent)):
        return "", {}
    listed = archive.with_suffix(f".{os.getpid()}{_LIST}")
    return f'"-XX:DumpLoadedClassList={listed}"', {
        ARCHIVE_SETTING: str(archive),
        LIST_SETTING: str(listed),
    }


class ClassArchive:
    """The archive of a session's JVM; ``path`` is None if it has none and lists no classes."""

    def __init__(self, spark: SparkSession) -> None:
        path, listed = (spark.conf.get(name, None) for name in (ARCHIVE_SETTING, LIST_SETTING))
        self.path = None if path is None else Path(path)
        # A descriptor that stays open until this process ends. The file has no name from now on, so
        # nothing is left of it, however that happens.
        self._listed: int | None = None
        if listed is not None:
            with contextlib.suppress(OSError):
                self._listed = os.open(listed, os.O_RDONLY)
                Path(listed).unlink()
            properties = spark._jvm.java.lang.System
            self._java = f"{properties.getProperty('java.home')}/bin/java"
            self._class_path = str(properties.getProperty("java.class.path"))
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Make the archive in the background, if the JVM lists classes for it."""
        if self._listed is not None:
            self._thread = threading.Thread(
                target=self._make_later, name="ledgerlake-class-archive"
            )
            self._thread.start()

    def end(self) -> None:
        """Give up an archive that is not finished."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def make(self) -> Path:
        """Make the archive now, unless it is there; return where it is.

        Raises:
            SetupError: the JVM listed no classes, or no archive can be made of them.
        """
        if self.path is not None and self.path.exists():
            return self.path
        if self.path is None or self._listed is None:
            raise SetupError(
                f"this JVM lists no classes: spark-submit has started it, or {cache_folder()} "
                "cannot be written to"
            )
        self._make(self.path, self._listed, [self._java], lambda: False)
        return self.path

    def _make_later(self) -> None:
        assert self.path is not None
        assert self._listed is not None
        if self._ended.wait(_DELAY_S) or self.path.exists() or _free_bytes() < _NEEDED_BYTES:
            return
        try:
            self._make(
                self.path, self._listed, ["nice", "-n", "19", self._java], self._ended.is_set
            )
        except SetupError as error:
            _log.info("%s", error)

    def _make(
        self, path: Path, listed_by_jvm: int, java: list[str], is_stopped: Callable[[], bool]
    ) -> None:
        try:
            _remove_unused(path.parent)
            with tempfile.TemporaryDirectory(dir=path.parent, suffix=_IN_WORK) as folder:
                listed, archive = Path(folder) / "classes", Path(folder) / "archive"
                listed.write_bytes(_classes_to_archive(listed_by_jvm))
                if self._dump(java, listed, archive, is_stopped):
                    archive.replace(path)
        except OSError as error:
            raise SetupError(f"no archive of the JVM's classes was made: {error}") from None

    def _dump(
        self, java: list[str], listed: Path, archive: Path, is_stopped: Callable[[], bool]
    ) -> bool:
        """Have a JVM make an archive; return whether it is complete, and not stopped.

        Raises:
            SetupError: the JVM refuses, or was ended.
        """
        options = [
            f"-XX:SharedClassListFile={listed}",
            f"-XX:SharedArchiveFile={archive}",
            "-cp",
            self._class_path,
        ]
        quiet = ["-XX:+UseSerialGC", "-Xmx512m", "-Xlog:all=off", "-Xlog:all=error:stdout"]
        command = [*java, "-Xshare:dump", *quiet, *options]
        with (
            tempfile.TemporaryFile() as said,
            # The archive is loaded as code.
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, umask=_ARCHIVE_UMASK
            ) as process,
        ):
            with contextlib.suppress(OSError):
                Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")
            while not is_stopped():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if process.wait(_POLL_S) == 0:
                        return True
                    said.seek(0)
                    first_line = said.read(1000).decode(errors="replace").strip().partition("\n")[0]
                    raise SetupError(
                        f"no archive of the JVM's classes was made: {self._java} ended with "
                        f"{process.returncode} ({first_line})"
                    )
            process.kill()
        return False


def _classes_to_archive(listed: int) -> bytes:
    """Return a list; the JVM goes on with it, so its last line may end in the middle.

    It is without the classes that the JVM makes for method handles: with an archive that has some
    of them, Java 17 crashes if an agent or a flight recording sees the classes that are loaded.
    """
    lines = os.pread(listed, os.fstat(listed).st_size, 0).rpartition(b"\n")[0].splitlines()
    return b"\n".join(line for line in lines if not any(made in line for made in _MADE_BY_THE_JVM))


def _free_bytes() -> int:
    """Return how much memory is free, in the container if there is one; a system without Linux's
    files counts as one that has enough.
    """
    free = [_NEEDED_BYTES]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(
            int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        )
    # Outside of a container the files have no limit, or are not there.
    with contextlib.suppress(OSError, ValueError):
        limit, used = (
            int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current")
        )
        free.append(limit - used)
    return min(free)


def _is_writable(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        make_trusted_folder(folder)
    return os.access(folder, os.W_OK)


def _remove_unused(folder: Path) -> None:
    """Remove archives that no start has used for long, and what processes left that were killed."""
    now_s = time.time()
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            unused_s = now_s - file.stat().st_mtime
            if file.suffix == _IN_WORK and unused_s > _DAY_S:
                shutil.rmtree(file)
            elif (file.suffix == _LIST and unused_s > _DAY_S) or (
                file.suffix == ".jsa" and unused_s > _UNUSED_S
            ):
                file.unlink()
