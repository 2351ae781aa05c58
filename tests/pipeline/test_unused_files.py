"""Which unused files of a pipeline's tables go, whoever removes them."""

from __future__ import annotations

import shutil
import threading
from typing import TYPE_CHECKING, Any

import pytest
from deltalake import DeltaTable
from pyiceberg.catalog import load_catalog

from ledgerlake.cli import main
from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.options.config import load_config
from ledgerlake.pipeline.iceberg import follow
from ledgerlake.pipeline.unused_files import UnusedFiles
from ledgerlake.pipeline.upkeep import Upkeep, keep_up
from ledgerlake.stored.places import Place
from ledgerlake.table.delta_table import Table
from ledgerlake.table.iceberg_table import IcebergTable
from ledgerlake.table.vacuum import Vacuumed
from tests.ageing import make_older
from tests.table.test_compaction import Writer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ledgerlake.options.config import Config

ROWS_OF_BATCHES = 30


def written(folder: Path, *sections: str, iceberg_table: str = "") -> Path:
    """Write a configuration, and its tables with small files of 40 days."""
    path = folder / "orders.toml"
    lines = [
        "[source]",
        'service_url = "pulsar://nowhere:1"',
        'topics = ["t"]',
        "[stream]",
        'name = "s"',
        f'checkpoint = "{folder}/checkpoint"',
        "[delta]",
        f'path = "{folder}/messages"',
        f'iceberg_table = "{iceberg_table}"',
        *sections,
    ]
    path.write_text("\n".join(lines))
    writer = Writer(Place(str(folder / "messages")))
    for _ in range(4):
        writer.commit()
    rejects = Table(load_config(path).rejects_place, schema.REJECTS)
    rejects.path.make()
    rejects.create()
    make_older(folder / "messages", 40)
    return path


def iceberg_of(folder: Path) -> dict[str, str]:
    return {
        "type": "sql",
        "uri": f"sqlite:///{folder}/catalog.db",
        "warehouse": f"file://{folder}/warehouse",
    }


def with_iceberg(folder: Path, *sections: str) -> Path:
    settings = ", ".join(f'{name} = "{value}"' for name, value in iceberg_of(folder).items())
    return written(
        folder, "[iceberg]", f"settings = {{ {settings} }}", *sections, iceberg_table="shop.orders"
    )


def rows_in_iceberg(folder: Path, **scan: Any) -> int:
    return (
        load_catalog("default", **iceberg_of(folder))
        .load_table("shop.orders")
        .scan(**scan)
        .to_arrow()
        .num_rows
    )


def by_upkeep(path: Path) -> list[Vacuumed]:
    return [Vacuumed(kept.table, [""] * kept.removed) for kept in keep_up(load_config(path))]


def by_thread(path: Path) -> list[Vacuumed]:
    running = Upkeep(load_config(path))
    place = load_config(path).messages_place
    return [running._unused_files.remove(place)]


def by_vacuum(path: Path) -> list[Vacuumed]:
    return [UnusedFiles(load_config(path)).remove(load_config(path).messages_place)]


def by_vacuum_with_hours(path: Path) -> list[Vacuumed]:
    return [UnusedFiles(load_config(path), 1).remove(load_config(path).messages_place)]


def removed(ways: list[Callable[[Path], list[Vacuumed]]], path: Path) -> list[int]:
    return [len(way(path)[0].files) for way in ways]


def test_the_command_vacuum_keeps_what_the_configuration_keeps_unless_hours_are_given(
    tmp_path: Path,
) -> None:
    path = written(tmp_path, "[upkeep]", 'retention = "30 days"')
    before = DeltaTable(str(tmp_path / "messages")).version()
    assert keep_up(load_config(path))[0].merged == 12
    make_older(tmp_path / "messages", 10)
    assert main(["vacuum", str(path)]) == 0
    assert DeltaTable(str(tmp_path / "messages"), version=before).to_pyarrow_table().num_rows > 0
    assert removed([by_upkeep, by_thread, by_vacuum], path) == [0, 0, 0]
    assert main(["vacuum", str(path), "--retention-hours", "168"]) == 0
    assert len([*(tmp_path / "messages").glob("*.parquet")]) == 1


