"""Hosts of their own on one machine, by Linux's namespaces: each has an address and a loopback of
its own. A bare host also has a ``/tmp`` of its own, and does not see this project.

So a path or a loopback address that leaks from a driver to a bare host fails at once. This process
stays where it was, at the first address of the network. Root alone may make namespaces.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = Path(__file__).parents[2]

# A connection to a host that is gone ends after half a minute.
_TCP_RETRIES = 6

# How long a killed process may take to end.
_END_S = 30

# The host's own folder becomes /tmp; then what it must not see is covered by empty folders.
_ENTER_BARE = """
set -e
for mount in $HOST_MOUNTS; do
    mkdir -p "$HOST_FOLDER/${mount#*=}"
    mount --bind "${mount%%=*}" "$HOST_FOLDER/${mount#*=}"
done
mount --rbind "$HOST_FOLDER" /tmp
for folder in $HOST_HIDDEN; do if [ -d "$folder" ]; then mount -t tmpfs tmpfs "$folder"; fi; done
cd /tmp
exec "$@"
"""


def can_make_hosts() -> bool:
    """Whether this process may make namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    return (
        subprocess.run(
            ["unshare", "--net", "--mount", "true"], check=False, capture_output=True
        ).returncode
        == 0
    )


@dataclass(frozen=True)
class Bare:
    """What a bare host sees.

    Args:
        folder: this machine's folder that is ``/tmp`` on it.
        mounts: folders of this machine, by their names below its ``/tmp``.
        hidden: folders of this machine that are empty on it.
    """

    folder: Path
    mounts: dict[str, Path]
    hidden: tuple[Path, ...]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "HOST_FOLDER": str(self.folder),
            "HOST_MOUNTS": " ".join(f"{source}={name}" for name, source in self.mounts.items()),
            "HOST_HIDDEN": " ".join(map(str, self.hidden)),
        }


@dataclass
class Host:
    """A host of a network.

    Args:
        bare: what a bare host sees.
    """

    namespace: str
    link: str
    address: str
    bare: Bare | None = None
    _started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, command: list[str], environment: dict[str, str], log: Path
    ) -> subprocess.Popen[bytes]:
        """Start a process on the host; it leads a session, and its output goes to ``log``."""
        entering = ["ip", "netns", "exec", self.namespace]
        if self.bare is not None:
            environment = environment | self.bare.environment
            entering += ["sh", "-c", _ENTER_BARE, "sh"]
        with open(log, "ab") as output:
            process = subprocess.Popen(
                [*entering, *command],
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def kill(self) -> None:
        """End every process of the host at once, and wait for those that were started here. Their
        connections are closed, as by a process that crashes.
        """
        self._signal(signal.SIGKILL)
        for process in self._started:
            process.wait(_END_S)
        self._started.clear()

    def vanish(self) -> None:
        """Cut the host off the network and end its processes, so that nobody is told of their end,
        as if it lost its power. ``come_back`` connects it again.
        """
        _ip("link", "set", self.link, "down")
        self.kill()

    def come_back(self) -> None:
        _ip("link", "set", self.link, "up")

    def suspend(self) -> None:
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        listed = subprocess.run(
            ["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=True
        )
        for pid in map(int, listed.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


@dataclass
class Network:
    """A bridge with the addresses ``10.<number>.0.0/24``; this process has the first one."""

    number: int
    hosts: list[Host] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"10.{self.number}.0.1"

    @property
    def bridge(self) -> str:
        return f"lake{self.number}"

    def host(self, name: str, bare: Bare | None = None) -> Host:
        """Make a host."""
        number = len(self.hosts) + 2
        link, inner, namespace = (
            f"{self.bridge}h{number}",
            f"{self.bridge}i{number}",
            f"{self.bridge}-{name}",
        )
        host = Host(namespace, link, f"10.{self.number}.0.{number}", bare)
        if bare is not None:
            bare.folder.mkdir(parents=True)
        self.hosts.append(host)
        _ip("netns", "add", namespace)
        _ip("link", "add", link, "type", "veth", "peer", "name", inner, "netns", namespace)
        _ip("link", "set", link, "master", self.bridge, "up")
        for change in (
            ("addr", "add", f"{host.address}/24", "dev", inner),
            ("link", "set", inner, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", namespace, *change)
        # Spark's master gives the cores of an application away when TCP says that its driver's host
        # is gone. By Linux's defaults that takes a quarter of an hour.
        _ip(
            "netns",
            "exec",
            namespace,
            "sysctl",
            "-q",
            "-w",
            f"net.ipv4.tcp_retries2={_TCP_RETRIES}",
        )
        return host


@contextlib.contextmanager
def network() -> Iterator[Network]:
    """A network until the end of the context, when all of its hosts end."""
    made = Network(64 + os.getpid() % 64)
    _ip("link", "add", made.bridge, "type", "bridge")
    try:
        _ip("addr", "add", f"{made.address}/24", "dev", made.bridge)
        _ip("link", "set", made.bridge, "up")
        yield made
    finally:
        for host in made.hosts:
            host.kill()
            _ip("netns", "del", host.namespace)
        _ip("link", "del", made.bridge)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
