"""What a session and a query are set up with."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark
import pytest

from ledgerlake.errors import SetupError
from ledgerlake.pipeline.query_settings import settings_of
from ledgerlake.runtime.class_archive import archive_path
from ledgerlake.runtime.jvm_output import _properties
from ledgerlake.runtime.session import home_without_zip, session_settings, start_session
from ledgerlake.stored.places import Place
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

FILE_MANAGER = "spark.sql.streaming.checkpointFileManagerClass"
CHECKSUMS = "spark.sql.streaming.checkpoint.fileChecksum.enabled"
WHOLE_STAGE = "spark.sql.codegen.wholeStage"
CODE = "spark.sql.codegen.factoryMode"
COMPARED = "spark.sql.shuffle.orderIndependentChecksum.enabled"
PARTITIONS = "spark.sql.shuffle.partitions"


@pytest.mark.spark
def test_a_query_with_a_local_checkpoint_renames_its_files_without_subprocesses(
    spark: SparkSession, tmp_path: Path
) -> None:
    with settings_of(spark, Place(str(tmp_path)), None):
        assert spark.conf.get(FILE_MANAGER).endswith(".FileSystemBasedCheckpointFileManager")
    assert spark.conf.get(FILE_MANAGER, None) is None


@pytest.mark.spark
def test_a_local_checkpoint_has_hadoops_checksums_alone(
    spark: SparkSession, tmp_path: Path
) -> None:
    with settings_of(spark, Place(str(tmp_path)), None):
        assert spark.conf.get(CHECKSUMS) == "false"
    assert spark.conf.get(CHECKSUMS, None) is None


@pytest.mark.spark
def test_spark_generates_no_code_for_the_few_rows_of_a_query(
    spark: SparkSession, tmp_path: Path
) -> None:
    spark = spark.newSession()
    for name in (WHOLE_STAGE, CODE):
        spark.conf.unset(name)
    with settings_of(spark, Place(str(tmp_path)), None):
        assert (spark.conf.get(WHOLE_STAGE), spark.conf.get(CODE)) == ("false", "NO_CODEGEN")
    assert (spark.conf.get(WHOLE_STAGE), spark.conf.get(CODE)) == ("true", "FALLBACK")


@pytest.mark.spark
def test_spark_does_not_compare_the_rows_of_repeated_tasks(
    spark: SparkSession, tmp_path: Path
) -> None:
    before = spark.conf.get(COMPARED)
    with settings_of(spark, Place(str(tmp_path)), None):
        assert spark.conf.get(COMPARED) == "false"
    assert spark.conf.get(COMPARED) == before


@pytest.mark.spark
@pytest.mark.parametrize(
    ("name", "value"),
    [(FILE_MANAGER, "org.example.Own"), (CHECKSUMS, "true"), (WHOLE_STAGE, "true")],
)
def test_a_choice_of_the_users_stands(
    spark: SparkSession, tmp_path: Path, name: str, value: str
) -> None:
    spark.conf.set(name, value)
    try:
        with settings_of(spark, Place(str(tmp_path)), None):
            assert spark.conf.get(name) == value
        assert spark.conf.get(name) == value
    finally:
        spark.conf.unset(name)


@pytest.mark.spark
@pytest.mark.parametrize(("most_keys", "partitions"), [(1, "1"), (2, "2"), (64, "2"), (None, "2")])
def test_state_has_no_more_partitions_than_keys(
    spark: SparkSession, tmp_path: Path, most_keys: int | None, partitions: str
) -> None:
    with settings_of(spark, Place(str(tmp_path)), most_keys):
        assert spark.conf.get(PARTITIONS) == partitions
    assert spark.conf.get(PARTITIONS) == "2"


def test_what_workers_are_forked_from_has_imported_their_modules_and_started_no_thread() -> None:
    program = (
        "import sys, threading, ledgerlake.workers.worker_daemon as "
        "worker_daemon\nworker_daemon.warm_up()\nassert {'pyarrow', 'pandas', 'numba', "
        "'ledgerlake.operators.outcome_files'} <= set(sys.modules)\nassert "
        "threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("operators.stateful", "pandas"),
        ("operators.stateful", "numba"),
        ("operators.ingest_source", "numba"),
        ("operators.outcome_files", "deltalake"),
        ("operators.stateful", "cryptography"),
    ],
)
def test_the_processes_that_a_query_starts_first_do_without_large_libraries(
    module: str, absent: str
) -> None:
    program = f"import sys, ledgerlake.{module}\nassert {absent!r} not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.spark
def test_workers_import_the_installed_pyspark_and_walk_over_none_of_what_they_were_forked_with(
    spark: SparkSession,
) -> None:
    def look(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for _ in batches:
            yield pa.RecordBatch.from_pydict(
                {"file": [pyspark.__file__], "frozen": [gc.get_freeze_count()]}
            )

    row = spark.range(1).mapInArrow(look, "file string, frozen bigint").first()
    assert row.file == pyspark.__file__
    assert row.frozen > 100_000


def test_the_home_of_a_new_jvm_has_all_of_spark_but_the_zip(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    monkeypatch.setenv("LEDGERLAKE_CACHE", str(tmp_path))
    for _ in range(2):
        with home_without_zip():
            home = os.environ["SPARK_HOME"]
            assert sorted(os.listdir(home)) == ["bin", "conf", "jars"]
            assert os.access(f"{home}/bin/spark-submit", os.X_OK)
        assert "SPARK_HOME" not in os.environ


def test_a_home_of_the_users_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with home_without_zip():
        assert os.environ["SPARK_HOME"] == "/opt/spark"
    assert os.environ["SPARK_HOME"] == "/opt/spark"


def test_executors_of_a_cluster_are_not_told_that_the_driver_is_on_their_own_machine() -> None:
    assert session_settings("local[2]", {}, [], "")["spark.driver.host"] == "127.0.0.1"
    assert "spark.driver.host" not in session_settings("spark://h:7077", {}, [], "")
    assert (
        session_settings("local[2]", {"spark.driver.host": "h"}, [], "")["spark.driver.host"] == "h"
    )


def test_jars_extensions_and_java_options_of_the_users_stand_behind_those_that_are_needed() -> None:
    user_settings = {
        "spark.jars": "own.jar",
        "spark.sql.extensions": "org.Own",
        "spark.driver.extraJavaOptions": "-Down=1",
    }
    settings = session_settings("local[2]", user_settings, ["delta.jar"], "-Dours=1")
    assert settings["spark.jars"] == "delta.jar,own.jar"
    assert settings["spark.sql.extensions"] == "io.delta.sql.DeltaSparkSessionExtension,org.Own"
    assert settings["spark.driver.extraJavaOptions"] == "-Dours=1 -Down=1"


@pytest.mark.parametrize(
    ("name", "value", "is_visible"),
    [
        ("spark.driver.extraJavaOptions", "-Xss4m -Djavax.net.ssl.keyStorePassword=hush", True),
        ("spark.executor.defaultJavaOptions", "-Dmy.TOKEN=hush", True),
        (
            "spark.driver.extraJavaOptions",
            "-Djavax.net.ssl.keyStore=/keys/store -XX:VMOptionsFile=/keys/options",
            False,
        ),
        ("spark.hadoop.fs.s3a.secret.key", "-Dpassword=hush", False),
    ],
)
def test_a_start_warns_of_a_secret_among_the_arguments_of_a_jvm(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    value: str,
    is_visible: bool,
) -> None:
    # The start ends before it has a JVM.
    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    with pytest.raises(SetupError):
        start_session("test", settings={name: value})
    assert [name in record.getMessage() for record in caplog.records] == [True] * is_visible
    assert "hush" not in caplog.text


def test_an_archive_of_classes_is_not_taken_for_jars_that_were_installed_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    (tmp_path / "jars").mkdir()
    java, jar, delta = tmp_path / "java", tmp_path / "jars" / "spark.jar", tmp_path / "delta.jar"
    for file in (java, jar, delta):
        file.write_bytes(b"")
    names = [archive_path(str(java), [str(delta)])]
    assert archive_path(str(java), [str(delta)]) == names[0]
    for file in (java, jar, delta):
        os.utime(file, ns=(1, 1))
        names.append(archive_path(str(java), [str(delta)]))
    assert len(set(names)) == 4


@pytest.mark.spark
def test_what_the_jvm_warns_of_is_not_in_the_output_of_a_command() -> None:
    # Large pages are set up on few machines, and on all others the JVM warns.
    program = (
        "from ledgerlake.runtime import session\nsession.start_session('test', "
        "settings={'spark.driver.extraJavaOptions': '-XX:+UseLargePages'}).stop()"
    )
    assert (
        subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.PIPE).stdout
        == b""
    )


@pytest.mark.spark
def test_what_comes_with_every_start_is_not_on_the_screen_unless_all_is_asked_for() -> None:
    program = "from ledgerlake.runtime import session\nsession.start_session('test'{}).stop()"
    said = [
        subprocess.run(
            [sys.executable, "-c", program.format(more)], check=True, capture_output=True, text=True
        ).stderr
        for more in ("", ", says_all=True")
    ]
    assert said[0] == ""
    assert "incubator" in said[1]


@pytest.mark.spark
def test_why_a_jvm_does_not_start_is_on_the_screen() -> None:
    program = (
        "from ledgerlake.runtime import session\nsession.start_session('test', "
        "settings={'spark.driver.extraJavaOptions': '-javaagent:nowhere.jar'})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    (error,) = (
        line
        for line in ended.stderr.splitlines()
        if "Spark did not start with master local" in line
    )
    assert "the JVM ended at once with exit code 1 and said last: " in error
    assert "nowhere.jar" in error


_SESSION = r"""
import os, sys
os.umask(0)
from pathlib import Path
import psutil
from ledgerlake.runtime.session import start_session