def test_a_file_stays_while_a_snapshot_of_the_iceberg_table_names_it(tmp_path: Path) -> None:
    path = with_iceberg(tmp_path)
    config = load_config(path)
    follow(config)
    (snapshot,) = (
        load_catalog("default", **iceberg_of(tmp_path)).load_table("shop.orders").snapshots()
    )
    rows = rows_in_iceberg(tmp_path)
    assert keep_up(config)[0].merged == 12
    # The catalog takes no commits for so long that the log has forgotten the removed files.
    make_older(tmp_path / "messages", 40)
    DeltaTable(str(tmp_path / "messages")).create_checkpoint()
    DeltaTable(str(tmp_path / "messages")).cleanup_metadata()
    assert removed([by_upkeep, by_thread, by_vacuum, by_vacuum_with_hours], path) == [0, 0, 0, 0]
    assert rows_in_iceberg(tmp_path) == rows
    follow(config)
    # A reader may have begun just before.
    assert removed([by_upkeep, by_thread, by_vacuum, by_vacuum_with_hours], path) == [0, 0, 0, 0]
    assert rows_in_iceberg(tmp_path, snapshot_id=snapshot.snapshot_id) == rows


def test_a_file_goes_that_only_old_snapshots_of_the_iceberg_table_name(tmp_path: Path) -> None:
    config = load_config(with_iceberg(tmp_path, 'retention = "0 s"'))
    follow(config)
    assert keep_up(config)[0].merged == 12
    make_older(tmp_path / "messages", 40)
    follow(config)
    assert keep_up(config)[0].removed == 12
    assert rows_in_iceberg(tmp_path) > 0


def test_nothing_goes_while_the_catalog_cannot_be_read(tmp_path: Path) -> None:
    path = with_iceberg(tmp_path)
    assert keep_up(load_config(path))[0].merged == 12
    make_older(tmp_path / "messages", 40)
    (tmp_path / "catalog.db").unlink(missing_ok=True)
    (tmp_path / "catalog.db").mkdir()
    for way in (by_upkeep, by_thread, by_vacuum, by_vacuum_with_hours):
        with pytest.raises(TableError, match="cannot say which files it has of the table at"):
            way(path)
    assert len([*(tmp_path / "messages").glob("*.parquet")]) == 13
    shutil.rmtree(tmp_path / "catalog.db")
    assert removed([by_vacuum], path) == [12]


def unused_of(config: Config, tmp_path: Path, is_stopped: Callable[[], bool]) -> UnusedFiles:
    keep_up(config)
    make_older(tmp_path / "messages", 40)
    return UnusedFiles(config, is_stopped=is_stopped)


def test_a_catalog_that_never_answers_is_asked_once_and_keeps_no_thread_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(with_iceberg(tmp_path))
    stopping, answer, questions = threading.Event(), threading.Event(), list[str]()
    unused = unused_of(config, tmp_path, stopping.is_set)

    def never(table: IcebergTable) -> set[str]:
        questions.append(table.name)
        stopping.set()
        answer.wait()
        return set()

    monkeypatch.setattr(IcebergTable, "named_files", never)
    for _ in range(3):
        with pytest.raises(
            TableError, match=r"the catalog of the Iceberg table .* does not answer"
        ):
            unused.remove(config.messages_place)
    assert questions == ["shop.orders"]
    answer.set()


def test_a_catalog_is_asked_only_if_there_is_something_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config(with_iceberg(tmp_path))
    monkeypatch.setattr(IcebergTable, "named_files", None)
    assert UnusedFiles(config).remove(config.messages_place).files == []
