"""Delayed messages that are due together, over a kill behind a commit. The module ``due_campaign``
has the steps and the checks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.live.due_campaign import Settings, run_round

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.slow]

_NOTHING = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}


@pytest.mark.parametrize("is_once", [True, False], ids=["once", "stream"])
def test_delayed_messages_that_are_due_together_come_once_though_the_pipeline_is_killed(
    runtime: Runtime, tmp_path: Path, is_once: bool
) -> None:
    trimming = runtime.in_namespace("due-kills", deduplication=True, retention=_NOTHING)
    settings = replace(Settings.of(int(is_once)), is_once=is_once, delivers=not is_once, kills=1)
    small = replace(settings, messages=3_000, more=300, cancels=2)
    _, faults = run_round(trimming, tmp_path / "round", small, print)
    assert faults == []
