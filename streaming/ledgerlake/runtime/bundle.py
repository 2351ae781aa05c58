"""A bundle: one archive with Ledgerlake and the packages that it needs, for Spark's executors.

Wheels with native code do not work out of a zip, so ``--py-files`` cannot carry them. Spark unpacks
an archive in the working folder of each executor, and the Python of the executor searches there
first (``options.spark_options``). A bundle holds the installed packages of this environment, so the
executors need the same platform and the same minor version of Python. PySpark is not in it: an
executor has Spark's own.

Our compiled kernels are in it too. Every executor unpacks the bundle anew, and its workers would
compile them again. Numba uses them if the executor has the same processor, and the source file the
same size and time. So the times of our files are whole seconds, which every archive keeps.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path

import ledgerlake
from ledgerlake.errors import SetupError
from ledgerlake.runtime.private_files import only_owner_writes

# An executor has Spark's own, and the driver alone needs Delta's.
_NOT_NEEDED = {"pyspark", "py4j", "delta-spark"}
_EXTRAS = ("spark",)

# Compressing more takes longer than sending more.
_COMPRESSION = 3


@dataclass(frozen=True)
class Bundle:
    """A written bundle.

    Args:
        packages: the names and versions of the packages in it.
    """

    path: str
    size_bytes: int
    packages: dict[str, str]


def default_name() -> str:
    """Return the name of a bundle of this environment's platform."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    version, machine = metadata.version("ledgerlake"), platform.machine()
    return f"ledgerlake-{version}-{python}-{sys.platform}-{machine}.tar.gz"


def write_bundle(path: str) -> Bundle:
    """Write the bundle of this environment; an older one is replaced when the new one is complete.

    Raises:
        SetupError: it cannot be written.
    """
    distributions = _distributions("ledgerlake", _EXTRAS)
    files = {
        name: file
        for distribution in distributions.values()
        for name, file in _files(distribution).items()
    }
    new = f"{path}.{os.getpid()}.new"
    try:
        # Some installers link files to a cache.
        with (
            # Executors run the files in it, and an archive keeps their permissions.
            only_owner_writes(),
            tempfile.TemporaryDirectory(prefix="ledgerlake-bundle-") as folder,
            tarfile.open(new, "w:gz", compresslevel=_COMPRESSION, dereference=True) as archive,
        ):
            for name, file in sorted((files | _compiled(Path(folder))).items()):
                archive.add(file, name, recursive=False)
        os.replace(new, path)
        size_bytes = os.path.getsize(path)
    except OSError as error:
        Path(new).unlink(missing_ok=True)
        raise SetupError(
            f"the bundle {path} cannot be written: {error.strerror} ({error.filename})"
        ) from None
    versions = {name: distribution.version for name, distribution in sorted(distributions.items())}
    return Bundle(path, size_bytes, versions)


def _distributions(name: str, extras: tuple[str, ...] = ()) -> dict[str, metadata.Distribution]:
    """Return a package and all installed packages that it requires, by their names."""
    distributions: dict[str, metadata.Distribution] = {}
    to_add = [(name, extras)]
    while to_add:
        name, extras = to_add.pop()
        if name in distributions or name in _NOT_NEEDED:
            continue
        try:
            distributions[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            # It is required on another platform.
            continue
        for requirement in distributions[name].requires or []:
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)", requirement)
            required = re.match(r"[A-Za-z0-9._-]+", requirement)
            if required and (extra is None or extra[1] in extras):
                to_add.append((re.sub(r"[._-]+", "-", required[0]).lower(), ()))
    return distributions


def _files(distribution: metadata.Distribution) -> dict[str, Path]:
    """Return the modules of a package, by their paths below the folder of packages.

    Raises:
        SetupError: the package does not list its files; Debian's packages do not.
    """
    if not distribution.files:
        raise SetupError(
            f"the package {distribution.name} does not list its files; install it with pip, and "
            "pack again"
        )
    return {
        str(file): Path(str(distribution.locate_file(file)))
        for file in distribution.files
        if file.parts[0] != ".." and "__pycache__" not in file.parts and file.suffix != ".pth"
    }


def _compiled(folder: Path) -> dict[str, Path]:
    """Return our own modules as copies in a folder, with the compiled kernels."""
    for name, file in _own_files().items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)
        seconds = int(file.stat().st_mtime)
        os.utime(copy, (seconds, seconds))
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    program = "from ledgerlake.decode.warm_up import warm_up; warm_up()"
    # Without compiled kernels a bundle is complete, and its executors start later.
    subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(folder)},
        check=False,
        capture_output=True,
    )
    return {
        file.relative_to(folder).as_posix(): file for file in folder.rglob("*") if file.is_file()
    }


def _own_files() -> dict[str, Path]:
    """Return our own modules, which an editable installation has in several places."""
    files: dict[str, Path] = {}
    for root in map(Path, ledgerlake.__path__):
        for file in root.rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts:
                files.setdefault(f"ledgerlake/{file.relative_to(root).as_posix()}", file)
    source = util.find_spec("pyspark_ledgerlake")
    if source is not None and source.origin is not None:
        files["pyspark_ledgerlake.py"] = Path(source.origin)
    return files
