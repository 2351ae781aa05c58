"""What a whole run shares: one broker and one Spark session, started when first needed and stopped
at the end.

A broker or session that cannot start fails the tests that need it; nothing is skipped.
"""

from __future__ import annotations

import contextlib
import os
import sys
from socketserver import BaseServer
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.stored import secrets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

# The broker that tests use, if one is running.
SERVICE_URL, ADMIN_URL = "LEDGERLAKE_TEST_SERVICE_URL", "LEDGERLAKE_TEST_ADMIN_URL"

settings.register_profile("ledgerlake", deadline=None)
settings.load_profile("ledgerlake")

# Tests start many JVMs that live for seconds, and the second compiler's work does not pay off in
# them. With the first one alone, a JVM keeps 48 MB of compiled code, which a session of the tests
# fills; then it throws code away and compiles it again.
os.environ.setdefault("PULSAR_EXTRA_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=240m")
os.environ.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1")

# A server of the standard library looks twice a second whether it is to end, and tests start
# hundreds.
BaseServer.serve_forever.__defaults__ = (0.02,)


@pytest.fixture(autouse=True)
def close_clusters_of_tests(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the clusters that a test made itself, so that a socket left open is one that the
    product left.
    """
    made: list[Cluster] = []
    begin = Cluster.__init__

    def noted(self: Cluster, settings: ClientSettings) -> None:
        begin(self, settings)
        if str(sys._getframe(1).f_globals["__name__"]).startswith("tests."):
            made.append(self)

    monkeypatch.setattr(Cluster, "__init__", noted)
    yield
    for cluster in made:
        cluster.close()


@pytest.fixture(autouse=True)
def forget_secrets_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let errors of a test show what was a secret in another one."""
    monkeypatch.setattr(secrets, "_known", {})


def pytest_configure(config: pytest.Config) -> None:
    """If tests run in several processes, start the broker that all of them share."""
    in_processes = getattr(config.option, "numprocesses", None) and not hasattr(
        config, "workerinput"
    )
    if not in_processes or "not live" in config.option.markexpr or SERVICE_URL in os.environ:
        return
    from tests.live.runtime import start_runtime

    shared = contextlib.ExitStack()
    running = shared.enter_context(start_runtime())
    os.environ |= {SERVICE_URL: running.service_url, ADMIN_URL: running.admin_url}
    config.add_cleanup(shared.close)


@pytest.fixture(scope="session")
def campaign_is_long() -> bool:
    return os.environ.get("LEDGERLAKE_CAMPAIGN") == "long"


@pytest.fixture(scope="session")
def runtime() -> Iterator[Runtime]:
    from tests.live.runtime import start_runtime

    with start_runtime() as running:
        yield running


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from ledgerlake.runtime.session import start_session

    # State that is no longer needed goes each minute by default, which no test lasts. Small tables
    # need one task to be read. Compiled code does not pay off for a few rows.
    settings = {
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        "spark.sql.streaming.stateStore.maintenanceInterval": "2s",
        "spark.databricks.delta.snapshotPartitions": "1",
    }
    session = start_session("tests", "local[2]", settings)
    yield session
    session.stop()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Campaigns run first, then other live tests: a run in processes is as long as its last
    file.
    """
    items.sort(
        key=lambda item: (item.get_closest_marker("slow") is None, "live" not in item.path.parts)
    )
