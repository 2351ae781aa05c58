"""What ``ledgerlake run`` does with signals."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from ledgerlake.cli.run import _Stop, _stop_on_signals

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
def test_while_spark_starts_a_second_signal_ends_nothing(number: int, capfd: pytest.CaptureFixture[str]) -> None:
    stop = _Stop()
    _stop_on_signals(stop, is_starting=True)
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert stop.is_set()
    assert capfd.readouterr().err == "stopping as soon as Spark has started\n"
    assert stop.exit_code == 128 + number


@pytest.mark.parametrize("number", SIGNALS)
def test_while_the_pipeline_runs_a_second_signal_ends_the_process(number: int) -> None:
    stop = _Stop()
    _stop_on_signals(stop, is_starting=False)
    os.kill(os.getpid(), number)
    assert stop.is_set()
    with pytest.raises(SystemExit) as ended:
        os.kill(os.getpid(), number)
    assert ended.value.code == 128 + number
