"""Rejects of five reasons are mended and replayed, and the replays are killed. The module
``replay_campaign`` has the steps and the checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.live.campaign import default_broker
from tests.live.replay_campaign import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.slow]


def test_each_reject_comes_once_however_often_replays_are_killed(
    tmp_path: Path, campaign_is_long: bool
) -> None:
    rejects, kills = (10_000, 20) if campaign_is_long else (300, 3)
    with default_broker() as runtime:
        assert run(runtime, tmp_path, rejects, kills, seed=1, say=print) == []
