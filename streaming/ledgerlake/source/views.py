"""Which reader function serves which view; the one place where the three meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ledgerlake.source.task_reader import read_bundles, read_compat, read_entries, read_messages

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from ledgerlake.options.source_options import SourceOptions
    from ledgerlake.source.planning import EntryRange

_READERS = {"messages": read_messages, "entries": read_entries, "compat": read_compat, "bundles": read_bundles}


def read_view(options: SourceOptions, span: EntryRange) -> Iterator[pa.RecordBatch]:
    return _READERS[options.view](options, span)
