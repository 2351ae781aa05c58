"""The outbox: numbers that a micro-batch run again gives again, and nothing sent before its batch
has committed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from ledgerlake.errors import CheckpointError, OffsetError
from ledgerlake.operators.outcome_digest import Tally
from ledgerlake.publish.outbox import OtherName, Outbox, OutboxBatch, Sending
from ledgerlake.publish.routing import java_hash
from ledgerlake.stored.files import load_stored
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.ordered_files import DataFile
from ledgerlake.wire.message_id import Position

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, name: str, rows: int) -> DataFile:
    (folder / name).write_bytes(b"rows")
    return DataFile(name, 4, rows, "{}")


def of(*positions: int) -> dict[str, Any]:
    """The outcomes of a run that has messages of these positions for the topic."""
    return {"t": {"outbox": str(Tally.of(np.array(positions)))}} if positions else {}


def batch(number: int, *positions: int) -> BatchCommit:
    return BatchCommit("stream", "query", number, 1, outcomes=of(*positions))


def begun(folder: Path, committed: int | None = None) -> Outbox:
    outbox = Outbox(Place(str(folder)))
    outbox.begin(committed, None)
    return outbox


def numbers(outbox: Outbox) -> list[tuple[str, int]]:
    return [
        (file.name, file.first_sequence)
        for outbox_batch in outbox.ready()
        for file in outbox_batch.files
    ]


def test_messages_are_numbered_one_after_another_by_topic_partition(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    files = [
        written(tmp_path, name, rows)
        for name, rows in (("a.parquet", 3), ("b.parquet", 2), ("c.parquet", 7))
    ]
    outbox.add(batch(4), {"t-0": files[:2], "t-1": files[2:]})
    outbox.commit(4)
    assert outbox.add(batch(6), {"t-0": [written(tmp_path, "d.parquet", 1)], "t-1": []}) == 13
    outbox.commit(6)
    assert numbers(outbox) == [
        ("a.parquet", 0),
        ("b.parquet", 3),
        ("c.parquet", 0),
        ("d.parquet", 5),
    ]
    assert [outbox.messages_up_to(number) for number in (3, 5, 6)] == [0, 12, 13]


def test_a_batch_that_is_run_again_gives_the_same_numbers_also_when_it_was_sent_meanwhile(
    tmp_path: Path,
) -> None:
    outbox = begun(tmp_path)
    outbox.add(batch(1), {"t": [written(tmp_path, "a.parquet", 3)]})
    outbox.commit(1)
    outbox.add(batch(2), {"t": [written(tmp_path, "b.parquet", 2)]})
    assert numbers(outbox) == [("a.parquet", 0)], "batch 2 is not in the table"
    outbox.sent(outbox.ready()[0])
    reopened = begun(tmp_path, committed=1)
    assert reopened.name == outbox.name
    reopened.add(batch(2), {"t": [written(tmp_path, "b2.parquet", 2)]})
    reopened.commit(2)
    assert numbers(reopened) == [("b2.parquet", 3)]
    reopened.sent(reopened.ready()[0])
    third = begun(tmp_path, committed=2)
    third.add(batch(2), {"t": [written(tmp_path, "b3.parquet", 2)]})
    third.commit(2)
    assert third.ready() == [], "it was sent"
    third.add(batch(3), {"t": [written(tmp_path, "c.parquet", 1)]})
    third.commit(3)
    assert numbers(third) == [("c.parquet", 5)]


def test_a_run_that_has_more_than_one_that_never_committed_sends_all_of_it(tmp_path: Path) -> None:
    begun(tmp_path).add(batch(1, 7), {"t": [written(tmp_path, "part-00000001-a.parquet", 1)]})
    reopened = begun(tmp_path)
    assert (
        reopened.add(batch(1, 7, 8), {"t": [written(tmp_path, "part-00000001-b.parquet", 2)]}) == 2
    )
    reopened.commit(1)
    assert numbers(reopened) == [("part-00000001-b.parquet", 0)]
    assert numbers(begun(tmp_path, committed=1)) == [("part-00000001-b.parquet", 0)]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000001.json",
        "outbox.json",
        "part-00000001-b.parquet",
    ]


def test_a_run_that_has_nothing_sends_nothing_of_one_that_never_committed(tmp_path: Path) -> None:
    begun(tmp_path).add(batch(1, 7), {"t": [written(tmp_path, "part-00000001-a.parquet", 1)]})
    reopened = begun(tmp_path)
    assert reopened.add(batch(1), {"t": []}) == 0
    reopened.commit(1)
    assert reopened.ready() == []
    reopened.add(batch(2, 9), {"t": [written(tmp_path, "b.parquet", 1)]})
    reopened.commit(2)
    assert numbers(begun(tmp_path, committed=2)) == [("b.parquet", 0)]
    assert not list(tmp_path.glob("0000000001.*"))


@pytest.mark.parametrize("again", [(), (7,), (7, 8, 9)])
def test_what_the_table_has_is_sent_whatever_a_repeat_has(
    tmp_path: Path, again: tuple[int, ...]
) -> None:
    begun(tmp_path).add(batch(1, 7, 8), {"t": [written(tmp_path, "part-00000001-a.parquet", 2)]})
    reopened = begun(tmp_path, committed=1)
    assert reopened.messages_up_to(1) == 2, "the table counts them"
    files = [written(tmp_path, "part-00000001-b.parquet", len(again))] if again else []
    reopened.add(batch(1, *again), {"t": files})
    reopened.commit(1, of(7, 8))
    assert numbers(reopened) == [("part-00000001-a.parquet", 0)]
    assert numbers(begun(tmp_path, committed=1)) == [("part-00000001-a.parquet", 0)]
    assert not (tmp_path / "part-00000001-b.parquet").exists()


def test_a_repeat_of_a_run_that_had_nothing_sends_nothing(tmp_path: Path) -> None:
    outbox = begun(tmp_path, committed=1)
    outbox.add(batch(1, 7), {"t": [written(tmp_path, "a.parquet", 1)]})
    outbox.commit(1, of())
    assert outbox.ready() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outbox.json"]


def test_a_record_of_what_the_table_has_that_is_missing_is_one_sentence(tmp_path: Path) -> None:
    outbox = begun(tmp_path, committed=1)
    outbox.add(batch(1, 7), {"t": [written(tmp_path, "a.parquet", 1)]})
    with pytest.raises(
        CheckpointError, match=r"lacks the record of batch 1, which is in the table.*restore it"
    ):
        outbox.commit(1, of(7, 8))


def test_a_process_that_was_suspended_with_another_outcome_changes_nothing_of_its_successors(
    tmp_path: Path,
) -> None:
    suspended, successor = begun(tmp_path), begun(tmp_path)
    successor.add(batch(1, 7, 8), {"t": [written(tmp_path, "b.parquet", 2)]})
    suspended.add(batch(1, 7), {"t": [written(tmp_path, "a.parquet", 1)]})
    successor.commit(1)
    assert numbers(successor) == [("b.parquet", 0)]
    # It finds the micro-batch in the table, and its successor's record.
    suspended.commit(1, of(7, 8))
    assert numbers(suspended) == numbers(begun(tmp_path, committed=1)) == [("b.parquet", 0)]


def test_a_process_that_was_suspended_cannot_replace_what_its_successor_recorded(
    tmp_path: Path,
) -> None:
    suspended = begun(tmp_path)
    successor = begun(tmp_path)
    successor.add(batch(1), {"t": [written(tmp_path, "a.parquet", 3)]})
    successor.commit(1)
    successor.sent(successor.ready()[0])
    successor.add(batch(2), {"t": [written(tmp_path, "b.parquet", 2)]})
    successor.commit(2)
    suspended.add(batch(1), {"t": [written(tmp_path, "part-00000001-late.parquet", 3)]})
    suspended.commit(1)
    assert numbers(suspended) == []
    last = begun(tmp_path, committed=2)
    assert numbers(last) == [("b.parquet", 3)]
    assert not (tmp_path / "part-00000001-late.parquet").exists()


def test_what_a_successor_has_sent_is_done_for_an_owner_that_wakes_up(tmp_path: Path) -> None:
    suspended = begun(tmp_path)
    suspended.add(batch(5), {"t": [written(tmp_path, "a.parquet", 2)]})
    suspended.commit(5)
    successor = begun(tmp_path, committed=5)
    successor.sent(successor.ready()[0])
    assert numbers(suspended) == []
    suspended.add(batch(6), {"t": [written(tmp_path, "b.parquet", 1)]})
    suspended.commit(6)
    assert numbers(suspended) == [("b.parquet", 2)]


def test_nothing_is_touched_before_the_outbox_is_begun(tmp_path: Path) -> None:
    owner = begun(tmp_path)
    owner.add(batch(1), {"t": [written(tmp_path, "a.parquet", 3)]})
    written(tmp_path, "in-work.parquet", 9)
    before = sorted(path.name for path in tmp_path.iterdir())
    Outbox(Place(str(tmp_path)))
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_files_without_a_record_are_removed_if_the_table_has_their_batch(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    outbox.add(batch(1), {"t": [written(tmp_path, "part-00000001-00000-000-a.zstd.parquet", 3)]})
    outbox.commit(1)
    for name in (
        "part-00000001-00000-000-b.zstd.parquet",
        "part-00000002-00000-000-c.zstd.parquet",
    ):
        written(tmp_path, name, 9)
    begun(tmp_path, committed=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0000000001.json",
        "outbox.json",
        "part-00000001-00000-000-a.zstd.parquet",
        "part-00000002-00000-000-c.zstd.parquet",
    ]


def test_a_process_that_is_suspended_while_it_opens_the_outbox_removes_nothing_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = begun(tmp_path).name
    successors: list[Outbox] = []
    load = Outbox._load

    def load_and_be_suspended(outbox: Outbox) -> None:
        load(outbox)
        monkeypatch.setattr(Outbox, "_load", load)
        successors.append(begun(tmp_path))
        file = written(tmp_path, "part-00000001-00000-000-b.zstd.parquet", 3)
        successors[0].add(batch(1), {"t": [file]})
        successors[0].commit(1)

    monkeypatch.setattr(Outbox, "_load", load_and_be_suspended)
    Outbox(Place(str(tmp_path))).begin(None, name)
    (outbox_batch,) = successors[0].ready()
    assert successors[0].is_present(outbox_batch, outbox_batch.files[0])


def test_an_owner_that_gets_the_stream_back_sends_what_its_tasks_wrote_before(
    tmp_path: Path,
) -> None:
    older = begun(tmp_path, committed=1)
    file = written(tmp_path, "part-00000002-00000-000-a.zstd.parquet", 3)
    begun(tmp_path, committed=1)
    older.add(batch(2), {"t": [file]})
    older.commit(2)
    (outbox_batch,) = older.ready()
    assert older.is_present(outbox_batch, outbox_batch.files[0])


def run(outbox: Outbox, number: int, file: DataFile) -> None:
    outbox.add(batch(number), {"t": [file]})
    outbox.commit(number)


@pytest.mark.parametrize("sends", [True, False])
def test_an_owner_that_gets_the_stream_back_goes_on_where_its_successor_ended(
    tmp_path: Path, sends: bool
) -> None:
    older, successor = begun(tmp_path), begun(tmp_path)
    for number in range(3):
        run(successor, number, written(tmp_path, f"{number}.parquet", 2))
    for outbox_batch in successor.ready() if sends else ():
        successor.sent(outbox_batch)
    # It runs all micro-batches again, and finds them in the table.
    for number in range(4):
        run(older, number, written(tmp_path, f"{number} of older.parquet", 2))
    waiting = [] if sends else [("0.parquet", 0), ("1.parquet", 2), ("2.parquet", 4)]
    assert numbers(older) == [*waiting, ("3 of older.parquet", 6)]
    assert older.messages_up_to(3) == 8


def test_what_was_sent_leaves_one_record_that_keeps_the_numbers(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    for number in range(5):
        outbox.add(batch(number), {"t": [written(tmp_path, f"{number}.parquet", 2)]})
        outbox.commit(number)
    for outbox_batch in outbox.ready():
        outbox.sent(outbox_batch)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000004.sent", "outbox.json"]
    assert begun(tmp_path, committed=4).messages_up_to(4) == 10


def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads and listings from now on."""
    made: list[str] = []
    names = Outbox._names

    def counted_load(file: Place, *args: Any) -> Any:
        made.append(f"read {file.root.rpartition('/')[2]}")
        return load_stored(file, *args)

    def counted_names(outbox: Outbox, *args: Any) -> set[str]:
        made.append("list")
        return names(outbox, *args)

    monkeypatch.setattr("ledgerlake.publish.outbox.load_stored", counted_load)
    monkeypatch.setattr(Outbox, "_names", counted_names)
    return made


