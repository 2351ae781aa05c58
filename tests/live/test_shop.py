"""A shop with five tables, an analyst's queries, and kills."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.live.shop import run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.live, pytest.mark.spark, pytest.mark.long]


def test_the_queries_of_an_analyst_are_answered_as_plain_python_does(tmp_path: Path) -> None:
    assert run(tmp_path, kills=10, seed=1) == []
