"""The ways in which people get the package: installed, as a wheel, and as a file handed to Spark;
and the compose file.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from ledgerlake.devbroker.standalone import INTERCEPTORS, PULSAR_VERSION

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist_folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(dist_folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = dist_folder.glob("*.whl")
    return built


def test_the_editable_install_sees_all_three_source_roots() -> None:
    for name in ("ledgerlake.wire.framing", "ledgerlake.decode.schema", "ledgerlake.client.reader"):
        module_file = importlib.import_module(name).__file__
        assert module_file is not None
        assert module_file.startswith(str(ROOT))


def test_the_wheel_holds_every_module_and_the_package_itself(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {
        "ledgerlake/__init__.py",
        "pyspark_ledgerlake.py",
        "ledgerlake/runtime/log4j2.properties",
    } <= names
    folders = [ROOT / root / "ledgerlake" for root in ("proto", "udfs", "streaming")]
    sources = [
        path for folder in folders for kind in ("*.py", "*.html") for path in folder.rglob(kind)
    ]
    missing = [
        str(path)
        for path in sources
        if f"ledgerlake/{str(path).split('/ledgerlake/', 1)[1]}" not in names
    ]
    assert missing == []


def test_the_wheel_says_that_it_has_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert archive.read("ledgerlake/py.typed") == b""


def test_nothing_top_level_collides_with_other_peoples_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {
        "ledgerlake",
        "pyspark_ledgerlake.py",
        f"ledgerlake-{version('ledgerlake')}.dist-info",
    }


@pytest.mark.spark
@pytest.mark.live
@pytest.mark.long
def test_spark_reads_with_the_wheel_handed_over_as_a_file(
    runtime: Runtime, wheel: Path, tmp_path: Path
) -> None:
    """In an environment where the package is not installed, as on a cluster; its
    dependencies are.
    """
    topic = runtime.topic()
    producer = runtime.client().create_producer(topic)
    for number in range(10):
        producer.send(b"%d" % number)
    archive = tmp_path / "ledgerlake.zip"
    archive.write_bytes(wheel.read_bytes())
    python = _environment_without_us(tmp_path / "env")
    program = tmp_path / "program.py"
    program.write_text(
        "from pyspark.sql import SparkSession\nspark = "
        "SparkSession.builder.master('local[2]').config('spark.ui.enabled', "
        "'false').getOrCreate()\nfrom ledgerlake.publish.datasource import "
        "LedgerlakeDataSource\nimport ledgerlake\nassert 'ledgerlake.zip' in ledgerlake.__file__, "
        "ledgerlake.__file__\nspark.dataSource.register(LedgerlakeDataSource)\nreader = "
        "spark.read.format('ledgerlake').option('service.url', "
        f"'{runtime.service_url}')\nprint('count', reader.option('topic', "
        f"'{topic}').load().count())\n"
    )
    submit = Path(sys.executable).parent / "spark-submit"
    environment = {**os.environ, "PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}
    result = subprocess.run(
        [str(submit), "--py-files", str(archive), str(program)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=False,
    )
    assert "count 10" in result.stdout, result.stderr[-3000:]


@pytest.mark.spark
@pytest.mark.live
def test_spark_finds_the_format_by_itself_where_the_package_is_installed(
    runtime: Runtime, spark: SparkSession
) -> None:
    topic = runtime.topic()
    runtime.client().create_producer(topic).send(b"x")
    # What another session has registered, this one does not know.
    reader = spark.newSession().read.format("ledgerlake").option("service.url", runtime.service_url)
    assert reader.option("topic", topic).load().count() == 1


def _environment_without_us(folder: Path) -> str:
    """A virtual environment that sees this one's packages, except ourselves."""
    venv.create(folder, symlinks=True)
    own_site_packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for package in own_site_packages.iterdir():
        if "ledgerlake" not in package.name and package.suffix != ".pth":
            (site_packages / package.name).symlink_to(package)
    return str(folder / "bin" / "python")


def test_compose_runs_the_same_broker_with_entry_metadata_on() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    (service,) = compose["services"].values()
    assert service["image"] == f"apachepulsar/pulsar:{PULSAR_VERSION}"
    environment = service["environment"]
    assert environment["PULSAR_PREFIX_brokerEntryMetadataInterceptors"] == INTERCEPTORS
    assert environment["PULSAR_PREFIX_exposingBrokerEntryMetadataToClientEnabled"] == "true"
    assert "apply-config-from-env.py conf/standalone.conf" in " ".join(service["command"])
    assert "127.0.0.1:6650:6650" in service["ports"]
