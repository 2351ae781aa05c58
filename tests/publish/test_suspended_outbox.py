"""The outbox of a process that is suspended at any access to the disk, and goes on after two
further starts: what they have recorded stands.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, cast

import pytest

from ledgerlake.publish.outbox import Outbox, Sending
from ledgerlake.stored.places import Place
from ledgerlake.table.ordered_files import DataFile
from tests.publish.test_outbox import batch, of
from tests.simulation.disk import Disk

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.simulation.world import World

FOLDER = "/checkpoint/ledgerlake/outbox"


@dataclass
class Turns:
    """At the access with a number, others have their turn."""

    at: int = 0
    others: list[Callable[[], None]] = field(default_factory=list)
    made: int = 0

    def access(self, _what: str) -> None:
        self.made += 1
        if self.made == self.at:
            for other in self.others:
                other()


@dataclass
class Stream:
    """What the processes of a stream share: the disk, the names that they have used, what the table
    has of micro-batch 1, and what was sent.
    """

    disk: Disk
    names: set[str] = field(default_factory=set)
    in_table: tuple[int, ...] | None = None
    sent: list[list[int]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def live(self, positions: tuple[int, ...], *, sends: bool = False) -> None:
        """A process starts, runs micro-batch 1, and may send what is to be sent."""
        outbox = Outbox(Place(FOLDER))
        outbox.begin(0 if self.in_table is None else 1, None)
        self.names.add(outbox.name)
        name = f"part-00000001-{next(self.numbers)}.parquet"
        self.disk.files[f"{FOLDER}/{name}"] = json.dumps(positions).encode()
        outbox.add(batch(1, *positions), {"t": [DataFile(name, 4, len(positions), "{}")]})
        was_there = self.in_table is not None
        if self.in_table is None:
            self.in_table = positions
        outbox.commit(1, of(*self.in_table) if was_there else None)
        for waiting in outbox.ready() if sends else []:
            for file in waiting.files:
                assert outbox.is_present(waiting, file)
                self.sent.append(json.loads(self.disk.files[f"{FOLDER}/{file.name}"]))
            outbox.begin_sending(waiting, Sending(1))
            outbox.sent(waiting)


def shared(turns: Turns, monkeypatch: pytest.MonkeyPatch) -> Stream:
    """A stream whose processes come to the disk in turns."""
    disk = Disk(cast("World", turns))
    monkeypatch.setattr(Place, "filesystem", lambda _: disk.filesystem)
    monkeypatch.setattr(Place, "create_file", lambda file, data: disk.create(file.root, data))
    return Stream(disk)


@pytest.mark.parametrize("again", [(7, 8), (7, 8, 9)])
@pytest.mark.parametrize("sends", [True, False])
def test_whatever_a_process_was_about_to_write_its_successors_decide(
    again: tuple[int, ...], sends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = shared(turns := Turns(), monkeypatch)
    stream.live((7, 8))
    accesses = turns.made
    assert accesses > 10
    for at in range(1, accesses + 1):
        stream = shared(turns := Turns(at), monkeypatch)
        turns.others = [partial(stream.live, again), partial(stream.live, (7, 8), sends=sends)]
        for is_last in (False, True, True):
            stream.live((7, 8), sends=is_last)
        assert stream.in_table is not None
        assert stream.sent == [list(stream.in_table)], at
        assert len(stream.names) == 1, at
