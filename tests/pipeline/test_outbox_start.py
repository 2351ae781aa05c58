"""A start with ``[deliver]``: the outbox is the one that this checkpoint had, or the first."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.errors import CheckpointError, OffsetError
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.start import Start
from ledgerlake.publish.outbox import Outbox
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit, Recorded
from ledgerlake.table.ordered_files import DataFile

if TYPE_CHECKING:
    from pathlib import Path


def begin(checkpoint: Path) -> Outbox:
    """Begin the outbox of a pipeline that has never committed anything."""
    outbox = Outbox(Place(str(checkpoint / "ledgerlake/outbox")))
    start_of(checkpoint).open_outbox(outbox)
    return outbox


def start_of(
    checkpoint: Path,
    *,
    is_there: bool = True,
    recorded: int | None = None,
    messages: int | None = None,
) -> Start:
    """A start whose main table has a micro-batch, and says how many messages the outbox had with
    it.
    """
    config: Any = SimpleNamespace(source=None, stream=SimpleNamespace(name="s"))
    nothing: Any = None
    table = SimpleNamespace(
        path="table",
        outbox_messages=lambda _name: messages,
        recorded=lambda _query: None if recorded is None else Recorded(recorded, None),
    )
    tables: Any = SimpleNamespace(
        main=SimpleNamespace(table=table), main_name="table", exists=lambda _name: is_there
    )
    return Start(config, nothing, Checkpoint(Place(str(checkpoint))), nothing, tables)


def test_an_outbox_is_opened_before_the_main_table_is_made(tmp_path: Path) -> None:
    start = start_of(tmp_path, is_there=False)
    start._tables.main.table.outbox_messages = None  # type: ignore[method-assign, assignment]
    outbox = Outbox(Place(str(tmp_path / "ledgerlake/outbox")))
    start.open_outbox(outbox)
    assert Checkpoint(Place(str(tmp_path))).outbox() == outbox.name


def test_what_waits_to_be_sent_before_the_main_table_is_made_is_sent(tmp_path: Path) -> None:
    outbox = begin(tmp_path)
    (tmp_path / "ledgerlake/outbox/a.parquet").write_bytes(b"rows")
    outbox.add(BatchCommit("s", "q", 0, 1), {"t": [DataFile("a.parquet", 4, 2, "{}")]})
    outbox.commit(0)
    for folder in ("offsets", "commits"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0").write_text("v1\n{}\n{}")
    reopened = Outbox(outbox.folder)
    start_of(tmp_path, is_there=False).open_outbox(reopened)
    assert [batch.batch_id for batch in reopened.ready()] == [0]


def commit_batches(checkpoint: Path, outbox: Outbox, last: int, sent: int) -> None:
    """The outbox and Spark's log after micro-batches, each with a message for the topic."""
    (checkpoint / "metadata").write_text('{"id": "q"}')
    for folder in ("offsets", "commits"):
        (checkpoint / folder).mkdir()
    for number in range(last + 1):
        name = f"part-{number:08d}-00000.parquet"
        (checkpoint / "ledgerlake/outbox" / name).write_bytes(b"rows")
        outbox.add(BatchCommit("s", "q", number, 1), {"t": [DataFile(name, 4, 1, "{}")]})
        outbox.commit(number)
        if number <= sent:
            outbox.sent(outbox.ready()[0])
        (checkpoint / "offsets" / str(number)).write_text("v1\n{}\n{}")
        (checkpoint / "commits" / str(number)).write_text("v1\n{}")


@pytest.mark.parametrize("sent", [5, 3, -1])
def test_a_table_that_is_the_main_one_again_knows_an_earlier_count_of_the_outbox(
    tmp_path: Path, sent: int
) -> None:
    outbox = begin(tmp_path)
    commit_batches(tmp_path, outbox, 5, sent)
    reopened = Outbox(outbox.folder)
    start_of(tmp_path, recorded=2, messages=3).open_outbox(reopened)
    assert [batch.batch_id for batch in reopened.ready()] == [*range(sent + 1, 6)]


