"""Which section of the configuration a table of a topic belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from deltalake import write_deltalake

from ledgerlake.decode import schema
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.cursors import CursorKeeper, LastRun
from ledgerlake.pipeline.known_tables import known_tables
from ledgerlake.stored.places import Place
from ledgerlake.table.batch_record import SeenBatch

if TYPE_CHECKING:
    from pathlib import Path


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
    no_cluster: Any = None
    CursorKeeper(no_cluster, "s", Checkpoint(Place(config.stream.checkpoint))).add(LastRun(0, 0), {}, seen)
    known = [(table.place.uri.rpartition("/")[2], table.keeps_latest) for table in known_tables(config)]
    assert sorted(known) == [("ab", False), ("ab_latest", True), ("others", False), ("others_rejects", False)]
