"""A campaign against a cluster: master, driver and two workers are hosts of their own (see
``hosts``), table and checkpoint are in S3, the broker trims and deletes by its defaults.

When most messages are published, faults begin, while messages go on coming. Hosts are killed or
lose their network. The broker and the store end and come back. The store refuses every request for
half a minute. One host is so slow that Spark's speculation repeats its tasks. Then ``oracle``
judges, and the store's key is searched for in all that the run left.

    python -m tests.live.cluster_campaign --rounds 10 --messages 5000000 --folder /tmp/cluster
    --seed 1
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyspark
from pyarrow import fs

from ledgerlake.runtime.java import cache_folder, fetch_jars
from tests.live.campaign import (
    DEDUPLICATION,
    Campaign,
    batched,
    begin,
    chunked,
    delayed,
    finish,
    say_at_once,
    single,
)
from tests.live.hosts import PROJECT, Bare, Host, Network, network
from tests.live.object_store import (
    ACCESS_KEY,
    SECRET_KEY,
    ObjectStore,
    hadoop_version,
    start_object_store,
)
from tests.live.oracle import StoredTable, Verdict, judge
from tests.live.pipelines import ledgerlake_process
from tests.live.runtime import start_runtime, to_toml
from tests.live.servers import answers_at
from tests.live.store_proxy import StoreProxy
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAULTS = ("executor host", "driver", "broker", "store", "slow host")
_REFUSING_S = 30
_SLOW_S = 20
_MASTER_PORT, _PAGE_PORT, _UI_PORT = 7077, 8080, 4040
_SPARK_HOME = Path(pyspark.__file__).parent

# So that a host that lost its network is missed within the round.
_SETTINGS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "1g",
    "spark.network.timeout": "40s",
    "spark.network.timeoutInterval": "10s",
    "spark.executor.heartbeatInterval": "5s",
    "spark.speculation": "true",
    "spark.speculation.interval": "500ms",
    "spark.speculation.quantile": "0.5",
    "spark.ui.enabled": "true",
    "spark.eventLog.enabled": "true",
    "spark.eventLog.rolling.enabled": "false",
    "spark.eventLog.compress": "false",
}


@dataclass
class Cluster:
    """A standalone cluster of Spark, with two hosts for drivers. Its other hosts are bare: they
    have Spark and a Python without packages.
    """

    network: Network
    folder: Path
    hosts: dict[str, Host] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hidden = (
            PROJECT,
            Path(sys.prefix),
            cache_folder(),
            Path.home() / ".ivy2",
            Path.home() / ".ivy2.5.2",
        )
        for name in ("master", "worker1", "worker2"):
            self.hosts[name] = self.network.host(
                name, Bare(self.folder / name, {"spark": _SPARK_HOME}, hidden)
            )
        for name in ("driver1", "driver2"):
            self.hosts[name] = self.network.host(name)
        self.start("master")
        for name in ("worker1", "worker2"):
            self.start(name)

    @property
    def master(self) -> str:
        return f"spark://{self.hosts['master'].address}:{_MASTER_PORT}"

    def start(self, name: str) -> None:
        """Start the master or a worker; it answers when this returns. What its killed executors
        left is removed: a bundle for each takes most of a gigabyte.
        """
        host = self.hosts[name]
        for left in (self.folder / name).glob("spark-*"):
            shutil.rmtree(left)
        shutil.rmtree(self.folder / name / "applications", ignore_errors=True)
        options = ["--host", host.address, "--webui-port", str(_PAGE_PORT)]
        if name == "master":
            daemon, options = "master.Master", [*options, "--port", str(_MASTER_PORT)]
        else:
            daemon, options = "worker.Worker", [*options, "-c", "1", "-m", "1g", self.master]
        # A venv without packages is the Python of a host on which nobody has installed any.
        python = f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
        start = (
            f"[ -d bare ] || {python} -m venv --without-pip bare; exec spark/bin/spark-class "
            f"org.apache.spark.deploy.{daemon} "
        )
        environment = {
            "PATH": "/tmp/bare/bin:/usr/bin:/bin",
            "SPARK_HOME": "/tmp/spark",
            "SPARK_WORKER_DIR": "/tmp/applications",
            "SPARK_MASTER_OPTS": "-Dspark.worker.timeout=20",
            "SPARK_WORKER_OPTS": "-Dspark.worker.cleanup.enabled=true "
            "-Dspark.worker.cleanup.interval=60 "
            "-Dspark.worker.cleanup.appDataTtl=60",
        }
        java = {"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {}
        host.start(
            ["sh", "-c", start + " ".join(options)], java | environment, self.folder / f"{name}.log"
        )
        wait_until(lambda: answers_at(f"http://{host.address}:{_PAGE_PORT}/json/"))


@dataclass
class ClusterCampaign(Campaign):
    """A campaign whose driver runs on a host of the cluster, and whose lake is a bucket."""

    cluster: Cluster = field(kw_only=True)
    store: ObjectStore = field(kw_only=True)
    proxy: StoreProxy = field(kw_only=True)
    bundle: Path = field(kw_only=True)
    look_every_s: float = 0.2
    ui_pages: dict[str, str] = field(default_factory=dict)
    enough: threading.Event = field(default_factory=threading.Event)
    _driver: str = "driver1"
    _seen_commits: int = 0

    def __post_init__(self) -> None:
        self.kinds = (batched, single, delayed, _some_chunked, self.bulk)
        super().__post_init__()
        self.bucket = self.store.bucket()
        connector = fetch_jars("org.apache.hadoop", "hadoop-aws", hadoop_version())
        self.data["delta"] = {
            "path": f"s3://{self.bucket}/messages",
            "rejects_path": f"s3://{self.bucket}/rejects",
        }
        self.data["stream"]["checkpoint"] = f"s3://{self.bucket}/checkpoint"
        self.data["storage"] = self.store.settings | {
            "endpoint_url": f"http://{self.store.host}:{self.proxy.port}",
            "access_key_id": "env:LAKE_KEY",
            "secret_access_key": "env:LAKE_SECRET",
        }
        self.data["spark"] = {
            "master": self.cluster.master,
            "bundle": str(self.bundle),
            # A driver's host has no way to Maven.
            "settings": _SETTINGS
            | {
                "spark.jars": ",".join(map(str, connector)),
                "spark.eventLog.dir": str(self.folder / "events"),
            },
        }
        (self.folder / "events").mkdir()
        Path(self.config).write_text(to_toml(self.data))

    def bulk(
        self, rng: random.Random
    ) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
        """A producer of most messages, until there are ``enough``."""
        settings = {
            "batching_enabled": True,
            "batching_max_messages": 1000,
            "max_pending_messages": 5000,
        }
        return (
            settings,
            lambda: [] if self.enough.is_set() else [(b"z" * rng.randint(1, 40), 0)] * 1000,
            0.1,
        )

    def spawn(
        self, command: list[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        local = self.folder / "driver"
        shutil.rmtree(local, ignore_errors=True)
        settings = {
            "LAKE_KEY": ACCESS_KEY,
            "LAKE_SECRET": SECRET_KEY,
            "SPARK_LOCAL_DIRS": str(local),
        }
        return self.driver.start(command, environment | settings, log)

    @property
    def driver(self) -> Host:
        return self.cluster.hosts[self._driver]

    def commits(self) -> int:
        log = fs.FileSelector(f"{self.bucket}/messages/_delta_log", allow_not_found=True)
        # While the store is down, the last known number counts.
        with suppress(OSError):
            files = self.store.filesystem().get_file_info(log)
            self._seen_commits = sum(file.extension == "json" for file in files)
        return self._seen_commits

    def strike(self, fault: str, number: int) -> None:
        """Let a fault happen, and wait until the pipeline has got over it."""
        with self.process() as running:
            self.await_commits(self.rng.randint(1, 4), running)
            time.sleep(self.rng.uniform(0, 2))
            self.log.append(fault)
            if fault == "driver":
                self._end_driver(vanishes=number % 2 == 1)
            else:
                getattr(self, f"_{fault.replace(' ', '_')}")(number)
                self.await_commits(2, running)

    def _end_driver(self, *, vanishes: bool) -> None:
        host = self.driver
        if vanishes:
            # Another host goes on, while the broker still takes the one that is gone for connected.
            host.vanish()
            self._driver = "driver1" if self._driver == "driver2" else "driver2"
        else:
            host.kill()
        self.end()
        with self.process() as running:
            self.await_commits(2, running)
        host.come_back()

    def _executor_host(self, number: int) -> None:
        name = self.rng.choice(("worker1", "worker2"))
        host = self.cluster.hosts[name]
        if number % 2:
            host.vanish()
            time.sleep(self.rng.uniform(0, 40))
            host.come_back()
        else:
            host.kill()
            time.sleep(self.rng.uniform(0, 5))
        self.cluster.start(name)

    def _broker(self, _number: int) -> None:
        self.restart_broker()

    def _store(self, number: int) -> None:
        if number % 2:
            self.proxy.refuses = True
            time.sleep(_REFUSING_S)
            self.proxy.refuses = False
        else:
            self.store.stop()
            time.sleep(self.rng.uniform(0, 5))
            self.store.start()

    def _slow_host(self, _number: int) -> None:
        host = self.cluster.hosts[self.rng.choice(("worker1", "worker2"))]
        ends_s = time.monotonic() + _SLOW_S
        try:
            while time.monotonic() < ends_s:
                host.suspend()
                time.sleep(0.9)
                host.go_on()
                time.sleep(0.1)
        finally:
            host.go_on()

    def stored(self, name: str) -> StoredTable:
        return StoredTable(
            f"s3://{self.bucket}/{name}", self.store.filesystem(), self.store.delta_options
        )

    def judge_table(self) -> Verdict:
        """What the oracle says of the tables in the store."""
        messages = self.stored("messages")
        verdict = judge(self.confirmed, messages, self.stored("rejects"))
        rows = messages.delta_table().count()
        assert rows == verdict.rows, f"deltalake counts {rows} rows, the oracle {verdict.rows}"
        return verdict

    def await_messages(self, count: int) -> None:
        """Wait until so many messages are published, and end what published most of them."""
        self.log.append("messages")
        with self.process() as running:
            while len(self.confirmed) < count:
                assert running.poll() is None, self.last_log()
                time.sleep(1)
        self.enough.set()

    def read_pages(self) -> None:
        """Keep the pages of the driver's interface that show settings and plans."""
        self.log.append("pages")
        root = f"http://{self.driver.address}:{_UI_PORT}"
        (application,) = json.loads(_read(f"{root}/api/v1/applications"))
        of_application = f"{root}/api/v1/applications/{application['id']}"
        addresses = [
            f"{root}/environment/",
            f"{of_application}/environment",
            f"{of_application}/sql?planDescription=true",
        ]
        self.ui_pages = {address: _read(address) for address in addresses}

    def places_of_the_key(self) -> list[str]:
        """Which logs, event logs, pages, and files of the checkpoint and of the tables' logs have
        the key.
        """
        left = [
            path
            for name in ("*.log", "std???", "events/*")
            for path in self.folder.rglob(name)
            if path.is_file()
        ]
        places = [str(path) for path in left if SECRET_KEY.encode() in path.read_bytes()]
        filesystem = self.store.filesystem()
        for folder in ("checkpoint", "messages/_delta_log", "rejects/_delta_log"):
            selector = fs.FileSelector(
                f"{self.bucket}/{folder}", recursive=True, allow_not_found=True
            )
            files = [file.path for file in filesystem.get_file_info(selector) if file.is_file]
            places += [
                path
                for path in files
                if SECRET_KEY.encode() in filesystem.open_input_file(path).read()
            ]
        assert "spark.executor.heartbeatInterval" in "".join(self.ui_pages.values())
        return places + [address for address, page in self.ui_pages.items() if SECRET_KEY in page]


