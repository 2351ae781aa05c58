"""Programs that import from former places still run."""

from __future__ import annotations

from importlib import import_module

import pytest

from ledgerlake import api
from ledgerlake.pipeline import worker_daemon


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("ledgerlake.query", ["Config", "load_config", "messages", "rejects", "run", "typed"]),
        ("ledgerlake.query.session", ["start_session"]),
        ("ledgerlake.query.progress", ["lags_of"]),
        ("ledgerlake.sinks.datasource", ["LedgerlakeDataSource"]),
        ("ledgerlake.sinks.pulsar", ["LargeMessageProducer"]),
    ],
)
def test_a_former_place_has_what_the_api_has(module: str, names: list[str]) -> None:
    former = import_module(module)
    assert [getattr(former, name) is getattr(api, name) for name in names] == [True] * len(names)


def test_the_former_daemon_of_workers_is_the_present_one() -> None:
    assert import_module("ledgerlake.query.daemon").main is worker_daemon.main