@pytest.mark.parametrize("last", [1, 4])
def test_an_outbox_that_has_had_fewer_messages_than_the_table_says_is_an_older_copy(
    tmp_path: Path, last: int
) -> None:
    outbox = begin(tmp_path)
    commit_batches(tmp_path, outbox, last, sent=last)
    with pytest.raises(
        CheckpointError, match=rf"has held {last + 1} messages, and the table at table says 6"
    ):
        start_of(tmp_path, recorded=5, messages=6).open_outbox(Outbox(outbox.folder))


def test_an_outbox_that_is_gone_is_refused_and_the_way_on_is_said(tmp_path: Path) -> None:
    outbox = begin(tmp_path)
    assert begin(tmp_path).name == outbox.name
    shutil.rmtree(outbox.folder.root)
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"is gone.* or remove (\S+) to go on without them"
        ) as refused:
            begin(tmp_path)
    record = tmp_path / "ledgerlake/outbox.json"
    assert str(record) in refused.value.message
    record.unlink()
    assert begin(tmp_path).name != outbox.name


def test_an_outbox_that_a_killed_start_did_not_record_is_taken_and_known_from_then_on(
    tmp_path: Path,
) -> None:
    name = begin(tmp_path).name
    (tmp_path / "ledgerlake/outbox.json").unlink()
    assert begin(tmp_path).name == name
    assert json.loads((tmp_path / "ledgerlake/outbox.json").read_text()) == {
        "version": 1,
        "name": name,
    }


def test_an_outbox_that_has_sent_more_than_the_checkpoint_planned_is_refused(
    tmp_path: Path,
) -> None:
    outbox = begin(tmp_path)
    (tmp_path / "ledgerlake/outbox/a.parquet").write_bytes(b"rows")
    outbox.add(BatchCommit("s", "q", 5, 1), {"t": [DataFile("a.parquet", 4, 2, "{}")]})
    outbox.commit(5)
    outbox.sent(outbox.ready()[0])
    (tmp_path / "offsets").mkdir()
    (tmp_path / "offsets/5").write_text("v1\n{}\n{}")
    begin(tmp_path)
    (tmp_path / "offsets/5").rename(tmp_path / "offsets/4")
    with pytest.raises(
        CheckpointError, match="has sent batch 5, which the checkpoint does not have"
    ):
        begin(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"version": 1}', '{"version": 1, "name": 7}', '{"version": 2, "name": "a"}'],
)
def test_a_record_of_the_outbox_that_is_damaged_or_newer_is_one_sentence(
    tmp_path: Path, text: str
) -> None:
    begin(tmp_path)
    (tmp_path / "ledgerlake/outbox.json").write_text(text)
    with pytest.raises(
        OffsetError, match=r"damaged outbox's name|newer Ledgerlake \(outbox's name of version 2"
    ):
        begin(tmp_path)


def test_a_look_at_an_outbox_refuses_what_a_start_refuses_and_changes_nothing(
    tmp_path: Path,
) -> None:
    outbox = begin(tmp_path)
    name = Checkpoint(Place(str(tmp_path))).outbox()
    before = sorted(tmp_path.rglob("*"))
    Outbox(outbox.folder).examine(None, name)
    Outbox(outbox.folder).examine(None, None)
    with pytest.raises(CheckpointError, match="another one"):
        Outbox(outbox.folder).examine(None, "of another checkpoint")
    assert sorted(tmp_path.rglob("*")) == before
    shutil.rmtree(outbox.folder.root)
    with pytest.raises(CheckpointError, match="is gone"):
        Outbox(outbox.folder).examine(None, name)
    Outbox(outbox.folder).examine(None, None)
    assert not (tmp_path / "ledgerlake/outbox").exists()
