"""All forms of a checkpoint that Delta's protocol has, made of the one that delta-rs writes."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable

from ledgerlake.stored.places import Place
from ledgerlake.table.log_commit import OwnCommit
from ledgerlake.table.metadata_commits import protocol_change

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# A log without a checkpoint, and each form: how its files are named, and whether sidecars have the
# actions of the table's files.
FORMS = [
    "commits",
    "classic",
    "classic with sidecars",
    "parts",
    "uuid.parquet",
    "uuid.parquet with sidecars",
    "uuid.json",
    "uuid.json with sidecars",
]

_V2 = frozenset({"v2Checkpoint"})
_OF_V2 = {
    "checkpointMetadata": pa.struct([("version", pa.int64())]),
    "sidecar": pa.struct(
        [("path", pa.string()), ("sizeInBytes", pa.int64()), ("modificationTime", pa.int64())]
    ),
}


def rewrite_log(folder: Path, form: str) -> None:
    """Give a table's log a checkpoint of a form, and remove all commits before it."""
    log, table = folder / "_delta_log", DeltaTable(str(folder))
    change = protocol_change(table, str(folder), _V2, _V2)
    version = table.version() + 1
    assert OwnCommit(Place(str(folder)), "UPGRADE", {}, version - 1, change).land(version)
    if form == "commits":
        return
    DeltaTable(str(folder)).create_checkpoint()
    (log / "_last_checkpoint").unlink()
    for file in log.glob("*.json"):
        if file.name < f"{version:020}":
            file.unlink()
    classic = log / f"{version:020}.checkpoint.parquet"
    content = pq.read_table(classic)
    is_of_file = pc.or_(content["add"].is_valid(), content["remove"].is_valid())
    others, files = content.filter(pc.invert(is_of_file)), content.filter(is_of_file)
    if form == "parts":
        classic.unlink()
        _write_parts(log, version, [others, *_by_kind(files)])
    elif form != "classic":
        classic.unlink()
        name, _, sidecars = form.partition(" ")
        name = name.replace("classic", "parquet").replace("uuid", str(uuid.uuid4()))
        rows = _with_sidecars(log, others, files) if sidecars else [*_rows(others), *_rows(files)]
        rows.append({"checkpointMetadata": {"version": version}})
        _write(log / f"{version:020}.checkpoint.{name}", rows, content.schema)


def _write_parts(log: Path, version: int, parts: list[pa.Table]) -> None:
    """Write several files. A file whose deletion vector has changed is removed in the last one, and
    added in the one before. Another checkpoint of that version lacks a file, so it does not count.
    """
    for number, part in enumerate(parts, 1):
        pq.write_table(
            part, log / f"{version:020}.checkpoint.{number:010}.{len(parts):010}.parquet"
        )
    pq.write_table(parts[0], log / f"{version:020}.checkpoint.{1:010}.{2:010}.parquet")


def _with_sidecars(log: Path, others: pa.Table, files: pa.Table) -> list[dict[str, Any]]:
    (log / "_sidecars").mkdir()
    rows = _rows(others)
    for part in _by_kind(files):
        file = log / "_sidecars" / f"{uuid.uuid4()}.parquet"
        pq.write_table(part.select(["add", "remove"]), file)
        size_bytes = file.stat().st_size
        entry = {"path": file.name, "sizeInBytes": size_bytes, "modificationTime": 1}
        rows.append({"sidecar": entry})
    return rows


def _write(file: Path, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
    kinds = {field.name: field.type for field in schema} | _OF_V2
    content = pa.Table.from_pylist(rows, schema=pa.schema(kinds))
    if file.suffix == ".parquet":
        pq.write_table(content, file)
    else:
        file.write_text("".join(f"{json.dumps(action)}\n" for action in _as_json(content)))


def _by_kind(files: pa.Table) -> list[pa.Table]:
    return [files.filter(files[kind].is_valid()) for kind in ("add", "remove")]


def _rows(content: pa.Table) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = content.to_pylist()
    return rows


def _as_json(content: pa.Table) -> Iterator[dict[str, Any]]:
    for row in content.to_pylist(maps_as_pydicts="strict"):
        for kind, action in row.items():
            if action is not None:
                yield {kind: {name: value for name, value in action.items() if value is not None}}
