"""The names of schema files in the metadata of a state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ledgerlake.errors import CheckpointError
from ledgerlake.pipeline.moved_state import adopt_state, former_place
from ledgerlake.stored.places import Place

SCHEMA = "state/0/_stateSchema/default/0_60bb9b12"


def write_metadata(checkpoint: Path, *places: str) -> Path:
    file = checkpoint / "state/0/_metadata/v2/0"
    file.parent.mkdir(parents=True)
    store = {
        "storeName": "default",
        "stateSchemaFilePaths": [f"{place}/{SCHEMA}" for place in places],
    }
    file.write_text(
        "v2\n" + json.dumps({"operatorInfo": {"operatorId": 0}, "stateStoreInfo": [store]})
    )
    (file.parent / ".0.crc").write_text("of the old content")
    return file


def names(file: Path) -> list[str]:
    paths: list[str] = json.loads(file.read_text().splitlines()[1])["stateStoreInfo"][0][
        "stateSchemaFilePaths"
    ]
    return paths


def test_names_of_another_place_become_those_of_this_one(tmp_path: Path) -> None:
    file = write_metadata(tmp_path, "file:/volume/old", f"file:{tmp_path}")
    assert former_place(Place(str(tmp_path))) == "file:/volume/old"
    adopt_state(Place(str(tmp_path)))
    assert names(file) == [f"file:{tmp_path}/{SCHEMA}"] * 2
    assert former_place(Place(str(tmp_path))) is None
    assert [path.name for path in file.parent.iterdir()] == ["0"]


def test_a_checkpoint_that_stayed_is_not_written(tmp_path: Path) -> None:
    file = write_metadata(tmp_path, f"file:{tmp_path}")
    before = file.stat()
    adopt_state(Place(str(tmp_path)))
    assert file.stat() == before
    assert (file.parent / ".0.crc").exists()


def test_a_checkpoint_without_state_was_never_moved(tmp_path: Path) -> None:
    adopt_state(Place(str(tmp_path)))
    assert former_place(Place(str(tmp_path))) is None


@pytest.mark.parametrize(
    "content", ["", "v2", "v2\n{}", "v2\n[]", 'v2\n{"stateStoreInfo": [{}]}', "v2\n{"]
)
def test_damaged_metadata_is_named(tmp_path: Path, content: str) -> None:
    write_metadata(tmp_path).write_text(content)
    with pytest.raises(
        CheckpointError, match=r"state/0/_metadata/v2/0 of the checkpoint .* is damaged"
    ):
        adopt_state(Place(str(tmp_path)))
