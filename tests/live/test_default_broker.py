"""Exactly once on a broker as users have it, over kills, stops, takeovers and restored checkpoints,
by an oracle of its own.

The short version runs by default; ``make test-campaign`` has takeovers and copies of the checkpoint
too, and ``make campaign`` any length. A failure prints its seed.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from tests.live.campaign import Campaign, default_broker, run_campaign

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.slow]


def test_nothing_is_missing_doubled_early_or_out_of_order_on_a_broker_that_trims(
    tmp_path: Path, campaign_is_long: bool
) -> None:
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    long: dict[str, Any] = {"kills": 6, "stops": 3, "takeovers": 3, "copies": 2}
    disturbances: dict[str, Any] = long if campaign_is_long else {"kills": 3, "stops": 1}
    with default_broker() as runtime:
        assert run_campaign(Campaign(runtime, tmp_path, random.Random(seed)), **disturbances) == []
