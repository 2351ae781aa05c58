"""A micro-batch that is run again after a kill between the commits of its two tables, and is judged
otherwise then.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.simulation.by_hand import by_hand, put
from tests.simulation.driver import REJECTS, Edges, config
from tests.simulation.history import TOPIC, History, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.simulation.broker import Topic


@pytest.fixture(scope="module")
def edges() -> Iterator[Edges]:
    with Edges() as entered:
        yield entered


class WithOrphans(History):
    """A history with one more kind of message."""

    def _send_orphan(self, topic: Topic) -> None:
        """A chunk of whose message nobody has seen the beginning: a reject in every run."""
        metadata = self._metadata(uuid="orphan", chunk_id=1, num_chunks_from_msg=2, total_chunk_msg_size=8)
        self._store(topic, metadata, b"half")


def killed_at_rejects(at_s: float, back_s: float) -> Step:
    return Step(at_s, "kill", {"back_s": back_s, "noticed_s": 0.0}, "committed rejects")


def reasons(history: History) -> list[str]:
    """What ``rejects`` holds."""
    names = [name for commit in history.lake.tables[REJECTS].commits for name in commit.files]
    contents = [io.BytesIO(history.disk.files[f"{REJECTS}/{name}"]) for name in names]
    return [reason for one in contents for reason in pq.read_table(one, use_threads=False)["reason"].to_pylist()]


@pytest.mark.parametrize("later", [(), (killed_at_rejects(7.0, 2.0),)])
def test_a_loss_that_only_the_repeat_meets_is_in_rejects_once(edges: Edges, later: tuple[Step, ...]) -> None:
    script = by_hand(
        put(1.0),
        killed_at_rejects(2.9, 4.0),
        put(3.0),
        put(3.0, "orphan"),
        put(3.0),
        Step(4.5, "roll", {"partition": 0}),
        put(4.6),
        put(4.6),
        Step(5.0, "skip"),
        *later,
        put(12.0),
    )
    history = WithOrphans(script, edges)
    history.settings = config([TOPIC], None, starting="earliest", source={"fail_on_data_loss": False})
    complain = history.oracle.complain
    # Somebody skips messages by hand: the cursor passes them, and they are lost, as rejects shall
    # say.
    allowed = ("nothing unpinned", "nothing missing")
    history.oracle.complain = lambda words: None if words.startswith(allowed) else complain(words)  # type: ignore[method-assign]
    assert history.play().violations == []
    assert sorted(reasons(history)) == ["chunk_orphan", "data_loss"]
    assert len(history.apps) > 1 + len(later)
