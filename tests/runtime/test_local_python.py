"""The Python that Spark starts with a local master: forks of a process that has imported
everything.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from ledgerlake.runtime import local_python as of_driver
from ledgerlake.runtime.session import python_of
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import pyarrow as pa
    from pyspark.sql import SparkSession

    # Writes a module with some code; returns the options of a process that finds it.
    Module = Callable[[str], dict[str, Any]]

_DRIVER = """
from ledgerlake.runtime.local_python import local_python
print(local_python(), flush=True)
input()
"""


class Driver:
    """A process that has a Python for Spark."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", _DRIVER]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.python = self.process.stdout.readline().strip()
        (self.server,) = psutil.Process(self.process.pid).children()

    def run(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        command = [self.python, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    def start(self, **options: Any) -> tuple[subprocess.Popen[str], str]:
        """Start the module that was asked for; what Spark started, and the first line."""
        command = [self.python, "-m", "asked_for"]
        client = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        assert client.stdout is not None
        return client, client.stdout.readline()

    def end(self) -> None:
        self.process.communicate("\n")


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    running = Driver()
    yield running
    running.end()


@pytest.fixture
def module(tmp_path: Path) -> Module:
    def write(code: str) -> dict[str, Any]:
        (tmp_path / "asked_for.py").write_text(code)
        return {
            "env": {**os.environ, "PYTHONPATH": str(tmp_path), "asked.for": "yes"},
            "cwd": str(tmp_path),
        }

    return write


def is_forked(driver: Driver, module: Module) -> bool:
    """Whether a process has what its server has imported."""
    ended = driver.run("-m", "asked_for", **module("import sys\nprint('pandas' in sys.modules)"))
    return {"True\n": True, "False\n": False}[ended.stdout]


def test_a_process_has_the_arguments_environment_folder_and_streams_that_spark_gave(
    driver: Driver, module: Module, tmp_path: Path
) -> None:
    code = (
        "import os, sys\nprint(__name__, sys.argv[1:], os.environ['asked.for'], os.getcwd(), "
        "input())\nprint('pandas' in sys.modules, file=sys.stderr)\nsys.exit(7)"
    )
    ended = driver.run("-m", "asked_for", "one", "two", input="line\n", **module(code))
    assert ended.stdout == f"__main__ ['one', 'two'] yes {tmp_path} line\n"
    assert (ended.stderr, ended.returncode) == ("True\n", 7)


def test_an_error_of_a_process_is_on_its_standard_error(driver: Driver, module: Module) -> None:
    ended = driver.run("-m", "asked_for", **module("raise ValueError('wrong')"))
    assert "ValueError: wrong" in ended.stderr
    assert ended.returncode == 1


def test_a_process_that_a_signal_ended_is_no_success(driver: Driver, module: Module) -> None:
    assert (
        driver.run("-m", "asked_for", **module("import os\nos.kill(os.getpid(), 9)")).returncode
        != 0
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_ends_with_what_spark_started(
    driver: Driver, module: Module, number: int
) -> None:
    client, pid = driver.start(
        **module("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    )
    forked = psutil.Process(int(pid))
    assert forked.parent() == driver.server
    client.send_signal(number)
    client.communicate()
    wait_until(lambda: not forked.is_running())


def test_what_is_no_module_is_run_by_python_itself(driver: Driver) -> None:
    assert driver.run("-c", "import sys; print('pandas' in sys.modules)").stdout == "False\n"


def test_clients_that_leave_do_not_hold_up_the_others(driver: Driver, module: Module) -> None:
    for content in (b"", b"\xff" * 8, (2).to_bytes(8, "big") + b"[]"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(Path(driver.python).with_name("socket")))
            client.sendall(content)
    assert is_forked(driver, module)


def test_a_client_and_its_process_may_end_at_once(driver: Driver, module: Module) -> None:
    client, pid = driver.start(
        **module("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)")
    )
    files = driver.server.num_fds()
    with socket.socket(socket.AF_UNIX) as slow, open(os.devnull) as stream:
        slow.connect(str(Path(driver.python).with_name("socket")))
        # The server waits for the rest of this, and finds both ends then.
        socket.send_fds(slow, [(2).to_bytes(8, "big")], [stream.fileno()] * 3)
        wait_until(lambda: driver.server.num_fds() == files + 4)
        os.kill(int(pid), signal.SIGKILL)
        wait_until(lambda: psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE)
        client.kill()
        client.communicate()
    assert is_forked(driver, module)


def test_in_a_folder_that_was_removed_python_itself_is_started(
    driver: Driver, module: Module, tmp_path: Path
) -> None:
    options = module("print('here')")
    (tmp_path / "gone").mkdir()
    command = f"cd gone; rmdir ../gone; exec {driver.python} -m asked_for"
    ended = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, check=False, **options
    )
    assert (ended.stdout, ended.stderr) == ("here\n", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_to_all_processes_leave_the_one_that_others_are_forked_from(
    driver: Driver, module: Module, number: int
) -> None:
    driver.server.send_signal(number)
    assert is_forked(driver, module)


def test_the_folder_of_the_processes_is_closed_to_other_users(driver: Driver) -> None:
    assert Path(driver.python).parent.stat().st_mode & 0o077 == 0


def test_if_the_server_was_killed_python_itself_is_started(module: Module) -> None:
    driver = Driver()
    driver.server.kill()
    wait_until(lambda: driver.server.status() == psutil.STATUS_ZOMBIE)
    assert not is_forked(driver, module)
    driver.end()


def test_after_a_driver_was_killed_processes_go_on_until_spark_ends_them_and_nothing_stays(
    module: Module,
) -> None:
    driver = Driver()
    client, line = driver.start(**module("print('up', flush=True)\nprint(input())"))
    assert line == "up\n"
    driver.process.kill()
    driver.process.communicate()
    assert client.communicate("done\n")[0] == "done\n"
    assert client.returncode == 0
    wait_until(lambda: not driver.server.is_running())
    assert not Path(driver.python).parent.exists()


def test_without_a_place_for_a_socket_python_itself_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert of_driver.local_python.__wrapped__() == sys.executable
    assert list(folder.iterdir()) == []


def test_variables_of_the_users_may_be_for_a_python_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/before")
    with python_of("local[2]", {"spark.executorEnv.PYTHONHASHSEED": "7"}):
        assert os.environ["PYSPARK_PYTHON"] == os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert os.environ["PYSPARK_PYTHON"] == "/usr/bin/before"
    assert "PYSPARK_DRIVER_PYTHON" not in os.environ


def test_executors_on_other_machines_have_their_own_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)
    with python_of("spark://h:7077", {"spark.pyspark.python": "python3.11"}):
        assert os.environ["PYSPARK_PYTHON"] == "python3.11"
        assert os.environ["PYSPARK_DRIVER_PYTHON"] == sys.executable
    assert "PYSPARK_PYTHON" not in os.environ


def test_with_a_home_of_spark_of_the_users_python_itself_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert of_driver.local_python.__wrapped__() == sys.executable


def test_the_modules_that_processes_need_start_no_thread() -> None:
    program = (
        "import threading, ledgerlake.workers.fork_server as "
        "fork_server\nfork_server.worker_daemon.prepare()\nassert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.spark
def test_sparks_workers_are_forks_of_forks(spark: SparkSession) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for _ in batches:
            commands = [" ".join(above.cmdline()) for above in psutil.Process().parents()]
            yield pa.RecordBatch.from_pydict({"command": commands})

    rows = spark.range(1).mapInArrow(look, "command string").collect()
    assert ["workers.fork_server" in row.command for row in rows[:3]] == [True, True, False]


def test_nothing_is_imported_from_the_working_folder(tmp_path: Path) -> None:
    mark = tmp_path / "imported"
    for name in ("numba", "pyspark", "ledgerlake", "json", "asked_for"):
        (tmp_path / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write({name!r})\n")
    program = f"import sys, os\nsys.path.remove('')\nos.chdir({str(tmp_path)!r})\n{_DRIVER}"
    command = [sys.executable, "-c", program]
    driver = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    python = driver.stdout.readline().strip()
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    asked = [python, "-m", "json.tool", "--help"]
    subprocess.run(asked, cwd=tmp_path, env=environment, check=True, capture_output=True)
    driver.communicate("\n")
    assert not mark.exists()


@pytest.mark.parametrize(("folder", "is_safe"), [("", None), (".", None), ("elsewhere", "1")])
def test_workers_search_the_working_folder_if_the_driver_does(
    folder: str, is_safe: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path) if folder == "." else folder])
    monkeypatch.setattr("ledgerlake.runtime.session.local_python", lambda: sys.executable)
    with python_of("local[2]", {}):
        assert os.environ.get("PYTHONSAFEPATH") == is_safe


def test_a_process_that_may_search_the_working_folder_finds_modules_there(
    driver: Driver, tmp_path: Path
) -> None:
    (tmp_path / "of_the_user.py").write_text("print('found')\n")
    for safe, expected in ({}, "found\n"), ({"PYTHONSAFEPATH": "1"}, ""):
        environment = {
            name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"
        } | safe
        assert driver.run("-m", "of_the_user", cwd=tmp_path, env=environment).stdout == expected
