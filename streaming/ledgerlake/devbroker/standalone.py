"""A Pulsar standalone of our own: fetch, configure, start, stop.

Layout of a data folder:

    broker.json      version, ports, pid, addresses: what another command needs to find it
    standalone.conf  the distribution's file with our settings over it
    broker.log       what the broker printed
    bookkeeper/ metadata/

Rules kept here:
  - A data folder keeps its ports, since BookKeeper knows its bookie by address. They are any that
    are free, or Pulsar's own if those are free and wanted. A start may choose the broker's ports,
    but not the bookie's, and no other port is used if one that was chosen or kept is taken.
  - ``attached`` brokers end when the process that started them ends, however it ends; detached ones
    end by ``stop``.
  - Only a process that we started is ever signalled: its command line must name the data folder.
  - A data folder that other users can write to is neither read nor written.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ledgerlake.devbroker.ports import free_ports, is_free
from ledgerlake.devbroker.security import Security, make_security
from ledgerlake.errors import SetupError
from ledgerlake.runtime.java import cache_folder, fetch_file, find_java, locked
from ledgerlake.runtime.private_files import check_trusted_folder, only_owner_writes

PULSAR_VERSION = "4.0.8"
_SHA512 = (
    "65b769b10696cdfebf7fc5bcdc95dd663702e27051e616c1a13cb100e91279525"
    "be35352171befe7b0011176330aab29bd0a6c8a0f2f0646641af46d2e33cbd6"
)
_STATE_VERSION = 2
# The first line of a stack trace, of one of its causes, or of the JVM's own complaint.
_ERROR = re.compile(r"^(Caused by: )?[\w.$]+(Exception|Error)\b|^Error[: ]|^# |insufficient memory")
_LONGEST_ERROR = 300

_SECURE = "pulsar+ssl://"
_USUAL_PORTS = {"service": 6650, "web": 8080, "service_tls": 6651}

START_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
_ENDING_S = 2.0

INTERCEPTORS = (
    "org.apache.pulsar.common.intercept.AppendBrokerTimestampMetadataInterceptor,"
    "org.apache.pulsar.common.intercept.AppendIndexMetadataInterceptor"
)

# The distribution's own launcher passes these; without them Netty and BookKeeper fall back to slow
# paths.
_JVM_OPTIONS = [
    "-Xms256m",
    "-Xmx512m",
    "-XX:MaxDirectMemorySize=768m",
    "-Djava.net.preferIPv4Stack=true",
    "-Djute.maxbuffer=10485760",
    "-Dio.netty.tryReflectionSetAccessible=true",
    "-Dpulsar.allocator.exit_on_oom=true",
    "-Dlog4j2.disable.jmx=true",
    "-Dpulsar.log.level=warn",
    "-Dpulsar.log.root.level=warn",
    "-Dpulsar.log.appender=Console",
    "-Dlog4j.configurationFile=log4j2.yaml",
    "-Dlog4j.shutdownHookEnabled=false",
]
_JVM_OPENS = [
    "java.base/java.io",
    "java.base/java.nio",
    "java.base/java.util.zip",
    "java.base/jdk.internal.misc",
    "java.base/jdk.internal.platform",
    "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
]


@dataclass(frozen=True)
class BrokerAddress:
    """The address of a running broker; ``data_dir`` holds everything that it writes."""

    service_url: str
    admin_url: str
    pid: int
    data_dir: str


@dataclass(frozen=True)
class _Ports:
    service: int
    web: int
    bookie: int
    service_tls: int
    web_tls: int


_NAMES = [field.name for field in fields(_Ports)]


class Broker:
    """A standalone broker on one data folder.

    Args:
        data_dir: kept across restarts; None makes a temporary folder that ``stop`` removes.
        broker_metadata: whether the PIP-70 interceptors and their exposure to clients are switched
            on.
        settings: further lines for the broker's configuration.
        host: the address of this machine at which it listens.
        secure: TLS, and tokens or client certificates for everybody (see ``security``).
        usual_ports: whether it listens at Pulsar's own ports, if they are free.
        port: the port for clients, in place of any other.
        http_port: the port of the admin address, likewise.
    """

    def __init__(
        self,
        data_dir: str | Path | None = None,
        *,
        broker_metadata: bool = True,
        settings: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        secure: bool = False,
        usual_ports: bool = False,
        port: int | None = None,
        http_port: int | None = None,
    ) -> None:
        self._temporary = data_dir is None
        self._given_dir = Path(data_dir or tempfile.mkdtemp(prefix="ledgerlake-broker-"))
        self.data_dir = self._given_dir.resolve()
        self._broker_metadata = broker_metadata
        self._settings = dict(settings or {})
        self._host = host
        self._secure = secure
        self._usual_ports = usual_ports
        # The ports that are told to users, and the options that choose them.
        self._options = {"service_tls" if secure else "service": "--port", "web": "--http-port"}
        wanted = zip(self._options, (port, http_port), strict=True)
        self._wanted = {name: number for name, number in wanted if number is not None}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, attached: bool = True) -> BrokerAddress:
        """Start and wait until a client can use it (about 8 s once the distribution is there).

        Raises:
            SetupError: no Java, no distribution, other users can write to the data folder, a port
                is taken, or the broker did not come up; the message names its log.
        """
        running = self.status()
        if running is not None and self._secure and not running.service_url.startswith(_SECURE):
            raise SetupError(
                "the broker that runs is not secure; end it with: ledgerlake broker stop"
            )
        if running is not None:
            self._check_runs_there()
            return running
        ports = self._ports()
        home = distribution()
        try:
            with only_owner_writes():
                self.data_dir.mkdir(parents=True, exist_ok=True)
            if self._secure:
                self._settings |= make_security(self.security.folder).settings(
                    ports.service_tls, ports.web_tls
                )
            (self.data_dir / "standalone.conf").write_text(self._configuration(home, ports))
        except OSError as error:
            raise SetupError(
                f"the broker cannot write to {self.data_dir}: {error.strerror}; choose another "
                "--data-dir"
            ) from None
        self._process = self._spawn(home, ports, attached)
        address = BrokerAddress(
            f"{_SECURE}{self._host}:{ports.service_tls}"
            if self._secure
            else f"pulsar://{self._host}:{ports.service}",
            f"http://{self._host}:{ports.web}",
            self._process.pid,
            str(self.data_dir),
        )
        state = {"version": _STATE_VERSION, **asdict(ports), **asdict(address)}
        (self.data_dir / "broker.json").write_text(json.dumps(state, indent=2))
        try:
            self._wait_until_ready(ports)
        except BaseException:
            self.stop()
            raise
        return address

    @property
    def security(self) -> Security:
        """Certificates and tokens of a secure broker."""
        return Security(self.data_dir / "security")

    def status(self) -> BrokerAddress | None:
        """The running broker of this data folder, or None.

        Raises:
            SetupError: other users can write to the data folder.
        """
        check_trusted_folder(self._given_dir, "choose another --data-dir")
        state = self._state()
        if state is None or not _is_ours(state["pid"], self.data_dir):
            return None
        return BrokerAddress(
            state["service_url"], state["admin_url"], state["pid"], state["data_dir"]
        )

    def stop(self) -> bool:
        """Stop it, by force after a while; False if none ran. A temporary data folder is
        removed.
        """
        running = self.status()
        if running is not None:
            _end(running.pid, self._process)
        self._forget_process()
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)
        return running is not None

    def kill(self) -> None:
        """End it at once, as a crash would; the data folder stays."""
        running = self.status()
        if running is None:
            return
        for pid in [*_children(running.pid), running.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._forget_process()

    def _forget_process(self) -> None:
        """Wait for the end of the process, and close the pipe to it."""
        if self._process is None:
            return
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=STOP_TIMEOUT_S)
        self._process = None

    def __enter__(self) -> BrokerAddress:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _state(self) -> dict[str, Any] | None:
        try:
            state: dict[str, Any] = json.loads((self.data_dir / "broker.json").read_text())
        except (OSError, ValueError):
            return None
        return state if state.get("version") == _STATE_VERSION else None

    def _check_runs_there(self) -> None:
        state = self._state() or {}
        for name, port in self._wanted.items():
            if state.get(name) != port:
                raise SetupError(
                    f"the broker with its data in {self.data_dir} runs at port {state.get(name)}, "
                    f"and not at {port}; end it with: ledgerlake broker stop"
                )

    def _ports(self) -> _Ports:
        """Return the ports to listen at.

        Raises:
            SetupError: one is taken.
        """
        wanted = list(self._wanted.values())
        if len(set(wanted)) < len(wanted):
            raise SetupError(f"two ports cannot both be {wanted[0]}; choose another --http-port")
        ports = self._kept_or_new_ports()
        for name, option in self._options.items():
            port = getattr(ports, name)
            if port == ports.bookie:
                raise SetupError(
                    f"port {port} is the one at which the broker with its data in {self.data_dir} "
                    f"stores messages; choose another {option}"
                )
            if not self._becomes_free(port):
                raise SetupError(
                    f"port {port} is taken; end the program that listens there, or choose another "
                    f"{option}"
                )
        if not self._becomes_free(ports.bookie):
            raise SetupError(
                f"port {ports.bookie} is taken, at which the broker with its data in "
                f"{self.data_dir} stores messages; end the program that listens there, or choose "
                "another --data-dir"
            )
        return ports

    def _kept_or_new_ports(self) -> _Ports:
        """Return the ports of the options, in their absence the last start's, or new ones."""
        state, wanted = self._state() or {}, set(self._wanted.values())
        kept = {name: state[name] for name in _NAMES if name in state}
        kept = {name: port for name, port in kept.items() if self._stays(name, port)}
        usual = {
            name: port
            for name, port in _USUAL_PORTS.items()
            if self._usual_ports and not state and port not in wanted and is_free(port, self._host)
        }
        chosen = {**usual, **kept, **self._wanted}
        free = [port for port in free_ports(2 * len(_NAMES)) if port not in chosen.values()]
        return _Ports(**{**dict(zip(_NAMES, free, strict=False)), **chosen})

    def _stays(self, name: str, port: int) -> bool:
        """Return whether a port of the last start has the same number now. The bookie's data is
        bound to it; other numbers may be wanted for another port, or be taken and told to nobody.
        """
        return name == "bookie" or (
            port not in self._wanted.values()
            and (name in self._options or is_free(port, self._host))
        )

    def _becomes_free(self, port: int) -> bool:
        """Return whether a port is free soon: a broker that was killed has its ports for a
        moment.
        """
        deadline = time.monotonic() + _ENDING_S
        while not is_free(port, self._host):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def _configuration(self, home: Path, ports: _Ports) -> str:
        metadata = {
            "brokerEntryMetadataInterceptors": INTERCEPTORS,
            "exposingBrokerEntryMetadataToClientEnabled": "true",
        }
        ours = {
            "brokerServicePort": str(ports.service),
            "webServicePort": str(ports.web),
            "bindAddress": self._host,
            "advertisedAddress": self._host,
            "webSocketServiceEnabled": "false",
            "numIOThreads": "4",
            **(metadata if self._broker_metadata else {}),
            **self._settings,
        }
        original = (home / "conf" / "standalone.conf").read_text().splitlines()
        unchanged = [line for line in original if line.split("=")[0].strip() not in ours]
        return "\n".join(unchanged + [f"{key}={value}" for key, value in ours.items()]) + "\n"

    def _spawn(self, home: Path, ports: _Ports, attached: bool) -> subprocess.Popen[bytes]:
        # The variable of the distribution's own launcher.
        command = [
            find_java(),
            *_JVM_OPTIONS,
            *shlex.split(os.environ.get("PULSAR_EXTRA_OPTS", "")),
        ]
        command += [
            option for package in _JVM_OPENS for option in ("--add-opens", f"{package}=ALL-UNNAMED")
        ]
        command += ["-cp", f"{home}/conf:{home}/lib/*", f"-Dpulsar.log.dir={self.data_dir}"]
        command += ["org.apache.pulsar.PulsarStandaloneStarter", "-nfw", "-nss"]
        command += ["--config", f"{self.data_dir}/standalone.conf", "-a", self._host]
        command += [
            "--bookkeeper-dir",
            f"{self.data_dir}/bookkeeper",
            "--metadata-dir",
            f"{self.data_dir}/metadata",
        ]
        command += ["--bookkeeper-port", str(ports.bookie)]
        if attached:
            command = [sys.executable, "-m", "ledgerlake.devbroker.supervise", *command]
        with open(self.data_dir / "broker.log", "ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE if attached else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.data_dir,
            )

    def _wait_until_ready(self, ports: _Ports) -> None:
        # A token goes to the broker with its own certificate alone: another program may have the
        # port.
        web = (
            f"https://{self._host}:{ports.web_tls}"
            if self._secure
            else f"http://{self._host}:{ports.web}"
        )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process is not None and self._process.poll() is not None:
                raise SetupError(f"the broker ended while starting{self._log_hint()}")
            if _answers(
                f"{web}/admin/v2/namespaces/public/default", self.security if self._secure else None
            ):
                return
            time.sleep(0.1)
        raise SetupError(f"the broker was not ready after {START_TIMEOUT_S} s{self._log_hint()}")

    def _log_hint(self) -> str:
        """The last error in the log; the log's path as well, unless it goes with a temporary
        folder.
        """
        log = self.data_dir / "broker.log"
        error = _last_error(log)
        where = "" if self._temporary else f"; read {log}"
        return (f": {error}" if error else "") + where


