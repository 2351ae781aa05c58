"""Which section of the configuration a table of a topic belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from deltalake import write_deltalake

from ledgerlake.decode import schema
from ledgerlake.errors import TableError
from ledgerlake.options.config import REJECTS_TABLE, parse_config
from ledgerlake.pipeline.batch_ends import BatchEnds, LastRun
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.known_tables import known_tables
from ledgerlake.stored.offsets import PartitionOffset
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_commit import SeenBatch
from ledgerlake.verify.verify import _Tables
from ledgerlake.wire.message_id import BEFORE_ALL

if TYPE_CHECKING:
    from pathlib import Path


def test_a_main_table_that_is_not_made_yet_is_none_and_one_that_was_removed_is_missed(
    tmp_path: Path,
) -> None:
    config = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["a"]},
            "stream": {"name": "s", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"path": f"{tmp_path}/orders"},
        }
    )
    write_deltalake(str(tmp_path / "orders_rejects"), schema.REJECTS.empty_table())
    no_cluster: Any = None
    assert [table.name for table in known_tables(config)] == [REJECTS_TABLE]
    assert _Tables(config, no_cluster, {}).opened() == []
    keeper = BatchEnds(Checkpoint(Place(config.stream.checkpoint)))
    keeper.add(LastRun(0, 0), {}, {config.main_table: SeenBatch(str(tmp_path / "orders"), 0)})
    assert [table.name for table in known_tables(config)] == [config.main_table, REJECTS_TABLE]
    with pytest.raises(TableError, match=r"there is no table at .*; if it was removed, restore"):
        _Tables(config, no_cluster, {})


@pytest.mark.parametrize("mode", ["append", "latest"])
def test_verify_misses_each_table_that_was_there(mode: str, tmp_path: Path) -> None:
    topic = "persistent://public/default/a"
    config = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["a"]},
            "stream": {"name": "s", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"path": f"{tmp_path}/all"},
            "tables": [{"path": f"{tmp_path}/second", "mode": mode, "topics_pattern": "a"}],
        }
    )
    no_cluster: Any = None
    for name in ("all", "all_rejects"):
        write_deltalake(str(tmp_path / name), schema.MESSAGES.empty_table())
    _Tables(config, no_cluster, {topic: PartitionOffset(BEFORE_ALL)})
    keeper = BatchEnds(Checkpoint(Place(config.stream.checkpoint)))
    keeper.add(
        LastRun(0, 0), {}, {config.table_options[0].name: SeenBatch(str(tmp_path / "second"), 0)}
    )
    with pytest.raises(TableError, match=r"there is no table at .*second"):
        _Tables(config, no_cluster, {topic: PartitionOffset(BEFORE_ALL)})


def test_a_table_belongs_to_the_section_whose_path_names_it_most_closely(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    config = parse_config(
        {
            "source": {"service_url": "pulsar://nowhere:1", "topics": ["a", "b"]},
            "stream": {"name": "s", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {"path": f"{lake}/others"},
            "tables": [
                {"path": f"{lake}/{{namespace}}{{topic}}"},
                {"path": f"{lake}/{{topic}}_latest", "mode": "latest"},
            ],
        }
    )
    seen: dict[str, SeenBatch] = {}
    for name in ("ab", "ab_latest", "others", "others_rejects"):
        write_deltalake(str(lake / name), schema.MESSAGES.empty_table())
        seen[name] = SeenBatch(str(lake / name), 0)
    BatchEnds(Checkpoint(Place(config.stream.checkpoint))).add(LastRun(0, 0), {}, seen)
    known = [
        (table.place.uri.rpartition("/")[2], table.keeps_latest) for table in known_tables(config)
    ]
    assert sorted(known) == [
        ("ab", False),
        ("ab_latest", True),
        ("others", False),
        ("others_rejects", False),
    ]
