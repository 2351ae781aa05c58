"""Filters what Spark's JVM and its Python processes write to standard error.

The JVM is started with a pipe as its standard error, and the processes that it starts inherit it. A
thread of this process hands each line on, as plain text. Two lines come with every start and cannot
be switched off: the JVM's warning of a module that Spark's launcher asks for, and the first line of
the process that Spark asks for the variables of a stateful operator, with an empty line after it.

The JVM has a session of its own, so that a signal to this process's group, as ``timeout`` sends it,
does not end the JVM before the current micro-batch is finished. It ends when its standard input
does.
"""

from __future__ import annotations

import os
import shlex
import string
import struct
import subprocess
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ledgerlake.runtime.guarded_output import printable_line
from ledgerlake.runtime.private_files import only_owner_reads

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_STDERR = 2

# PySpark passes its words to spark-submit.
_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"

# Characters of settings that Java's class Properties takes as they are.
_PLAIN = frozenset(string.ascii_letters + string.digits + "-_./,;@+*$%&()[]{}<>|?'\"")

# The file in which a JVM says how to connect to it.
_CONNECTION_FILE = "_PYSPARK_DRIVER_CONN_INFO_PATH"
_POLL_S = 0.05
_LAST_WORDS_S = 2.0
_LAST_LINES = 3
_NO_NEWS = (
    b"WARNING: Using incubator modules: jdk.incubator.vector",
    b"Starting Streaming TransformWithState",
)


def start_jvm(settings: dict[str, str], folder: Path, *, is_quiet: bool = True) -> None:
    """Start the JVM of the sessions of this process, unless there is one.

    Args:
        settings: the settings of Spark. They may be secrets, and each user of this machine can read
            the arguments of a process. So the JVM reads them from a file.
        folder: a folder that no other user may enter.
        is_quiet: whether the two lines are left out; each line is plain text in any case.

    Raises:
        PySparkException: it does not start; with what it said last.
    """
    from pyspark import SparkContext

    if SparkContext._gateway is not None:
        return
    file = folder / "settings"
    with only_owner_reads():
        file.write_text(_properties(settings))
    try:
        with _arguments(f"--properties-file {shlex.quote(str(file))} --load-spark-defaults"):
            gateway = _launch_plainly(is_quiet)
    finally:
        file.unlink()
    remove_with_jvm(gateway.jvm, str(folder))
    SparkContext._ensure_initialized(gateway=gateway)


def remove_with_jvm(jvm: Any, folder: str) -> None:
    """Let a JVM remove a folder when it ends, which is after this process has ended. It removes the
    files first that it has noted later, so the folder is noted before them.
    """
    jvm.java.io.File(folder).deleteOnExit()


def _launch_plainly(is_quiet: bool) -> Any:
    from pyspark.errors import PySparkRuntimeError

    reader, writer = os.pipe()
    last: deque[str] = deque(maxlen=_LAST_LINES)
    copying = threading.Thread(
        target=_copy,
        args=(os.fdopen(reader, "rb"), last, is_quiet),
        name="ledgerlake-jvm",
        daemon=True,
    )
    copying.start()
    try:
        with os.fdopen(writer, "wb") as stderr:
            return _launch(stderr)
    except PySparkRuntimeError as error:
        copying.join(_LAST_WORDS_S)
        said = f"and said last: {' / '.join(last)}" if last else "and said nothing"
        raise PySparkRuntimeError(f"{error} {said}") from None


def _launch(stderr: BinaryIO) -> Any:
    """Start the JVM and connect to it.

    PySpark would run Python code between fork and exec. In a process with threads and the native
    libraries of this one, that has ended with signal 11. Here nothing runs in between.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.find_spark_home import _find_spark_home
    from pyspark.java_gateway import launch_gateway

    command = [f"{_find_spark_home()}/bin/spark-submit", *shlex.split(os.environ[_ARGUMENTS])]
    with tempfile.TemporaryDirectory() as folder:
        connection = Path(folder) / "connection"
        environment = {**os.environ, "SPARK_CONNECT_MODE": "0", _CONNECTION_FILE: str(connection)}
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stderr=stderr, env=environment, start_new_session=True
        )
        while process.poll() is None and not connection.exists():
            time.sleep(_POLL_S)
        if not connection.exists():
            code = process.returncode
            raise PySparkRuntimeError(
                "the JVM ended at once "
                f"{f'by signal {-code}' if code < 0 else f'with exit code {code}'}"
            )
        with _connection(connection.read_bytes()):
            gateway = launch_gateway()
    # The JVM ends when this pipe is closed.
    gateway.proc = process
    return gateway


@contextmanager
def _connection(written: bytes) -> Iterator[None]:
    """Let ``launch_gateway`` connect to a JVM.

    Args:
        written: what the JVM has written of itself: its port, and the secret with its length before
            it.
    """
    port, size = struct.unpack(">ii", written[:8])
    found = {
        "PYSPARK_GATEWAY_PORT": str(port),
        "PYSPARK_GATEWAY_SECRET": written[8 : 8 + size].decode(),
    }
    os.environ |= found
    try:
        yield
    finally:
        for name in found:
            del os.environ[name]


@contextmanager
def _arguments(arguments: str) -> Iterator[None]:
    """Start spark-submit with these arguments, before those that the user has set."""
    given = os.environ.get(_ARGUMENTS)
    os.environ[_ARGUMENTS] = f"{arguments} {'pyspark-shell' if given is None else given}"
    try:
        yield
    finally:
        del os.environ[_ARGUMENTS]
        if given is not None:
            os.environ[_ARGUMENTS] = given


def _properties(settings: dict[str, str]) -> str:
    """Return settings as Java's class Properties reads them."""
    return "".join(f"{_escaped(name)}={_escaped(value)}\n" for name, value in settings.items())


def _escaped(text: str) -> str:
    units = memoryview(text.encode("utf-16-be")).cast("B")
    codes = [units[at] << 8 | units[at + 1] for at in range(0, len(units), 2)]
    return "".join(chr(code) if chr(code) in _PLAIN else f"\\u{code:04x}" for code in codes)


def _copy(lines: BinaryIO, last: deque[str], is_quiet: bool) -> None:
    """Hand lines on, and keep the last ones that are not places in a stack trace."""
    with lines:
        for line in news(lines) if is_quiet else lines:
            text = line.decode(errors="backslashreplace")
            end = "\n" if text.endswith("\n") else ""
            shown = printable_line(text.rstrip("\r\n"))
            if shown.strip() and not shown.startswith("\tat "):
                last.append(shown)
            os.write(_STDERR, (shown + end).encode())


def news(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines that say something."""
    was_no_news = False
    for line in lines:
        is_no_news = line.startswith(_NO_NEWS) or (was_no_news and not line.strip())
        if not is_no_news:
            yield line
        was_no_news = is_no_news
