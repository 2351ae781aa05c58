"""What a table records of a micro-batch, in the commit that adds its files.

A micro-batch is known by its query and number. The digest of its offsets tells it apart from
another micro-batch of the same number, which an older copy of the checkpoint may plan.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

_VERSION = 1

# Behind a query's name, which ends with Spark's id of it.
_MORE = ":more:"


@dataclass(frozen=True)
class BatchRecord:
    """A micro-batch as the table records it.

    Args:
        stream: the configured name.
        query: the name under which the table counts micro-batches: the stream's name and Spark's id
            of the query.
        range_digest: 63 bits of a hash over the offsets before and after the micro-batch.
        ranges: by topic partition the offsets where its range started and ended, as the checkpoint
            has them.
    """

    stream: str
    query: str
    batch_id: int
    range_digest: int
    ranges: dict[str, Any] = field(default_factory=dict)

    @property
    def reads(self) -> bool:
        """Return whether it reads entries; a clock alone can make a micro-batch too."""
        return any(_place(span["start"]) != _place(span["end"]) for span in self.ranges.values())

    def more(self, number: int) -> BatchRecord:
        """Return what an addition to it is committed as (see ``table.additions``); the first has
        the number 1.
        """
        return replace(self, query=f"{self.query}{_MORE}{number}")

    def is_in(self, known: dict[str, Any]) -> bool:
        """Return whether a commit, by the JSON in its metadata, has rows of it: its own commit, or
        an addition.
        """
        if (known.get("batch"), known.get("range_digest")) != (self.batch_id, self.range_digest):
            return False
        query = known.get("query")
        return isinstance(query, str) and _base_name(query) == self.query

    def to_json(self) -> str:
        """Return what people and tools find in the table's history."""
        return json.dumps(
            {
                "version": _VERSION,
                "stream": self.stream,
                "query": self.query,
                "batch": self.batch_id,
                "range_digest": self.range_digest,
                "ranges": self.ranges,
            }
        )


def number_of(query: str) -> int:
    """Return 63 bits of a hash over a query's name, by which a table remembers who wrote last."""
    return int.from_bytes(hashlib.sha256(_base_name(query).encode()).digest()[:8], "big") >> 1


def _base_name(query: str) -> str:
    """The query whose micro-batch an addition belongs to; another query's name stays as it is."""
    return query.partition(_MORE)[0]


def _place(offset: dict[str, Any] | None) -> Any:
    return offset and [offset.get(name) for name in ("ledger", "entry", "batch")]


@dataclass(frozen=True)
class Recorded:
    """The last micro-batch of a query that a table holds; ``range_digest`` is None if the table
    does not know it.
    """

    batch_id: int
    range_digest: int | None

    def is_batch(self, batch: BatchRecord) -> bool:
        """Return whether it is this very micro-batch."""
        return self.batch_id == batch.batch_id and self.range_digest in (None, batch.range_digest)


@dataclass(frozen=True)
class Held:
    """The last micro-batch that a checkpoint saw in the table at ``path``: one that knows less of
    the query is an older copy.
    """

    path: str
    batch_id: int
