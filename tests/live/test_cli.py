"""The command as a person and a script meet it: results, exit codes, and one sentence for each
error.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from ledgerlake.runtime.java import cache_folder
from ledgerlake.runtime.session import delta_jars
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    publish_numbers,
    run_once,
    sentence,
)
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = pytest.mark.live


def test_a_broker_that_is_down(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, "t", service_url="pulsar://127.0.0.1:1")
    error_text = sentence(ledgerlake("run", config_file(tmp_path, data), "--once"), 3)
    assert (
        error_text
        == "ledgerlake: no broker listens at pulsar://127.0.0.1:1 (Connection refused); start it "
        "or correct the service url"
    )


def test_a_port_that_is_not_pulsars(runtime: Runtime, tmp_path: Path) -> None:
    wrong = runtime.admin_url.replace("http://", "pulsar://")
    error_text = sentence(
        ledgerlake(
            "run", config_file(tmp_path, runtime.config(tmp_path, "t", service_url=wrong)), "--once"
        ),
        3,
    )
    assert "does not speak Pulsar's binary protocol; check the port" in error_text


def test_a_topic_that_is_missing(runtime: Runtime, tmp_path: Path) -> None:
    error_text = sentence(
        ledgerlake(
            "run", config_file(tmp_path, runtime.config(tmp_path, "absent-topic")), "--once"
        ),
        2,
    )
    assert (
        "persistent://public/default/absent-topic: the topic does not exist; create it or correct "
        "its name" in error_text
    )


def test_a_bad_option() -> None:
    error_text = sentence(ledgerlake("run", "--onse", "x.toml"), 2)
    assert (
        error_text
        == "ledgerlake: there is no option --onse; did you mean '--once'? see 'ledgerlake run "
        "--help'"
    )
    error_text = sentence(ledgerlake("rnu", "x.toml"), 2)
    assert (
        error_text
        == "ledgerlake: there is no command rnu; did you mean 'run'? see 'ledgerlake --help'"
    )
    error_text = sentence(ledgerlake("run", "x.toml", "y.toml"), 2)
    assert (
        error_text
        == "ledgerlake: there is no place for the argument y.toml; see 'ledgerlake run --help'"
    )


def test_a_bad_key(runtime: Runtime, tmp_path: Path) -> None:
    error_text = sentence(
        ledgerlake("run", config_file(tmp_path, runtime.config(tmp_path, "t", topicz=["a"]))), 2
    )
    assert error_text.endswith(
        "pipeline.toml: [source] has no key 'topicz'; did you mean 'topics'?"
    )


@pytest.mark.long
def test_a_path_that_cannot_be_written(runtime: Runtime, tmp_path: Path) -> None:
    topic = runtime.topic()
    (tmp_path / "file").write_text("")
    data = runtime.config(tmp_path / "file", topic)
    error_text = sentence(
        ledgerlake_process("run", config_file(tmp_path / "config", data), "--once"), 2
    )
    assert "choose another path" in error_text


def test_no_java(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, runtime.topic())
    error_text = sentence(
        ledgerlake_process(
            "run", config_file(tmp_path, data), "--once", PATH="/nonexistent", JAVA_HOME=""
        ),
        2,
    )
    assert "Java is missing" in error_text
    assert "apt-get install" in error_text


def test_a_configuration_that_is_not_there() -> None:
    assert sentence(ledgerlake("verify", "/nonexistent.toml"), 2).endswith(
        "cannot be read (No such file or directory); check the path"
    )


def test_a_pipeline_that_has_not_run_yet(runtime: Runtime, tmp_path: Path) -> None:
    data = runtime.config(tmp_path, runtime.topic())
    error_text = sentence(ledgerlake("verify", config_file(tmp_path, data)), 2)
    assert (
        error_text
        == f"ledgerlake: there is no checkpoint at {tmp_path / 'checkpoint'}; run the pipeline "
        "first"
    )


def test_debug_shows_the_traceback(runtime: Runtime, tmp_path: Path) -> None:
    result = ledgerlake(
        "run", config_file(tmp_path, runtime.config(tmp_path, "absent-topic")), "--debug"
    )
    assert "Traceback" in result.stderr


def test_a_topic_in_place_of_a_configuration_and_the_reverse_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "orders.toml"
    file.write_text("")
    said = sentence(ledgerlake("pause", str(file), "--all"), 2)
    assert f"{file} is a configuration; name a topic, and give the file as --config {file}" in said
    assert "it is that of a TOML file, and no topic" in sentence(ledgerlake("lag", "orders"), 2)


@pytest.mark.parametrize("command", ["run", "demo", "peek", "verify", "forget", "vacuum", "broker"])
def test_every_command_explains_itself_with_an_example(command: str) -> None:
    result = ledgerlake(command, "--help")
    assert result.returncode == 0
    assert "example: ledgerlake " + command in " ".join(result.stdout.split())


@pytest.mark.spark
def test_verify_peek_and_forget_as_a_script_uses_them(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    topic = runtime.topic(partitions=2)
    publish_numbers(runtime, topic, range(1000), batch=50)
    data = runtime.config(tmp_path, topic, name="scripted")
    config = config_file(tmp_path, data)
    run_once(spark, data)
    verified = ledgerlake("verify", config, "--json")
    assert verified.returncode == 0
    verdict = json.loads(verified.stdout)
    assert {
        name: verdict[name]
        for name in ("messages", "missing", "duplicate", "out_of_order", "rejects")
    } == {
        "messages": 1000,
        "missing": 0,
        "duplicate": 0,
        "out_of_order": 0,
        "rejects": 0,
    }
    peeked = ledgerlake(
        "peek", topic, "-n", "1", "--json", LEDGERLAKE_SERVICE_URL=runtime.service_url
    )
    assert [json.loads(line)["partition"] for line in peeked.stdout.splitlines()] == [0, 1]
    assert "remove the checkpoint first" in sentence(ledgerlake("forget", config), 2)
    shutil.rmtree(tmp_path / "checkpoint")
    forgotten = ledgerlake("forget", config, "--json")
    assert (
        f"the table at {tmp_path / 'messages'} keeps its rows; remove it before the next run"
        in forgotten.stderr
    )
    assert json.loads(forgotten.stdout)["subscription"] == "ledgerlake-scripted"
    again = ledgerlake("forget", config)
    assert (again.returncode, again.stdout) == (0, "")
    assert (
        "no topic has the subscription ledgerlake-scripted, so there was nothing to remove"
        in again.stderr
    )


@pytest.mark.long
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_run_ends_cleanly_when_it_is_asked_to(
    runtime: Runtime, tmp_path: Path, signal_number: int
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(100))
    config = config_file(tmp_path, runtime.config(tmp_path, topic, name=f"signal-{signal_number}"))
    running = subprocess.Popen(
        [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=subprocess.PIPE, text=True
    )
    commits = tmp_path / "messages" / "_delta_log" / "00000000000000000002.json"
    wait_until(lambda: commits.exists() or running.poll() is not None)
    assert running.poll() is None
    running.send_signal(signal_number)
    _, errors = running.communicate(timeout=300)
    assert running.returncode == 0, errors
    assert "100 messages and 0 rejects" in errors
    assert "Traceback" not in errors
    assert ledgerlake("verify", config).returncode == 0


def test_a_start_that_waits_for_another_process_ends_when_it_is_asked_to(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    config = config_file(tmp_path, runtime.config(tmp_path, topic, name="held"))
    holder = runtime.client().subscribe(topic, "ledgerlake-held")
    starting = subprocess.Popen(
        [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=subprocess.PIPE, text=True
    )
    assert starting.stderr is not None
    errors = ""
    while "another consumer holds the subscription" not in errors and starting.poll() is None:
        errors += starting.stderr.readline()
    starting.send_signal(signal.SIGTERM)
    _, more = starting.communicate(timeout=60)
    assert starting.returncode == 0, errors + more
    assert "stopping\n" in more
    assert "Traceback" not in errors + more
    holder.close()
    assert not (tmp_path / "messages" / "_delta_log").exists()


def test_the_demo_ends_with_a_clean_verdict() -> None:
    result = ledgerlake_process("demo", "--messages", "4000")
    assert result.returncode == 0, result.stderr
    # Spark's Python processes would print their steps, and pipes that are closed when the session
    # ends.
    assert [word for word in ("TransformWithState", "Traceback") if word in result.stderr] == []
    assert "\\n" not in result.stdout, "each row of a table is a line"
    assert result.stdout.count("\n|") > 20
    # Beside the 4,000 there are 12 large messages and 300 delayed ones.
    assert (
        "4,312 messages were sent and the table has 4,312 messages: 0 missing, 0 duplicate, 0 out "
        "of order (" in result.stdout
    )


@pytest.mark.long
def test_a_run_that_archives_classes_leaves_what_the_next_one_loads_them_from(
    runtime: Runtime, tmp_path: Path
) -> None:
    topic = runtime.topic()
    publish_numbers(runtime, topic, range(10))
    config = config_file(tmp_path, runtime.config(tmp_path, topic))
    cache = tmp_path / "cache"
    cache.mkdir()
    assert delta_jars()
    (cache / "jars").symlink_to(cache_folder() / "jars")
    first = ledgerlake_process(
        "run", config, "--once", "--archive-classes", LEDGERLAKE_CACHE=str(cache)
    )
    assert first.returncode == 0, first.stderr
    (archive,) = (cache / "classes").iterdir()
    assert f"classes are archived in {archive}" in first.stderr
    log = tmp_path / "classes.log"
    publish_numbers(runtime, topic, range(10))
    environment = {
        "LEDGERLAKE_CACHE": str(cache),
        "JAVA_TOOL_OPTIONS": f"-Xlog:class+load:file={log}-%p",
    }
    second = ledgerlake_process("run", config, "--once", **environment)
    assert second.returncode == 0, second.stderr
    assert "10 messages and 0 rejects" in second.stderr
    loaded = max(
        (path.read_text() for path in tmp_path.glob("classes.log-*")), key=len
    ).splitlines()
    shared = [line for line in loaded if "shared objects file" in line]
    assert len(shared) > len(loaded) / 2
    # The JVM's own archive has none of Spark's.
    assert any("org.apache.spark.SparkContext source:" in line for line in shared)
    assert list((cache / "classes").iterdir()) == [archive]
    # A JVM that shows the classes that it loads to an agent or a recording.
    publish_numbers(runtime, topic, range(10))
    recording = f"-XX:StartFlightRecording=filename={tmp_path / 'of-jvm.jfr'},settings=profile"
    third = ledgerlake_process(
        "run", config, "--once", LEDGERLAKE_CACHE=str(cache), JDK_JAVA_OPTIONS=recording
    )
    assert third.returncode == 0, third.stderr
    assert "10 messages and 0 rejects" in third.stderr
