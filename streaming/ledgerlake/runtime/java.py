"""Finding a Java runtime, and fetching artifacts from Maven Central with the Ivy that ships inside
PySpark.

No Maven, no download code of ours: PySpark's jars hold Apache Ivy, which resolves, downloads,
checks and caches. What it fetched stays in the user's cache folder, under ``ledgerlake/``.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.runtime.private_files import (
    check_trusted_folder,
    make_trusted_folder,
    only_owner_writes,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OLDEST_JAVA = 17
_FETCH_TIMEOUT_S = 1800


def cache_folder(*names: str) -> Path:
    """Return the folder for downloads, ``$LEDGERLAKE_CACHE``, else the user's cache folder; or a
    folder below it. It may be missing.

    Raises:
        SetupError: other users can write to it, or replace it.
    """
    configured = os.environ.get("LEDGERLAKE_CACHE")
    user_folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ledgerlake"
    folder = Path(configured) if configured else user_folder
    check_trusted_folder(folder)
    for name in names:
        folder /= name
        check_trusted_folder(folder)
    return folder


def find_java() -> str:
    """The path of a Java 17+ launcher.

    Raises:
        SetupError: there is none, or it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    if java is None:
        if home and shutil.which("java") is not None:
            raise SetupError(
                f"JAVA_HOME={home} holds no bin/java; correct it, or unset it to use the Java on "
                "PATH"
            )
        where = f"JAVA_HOME={home} holds no bin/java" if home else "no java on PATH"
        raise SetupError(
            f"Java is missing ({where}); install it, on Debian or Ubuntu: apt-get install "
            "openjdk-17-jre-headless"
        )
    version = java_version(java)
    if version is None:
        raise SetupError(
            f"{java} does not say its version; install Java {OLDEST_JAVA}, or set JAVA_HOME to one"
        )
    if version < OLDEST_JAVA:
        raise SetupError(
            f"{java} is Java {version}, but {OLDEST_JAVA} or newer is needed; install it or set "
            "JAVA_HOME to one"
        )
    return java


def java_version(java: str) -> int | None:
    """Return the version of a Java launcher; None if it does not tell."""
    banner = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    matched = re.search(r'version "(\d+)', banner)
    return int(matched.group(1)) if matched else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes that would fill it at the same time. No other user may
    write to new files there.
    """
    import fcntl

    with only_owner_writes():
        make_trusted_folder(folder)
        with open(folder / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def fetch_jars(
    organisation: str, name: str, revision: str, sha256: Mapping[str, str] | None = None
) -> list[Path]:
    """A library and what it needs at run time, fetched once; the jars' paths.

    Args:
        sha256: the expected checksums by file name, verified each time. Other jars are left out.

    Raises:
        SetupError: no Java, the download failed, or a jar is missing or is not the expected one.
    """
    target = cache_folder("jars", f"{name}-{revision}")
    done = target / "complete"

    def is_complete() -> bool:
        return done.exists() and all((target / jar).exists() for jar in sha256 or ())

    # This process may be unable to write to a complete folder, for example in an image.
    if not is_complete():
        with locked(target):
            if not is_complete():
                dependency = (
                    f'<dependency org="{organisation}" name="{name}" rev="{revision}" '
                    'conf="default->default"/>'
                )
                _ivy(dependency, f"{target}/[artifact]-[revision].[ext]")
                if sha256 is not None:
                    _keep_expected(target, sha256)
                done.touch()
    if sha256 is None:
        return sorted(target.glob("*.jar"))
    for jar, expected in sha256.items():
        _verify(target / jar, expected, "sha256")
    return [target / jar for jar in sorted(sha256)]


def fetch_file(
    organisation: str, name: str, revision: str, classifier: str, extension: str, sha512: str
) -> Path:
    """Return an artifact's file, fetched once and verified against ``sha512``.

    Raises:
        SetupError: no Java, the download failed, or the file is not the expected one.
    """
    target = cache_folder("downloads")
    path = target / f"{name}-{revision}-{classifier}.{extension}"
    with locked(target):
        if not path.exists():
            artifact = (
                f'<artifact name="{name}" type="{extension}" ext="{extension}" '
                f'm:classifier="{classifier}"/>'
            )
            dependency = (
                f'<dependency org="{organisation}" name="{name}" rev="{revision}" '
                'transitive="false" '
                f'conf="default->master">{artifact}</dependency>'
            )
            _ivy(dependency, f"{target}/[artifact]-[revision]-[classifier].[ext]")
        _verify(path, sha512)
    return path


def _keep_expected(folder: Path, sha256: Mapping[str, str]) -> None:
    """Check the jars of a folder that are expected, and remove the others."""
    for jar in folder.glob("*.jar"):
        if jar.name not in sha256:
            jar.unlink()
    for name, expected in sha256.items():
        if not (folder / name).exists():
            raise SetupError(f"{name} was not downloaded from Maven Central; run the command again")
        _verify(folder / name, expected, "sha256")


def _verify(path: Path, expected: str, algorithm: str = "sha512") -> None:
    with open(path, "rb") as file:
        digest = hashlib.new(algorithm)
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        # It may be where this process cannot write.
        with suppress(OSError):
            path.unlink()
        what = f"remove {path}, and" if path.exists() else "it was removed;"
        raise SetupError(
            f"{path.name} does not have the expected checksum (it has the {algorithm} "
            f"{digest.hexdigest()}); {what} run the command again. If that repeats, what answers "
            "for Maven Central serves another file: do not use it, and find out why"
        )


def _ivy(dependency: str, pattern: str) -> None:
    import pyspark

    java = find_java()
    jars = Path(pyspark.__file__).parent / "jars"
    # A person waits, for minutes if the network is slow.
    print(
        f"downloading from Maven Central, once, into {Path(pattern).parent}",
        file=sys.stderr,
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="ledgerlake-ivy-") as folder:
        work = Path(folder)
        (work / "settings.xml").write_text(
            '<ivysettings><settings defaultResolver="central"/>'
            f'<caches defaultCacheDir="{work}/cache"/>'
            '<resolvers><ibiblio name="central" m2compatible="true"/></resolvers></ivysettings>'
        )
        (work / "ivy.xml").write_text(
            '<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">'
            '<info organisation="ledgerlake" module="fetch"/><configurations><conf '
            'name="default"/></configurations>'
            f"<dependencies>{dependency}</dependencies></ivy-module>"
        )
        command = [
            java,
            "-cp",
            f"{jars}/*",
            "org.apache.ivy.Main",
            "-settings",
            f"{work}/settings.xml",
        ]
        command += [
            "-ivy",
            f"{work}/ivy.xml",
            "-types",
            "jar",
            "bundle",
            "tar.gz",
            "-retrieve",
            pattern,
        ]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise SetupError(
                "a download from Maven Central did not finish in 30 minutes; check the network and "
                "try again"
            ) from None
    if result.returncode != 0:
        lines = [
            line.strip()
            for line in (result.stdout + result.stderr).splitlines()
            if "FAILED" in line or "ERROR" in line
        ]
        reason = lines[0] if lines else f"Ivy ended with code {result.returncode}"
        raise SetupError(
            f"a download from Maven Central failed ({reason}); check the network and try again"
        )
