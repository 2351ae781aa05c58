"""Exactly once on a broker as users have it, over kills, stops, a takeover and a restored checkpoint, by an oracle of its own.

A part of ``make test-campaign``, since a broker that was killed can take minutes until its topics can be written again;
``make campaign`` does the same at any length. A failure prints its seed.
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
    if not campaign_is_long:
        pytest.skip("it takes a quarter of an hour: make test-campaign")
    with default_broker() as runtime:
        campaign = Campaign(runtime, tmp_path, random.Random(seed))
        assert run_campaign(campaign, kills=6, stops=2, takeovers=3, copies=1) == []
