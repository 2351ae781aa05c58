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


class MoreKinds(History):
    """A history with two more kinds of messages."""

    def _send_late(self, topic: Topic) -> None:
        """A message that is due in 2.5 s."""
        self._send_due_in(topic, 2500, "a")

    def _send_orphan(self, topic: Topic) -> None:
        """A chunk of whose message nobody has seen the beginning: a reject in every run."""
        metadata = self._metadata(
            uuid="orphan", chunk_id=1, num_chunks_from_msg=2, total_chunk_msg_size=8
        )
        self._store(topic, metadata, b"half")


def killed_at(table: str, at_s: float, back_s: float) -> Step:
    return Step(at_s, "kill", {"back_s": back_s, "noticed_s": 0.0}, f"committed {table}")


def reasons(history: History) -> list[str]:
    """What ``rejects`` holds."""
    names = [name for commit in history.lake.tables[REJECTS].commits for name in commit.files]
    contents = [io.BytesIO(history.disk.files[f"{REJECTS}/{name}"]) for name in names]
    return [
        reason
        for content in contents
        for reason in pq.read_table(content, use_threads=False)["reason"].to_pylist()
    ]


def played(edges: Edges, *steps: Step) -> History:
    """Play a history in which somebody skips messages by hand: the cursor passes them, and they are
    lost, as rejects shall say.
    """
    history = MoreKinds(by_hand(*steps), edges)
    history.settings = config(
        [TOPIC], None, starting="earliest", source={"fail_on_data_loss": False}
    )
    complain = history.oracle.complain
    allowed = ("nothing unpinned", "nothing missing")
    history.oracle.complain = lambda words: None if words.startswith(allowed) else complain(words)  # type: ignore[method-assign]
    history.play()
    return history


ROLLED_AND_SKIPPED = (Step(4.5, "roll", {"partition": 0}), put(4.6), put(4.6), Step(5.0, "skip"))


@pytest.mark.parametrize("later", [(), (killed_at("rejects", 7.0, 2.0),)])
def test_a_loss_that_only_the_repeat_meets_is_in_rejects_once(
    edges: Edges, later: tuple[Step, ...]
) -> None:
    begin = (put(1.0), killed_at("rejects", 2.9, 4.0), put(3.0), put(3.0, "orphan"), put(3.0))
    history = played(edges, *begin, *ROLLED_AND_SKIPPED, *later, put(12.0))
    assert history.oracle.violations == []
    assert sorted(reasons(history)) == ["chunk_orphan", "data_loss"]
    assert len(history.apps) > 1 + len(later)


def test_a_query_whose_first_reject_came_with_a_repeat_starts_again(edges: Edges) -> None:
    killed_twice = (put(1.0), killed_at("messages", 2.9, 4.0), put(3.0), put(3.0))
    history = played(
        edges, *killed_twice, *ROLLED_AND_SKIPPED, killed_at("messages", 11.9, 2.0), put(12.0)
    )
    assert history.oracle.violations == []
    assert reasons(history) == ["data_loss"]
    assert len(history.apps) == 3


def test_a_repeat_has_reached_the_time_of_an_end_that_is_gone(edges: Edges) -> None:
    # The last message comes right after the late one is due, so its time decides in the same
    # micro-batch.
    is_due = (put(1.0), put(1.0, "late"), Step(3.0, "roll", {"partition": 0}), put(3.501))
    history = played(
        edges, *is_due, killed_at("messages", 3.4, 3.0), *ROLLED_AND_SKIPPED, put(9.0, count=2)
    )
    assert history.oracle.violations == []
    assert reasons(history) == ["data_loss"]
    runs = [
        line.split()[2]
        for line in history.world.trace
        if line.endswith("batch 2 of orders 4:1..5:0")
    ]
    assert runs == ["1:", "2:"]