def _some_chunked(
    rng: random.Random,
) -> tuple[dict[str, Any], Callable[[], list[tuple[bytes, int]]], float]:
    """Large messages, not so often that in an hour and a half they fill a disk."""
    settings, make, _ = chunked(rng)
    return settings, make, 10.0


def _read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as page:
        return str(page.read().decode())


def run_cluster_campaign(
    campaign: ClusterCampaign,
    rounds: int,
    messages: int,
    say: Callable[[str], None],
    most_s: float = float("inf"),
) -> list[str]:
    """Publish at least so many messages, then strike with each fault once a round; return what must
    not be. No strike begins after ``most_s``.
    """
    ends_s = time.monotonic() + most_s

    def strike_in_time(fault: str, number: int) -> None:
        if time.monotonic() < ends_s:
            campaign.strike(fault, number)
        else:
            campaign.log.append(f"no {fault}, for it is late")

    actions: list[Callable[[], None]] = [partial(campaign.await_messages, messages)]
    for number in range(rounds):
        faults = campaign.rng.sample(FAULTS, len(FAULTS))
        actions += [partial(strike_in_time, fault, number) for fault in faults]
    campaign.play([*actions, campaign.read_pages], say)
    return campaign.faults(say) + [
        f"the key is in {place}" for place in campaign.places_of_the_key()
    ]


