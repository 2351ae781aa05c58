"""A table whose log could not be read again is never committed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from ledgerlake.errors import SetupError
from ledgerlake.stored.places import Place
from ledgerlake.table.record_table import RecordTable

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("depth", [41, 42, 43, 60])
def test_columns_that_no_reader_gets_back_from_the_log_are_refused_before_the_commit(
    tmp_path: Path, depth: int, exists: bool
) -> None:
    kind: pa.DataType = pa.int32()
    for _ in range(depth):
        kind = pa.struct([("a", kind)])
    table = RecordTable(Place(str(tmp_path)))
    table.add_columns(pa.struct([("x", pa.int32())]))
    if exists:
        table.create()
    added = pa.struct([("deep", kind)])
    if depth > 41:
        with pytest.raises(SetupError, match="a Delta table cannot have the columns x, deep"):
            table.add_columns(added)
    else:
        table.add_columns(added)
    if not exists:
        table.create()
    assert len(DeltaTable(str(tmp_path)).schema().fields) == (3 if depth == 41 else 2)
