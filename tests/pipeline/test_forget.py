"""Which durable cursors ``forget`` removes, and when it is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ledgerlake.cli import main
from ledgerlake.errors import CheckpointError
from ledgerlake.options.config import load_config, parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.forget import forget, forget_topic
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.entries import single
from tests.live.pipelines import config_file
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ledgerlake.options.config import Config

_LEFT = "persistent://public/default/left"
_FORGETS = {
    "the topics of the configuration": forget,
    "a topic that left it": lambda config: forget_topic(config, _LEFT),
}


@pytest.fixture
def peer() -> Iterator[Peer]:
    with Peer(subscriptions={"ledgerlake-orders": False}) as peer:
        peer.add(single(b"a", index=0))
        yield peer


@pytest.fixture(params=_FORGETS)
def forgets(request: pytest.FixtureRequest) -> Callable[[Config], list[str]]:
    return _FORGETS[request.param]


def _config(peer: Peer, checkpoint: str) -> Config:
    return parse_config(
        {
            "source": {"service_url": peer.url, "topics": [TOPIC]},
            "stream": {"name": "orders", "checkpoint": checkpoint},
            "delta": {"path": "messages", "rejects_path": "rejects"},
        }
    )


def _has_removed(peer: Peer) -> bool:
    return "CommandUnsubscribe" in peer.requests


@pytest.mark.parametrize("has_checkpoint", [True, False])
def test_a_topic_that_the_configuration_still_selects_keeps_its_subscription(
    peer: Peer, tmp_path: Path, has_checkpoint: bool
) -> None:
    config = _config(peer, str(tmp_path / "checkpoint"))
    if has_checkpoint:
        Checkpoint(config.checkpoint_place).save_start({TOPIC: PartitionOffset(BEFORE_ALL)})
    reason = "still reads" if has_checkpoint else "has no checkpoint, and reads"
    with pytest.raises(CheckpointError, match=f"{reason} {TOPIC}.* out of the configuration"):
        forget_topic(config, TOPIC)
    assert not _has_removed(peer)


def test_the_subscription_goes_if_the_checkpoint_is_gone(
    peer: Peer, forgets: Callable[[Config], list[str]], tmp_path: Path
) -> None:
    forgets(_config(peer, str(tmp_path / "checkpoint")))
    assert _has_removed(peer)


def test_the_subscription_stays_if_the_command_runs_in_another_folder_or_by_a_link(
    peer: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = config_file(
        tmp_path / "home",
        {
            "source": {"service_url": peer.url, "topics": [TOPIC]},
            "stream": {"name": "orders"},
            "delta": {"path": "messages"},
        },
    )
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Checkpoint(load_config("pipeline.toml").checkpoint_place).save_start(
        {TOPIC: PartitionOffset(BEFORE_ALL)}
    )
    monkeypatch.chdir(tmp_path / "away")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/home/checkpoints/orders is still there"):
        forget(load_config(file))
    assert not _has_removed(peer)
    (tmp_path / "away/pipeline.toml").symlink_to(file)
    assert main(["forget", "pipeline.toml"]) == 2
    assert main(["forget", "pipeline.toml", "--topic", "former"]) == 2
    assert not _has_removed(peer)