@contextmanager
def cluster_campaign(folder: Path, seed: int) -> Iterator[ClusterCampaign]:
    """A campaign with its cluster, broker and store, which end with the context."""
    folder.mkdir(parents=True, exist_ok=True)
    bundle = folder / "bundle.tar.gz"
    assert ledgerlake_process("bundle", str(bundle)).returncode == 0
    with ExitStack() as stack:
        net = stack.enter_context(network())
        runtime = stack.enter_context(
            start_runtime(
                DEDUPLICATION, keeps_everything=False, broker_metadata=True, host=net.address
            )
        )
        store = stack.enter_context(start_object_store(net.address))
        proxy = StoreProxy(store.ports["s3.port"], net.address)
        cluster = Cluster(net, folder)
        yield ClusterCampaign(
            runtime,
            folder,
            random.Random(seed),
            cluster=cluster,
            store=store,
            proxy=proxy,
            bundle=bundle,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="strikes of each kind")
    parser.add_argument("--messages", type=int, default=0, help="the fewest messages")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="no strike begins later"
    )
    options = begin(parser)
    with cluster_campaign(options.folder, options.seed) as campaign:
        faults = run_cluster_campaign(
            campaign, options.rounds, options.messages, say_at_once, 60 * options.minutes
        )
    return finish(campaign, options.seed, faults)


if __name__ == "__main__":
    sys.exit(main())