def distribution() -> Path:
    """The unpacked Pulsar distribution, fetched once (240 MB).

    Raises:
        SetupError: no Java, or the download failed.
    """
    home = cache_folder(f"apache-pulsar-{PULSAR_VERSION}")
    if home.exists():
        return home
    archive = fetch_file(
        "org.apache.pulsar", "pulsar-server-distribution", PULSAR_VERSION, "bin", "tar.gz", _SHA512
    )
    with locked(cache_folder("unpack")):
        if not home.exists():
            with (
                tempfile.TemporaryDirectory(dir=cache_folder()) as folder,
                tarfile.open(archive) as tar,
            ):
                tar.extractall(folder, filter="data")
                (Path(folder) / home.name).rename(home)
    return home


def _last_error(log: Path) -> str | None:
    """Return the last line of the log, shortened, that names an exception or an error."""
    last = None
    with contextlib.suppress(OSError), open(log, errors="replace") as lines:
        for line in lines:
            if _ERROR.search(line):
                last = line.strip().removeprefix("Caused by: ")[:_LONGEST_ERROR]
    return last


def _answers(url: str, security: Security | None) -> bool:
    headers = {} if security is None else {"Authorization": f"Bearer {security.admin_token}"}
    trusted = None if security is None else ssl.create_default_context(cafile=security.ca_file)
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=2, context=trusted) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _is_ours(pid: object, data_dir: Path) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        listing = subprocess.run(
            ["ps", "-ww", "-o", "stat=,args=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        raise SetupError("the command ps is missing; install procps") from None
    return str(data_dir) in listing.stdout and not listing.stdout.startswith("Z")


def _children(pid: int) -> list[int]:
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(word) for word in listing.stdout.split()]


def _end(pid: int, process: subprocess.Popen[bytes] | None) -> None:
    children = _children(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        if process is not None:
            process.poll()
        if not _exists(pid):
            return
        time.sleep(0.05)
    for survivor in [*children, pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(survivor, signal.SIGKILL)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
