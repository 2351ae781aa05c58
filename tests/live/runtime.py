"""The broker that live tests talk to: the embedded one, or a running one named by
LEDGERLAKE_TEST_SERVICE_URL and _ADMIN_URL.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import urllib.error
import urllib.request
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.devbroker import Broker
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ledgerlake.devbroker.security import Security

_numbers = itertools.count()


@dataclass
class Runtime:
    """A broker with what tests do to it from outside."""

    service_url: str
    admin_url: str
    broker: Broker | None = None
    clients: list[Any] = field(default_factory=list)
    security: Security | None = None
    namespace: str = "public/default"

    def topic(self, partitions: int = 0) -> str:
        """A topic of its own."""
        name = f"persistent://{self.namespace}/test-{os.getpid()}-{next(_numbers)}"
        if partitions:
            self.admin("PUT", name, "/partitions", partitions)
        else:
            self.admin("PUT", name)
        return name

    def trimming(self) -> Runtime:
        """The same broker with topics of Pulsar's own defaults: no ledger is kept that every cursor
        has passed, and idle topics are deleted.
        """
        idle = {
            "inactiveTopicDeleteMode": "delete_when_no_subscriptions",
            "maxInactiveDurationSeconds": 60,
            "deleteWhileInactive": True,
        }
        nothing = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
        return self.in_namespace("trimming", retention=nothing, inactiveTopicPolicies=idle)

    def deduplicating(self, name: str = "deduplicating") -> Runtime:
        """The same broker with topics on which a message that is sent twice is stored once."""
        return self.in_namespace(name, deduplication=True)

    def in_namespace(self, name: str, **policies: Any) -> Runtime:
        """The same broker with topics in a namespace of these policies, which no other process of
        the tests uses.
        """
        namespace = f"public/{name}-{os.getpid()}"
        try:
            self._call("PUT", f"namespaces/{namespace}", {})
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        for policy, value in policies.items():
            self._call("POST", f"namespaces/{namespace}/{policy}", value)
        return replace(self, namespace=namespace)

    def admin(self, method: str, topic: str, action: str = "", body: Any = None) -> Any:
        """One call of the broker's REST address for a topic."""
        return self._call(method, f"{topic.replace('://', '/')}{action}", body)

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        url = f"{self.admin_url}/admin/v2/{path}"
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        if self.security is not None:
            headers["Authorization"] = f"Bearer {self.security.admin_token}"
        request = urllib.request.Request(url, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            text = response.read()
        return json.loads(text) if text else None

    def subscriptions(self, topic: str) -> dict[str, int]:
        """Subscriptions and their backlog by the broker's own numbers, once it has noticed that
        readers have gone.
        """

        def there() -> dict[str, Any]:
            stats: dict[str, Any] = self.admin("GET", topic, "/stats?getPreciseBacklog=true")[
                "subscriptions"
            ]
            return stats

        wait_until(lambda: all(subscription["durable"] for subscription in there().values()))
        return {name: subscription["msgBacklog"] for name, subscription in there().items()}

    def first_ledger(self, topic: str) -> int:
        """The oldest ledger that the broker has of a topic."""
        return int(self.admin("GET", topic, "/internalStats")["ledgers"][0]["ledgerId"])

    def entry_headers(self, topic: str, ledger_id: int, entry_id: int) -> dict[str, str]:
        """What the broker's REST address says about one stored entry."""
        url = f"{self.admin_url}/admin/v2/{topic.replace('://', '/')}/ledger/{ledger_id}/entry/{entry_id}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return dict(response.headers.items())

    def client(self) -> Any:
        """A pulsar-client, closed at the end of the run."""
        import pulsar

        quiet = pulsar.ConsoleLogger(pulsar.LoggerLevel.Error)
        secured: dict[str, Any] = {}
        if self.security is not None:
            secured["authentication"] = pulsar.AuthenticationToken(self.security.admin_token)
            secured["tls_trust_certs_file_path"] = self.security.ca_file
        pulsar_client = pulsar.Client(self.service_url, logger=quiet, **secured)
        self.clients.append(pulsar_client)
        return pulsar_client

    def cluster(self, give_up_after_s: float = 300.0) -> Cluster:
        return Cluster(ClientSettings(self.service_url, give_up_after_s=give_up_after_s))

    def config(
        self, folder: Path, *topics: str, name: str | None = None, **source: Any
    ) -> dict[str, Any]:
        """Return the configuration data of a pipeline below ``folder``. The pipeline is named after
        the folder, so two folders have two pipelines.
        """
        name = name or f"test-{zlib.crc32(str(folder).encode()):08x}"
        return {
            "source": {"service_url": self.service_url, "topics": list(topics), **source},
            "stream": {"name": name, "checkpoint": str(folder / "checkpoint"), "trigger": "200 ms"},
            "delta": {"path": str(folder / "messages"), "rejects_path": str(folder / "rejects")},
        }


# Pulsar's own defaults, but that what may be trimmed is looked for every few seconds instead of
# every two minutes.
DEFAULTS = {"retentionCheckIntervalInSeconds": "3"}

# Compaction of consumed ledgers and cleaning of idle topics would only add chance to tests that
# compare with the topic.
SETTINGS = {
    "defaultRetentionTimeInMinutes": "-1",
    "defaultRetentionSizeInMB": "-1",
    "brokerDeleteInactiveTopicsEnabled": "false",
    **DEFAULTS,
}


@contextmanager
def start_runtime(
    settings: dict[str, str] | None = None, *, keeps_everything: bool = True, **broker_options: Any
) -> Iterator[Runtime]:
    """A broker for tests; without ``keeps_everything`` it trims and deletes by Pulsar's own
    defaults.
    """
    service_url = os.environ.get("LEDGERLAKE_TEST_SERVICE_URL")
    if service_url and keeps_everything and not broker_options and not settings:
        yield Runtime(service_url, os.environ["LEDGERLAKE_TEST_ADMIN_URL"])
        return
    base_settings = SETTINGS if keeps_everything else DEFAULTS
    broker = Broker(settings={**base_settings, **(settings or {})}, **broker_options)
    address = broker.start()
    security = broker.security if broker_options.get("secure") else None
    running = Runtime(address.service_url, address.admin_url, broker, security=security)
    try:
        yield running
    finally:
        for client in running.clients:
            client.close()
        broker.stop()


def commits(checkpoint: Path) -> int:
    """How many micro-batches a query's checkpoint knows as done; Spark removes what it says of the
    oldest.
    """
    done = checkpoint / "commits"
    numbers = (
        [int(path.name) for path in done.iterdir() if path.name.isdigit()] if done.exists() else []
    )
    return max(numbers, default=-1) + 1


def wait_for_commits(checkpoint: Path, count: int, running: subprocess.Popen[bytes]) -> None:
    """Return when a query of another process, which is to be killed, has done so many
    micro-batches.
    """
    wait_until(lambda: commits(checkpoint) >= count or running.poll() is not None)
    assert commits(checkpoint) >= count, f"it ended by itself with {running.poll()}"


def to_toml(data: dict[str, Any]) -> str:
    """Configuration data as a file."""
    lines = []
    for section, values in data.items():
        for part in values if isinstance(values, list) else [values]:
            lines.append(f"[[{section}]]" if isinstance(values, list) else f"[{section}]")
            lines += [f"{key} = {_to_toml(value)}" for key, value in part.items()]
    return "\n".join(lines) + "\n"


def _to_toml(value: Any) -> str:
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{json.dumps(key)} = {json.dumps(text)}" for key, text in value.items())
            + "}"
        )
    return json.dumps(value)
