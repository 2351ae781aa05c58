"""What ``ledgerlake run`` does with signals."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from ledgerlake.cli.run import _Stop, _StoppedError

if TYPE_CHECKING:
    from collections.abc import Iterator

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_while_spark_starts_a_second_signal_ends_nothing(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = _Stop()
    stop.listen()
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert stop.is_set()
    assert capfd.readouterr().err == "stopping as soon as Spark has started\n"
    assert stop.exit_code == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_pipeline_runs_a_second_signal_ends_the_process(number: int) -> None:
    stop = _Stop()
    stop.listen()
    stop.ends_at = 2
    os.kill(os.getpid(), number)
    assert stop.is_set()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_pipeline_starts_the_first_signal_ends_the_start(
    number: int, capfd: pytest.CaptureFixture[str]
) -> None:
    stop = _Stop()
    stop.listen()
    stop.ends_at = 1
    with pytest.raises(_StoppedError):
        os.kill(os.getpid(), number)
    assert (stop.is_set(), stop.exit_code, capfd.readouterr().err) == (
        True,
        128 + number,
        "stopping\n",
    )
    with pytest.raises(SystemExit):
        os.kill(os.getpid(), number)