def test_micro_batches_that_wait_to_be_sent_cost_the_next_one_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, made, counts = begun(tmp_path), calls(monkeypatch), []
    for number in range(20):
        made.clear()
        run(outbox, number, written(tmp_path, f"{number}.parquet", 2))
        counts.append(len(made))
    assert counts == [1] * 20


def test_micro_batches_that_wait_cost_the_sending_of_each_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, made = begun(tmp_path), calls(monkeypatch)
    for number in range(20):
        run(outbox, number, written(tmp_path, f"{number}.parquet", 2))
    made.clear()
    for outbox_batch in outbox.ready():
        assert outbox.is_present(outbox_batch, outbox_batch.files[0])
        outbox.begin_sending(outbox_batch, Sending(1))
        outbox.sent(outbox_batch)
    # One list of the whole folder, and the small folders of the sendings, before and after each
    # began.
    assert [made.count(what) for what in ("list", "read 1.json")] == [1 + 2 * 20, 20]
    assert len(made) == 1 + 3 * 20


def test_a_record_of_a_sending_that_a_killed_process_had_half_written_does_not_count(
    tmp_path: Path,
) -> None:
    outbox = begun(tmp_path)
    run(outbox, 1, written(tmp_path, "a.parquet", 3))
    (waiting,) = outbox.ready()
    assert outbox.begin_sending(waiting, Sending(2)) == (Sending(2), False)
    (tmp_path / "0000000001.begun" / "3.json#1").write_text("{")
    assert outbox.begin_sending(waiting, Sending(3)) == (Sending(2), True)


