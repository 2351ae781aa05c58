"""How far a pipeline is behind, of a topic that is not the one that was read, and without a
checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from deltalake import write_deltalake

from ledgerlake.client.cluster import ClientSettings, Cluster
from ledgerlake.decode import schema
from ledgerlake.errors import SetupError
from ledgerlake.inspect.lag import Lag, _lag, find_lags
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.replay.replay import replay
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.verify.verify import verify
from ledgerlake.wire.message_id import Position
from tests.entries import single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.options.config import Config


@pytest.mark.parametrize(
    ("taken", "index", "is_another"),
    [
        pytest.param(Position(7, 5), 9, True, id="it ends before"),
        pytest.param(Position(3, 5), 9, True, id="it ends before in the same ledger"),
        pytest.param(Position(3, 1), 9, True, id="it has another entry there"),
        pytest.param(Position(3, 1), 1, False, id="it has the entry"),
    ],
)
def test_a_topic_without_the_entry_that_was_read_is_named_so(
    taken: Position, index: int, is_another: bool
) -> None:
    with Peer() as peer:
        peer.add(single(b"a", index=0), single(b"b", index=1), ledger_id=3)
        cluster = Cluster(ClientSettings(peer.url))
        try:
            lag = _lag(
                cluster,
                TOPIC,
                PartitionOffset(taken, time_ms=1_700_000_000_000 + index, index=index),
                "latest",
            )
        finally:
            cluster.close()
    if is_another:
        assert (lag.messages, lag.is_another_topic) == (2, True)
        assert lag.sentence() == (
            f"{TOPIC}: the topic, which ends at 3:1, does not have the entry {taken}, up to which "
            "it was read: it is another topic of that name"
        )
    else:
        assert lag == Lag(TOPIC, "3:1", "3:1", 0, 0)


def test_a_lag_over_a_broker_that_began_to_count_again_is_not_counted() -> None:
    with Peer() as peer:
        peer.add(single(b"a", index=7), single(b"b", index=8), ledger_id=3)
        peer.add(single(b"c", index=0), ledger_id=4)
        cluster = Cluster(ClientSettings(peer.url))
        try:
            taken = PartitionOffset(Position(3, 0), time_ms=1_700_000_000_007, index=7)
            assert _lag(cluster, TOPIC, taken, "latest").messages is None
        finally:
            cluster.close()


@pytest.mark.parametrize(
    ("ending", "taken", "messages", "has_ended"),
    [
        ("index 1", 0, 1, False),
        ("index 1", 1, 0, True),
        ("7:1", 1, 0, True),
        ("2023-11-14T22:13:20.002Z", 1, 0, True),
        ("2023-11-14T22:13:20.002Z", 0, 1, False),
        ("index 9", 1, 2, False),
        ("index 3", 2, 1, False),
        ("index 3", 3, 0, True),
        ("7:3", 3, 0, True),
        ("index 4", 3, 0, False),
        ("7:4", 3, 0, False),
        ("2023-11-14T22:13:20.004Z", 3, 0, False),
        ("latest", 3, 0, False),
    ],
)
def test_the_lag_of_a_stream_with_an_ending_is_behind_that_one(
    ending: str, taken: int, messages: int, has_ended: bool, tmp_path: Path
) -> None:
    with Peer() as peer:
        peer.add(*(single(b"a", index=number) for number in range(4)))
        config = parse_config(
            {
                "source": {"service_url": peer.url, "topics": [TOPIC], "ending": ending},
                "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
                "delta": {"path": str(tmp_path / "messages")},
            }
        )
        offset = PartitionOffset(Position(7, taken), time_ms=1_700_000_000_000 + taken, index=taken)
        Checkpoint(config.checkpoint_place).save_start({TOPIC: offset})
        (lag,) = find_lags(config)
    assert (lag.messages, lag.has_ended, lag.time_ms > 0) == (messages, has_ended, messages > 0)
    assert ("has reached its ending" in lag.sentence()) == has_ended


@pytest.mark.parametrize("command", [find_lags, verify, replay])
def test_a_command_names_the_checkpoint_that_is_not_there(
    command: Callable[[Config], object], tmp_path: Path
) -> None:
    with Peer() as peer:
        peer.add(single(b"a", index=0))
        config = parse_config(
            {
                "source": {"service_url": peer.url, "topics": [TOPIC]},
                "stream": {"name": "orders", "checkpoint": str(tmp_path / "checkpoint")},
                "delta": {
                    "path": str(tmp_path / "messages"),
                    "rejects_path": str(tmp_path / "rejects"),
                },
            }
        )
        for path, columns in (
            (config.messages_place, schema.MESSAGES),
            (config.rejects_place, schema.REJECTS),
        ):
            write_deltalake(path.uri, columns.empty_table())
        with pytest.raises(
            SetupError, match=rf"no checkpoint at {tmp_path}/checkpoint; run the pipeline first"
        ):
            command(config)
