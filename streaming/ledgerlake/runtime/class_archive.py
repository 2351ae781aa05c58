"""An archive of the classes that a session's JVM loads (class data sharing): a start that finds one
maps them, parsed and verified, where it would read them from jars.

Nothing writes it unasked: it takes 200 MB, and the JVM some twenty seconds at its end. A JVM goes
on without an archive of another Java or of other jars, but it checks the jars' sizes and times and
warns; all those are in the name, so that each has its own. One that a killed run left unfinished
has another name.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.runtime.java import cache_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def archive_path(java: str, jars: list[str]) -> Path:
    """Return where the archive for this Java, this PySpark and these jars is, or would be."""
    import pyspark

    home = Path(os.environ.get("SPARK_HOME", Path(pyspark.__file__).parent))
    files = [Path(java).resolve(), *sorted(home.glob("jars/*.jar")), *map(Path, jars)]
    # In whole seconds, as a JVM compares them; an image keeps no more.
    parts = [f"{file} {status.st_size} {int(status.st_mtime)}" for file in files for status in [file.stat()]]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "classes" / f"{name}.jsa"


def java_option(archive: Path, *, writes: bool) -> str:
    """Return the JVM's option: to write an archive when it ends, to use the one that is there, or
    none.
    """
    if writes:
        archive.parent.mkdir(parents=True, exist_ok=True)
        return f"-XX:ArchiveClassesAtExit={_unfinished(archive)}"
    return f"-XX:SharedArchiveFile={archive}" if archive.exists() else ""


def end_and_keep(spark: SparkSession, archive: Path) -> None:
    """End a session that was started to write an archive, with its JVM, and put the archive where
    starts look for it.

    Raises:
        SetupError: the JVM wrote none.
    """
    gateway = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()
    try:
        _unfinished(archive).replace(archive)
    except FileNotFoundError:
        raise SetupError(
            f"the JVM left no archive of its classes; see that {archive.parent} has 200 MB free and that Java is a HotSpot"
        ) from None


def _unfinished(archive: Path) -> Path:
    return archive.with_suffix(f".{os.getpid()}")
