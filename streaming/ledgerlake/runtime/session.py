"""A Spark session that fits: Delta's jars, our interpreter for the workers, settings for small
machines.

The jars are fetched once with PySpark's own Ivy and handed over as files, so that a start resolves
nothing. Spark's workers import the PySpark that is installed, not the zip of its sources that Spark
puts before it, which every new process would compile for 0.6 s.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.runtime.class_archive import archive_path, archive_settings
from ledgerlake.runtime.java import cache_folder, fetch_jars, find_java
from ledgerlake.runtime.java_errors import root_cause
from ledgerlake.runtime.jvm_output import remove_with_jvm, start_jvm
from ledgerlake.runtime.local_python import hash_seed, local_python
from ledgerlake.runtime.private_files import (
    check_trusted_folder,
    make_trusted_folder,
    only_owner_reads,
    session_folder,
)
from ledgerlake.runtime.spark_settings import join_settings, names_of_visible_secrets, secrets_of
from ledgerlake.stored.secrets import remember

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

DELTA_VERSION = "4.4.0"

# The checksums (SHA-256) of Delta's own jars; what else it depends on is in PySpark already.
_JARS = {
    "delta-kernel-api-4.4.0.jar": "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11",
    "delta-kernel-defaults-4.4.0.jar": "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    "delta-kernel-unitycatalog-4.4.0.jar": "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    "delta-spark_4.2_2.13-4.4.0.jar": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "delta-storage-4.4.0.jar": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "unitycatalog-client-0.6.0.jar": "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    "unitycatalog-hadoop-0.6.0.jar": "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
}

_LESS_LOGGING = (
    f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}"
)

# Throughput matters here and pauses do not; and Spark asks of each value whether it is null before
# it reads it, so that Arrow's asking once more costs a row of the source a twentieth of its CPU for
# nothing. Most code of a start runs a few times, and is compiled only if it runs three times as
# often as the JVM asks by itself. Up to a tenth of the time may go into collecting garbage before
# the heap grows. What the JVM warns of goes where logs go: the output is a command's answer.
_JAVA_OPTIONS = (
    "-XX:+UseParallelGC -XX:GCTimeRatio=9 -XX:CompileThresholdScaling=3 -Xlog:all=off:stdout "
    "-Xlog:all=warning:stderr -Darrow.enable_null_check_for_get=false"
)

_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Between JVM and Python workers: cheaper than loopback TCP, and closed to other users, if they
    # are in a private folder (``_private_settings``, ``workers.worker_daemon``).
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.python.daemon.module": "ledgerlake.workers.worker_daemon",
    # It is an environment variable of some workers and not of others, and each environment has a
    # daemon of its own.
    "spark.sql.execution.pyspark.udf.simplifiedTraceback.enabled": "false",
    "spark.driver.memory": "2g",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.databricks.delta.snapshotPartitions": "2",
}

# Executors on other machines have to find the driver, so there Spark chooses its address. With a
# local master Spark makes the secret itself, without which other users of the machine could read
# from the driver's ports what tasks get, such as tokens.
_LOCAL_SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.authenticate": "true",
}

# The Python of planners and workers, and the one that lists the sources.
_PYTHON_NAMES = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")

# The folder in which Numba keeps compiled kernels.
_KERNEL_CACHE = "NUMBA_CACHE_DIR"

# With it, Python does not search the working folder for modules (from Python 3.11 on). Spark's
# workers search it if this process does: a user's script imports the modules beside it.
_SAFE_PATH = "PYTHONSAFEPATH"

# spark-submit sets it for a program in Python.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"


def delta_jars() -> list[str]:
    """Paths of Delta's jars, fetched once.

    Raises:
        SetupError: no Java, the download failed, or a jar is not the expected one.
    """
    return [
        str(jar) for jar in fetch_jars("io.delta", "delta-spark_4.2_2.13", DELTA_VERSION, _JARS)
    ]


def start_session(
    name: str,
    master: str = "local[*]",
    settings: dict[str, str] | None = None,
    *,
    lists_classes: bool = False,
    says_all: bool = False,
) -> SparkSession:
    """Start, or get, a session with Delta. Under ``spark-submit`` that command decides the master
    and the jars.

    Args:
        lists_classes: its JVM lists its classes, so that a ``ClassArchive`` can make an archive
            that shortens later starts.
        says_all: Spark logs what it logs by itself, and nothing that it writes is left out.

    Raises:
        SetupError: no Java, PySpark is not installed, other users can write to a cache of code, or
            Spark does not start.
    """
    if kernels := os.environ.get(_KERNEL_CACHE):
        check_trusted_folder(Path(kernels), f"set {_KERNEL_CACHE} to a folder of your own")
    remember(*secrets_of(settings or {}))
    if _SUBMITTED in os.environ:
        return _submitted_session(name, settings or {})
    _warn_of_visible_secrets(settings or {})
    java = find_java()
    try:
        from py4j.protocol import Py4JError
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError:
        raise SetupError(
            "PySpark is missing; install it with: pip install 'ledgerlake[spark]'"
        ) from None
    jars = delta_jars()
    option, of_archive = archive_settings(archive_path(java, jars), lists_classes=lists_classes)
    folder = session_folder(os.getpid())
    java_options = f'{_JAVA_OPTIONS} "-Djava.io.tmpdir={folder}" {option}'
    if not says_all:
        java_options = f"{java_options} {_LESS_LOGGING}"
    private = _private_settings(master) | (settings or {})
    all_settings = session_settings(master, private, jars, java_options) | of_archive
    builder = SparkSession.builder.appName(name).master(master).config(map=all_settings)
    with python_of(master, settings or {}), home_without_zip():
        try:
            launched = {"spark.master": master, "spark.app.name": name} | all_settings
            start_jvm(launched, folder, is_quiet=not says_all)
            return builder.getOrCreate()
        except (Py4JError, PySparkException) as error:
            raise SetupError(
                f"Spark did not start with master {master}: {root_cause(error)}; look at what Java "
                "says above, and at [spark] or --master and --conf"
            ) from None


def session_settings(
    master: str, settings: dict[str, str], jars: list[str], java_options: str
) -> dict[str, str]:
    """Return all settings of a session.

    Args:
        settings: the user's. They override Ledgerlake's, or are appended if both are needed.
    """
    defaults = {
        **_SETTINGS,
        "spark.jars": ",".join(jars),
        "spark.driver.extraJavaOptions": java_options,
    }
    if master.startswith("local"):
        defaults |= _LOCAL_SETTINGS
    return join_settings(defaults, settings)


def _warn_of_visible_secrets(settings: dict[str, str]) -> None:
    for name in names_of_visible_secrets(settings):
        _log.warning(
            "%s holds a secret, and each user of the machine can read the arguments of a JVM; give "
            "it as a setting spark.hadoop.* if Hadoop uses it, or write the option into a file "
            "that only you can read, and give -XX:VMOptionsFile=FILE",
            name,
        )


def _private_settings(master: str) -> dict[str, str]:
    """Return the settings with which the Unix sockets of a local master are in a private folder.
    Executors on other machines do not have that folder; the socket that runs code there is closed
    to other users by itself (``workers.worker_daemon``).
    """
    if not master.startswith("local"):
        return {}
    return {"spark.python.unix.domain.socket.dir": str(session_folder(os.getpid()))}


def _submitted_session(name: str, settings: dict[str, str]) -> SparkSession:
    """Return the session of ``spark-submit``. Its JVM runs already, with the master, the jars and
    the memory of that command, and each setting of the command stands.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    # A configuration that is made before knows nothing of the command.
    SparkContext._ensure_initialized()
    submitted = SparkConf(_jvm=SparkContext._jvm)
    builder = SparkSession.builder.appName(name)
    private = _private_settings(submitted.get("spark.master", ""))
    for key, value in {**_SETTINGS, **private, **settings}.items():
        if not submitted.contains(key):
            builder = builder.config(key, value)
    for folder in private.values():
        remove_with_jvm(SparkContext._jvm, folder)
    # This process makes a socket too.
    with only_owner_reads(), _variables(hash_seed()):
        return builder.getOrCreate()


