"""Several writers of one table at once: two pipelines, with the upkeep of each, or with delta-rs's
compaction again and again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tests.live.object_store import ObjectStore, start_object_store
from tests.live.pipelines import config_file
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.long]


class Publisher(threading.Thread):
    """Publishes numbered values until it is ended, and counts those that the broker confirmed."""

    def __init__(self, runtime: Runtime, topic: str, name: str) -> None:
        super().__init__(name=name)
        self.confirmed: list[bytes] = []
        self._producer = runtime.client().create_producer(topic, block_if_queue_full=True)
        self._ended = threading.Event()

    def run(self) -> None:
        number = 0
        while not self._ended.wait(0.05):
            for _ in range(20):
                value = b"%s-%d" % (self.name.encode(), number)
                self._producer.send_async(
                    value, lambda _result, _id, value=value: self.confirmed.append(value)
                )
                number += 1
        self._producer.flush()
        self._producer.close()

    def end(self) -> None:
        self._ended.set()
        self.join()


class Compactor(threading.Thread):
    """Compacts the files of a table again and again, and counts how often that succeeded."""

    def __init__(self, path: str, options: dict[str, str] | None) -> None:
        super().__init__()
        self.count = 0
        self._path, self._options = path, options
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(1):
            # Another writer may have been first; the pipelines must not be held up by that.
            with suppress(DeltaError):
                DeltaTable(self._path, storage_options=self._options).optimize.compact()
                self.count += 1

    def end(self) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with start_object_store() as running:
        yield running


def values(path: str, options: dict[str, str] | None) -> Counter[bytes]:
    table = DeltaTable(path, storage_options=options).to_pyarrow_table(columns=["value"])
    return Counter(table["value"].to_pylist())


@pytest.mark.parametrize("place", ["disk", "s3"])
@pytest.mark.parametrize("has_upkeep", [True, False], ids=["upkeep", "delta-rs"])
def test_two_pipelines_and_compaction_of_one_table_lose_and_double_nothing_and_nobody_ends(
    runtime: Runtime,
    store: ObjectStore,
    tmp_path: Path,
    place: str,
    has_upkeep: bool,
    campaign_is_long: bool,
) -> None:
    in_store = place == "s3"
    path = f"s3://{store.bucket()}/messages" if in_store else str(tmp_path / "messages")
    options = store.delta_options if in_store else None
    topics = {name: runtime.topic(2) for name in ("one", "two")}
    pipelines = {
        name: started(runtime, tmp_path / name, name, topic, path, store, has_upkeep=has_upkeep)
        for name, topic in topics.items()
    }
    publishers = [Publisher(runtime, topic, name) for name, topic in topics.items()]
    compactor = Compactor(path, options)
    threads: list[Publisher | Compactor] = [*publishers] if has_upkeep else [*publishers, compactor]
    try:
        wait_until(lambda: DeltaTable.is_deltatable(path, storage_options=options))
        for thread in threads:
            thread.start()
        time.sleep(600 if campaign_is_long else 60)
        for publisher in publishers:
            publisher.end()
        confirmed = Counter(value for publisher in publishers for value in publisher.confirmed)
        wait_until(
            lambda: (
                sum(values(path, options).values()) >= sum(confirmed.values())
                or any(running.poll() is not None for running in pipelines.values())
            )
        )
        if not has_upkeep:
            compactor.end()
        for running in pipelines.values():
            running.send_signal(signal.SIGTERM)
        assert {name: running.wait(120) for name, running in pipelines.items()} == {
            "one": 0,
            "two": 0,
        }
    finally:
        for running in pipelines.values():
            running.kill()
            running.wait()
        for thread in threads:
            if thread.is_alive():
                thread.end()
    assert values(path, options) == confirmed
    assert set(confirmed.values()) == {1}
    print(f"{len(confirmed):,} messages, {DeltaTable(path, storage_options=options).version():,} "
          f"commits, {compactor.count} compactions")  # fmt: skip
    history = DeltaTable(path, storage_options=options).history()
    merges = sum(commit.get("engineInfo") == "ledgerlake" for commit in history)
    assert (merges if has_upkeep else compactor.count) > 2


def started(
    runtime: Runtime,
    folder: Path,
    name: str,
    topic: str,
    path: str,
    store: ObjectStore,
    *,
    has_upkeep: bool,
) -> subprocess.Popen[bytes]:
    data: dict[str, Any] = runtime.config(folder, topic, name=f"{name}-{folder.parent.name[-30:]}")
    data["delta"] = {"path": path}
    data["upkeep"] = {"enabled": has_upkeep, "interval": "500 ms", "busy_percent": 50}
    if path.startswith("s3:"):
        data["storage"] = store.settings
    command = [sys.executable, "-m", "ledgerlake.cli", "run", config_file(folder, data)]
    with open(folder / "run.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)
