"""The tables of a configuration, for work on all of them: upkeep, vacuum, checks.

The tables of a path with placeholders are those that the checkpoint has seen.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from ledgerlake.decode import schema
from ledgerlake.options.config import REJECTS_TABLE
from ledgerlake.options.table_options import table_name
from ledgerlake.pipeline.batch_ends import seen_tables
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.stored.places import parse_place
from ledgerlake.table.open_table import existing_table

if TYPE_CHECKING:
    import pyarrow as pa

    from ledgerlake.options.config import Config
    from ledgerlake.stored.places import Place


@dataclass(frozen=True)
class KnownTable:
    """A table of a configuration; ``schema`` has the columns of its rows, None for a table of
    records, whose columns its log has. ``keeps_latest``: its own commits keep its files few.
    """

    name: str
    place: Place
    schema: pa.Schema | None
    keeps_latest: bool = False


def known_tables(config: Config) -> list[KnownTable]:
    """Return the tables of a configuration, that of rejects last: those that exist, and the main
    one if it was there once.

    Raises:
        OffsetError: a newer release wrote the checkpoint, or it is damaged.
        TableError: a table cannot be opened.
    """
    tables: dict[str, tuple[int, KnownTable]] = {}
    seen = sorted(
        (name, batch.path)
        for name, batch in seen_tables(Checkpoint(config.checkpoint_place)).items()
    )
    # Several templates may match a table.
    numbered = sorted(
        enumerate(config.table_options),
        key=lambda item: (item[1].is_template, -item[1].specificity),
    )
    for number, options in numbered:
        rows = None if options.has_record_shape else schema.MESSAGES
        places = {options.name: options.place}
        if options.is_template:
            fixed = {table.place.uri for _, table in tables.values()} | {config.rejects_place.uri}
            found = (
                parse_place(path, options.section, config.storage)
                for name, path in seen
                if name not in tables
            )
            places = {
                table_name(place.uri): place
                for place in found
                if options.matches(place) and place.uri not in fixed
            }
        tables |= {
            name: (number, KnownTable(name, place, rows, options.keeps_latest))
            for name, place in places.items()
        }
    in_order = [table for _, table in sorted(tables.values(), key=itemgetter(0))]
    main = config.main_table
    known = [
        table
        for table in in_order
        if existing_table(table.place)
        or (table.name == main and is_missed(config, table.name, table.place))
    ]
    return [*known, KnownTable(REJECTS_TABLE, config.rejects_place, schema.REJECTS)]


def is_missed(config: Config, name: str, place: Place) -> bool:
    """Return whether a table that does not exist was there: it was removed, and is not one that is
    yet to be made.

    Raises:
        OffsetError: as ``known_tables``.
    """
    seen = seen_tables(Checkpoint(config.checkpoint_place)).get(name)
    return seen is not None and seen.path == str(place)
