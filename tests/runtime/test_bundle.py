"""What a bundle for executors holds, and how they are told of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.cli.command import start_spark
from ledgerlake.errors import SetupError
from ledgerlake.options.config import parse_config
from ledgerlake.runtime import bundle

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def only_pure_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out packages of hundreds of megabytes, which are packed like all others."""
    large = {"pandas", "numpy", "numba", "llvmlite", "pyarrow", "deltalake"}
    monkeypatch.setattr(bundle, "_NOT_NEEDED", bundle._NOT_NEEDED | large)


@pytest.mark.usefixtures("only_pure_packages")
def test_a_bundle_has_our_modules_and_the_packages_that_they_need(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written = bundle.write_bundle(str(tmp_path / "bundle.tar.gz"))
    finally:
        os.umask(before)
    assert os.stat(written.path).st_mode & 0o022 == 0
    assert {"ledgerlake", "lz4", "protobuf", "crc32c"} <= set(written.packages)
    assert not {"pyspark", "pulsar-client", "pytest"} & set(written.packages)
    with tarfile.open(written.path) as archive:
        assert [
            one.name for one in archive if one.name.startswith("ledgerlake/") and one.mode & 0o022
        ] == []
        archive.extractall(tmp_path / "bundle", filter="data")
    modules = "ledgerlake.wire.framing, ledgerlake.cli, lz4.block, crc32c, google.protobuf"
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'bundle')!r}); import {modules}; "
        "print(ledgerlake.__file__)"
    )
    # Without this environment's own packages.
    result = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == str(tmp_path / "bundle" / "ledgerlake" / "__init__.py"), (
        result.stderr
    )
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".new")]
    compiled = kernels_of(tmp_path / "bundle")
    assert compiled
    program = "from ledgerlake.decode.warm_up import warm_up; warm_up()"
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(tmp_path / "bundle")},
        check=True,
    )
    assert kernels_of(tmp_path / "bundle") == compiled, "a kernel was compiled again"


def kernels_of(folder: Path) -> dict[str, bytes]:
    """Numba's cache below a folder."""
    return {file.name: file.read_bytes() for file in folder.rglob("*.nb[ic]")}


@pytest.mark.usefixtures("only_pure_packages")
def test_a_bundle_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot be written: No such file or directory"):
        bundle.write_bundle(str(tmp_path / "missing" / "bundle.tar.gz"))


def pipeline(folder: Path, **spark: Any) -> dict[str, Any]:
    return {
        "source": {"service_url": "pulsar://localhost:1", "topics": ["orders"]},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {"path": str(folder / "orders")},
        "spark": spark,
    }


def test_executors_unpack_the_bundle_and_search_it_first(tmp_path: Path) -> None:
    data = pipeline(tmp_path, master="spark://h:7077", bundle="a/b.tar.gz")
    spark = parse_config(data, folder="/etc/app").spark
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert spark.session_settings == {
        "spark.driver.memory": "2g",
        "spark.archives": "/etc/app/a/b.tar.gz#ledgerlake_bundle",
        "spark.executorEnv.PYTHONPATH": "ledgerlake_bundle",
        "spark.pyspark.python": f"python{version}",
    }


def test_a_setting_of_the_users_stands_behind_the_bundle(tmp_path: Path) -> None:
    settings = {"spark.archives": "models.zip", "spark.executorEnv.PYTHONPATH": "own"}
    data = pipeline(tmp_path, master="yarn", bundle="/etc/b.tar.gz", settings=settings)
    spark = parse_config(data).spark
    assert spark.session_settings["spark.archives"] == "/etc/b.tar.gz#ledgerlake_bundle,models.zip"
    assert spark.session_settings["spark.executorEnv.PYTHONPATH"] == "ledgerlake_bundle:own"


def test_one_machine_needs_no_bundle(tmp_path: Path) -> None:
    spark = parse_config(pipeline(tmp_path, bundle="a/b.tar.gz")).spark
    assert "spark.archives" not in spark.session_settings


def test_a_bundle_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    config = parse_config(pipeline(tmp_path, master="spark://h:7077", bundle="/nowhere.tar.gz"))
    with pytest.raises(SetupError, match=r"make it with: ledgerlake bundle /nowhere\.tar\.gz"):
        start_spark("test", config, Namespace(master=None, conf=[]))
