"""Where buckets are kept: the same behaviour in the state store and in a folder, few calls, nothing
left over.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.decode.messages import TopicPartition
from ledgerlake.delay.bucket import SegmentRange
from ledgerlake.errors import OffsetError
from ledgerlake.operators import bucket_storage
from ledgerlake.operators.bucket_folders import open_folder
from ledgerlake.operators.bucket_storage import FolderStorage, StateStorage
from ledgerlake.pb import delay_pb2 as pb
from ledgerlake.stored.places import Place
from tests.operators.stage import DictState

if TYPE_CHECKING:
    from pathlib import Path

SEGMENTS = [
    bytes([number]) * size
    for number, size in enumerate([5, 100, 300_000, 1, 200_000, 60_000, 0, 7])
]


@pytest.fixture(params=["state", "folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(bucket_storage, "_recent", bucket_storage._Recent(10**6))
    fresh_storage = (
        StateStorage(DictState())
        if request.param == "state"
        else FolderStorage(Place(str(tmp_path / "buckets")), {})
    )
    fresh_storage.start()
    return fresh_storage


def save(storage: Any, segments: list[bytes]) -> int:
    bucket_id: int = storage.create_bucket()
    storage.save_all_segments(bucket_id, [*enumerate(segments, 1), (0, b"metadata")])
    return bucket_id


def test_every_segment_is_read_back(storage: Any) -> None:
    bucket_id, other = save(storage, SEGMENTS), save(storage, [])
    for _ in range(2):
        assert storage.get_segment(bucket_id, 0) == b"metadata"
        assert [storage.get_segment(bucket_id, number) for number in range(1, 9)] == SEGMENTS
        assert storage.get_segment(other, 0) == b"metadata"
        bucket_storage._recent.__init__(10**6)  # type: ignore[misc]


def test_what_is_not_there_is_an_error_that_says_so(storage: Any) -> None:
    bucket_id = save(storage, SEGMENTS)
    for asked_id, number in ((bucket_id, 9), (bucket_id + 1, 0), (bucket_id + 1, 3)):
        with pytest.raises(
            OffsetError, match=f"bucket {asked_id} of delayed messages lacks its value"
        ):
            storage.get_segment(asked_id, number)


def test_a_deleted_bucket_leaves_nothing_in_the_state_and_may_be_deleted_again() -> None:
    storage = StateStorage(DictState())
    bucket_id, kept_id = save(storage, SEGMENTS), save(storage, SEGMENTS[:1])
    storage.delete_bucket(bucket_id)
    storage.delete_bucket(bucket_id)
    assert storage.get_segment(kept_id, 1) == SEGMENTS[0]
    storage.delete_bucket(kept_id)
    assert not storage._state.exists()


def test_small_segments_share_a_value() -> None:
    state = DictState()
    storage = StateStorage(state)
    save(storage, [bytes(100)] * 1000)
    assert state.writes == 3


def test_memory_for_what_was_read_is_bounded() -> None:
    recent = bucket_storage._Recent(100)
    for number in range(50):
        recent.put(1, number, [bytes(20), bytes(20)])
    assert [number for number in range(50) if recent.get(1, number)] == [48, 49]


def test_a_newer_directory_is_refused_with_advice(storage: Any) -> None:
    storage.save_all_segments(bucket_id := storage.create_bucket(), [(0, b"metadata")])
    storage._put(bucket_id, -1, pb.BlockDirectory(version=2).SerializeToString())
    with pytest.raises(OffsetError, match=r"newer Ledgerlake \(version 2.*upgrade"):
        storage.get_segment(bucket_id, 1)


@pytest.mark.parametrize("number", [-1, 1], ids=["directory", "block"])
def test_a_damaged_bucket_says_what_to_do(number: int) -> None:
    state = DictState()
    storage = StateStorage(state)
    bucket_id = save(storage, SEGMENTS[:2])
    state.values[bucket_id, number] = (b"\xff\xff",)
    with pytest.raises(OffsetError, match="restore the checkpoint"):
        storage.get_segment(bucket_id, 1)


def test_blocks_of_finished_segments_leave_the_state_and_the_others_are_read() -> None:
    storage = StateStorage(state := DictState())
    bucket_id = save(storage, SEGMENTS)
    stored = {number for _, number in state.values}
    assert stored == {-1, 0, 1, 3, 4}
    storage.delete_segments(SegmentRange(bucket_id, 1, 3))
    storage.delete_segments(SegmentRange(bucket_id, 1, 3))
    assert {number for _, number in state.values} == stored - {1}
    storage.delete_segments(SegmentRange(bucket_id, 3, 6))
    assert {number for _, number in state.values} == stored - {1, 3}
    assert [storage.get_segment(bucket_id, number) for number in range(6, 9)] == SEGMENTS[5:]
    storage.delete_bucket(bucket_id)
    assert not state.values


def start_again(folder: Path, used: dict[int, int]) -> FolderStorage:
    """The first start of a new worker process."""
    bucket_storage._swept_s.clear()
    storage = FolderStorage(Place(str(folder)), used)
    storage.start()
    return storage


def a_day_passes(folder: Path) -> None:
    for path in folder.iterdir():
        before_s = path.stat().st_mtime - 25 * 3600
        os.utime(path, (before_s, before_s))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_bucket_deleted_from_a_folder_stays_readable_for_a_day(tmp_path: Path) -> None:
    storage = start_again(tmp_path, {})
    used, dropped = save(storage, SEGMENTS), save(storage, SEGMENTS)
    storage.delete_bucket(dropped)
    storage.delete_bucket(dropped)
    assert start_again(tmp_path, {used: 1}).get_segment(dropped, 1) == SEGMENTS[0]
    a_day_passes(tmp_path)
    start_again(tmp_path, {used: 1})
    assert names(tmp_path) == [str(used)]


def test_a_dropped_bucket_that_a_restored_checkpoint_names_is_kept(tmp_path: Path) -> None:
    storage = start_again(tmp_path, {})
    bucket_id = save(storage, SEGMENTS)
    storage.delete_bucket(bucket_id)
    a_day_passes(tmp_path)
    for _ in range(2):
        start_again(tmp_path, {bucket_id: 1})
        assert names(tmp_path) == [str(bucket_id)]
        a_day_passes(tmp_path)


def test_finished_segments_in_a_folder_go_a_day_after_they_were_noticed(tmp_path: Path) -> None:
    bucket_id = save(start_again(tmp_path, {}), SEGMENTS)
    folder = tmp_path / str(bucket_id)
    start_again(tmp_path, {bucket_id: 6})
    assert names(folder) == ["-1", "0", "1", "3", "4"]
    a_day_passes(tmp_path)
    storage = start_again(tmp_path, {bucket_id: 8})
    assert names(folder) == ["-1", "0", "4"]
    assert storage.get_segment(bucket_id, 6) == SEGMENTS[5]
    a_day_passes(tmp_path)
    start_again(tmp_path, {})
    a_day_passes(tmp_path)
    start_again(tmp_path, {})
    assert names(tmp_path) == []


def test_finished_segments_that_a_restored_checkpoint_needs_are_kept(tmp_path: Path) -> None:
    bucket_id = save(start_again(tmp_path, {}), SEGMENTS)
    start_again(tmp_path, {bucket_id: 4})
    a_day_passes(tmp_path)
    for _ in range(2):
        assert start_again(tmp_path, {bucket_id: 2}).get_segment(bucket_id, 2) == SEGMENTS[1]
        assert names(tmp_path / str(bucket_id)) == ["-1", "0", "1", "3", "4"]
        a_day_passes(tmp_path)


def test_what_killed_tasks_left_in_a_folder_goes_a_day_after_it_was_noticed(tmp_path: Path) -> None:
    storage = start_again(tmp_path, {})
    used, left_over = save(storage, SEGMENTS), save(storage, SEGMENTS)
    a_day_passes(tmp_path)
    start_again(tmp_path, {used: 1})
    assert {str(used), str(left_over)} <= set(names(tmp_path))
    a_day_passes(tmp_path)
    start_again(tmp_path, {used: 1})
    assert names(tmp_path) == [str(used)]


def test_each_topic_partition_has_a_folder_of_its_own_whatever_its_name_is(tmp_path: Path) -> None:
    """File systems take 255 bytes, and no ``/``, ``\\0`` or ``..``."""
    local_names = [
        "a",
        "a b",
        "a=20b",
        "..",
        ".a",
        "_a",
        "a\0b",
        "a\nb",
        "x" * 255,
        "x" * 256,
        "\u00fc" * 200,
    ]
    sources = [
        TopicPartition(f"persistent://{tenant}/n/{name}", -1)
        for tenant in "ab"
        for name in local_names
    ]
    sources += [TopicPartition("persistent://a/n/a", number) for number in (0, 1)]
    buckets = []
    for number, source in enumerate(sources):
        storage = open_folder(Place(str(tmp_path)), source, "query", {})
        storage.start()
        buckets.append(save(storage, [b"%d" % number]))
    for number, source in enumerate(sources):
        storage = open_folder(Place(str(tmp_path)), source, "query", {buckets[number]: 1})
        assert storage.get_segment(buckets[number], 1) == b"%d" % number
    assert len(names(tmp_path / "query")) == len(sources)