@contextlib.contextmanager
def python_of(master: str, settings: dict[str, str]) -> Iterator[None]:
    """Let a session that is started here know its Python."""
    if master.startswith("local"):
        # Some variables have an effect on a Python that starts alone.
        has_variables = any(name.startswith("spark.executorEnv.") for name in settings)
        names = dict.fromkeys(_PYTHON_NAMES, sys.executable if has_variables else local_python())
        if not {"", os.getcwd()} & set(sys.path):
            names[_SAFE_PATH] = "1"
    else:
        # On other machines Python may be at another path, such as ./environment/bin/python. The
        # planner runs on this machine, under the same name as the executors' Python.
        of_executors = os.environ.get(
            "PYSPARK_PYTHON", settings.get("spark.pyspark.python", sys.executable)
        )
        names = dict(zip(_PYTHON_NAMES, (of_executors, sys.executable), strict=True))
        os.environ["PATH"] = os.pathsep.join(
            (str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))
        )
    with _variables(names | hash_seed()):
        yield


@contextlib.contextmanager
def _variables(names: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(names)
    try:
        yield
    finally:
        for name in names:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def home_without_zip() -> Iterator[None]:
    """Let a JVM that is started here know a home of Spark without PySpark's zip; a home that the
    user chose stands.
    """
    from pyspark.find_spark_home import _find_spark_home

    if "SPARK_HOME" in os.environ:
        yield
        return
    installed = Path(_find_spark_home())
    home = cache_folder("spark") / hashlib.sha256(str(installed).encode()).hexdigest()[:16]
    make_trusted_folder(home)
    # A configuration may come later.
    for name in ("bin", "conf", "jars"):
        with contextlib.suppress(FileExistsError):
            (home / name).symlink_to(installed / name)
    os.environ["SPARK_HOME"] = str(home)
    try:
        yield
    finally:
        del os.environ["SPARK_HOME"]
