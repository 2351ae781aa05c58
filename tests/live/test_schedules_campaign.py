"""Schedules of two clients over kills of the pipeline. The module ``schedules_campaign`` has the
steps and the checks.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from tests.live.campaign import default_broker
from tests.live.schedules_campaign import WITHOUT_GO, run

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.slow, pytest.mark.long]

_NOTHING = {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}


def test_each_schedule_fires_once_in_its_last_version_though_the_pipeline_is_killed(
    runtime: Runtime, tmp_path: Path
) -> None:
    trimming = runtime.in_namespace("schedules", deduplication=True, retention=_NOTHING)
    assert run(trimming, tmp_path, 1_000, 0, kills=1, seed=1, span_s=15.0, say=print) == []


@pytest.mark.skipif(shutil.which("go") is None, reason=WITHOUT_GO)
def test_schedules_of_the_client_in_go_fire_once(runtime: Runtime, tmp_path: Path) -> None:
    trimming = runtime.in_namespace("schedules-of-go", deduplication=True, retention=_NOTHING)
    assert run(trimming, tmp_path, 100, 100, kills=0, seed=1, span_s=8.0, say=print) == []


@pytest.mark.long
def test_a_hundred_thousand_schedules_fire_once_over_kills_and_a_restart_of_the_broker(
    tmp_path: Path,
) -> None:
    by_go = 0 if shutil.which("go") is None else 1_000
    with default_broker() as broker:
        assert run(broker, tmp_path, 100_000, by_go, kills=5, seed=1, span_s=250.0, say=print) == []
