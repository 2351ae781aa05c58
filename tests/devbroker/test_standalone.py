"""The embedded broker: several at once, found again, stopped cleanly, and gone when its
parent is.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, ClassVar

import pytest

from ledgerlake.devbroker import Broker, ports, standalone
from ledgerlake.errors import SetupError
from ledgerlake.runtime.java import find_java
from tests.live.pipelines import ledgerlake, ledgerlake_process, sentence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.live


def gone(pid: int, within_s: float = 40.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        listing = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        if not listing.stdout.strip() or listing.stdout.startswith("Z"):
            return True
        time.sleep(0.1)
    return False


def test_a_broker_is_started_found_described_and_stopped_by_command(tmp_path: Path) -> None:
    folder = str(tmp_path / "broker")
    # In a process of its own, because the broker is to outlive that.
    started = json.loads(
        ledgerlake_process("broker", "start", "--json", "--data-dir", folder).stdout
    )
    try:
        assert set(started) == {"service_url", "admin_url", "pid", "data_dir"}
        assert started["data_dir"] == folder
        started_again = json.loads(
            ledgerlake("broker", "start", "--json", "--data-dir", folder).stdout
        )
        assert started_again == started
        status = json.loads(ledgerlake("broker", "status", "--json", "--data-dir", folder).stdout)
        assert status == started
        exports = ledgerlake("broker", "env", "--data-dir", folder).stdout
        assert f"export LEDGERLAKE_SERVICE_URL={started['service_url']}" in exports
    finally:
        stopped = json.loads(ledgerlake("broker", "stop", "--json", "--data-dir", folder).stdout)
    assert stopped == {"stopped": True}
    assert gone(started["pid"])
    assert "no broker is running" in sentence(
        ledgerlake("broker", "status", "--data-dir", folder), 2
    )


def test_without_a_broker_its_folder_is_named_and_how_to_start_it_there(tmp_path: Path) -> None:
    folder = f"{tmp_path}/a folder"
    none_runs = f"no broker is running with its data in {folder}"
    status = sentence(ledgerlake("broker", "status", "--data-dir", folder), 2)
    assert (
        status
        == f"ledgerlake: {none_runs}; start one with: ledgerlake broker start --data-dir '{folder}'"
    )
    assert ledgerlake("broker", "stop", "--data-dir", folder).stdout == f"{none_runs}\n"


def test_the_ports_of_a_start_may_be_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(_: object, home: Path, ports: standalone._Ports) -> str:
        raise SetupError(f"starts at {ports.service} and {ports.web}")

    monkeypatch.setattr(standalone, "distribution", lambda: tmp_path)
    monkeypatch.setattr(Broker, "_configuration", configured)
    port, http_port = ports.free_ports(2)
    chosen = ["--data-dir", f"{tmp_path}/b", "--port", str(port), "--http-port"]
    told = sentence(ledgerlake("broker", "start", *chosen, str(http_port)), 2)
    assert told == f"ledgerlake: starts at {port} and {http_port}"
    told = sentence(ledgerlake("broker", "start", *chosen, str(port)), 2)
    assert told == f"ledgerlake: two ports cannot both be {port}; choose another --http-port"
    with socket.create_server(("127.0.0.1", http_port)):
        told = sentence(ledgerlake("broker", "start", *chosen, str(http_port)), 2)
    assert told.startswith(f"ledgerlake: port {http_port} is taken; ")
    assert "'0' is not a port" in ledgerlake("broker", "start", *chosen, "0").stderr


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, int]:
    """The ports of a data folder that was used before."""
    names = ("service", "web", "bookie", "service_tls", "web_tls")
    kept = dict(zip(names, ports.free_ports(len(names)), strict=True))
    state = {"version": standalone._STATE_VERSION, **kept}
    (tmp_path / "broker.json").write_text(json.dumps(state))
    return kept


def test_a_folder_keeps_its_ports_unless_another_one_is_to_have_a_number(
    tmp_path: Path, kept: dict[str, int]
) -> None:
    assert asdict(Broker(tmp_path, usual_ports=True)._ports()) == kept
    for name in ("web", "service_tls", "web_tls"):
        chosen = asdict(Broker(tmp_path, port=kept[name])._ports())
        assert len(set(chosen.values())) == len(chosen)
        assert chosen.pop("service") == kept[name]
        assert {one for one in chosen if chosen[one] != kept[one]} == {name}
    with pytest.raises(SetupError, match="stores messages; choose another --http-port"):
        Broker(tmp_path, http_port=kept["bookie"])._ports()


@pytest.mark.parametrize(
    ("name", "secure", "says"),
    [
        ("service", False, "choose another --port"),
        ("service_tls", True, "choose another --port"),
        ("web", False, "choose another --http-port"),
        ("bookie", False, "choose another --data-dir"),
        ("service", True, None),
        ("web_tls", True, None),
    ],
)
def test_a_kept_port_that_is_taken_is_refused_or_gets_another_number_if_nobody_knows_it(
    tmp_path: Path,
    kept: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    secure: bool,
    says: str | None,
) -> None:
    monkeypatch.setattr(standalone, "_ENDING_S", 0.0)
    broker = Broker(tmp_path, secure=secure)
    with socket.create_server(("127.0.0.1", kept[name])):
        if says is None:
            chosen = asdict(broker._ports())
            assert {one for one in chosen if chosen[one] != kept[one]} == {name}
        else:
            with pytest.raises(SetupError, match=f"port {kept[name]} is taken.*{says}$"):
                broker._ports()


def test_a_broker_that_runs_is_not_started_at_another_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = standalone.BrokerAddress("pulsar://h:7000", "http://h:7001", 1, str(tmp_path))
    monkeypatch.setattr(Broker, "status", lambda _: address)
    monkeypatch.setattr(Broker, "_state", lambda _: {"service": 7000, "web": 7001})
    assert Broker(tmp_path, port=7000).start() == address
    with pytest.raises(SetupError, match="runs at port 7000, and not at 7002; end it"):
        Broker(tmp_path, port=7002).start()


@pytest.mark.long
def test_two_brokers_run_at_once_and_a_temporary_folder_goes_with_its_broker() -> None:
    first_broker, second_broker = Broker(), Broker()
    try:
        first, second = first_broker.start(), second_broker.start()
        assert first.service_url != second.service_url
        assert os.path.isdir(first.data_dir)
    finally:
        first_broker.stop()
        second_broker.stop()
    assert not os.path.exists(first.data_dir)


@pytest.mark.long
def test_a_broker_ends_when_the_process_that_started_it_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from ledgerlake.devbroker import Broker; address = "
        f"Broker({str(tmp_path / 'b')!r}).start(); print(address.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    supervisor = int(parent.stdout.readline())
    listing = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(supervisor)], capture_output=True, text=True, check=True
    )
    (java,) = [int(word) for word in listing.stdout.split()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert gone(java)
    assert gone(supervisor)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="choose another --data-dir"):
        Broker(tmp_path / "file" / "data").start()


def test_a_broker_that_does_not_come_up_is_told_with_the_last_cause_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "java"
    launcher.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -version ]; then echo \'openjdk version "17.0.2"\' >&2; exit; fi\n'
        "echo 'java.lang.IllegalStateException: no start'\necho '\tat "
        "org.example.Start.main(Start.java:1)'\necho 'Caused by: java.net.BindException: Address "
        "already in use'\nexit 1\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    data_dir = tmp_path / "data"
    with pytest.raises(SetupError) as failure:
        Broker(data_dir).start()
    reason = "java.net.BindException: Address already in use"
    assert (
        str(failure.value)
        == f"the broker ended while starting: {reason}; read {data_dir}/broker.log"
    )
    with pytest.raises(SetupError) as failure:
        Broker().start()
    assert str(failure.value) == f"the broker ended while starting: {reason}", (
        "its log went with its folder"
    )


def test_ports_are_free_ones_that_no_outgoing_connection_is_given() -> None:
    free_ports = ports.free_ports(4)
    assert len(set(free_ports)) == 4
    assert all(10_000 <= port < 32_768 for port in free_ports)


def test_a_port_on_which_something_listens_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listening_port = listener.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", listening_port)
        monkeypatch.setattr(ports, "_TRIES", 1)
        with pytest.raises(OSError, match="no 1 free ports"):
            ports.free_ports(1)


def test_a_broker_for_trials_has_pulsars_own_ports_if_they_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_port, taken_port = ports.free_ports(2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", taken_port))
        listener.listen()
        assert ports.is_free(free_port)
        assert not ports.is_free(taken_port)
        monkeypatch.setattr(standalone, "_USUAL_PORTS", {"service": free_port, "web": taken_port})
        chosen = Broker(tmp_path, usual_ports=True)._ports()
    assert chosen.service == free_port
    assert taken_port not in (chosen.service, chosen.web, chosen.bookie, chosen.service_tls)


def test_a_secure_broker_is_not_started_beside_one_that_is_not(tmp_path: Path) -> None:
    folder = str(tmp_path / "broker")
    plain = Broker(tmp_path / "broker")
    address = standalone.BrokerAddress(
        "pulsar://127.0.0.1:6650", "http://127.0.0.1:8080", 1, folder
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Broker, "status", lambda _: address)
        assert plain.start() == address
        with pytest.raises(SetupError, match="is not secure; end it with: ledgerlake broker stop"):
            Broker(tmp_path / "broker", secure=True).start()


@pytest.mark.parametrize("act", [Broker.start, Broker.status, Broker.stop, Broker.kill])
def test_a_data_folder_that_others_can_write_to_is_neither_read_nor_written(
    act: Callable[[Broker], object], tmp_path: Path
) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    (tmp_path / "link").symlink_to(data_dir)
    for rights in (0o777, 0o1777):
        data_dir.chmod(rights)
        for given in (data_dir, tmp_path / "link"):
            with pytest.raises(
                SetupError, match=rf"can write to {given}, .*, or choose another --data-dir"
            ):
                act(Broker(given, secure=True))
    assert list(data_dir.iterdir()) == []


def test_an_old_java_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    launcher = tmp_path / "bin" / "java"
    launcher.write_text("#!/bin/sh\necho 'openjdk version \"11.0.2\"' >&2\n")
    launcher.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SetupError, match="is Java 11, but 17 or newer is needed"):
        find_java()


class _Squatter(BaseHTTPRequestHandler):
    """Another user's program at the port of a secure broker."""

    heard: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.heard.append(self.headers.get("Authorization"))
        self.send_response(200)
        self.end_headers()


def test_no_other_program_gets_the_token_of_a_secure_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Broker(tmp_path / "broker", secure=True) as address:
        port = int(address.admin_url.rpartition(":")[2])
    server = ThreadingHTTPServer(("127.0.0.1", port), _Squatter)
    answering = threading.Thread(target=server.serve_forever)
    answering.start()
    # The program may come after the ports were looked at.
    monkeypatch.setattr(standalone, "is_free", lambda *_: True)
    try:
        with pytest.raises(SetupError, match="the broker ended while starting"):
            Broker(tmp_path / "broker", secure=True).start()
    finally:
        server.shutdown()
        server.server_close()
        answering.join()
    assert not any(_Squatter.heard)
