"""Exactly once on a broker as users have it, over kills, stops, a takeover and a restored checkpoint, by an oracle of its own.

The short version of ``make campaign``; a failure prints its seed.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

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
    kills, stops, takeovers, copies = (40, 10, 6, 4) if campaign_is_long else (6, 2, 1, 1)
    with default_broker() as runtime:
        campaign = Campaign(runtime, tmp_path, random.Random(seed))
        assert run_campaign(campaign, kills, stops, takeovers, copies) == []
