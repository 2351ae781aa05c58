"""Which tables of a configuration get nothing of its topics, and which topics reach no table, for
``check`` and ``verify``. What ``where`` and queries select is not known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ledgerlake.options.table_options import TableOptions

    # For each topic, the names of the records that its schemas have; None if they are not known.
    Records = Mapping[str, Collection[str] | None]


def routing_warnings(tables: Sequence[TableOptions], records: Records) -> list[str]:
    """Return a sentence for each table that gets no message, and one for topics without a table."""
    warnings = [
        f"{section} gets no message: {why}"
        for section, why in tables_without_messages(tables, records).items()
    ]
    lost = topics_without_table(tables, records)
    if lost:
        more = f" and {len(lost) - 1:,} more" if len(lost) > 1 else ""
        warnings.append(
            f"no table takes messages of {min(lost)}{more}, so they are rejects (no_table); "
            "correct the tables, or set [delta] path for the others"
        )
    return warnings


def tables_without_messages(tables: Sequence[TableOptions], records: Records) -> dict[str, str]:
    """Return by section why a table gets no message, if there are topics at all."""
    found = {}
    for table in tables if records else ():
        selected = [topic for topic in records if table.of_topic(topic) is not None]
        if not selected:
            found[table.section] = (
                f"its topics_pattern {table.topics_pattern} matches no topic that is read"
            )
        elif not any(_takes(table, records[topic]) for topic in selected):
            known = {name for topic in selected for name in records[topic] or () if name}
            have = f"they have {', '.join(sorted(known))}" if known else "they have none yet"
            found[table.section] = f"no schema of its topics has the record {table.schema}; {have}"
    return found


def topics_without_table(tables: Sequence[TableOptions], records: Records) -> list[str]:
    """Return the topics whose messages no table takes. A topic without a schema yet may still get
    the one that a table names.
    """
    return [
        topic
        for topic, names in records.items()
        if not any(
            table.of_topic(topic) and (not names or _takes(table, names)) for table in tables
        )
    ]


def _takes(table: TableOptions, names: Collection[str] | None) -> bool:
    return not table.schema or names is None or any(map(table.takes_schema, names))
