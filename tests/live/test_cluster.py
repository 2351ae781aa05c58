"""A pipeline whose executors are other processes, with a Python that has no package of ours."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from ledgerlake.devbroker.ports import free_ports
from ledgerlake.runtime.session import delta_jars
from tests.live.cluster_campaign import cluster_campaign, run_cluster_campaign
from tests.live.hosts import can_make_hosts
from tests.live.pipelines import config_file, ledgerlake_process, publish_numbers, values
from tests.live.servers import answers_at, server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.long]

_SPARK_HOME = Path(pyspark.__file__).parent
_START_S = 120


@pytest.fixture(scope="module")
def master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster with one worker, whose Python has no package at all."""
    folder = tmp_path_factory.mktemp("cluster")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder / "bare")], check=True
    )
    port, page, worker_page = free_ports(3)
    address = f"spark://127.0.0.1:{port}"
    environment = {
        "PATH": f"{folder}/bare/bin:/usr/bin:/bin",
        "SPARK_WORKER_DIR": str(folder / "work"),
    }
    master_options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)]
    worker_options = [
        "--host",
        "127.0.0.1",
        "--webui-port",
        str(worker_page),
        "-c",
        "2",
        "-m",
        "2g",
        address,
    ]
    with (
        _daemon("master.Master", master_options, environment, page),
        _daemon("worker.Worker", worker_options, environment, worker_page),
    ):
        yield address


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("bundle") / "bundle.tar.gz")
    assert ledgerlake_process("bundle", path).returncode == 0
    return path


def _daemon(
    name: str, options: list[str], environment: dict[str, str], page: int
) -> AbstractContextManager[None]:
    command = [
        str(_SPARK_HOME / "bin" / "spark-class"),
        f"org.apache.spark.deploy.{name}",
        *options,
    ]
    java = {"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}
    return server(
        command,
        lambda: answers_at(f"http://127.0.0.1:{page}/json/"),
        {"SPARK_HOME": str(_SPARK_HOME), **java, **environment},
        _START_S,
    )


def test_a_bundle_is_all_that_executors_need_and_relative_paths_are_the_drivers(
    runtime: Runtime, master: str, bundle: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = runtime.topic(2)
    publish_numbers(runtime, topic, range(1000), batch=10)
    monkeypatch.chdir(tmp_path)
    data = runtime.config(Path(), topic) | {
        "spark": {"master": master, "bundle": bundle},
        "deliver": {"topic": runtime.topic()},
    }
    result = ledgerlake_process("run", config_file(tmp_path, data), "--once")
    assert result.returncode == 0, result.stderr
    assert sorted(values(tmp_path)) == list(range(1000))


@pytest.mark.skipif(not can_make_hosts(), reason="namespaces need root on Linux")
def test_hosts_that_die_vanish_or_are_slow_lose_and_double_nothing(
    tmp_path: Path, campaign_is_long: bool
) -> None:
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    with cluster_campaign(tmp_path, seed) as campaign:
        assert run_cluster_campaign(campaign, 2 if campaign_is_long else 1, 0, print) == []


def test_a_program_of_spark_submit_runs_where_that_command_says(
    runtime: Runtime, master: str, bundle: str, tmp_path: Path
) -> None:
    topic = runtime.topic(2)
    publish_numbers(runtime, topic, range(1000), batch=10)
    config = config_file(tmp_path, runtime.config(tmp_path, topic))
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    settings = [
        "spark.executorEnv.PYTHONPATH=environment",
        f"spark.pyspark.python={python}",
        # One that Ledgerlake would choose otherwise.
        "spark.sql.session.timeZone=Asia/Tokyo",
        f"spark.eventLog.dir={tmp_path}",
        "spark.eventLog.enabled=true",
        "spark.eventLog.rolling.enabled=false",
        "spark.eventLog.compress=false",
    ]
    where = [
        "--master",
        master,
        "--archives",
        f"{bundle}#environment",
        "--jars",
        ",".join(delta_jars()),
    ]
    options = [option for setting in settings for option in ("--conf", setting)]
    result = subprocess.run(
        [
            str(_SPARK_HOME / "bin" / "spark-submit"),
            *where,
            *options,
            "deploy/submit.py",
            "run",
            config,
            "--once",
        ],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(values(tmp_path)) == list(range(1000))
    events = next(file for file in tmp_path.glob("app-*") if file.is_file()).read_text()
    assert '"spark.sql.session.timeZone":"Asia/Tokyo"' in events
