"""Commands that ask the broker while a person waits."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from ledgerlake.cli.command import GIVE_UP_AFTER_S, client_settings, load_config_with_short_retries

CONFIG = """
[source]
service_url = "pulsar://localhost:6650"
topics = ["orders"]
retry_timeout_s = 600
[stream]
name = "orders"
[delta]
path = "orders"
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "orders.toml").write_text(CONFIG)
    return str(tmp_path / "orders.toml")


def test_a_command_gives_up_soon_however_long_a_stream_tries(config: str) -> None:
    assert load_config_with_short_retries(config).source.client.give_up_after_s == GIVE_UP_AFTER_S
    for options in (
        Namespace(config=config),
        Namespace(config=None, service_url="pulsar://localhost:6650"),
    ):
        assert client_settings(options).give_up_after_s == GIVE_UP_AFTER_S