def test_a_file_that_is_missing_does_not_count_as_sent(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    outbox.add(batch(1), {"t": [written(tmp_path, "a.parquet", 3)]})
    outbox.commit(1)
    (tmp_path / "a.parquet").unlink()
    reopened = begun(tmp_path, committed=1)
    with pytest.raises(
        CheckpointError,
        match=r"lacks a\.parquet, which holds 3 due messages of t that were not sent",
    ):
        reopened.is_present(reopened.ready()[0], reopened.ready()[0].files[0])


def test_a_file_that_a_successor_has_sent_and_removed_is_not_missing(tmp_path: Path) -> None:
    suspended = begun(tmp_path)
    suspended.add(batch(5), {"t": [written(tmp_path, "a.parquet", 2)]})
    suspended.commit(5)
    (outbox_batch,) = suspended.ready()
    successor = begun(tmp_path, committed=5)
    successor.add(batch(6), {"t": [written(tmp_path, "b.parquet", 1)]})
    successor.commit(6)
    successor.sent(successor.ready()[0])
    assert not suspended.is_present(outbox_batch, outbox_batch.files[0])
    assert numbers(suspended) == []


@pytest.mark.parametrize("later", ["sent", "waiting"])
def test_a_record_that_is_written_after_its_batch_was_sent_and_removed_does_not_come_to_life(
    tmp_path: Path, later: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = begun(tmp_path)
    late_file = written(tmp_path, "late.parquet", 3)
    look = suspended._stored

    def suspended_here(batch_id: int) -> OutboxBatch | None:
        stored_batch = look(batch_id)
        successor = begun(tmp_path)
        run(successor, 1, written(tmp_path, "a.parquet", 3))
        run(successor, 2, written(tmp_path, "b.parquet", 2))
        for outbox_batch in successor.ready()[: 2 if later == "sent" else 1]:
            successor.sent(outbox_batch)
        return stored_batch

    monkeypatch.setattr(suspended, "_stored", suspended_here)
    run(suspended, 1, late_file)
    assert (tmp_path / "0000000001.json").exists()
    assert numbers(suspended) == []
    last = begun(tmp_path, committed=2)
    assert numbers(last) == ([] if later == "sent" else [("b.parquet", 3)])
    assert not (tmp_path / "0000000001.json").exists()
    assert last.messages_up_to(2) == 5


def test_an_outbox_that_is_gone_or_another_one_is_refused_and_nothing_is_made(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "outbox"
    name = begun(folder).name
    reopened = Outbox(Place(str(folder)))
    reopened.begin(None, name)
    assert reopened.name == name
    with pytest.raises(
        CheckpointError, match=r"outbox is another one, .* restore it .* or remove .*outbox\.json"
    ):
        Outbox(Place(str(folder))).begin(None, "other")
    (folder / "outbox.json").unlink()
    folder.rmdir()
    with pytest.raises(
        CheckpointError,
        match=r"outbox is gone, and messages may wait in the one that this checkpoint had",
    ):
        Outbox(Place(str(folder))).begin(None, name)
    assert not folder.exists()


def test_a_batch_that_did_not_commit_is_numbered_again_behind_the_one_that_was_sent(
    tmp_path: Path,
) -> None:
    outbox = begun(tmp_path)
    outbox.add(batch(5), {"t": [written(tmp_path, "five.parquet", 3)]})
    outbox.commit(5)
    outbox.sent(outbox.ready()[0])
    outbox.add(batch(6), {"t": [written(tmp_path, "six.parquet", 2)]})
    reopened = begun(tmp_path, committed=5)
    assert reopened.messages_up_to(5) == 3
    # Another run of it, in which a task was tried again, has files of other names.
    (tmp_path / "six.parquet").unlink()
    reopened.add(batch(6), {"t": [written(tmp_path, "again.parquet", 2)]})
    reopened.commit(6)
    assert numbers(reopened) == [("again.parquet", 3)]


def test_what_a_micro_batch_that_waits_costs_does_not_grow_with_the_topic_partitions(
    tmp_path: Path,
) -> None:
    sizes = []
    for count in (1, 100):
        folder = tmp_path / str(count)
        folder.mkdir()
        outbox = begun(folder)
        outbox.add(
            batch(0),
            {f"t-{number}": [written(folder, f"{number}.parquet", 3)] for number in range(count)},
        )
        outbox.commit(0)
        outbox.add(batch(1), {"t-0": [written(folder, "one.parquet", 1)]})
        outbox.commit(1)
        sizes.append((folder / "0000000001.json").stat().st_size)
        assert len(outbox.ready()[1].next_sequences) == 1
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("is_reopened", [False, True])
def test_numbers_go_on_after_micro_batches_without_the_topic_partition_were_sent(
    tmp_path: Path, is_reopened: bool
) -> None:
    outbox = begun(tmp_path)
    for number, topic_partition in enumerate(("t-0", "t-1", "t-1")):
        outbox.add(batch(number), {topic_partition: [written(tmp_path, f"{number}.parquet", 3)]})
        outbox.commit(number)
    for ready in outbox.ready():
        outbox.sent(ready)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0000000002.sent", "outbox.json"]
    outbox = begun(tmp_path, committed=2) if is_reopened else outbox
    assert outbox.messages_up_to(2) == 9
    files = {name: [written(tmp_path, f"{name}.parquet", 1)] for name in ("t-0", "t-1")}
    assert outbox.add(batch(3), files) == 11
    outbox.commit(3)
    assert numbers(outbox) == [("t-0.parquet", 3), ("t-1.parquet", 6)]
    assert begun(tmp_path, committed=3).messages_up_to(3) == 11


def test_the_golden_record_of_what_was_sent_is_read_and_a_newer_one_is_refused(
    tmp_path: Path,
) -> None:
    golden = '{"version": 1, "next_sequences": {"t": 17}}'
    path = tmp_path / "0000000008.sent"
    path.write_text(golden)
    outbox = begun(tmp_path, committed=8)
    assert outbox.messages_up_to(8) == 17
    outbox.add(batch(9), {"t": [written(tmp_path, "f", 2)]})
    outbox.commit(9)
    outbox.sent(outbox.ready()[0])
    assert json.loads((tmp_path / "0000000009.sent").read_text()) == {
        "version": 1,
        "next_sequences": {"t": 19},
    }
    (tmp_path / "0000000009.sent").write_text('{"version": 2}')
    with pytest.raises(OffsetError, match="newer Ledgerlake"):
        begun(tmp_path, committed=9)


def test_golden_records_are_read_and_written(tmp_path: Path) -> None:
    own = '{"version": 1, "name": "abcd"}'
    record = (
        '{"version": 1, "batch_id": 8, "files": [{"name": "f", "topic_partition": "t", '
        '"first_sequence": 15, "rows": 2}],'
        ' "next_sequences": {"t": 17}}'
    )
    sending = '{"version": 1, "partitions": 3, "ends": {"due": {"ledger_id": 7, "entry_id": -1}}}'
    texts = {"outbox.json": own, "0000000008.json": record, "0000000008.begun/3.json": sending}
    (tmp_path / "0000000008.begun").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    written(tmp_path, "f", 2)
    outbox = begun(tmp_path, committed=8)
    assert (outbox.name, numbers(outbox), outbox.messages_up_to(8)) == ("abcd", [("f", 15)], 17)
    ends = {"due": Position(7, -1)}
    assert outbox.begin_sending(outbox.ready()[0], Sending(9)) == (Sending(3, ends), True)
    (tmp_path / "0000000008.json").unlink()
    (tmp_path / "0000000008.begun" / "3.json").unlink()
    outbox = begun(tmp_path, committed=7)
    run(outbox, 8, written(tmp_path, "f", 2))
    outbox.begin_sending(outbox.ready()[0], Sending(3, ends))
    first = record.replace("15", "0").replace("17", "2")
    for name, text in (texts | {"0000000008.json": first}).items():
        assert json.loads((tmp_path / name).read_text()) == json.loads(text)


def test_how_the_sending_of_a_batch_began_stands_until_it_is_sent(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    outbox.add(batch(1), {"t": [written(tmp_path, "a.parquet", 3)]})
    outbox.commit(1)
    (outbox_batch,) = outbox.ready()
    assert outbox.begin_sending(outbox_batch, Sending(2, {"due": Position(7, 4)})) == (
        Sending(2, {"due": Position(7, 4)}),
        False,
    )
    reopened = begun(tmp_path, committed=1)
    assert reopened.begin_sending(outbox_batch, Sending(5)) == (
        Sending(2, {"due": Position(7, 4)}),
        True,
    )
    reopened.sent(outbox_batch)
    assert list(tmp_path.glob("*.begun*")) == []


def test_a_process_that_was_suspended_cannot_change_how_its_successor_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suspended = begun(tmp_path)
    run(suspended, 1, written(tmp_path, "a.parquet", 3))
    (outbox_batch,) = begun(tmp_path, committed=1).ready()
    look = suspended._begun

    def suspended_here(batch_id: int) -> Sending | None:
        monkeypatch.setattr(suspended, "_begun", look)
        assert look(batch_id) is None
        assert begun(tmp_path, committed=1).begin_sending(outbox_batch, Sending(12)) == (
            Sending(12),
            False,
        )
        return None

    monkeypatch.setattr(suspended, "_begun", suspended_here)
    assert suspended.begin_sending(outbox_batch, Sending(9)) == (Sending(12), True)
    assert begun(tmp_path, committed=1).begin_sending(outbox_batch, Sending(20)) == (
        Sending(12),
        True,
    )


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 1, "partitions": 0, "ends": {}}']
)
def test_a_damaged_record_of_a_sending_is_one_sentence(tmp_path: Path, text: str) -> None:
    outbox = begun(tmp_path)
    run(outbox, 1, written(tmp_path, "a.parquet", 3))
    folder = tmp_path / "0000000001.begun"
    folder.mkdir()
    (folder / "1.json").write_text(text)
    with pytest.raises(
        OffsetError, match=r"the checkpoint holds damaged outbox record of a sending.*restore"
    ):
        begun(tmp_path, committed=1)


def test_a_newer_record_of_a_sending_is_refused_at_the_start(tmp_path: Path) -> None:
    outbox = begun(tmp_path)
    run(outbox, 1, written(tmp_path, "a.parquet", 3))
    folder = tmp_path / "0000000001.begun"
    folder.mkdir()
    (folder / "2.json").write_text(json.dumps({"version": 2, "partitions": 2}))
    with pytest.raises(
        OffsetError, match=r"newer Ledgerlake \(outbox record of a sending of version 2.*upgrade"
    ):
        begun(tmp_path, committed=1)


@pytest.mark.parametrize("name", ["outbox.json", "0000000001.json"])
@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', '{"version": 1, "name": 7, "batch_id": "x"}']
)
def test_a_damaged_outbox_is_one_sentence(tmp_path: Path, name: str, text: str) -> None:
    outbox = begun(tmp_path)
    run(outbox, 1, written(tmp_path, "a.parquet", 3))
    (tmp_path / name).write_text(text)
    with pytest.raises(OffsetError, match=r"the checkpoint holds damaged outbox.*restore"):
        begun(tmp_path, committed=1)


def test_a_newer_outbox_is_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "outbox.json").write_text(json.dumps({"version": 2}))
    with pytest.raises(OffsetError, match=r"newer Ledgerlake \(outbox of version 2.*upgrade"):
        begun(tmp_path)