SECRET = os.environ["A_SECRET"]
ODD = "a\\b=c:#!é d"
settings = {"spark.hadoop.fs.s3a.secret.key": SECRET, "spark.odd": ODD, "spark.executorEnv.ODD": "x"}
spark = start_session("test", "local[2]", settings if sys.argv[1] == "odd" else {"spark.odd": ODD, "spark.hadoop.k": SECRET})

def look(batches):
    yield from batches

assert spark.range(4).repartition(2).mapInArrow(look, "id long").count() == 4

def seen(look):
    found = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            found += look(process)
        except psutil.NoSuchProcess:
            # It has ended.
            pass
    return found

arguments = seen(psutil.Process.cmdline)
assert "org.apache.spark.deploy.SparkSubmit" in arguments
assert not [argument for argument in arguments if SECRET in argument]
properties = spark._jvm.java.lang.System
assert properties.getProperty("spark.odd") == ODD

def is_open(path):
    return all(folder.stat().st_mode & 0o001 for folder in path.parents)

folder = Path(properties.getProperty("java.io.tmpdir"))
assert not is_open(folder / "x"), folder
assert spark.conf.get("spark.python.unix.domain.socket.dir") == str(folder)
connections = seen(lambda process: process.net_connections("unix"))
sockets = {Path(one.laddr) for one in connections if one.laddr.startswith("/")}
assert len(sockets) > 1
assert [path for path in sockets if is_open(path)] == []
assert not list(folder.glob("settings"))
assert spark.sparkContext._jsc.sc().env().securityManager().isAuthenticationEnabled()
print(folder)
spark.stop()
"""


@pytest.mark.spark
@pytest.mark.parametrize("variant", ["forked", "odd"])
def test_nobody_else_enters_what_a_session_makes_and_no_argument_is_a_secret(variant: str) -> None:
    command = [sys.executable, "-c", _SESSION, variant]
    environment = {**os.environ, "A_SECRET": "the-secret"}
    ended = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    folder = Path(ended.stdout.strip())
    assert folder.name.startswith("ledgerlake-")
    # The JVM ends after the process that has started it, and removes its files.
    wait_until(lambda: not folder.exists() or not list(folder.iterdir()))


def test_settings_are_written_as_java_reads_them() -> None:
    settings = {"a.b": "c", "d": " e=f:#!\\", "g": "é\n\U0001f600"}
    assert (
        _properties(settings)
        == "a.b=c\nd=\\u0020e\\u003df\\u003a\\u0023\\u0021\\u005c\ng=\\u00e9\\u000a\\ud83d\\ude00\n"
    )
