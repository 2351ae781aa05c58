"""Servers of other projects that a test runs as processes."""

from __future__ import annotations

import subprocess
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_START_S = 300


@contextmanager
def server(
    command: list[str],
    answers: Callable[[], bool],
    environment: dict[str, str] | None = None,
    within_s: float = _START_S,
) -> Iterator[None]:
    """Run a server until the end of the context; it answers when the context begins."""
    with tempfile.TemporaryFile() as log:

        def read_log() -> str:
            log.seek(0)
            return log.read().decode(errors="replace")

        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            wait_for_answer(process, answers, read_log, within_s)
            yield
        finally:
            process.kill()
            process.wait()


def answers_at(url: str) -> bool:
    """Whether a page is there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def wait_for_answer(
    process: subprocess.Popen[bytes],
    answers: Callable[[], bool],
    read_log: Callable[[], str],
    within_s: float = _START_S,
) -> None:
    """Return when a server answers; fail with the end of its log if it ends instead."""
    deadline = time.monotonic() + within_s
    while not answers():
        assert process.poll() is None, read_log()[-2000:]
        assert time.monotonic() < deadline, f"{process.args!r} does not answer"
        time.sleep(0.1)