@pytest.mark.parametrize(
    ("text", "hashed"),
    [("", 0), ("hello", 99162322), ("polygenelubricants", 0), ("é€", 31 * 233 + 8364)],
)
def test_keys_are_hashed_as_by_java(text: str, hashed: int) -> None:
    assert java_hash(text) == hashed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"version": 2}',
            r"newer Ledgerlake \(outbox record of a producer of version 2.*upgrade",
        ),
        ('{"version": 1, "target": 5}', "damaged outbox record of a producer.*restore"),
        ("{", "damaged outbox record of a producer.*restore"),
    ],
)
def test_names_of_producers_that_cannot_be_read_are_refused_at_the_start(
    tmp_path: Path, text: str, message: str
) -> None:
    begun(tmp_path)
    (tmp_path / "producers").mkdir()
    (tmp_path / "producers/a.json").write_text(text)
    with pytest.raises(OffsetError, match=message):
        begun(tmp_path)


def test_a_suspended_process_takes_the_name_that_its_successor_gave_a_producer(
    tmp_path: Path,
) -> None:
    suspended, successor = begun(tmp_path), begun(tmp_path)
    successor.rename(OtherName("t", "due", "", "a", 7))
    suspended.rename(OtherName("t", "due", "", "b", 5))
    successor.rename(OtherName("t", "due", "a", "c", 9))
    suspended.rename(OtherName("u", "due", "", "d", 1))
    assert suspended.other_names() == {
        ("t", "due"): OtherName("t", "due", "a", "c", 9),
        ("u", "due"): OtherName("u", "due", "", "d", 1),
    }
