"""What Spark's JVM and its Python processes write to standard error, without what is no news.

The JVM is started with a pipe as its standard error, and the processes that it starts inherit it. A
thread of this process hands each line on, as plain text. Two lines come with every start and cannot be switched
off: the JVM's warning of a module that Spark's launcher asks for, and the first line of the process
that Spark asks for the variables of a stateful operator, with an empty line after it.

The JVM has a session of its own, so that a signal to this process's group, as ``timeout`` sends it,
does not end the JVM before the current micro-batch is finished. It ends when its standard input does.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, BinaryIO

from ledgerlake.runtime.guarded_output import printable_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pyspark import SparkConf

_STDERR = 2
_LAST_WORDS_S = 2.0
_NO_NEWS = (b"WARNING: Using incubator modules: jdk.incubator.vector", b"Starting Streaming TransformWithState")


def start_quiet_jvm(conf: SparkConf) -> None:
    """Start the JVM of the sessions of this process, unless there is one.

    Raises:
        PySparkException: it does not start.
    """
    from pyspark import SparkContext
    from pyspark.java_gateway import launch_gateway

    if SparkContext._gateway is not None:
        return
    reader, writer = os.pipe()
    copying = threading.Thread(target=_copy, args=(os.fdopen(reader, "rb"),), name="ledgerlake-jvm", daemon=True)
    copying.start()
    try:
        gateway = launch_gateway(conf, {"stderr": writer, "start_new_session": True})
    except BaseException:
        os.close(writer)
        # What a JVM that has ended said last.
        copying.join(_LAST_WORDS_S)
        raise
    os.close(writer)
    SparkContext._ensure_initialized(gateway=gateway)


def _copy(lines: BinaryIO) -> None:
    with lines:
        for line in news(lines):
            text = line.decode(errors="backslashreplace")
            end = "\n" if text.endswith("\n") else ""
            os.write(_STDERR, (printable_line(text.rstrip("\r\n")) + end).encode())


def news(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the lines that say something."""
    was_no_news = False
    for line in lines:
        is_no_news = line.startswith(_NO_NEWS) or (was_no_news and not line.strip())
        if not is_no_news:
            yield line
        was_no_news = is_no_news
