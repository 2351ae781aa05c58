"""The tables of a pipeline, for tests without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.options.config import parse_config
from ledgerlake.options.table_options import MESSAGES_TABLE, TableOptions
from ledgerlake.pipeline.tables import Tables
from ledgerlake.stored.places import Place

if TYPE_CHECKING:
    from pathlib import Path


def messages_table(folder: Path, **options: Any) -> TableOptions:
    """The table of messages of a configuration without ``[[tables]]``."""
    return TableOptions(MESSAGES_TABLE, "[delta]", Place(str(folder)), **options)


def opened_tables(
    folder: Path,
    tables: list[dict[str, Any]] | None = None,
    sections: dict[str, Any] | None = None,
    **delta: Any,
) -> Tables:
    """The tables at ``messages`` and ``rejects`` in a folder; those that are missing are made."""
    data = {
        "source": {"service_url": "pulsar://nowhere:1", "topics": ["a", "b"]},
        "stream": {"name": "orders", "checkpoint": str(folder / "checkpoint")},
        "delta": {
            "path": str(folder / "messages"),
            "rejects_path": str(folder / "rejects"),
            "writer": "arrow",
            **delta,
        },
        **({"tables": tables} if tables else {}),
        **(sections or {}),
    }
    opened = Tables(parse_config(data), Place(str(folder / "staging")))
    opened.check(None)
    return opened
