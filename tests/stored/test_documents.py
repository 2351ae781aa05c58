"""Each JSON object in a checkpoint is refused if a newer release wrote it, or if it is not exactly
what this release writes.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ledgerlake.errors import OffsetError
from tests.fuzz.of_state import DOCUMENTS

WITH_VERSION = [name for name, (texts, _) in DOCUMENTS.items() if "version" in json.loads(texts[0])]


def read(name: str, document: dict[str, Any]) -> int:
    return DOCUMENTS[name][1](json.dumps(document).encode())


def written(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DOCUMENTS[name][0][0])
    return document


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_object_is_read_as_it_was_written(name: str) -> None:
    for text in DOCUMENTS[name][0]:
        assert DOCUMENTS[name][1](text.encode()) >= 0


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_object_with_a_field_that_nobody_knows_is_refused(name: str) -> None:
    with pytest.raises(OffsetError):
        read(name, written(name) | {"more": 1})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_an_object_that_lacks_a_field_is_refused(name: str) -> None:
    for lacking in written(name):
        with pytest.raises(OffsetError):
            read(name, {field: value for field, value in written(name).items() if field != lacking})


@pytest.mark.parametrize("name", WITH_VERSION)
@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, [1]], ids=str)
def test_a_version_that_no_release_writes_is_refused(name: str, version: Any) -> None:
    with pytest.raises(OffsetError):
        read(name, written(name) | {"version": version})


@pytest.mark.parametrize("name", WITH_VERSION)
def test_a_newer_version_is_refused_with_advice_whatever_else_it_has(name: str) -> None:
    with pytest.raises(OffsetError, match=r"written by a newer Ledgerlake.*upgrade Ledgerlake"):
        read(name, {"version": 2, "more": 1})
