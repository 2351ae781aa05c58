"""The record of a micro-batch in the table, in the commit that adds its files.

A micro-batch is known by its query and number. The digest of its offsets tells it apart from
another micro-batch of the same number, which an older copy of the checkpoint may plan.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

VERSION = 1

# Follows a query's name, which ends with Spark's id of the query.
_MORE = ":more:"


@dataclass(frozen=True)
class BatchCommit:
    """A micro-batch as the table records it.

    Args:
        stream: the configured name.
        query: the name under which the table counts micro-batches: the stream's name and Spark's id
            of the query.
        range_digest: 63 bits of a hash over the offsets before and after the micro-batch.
        ranges: by topic partition the offsets where its range started and ended, as the checkpoint
            has them.
        reporting: the topic partitions whose tasks have to report; not in the table.
        outcomes: by topic partition the digest of what the micro-batch made of its range (see
            ``operators.outcome_digest``), by which a repeat is compared with it.
        checkpoint: the number of the stream's checkpoint (see ``pipeline.checkpoint``).
    """

    stream: str
    query: str
    batch_id: int
    range_digest: int
    ranges: dict[str, Any] = field(default_factory=dict)
    reporting: frozenset[str] = frozenset()
    outcomes: dict[str, Any] = field(default_factory=dict)
    checkpoint: int = 0

    @property
    def reads(self) -> bool:
        """Return whether it reads entries; a clock alone can make a micro-batch too."""
        return any(_ids(span["start"]) != _ids(span["end"]) for span in self.ranges.values())

    @property
    def with_messages(self) -> list[str]:
        """Return the topic partitions whose ranges may have messages. A range from an unread topic
        partition's beginning to before a ledger's first entry only notes where it begins.
        """
        return [
            name
            for name, span in self.ranges.items()
            if _ids(span["start"]) != _ids(span["end"])
            and not (_is_unread(span["start"]) and _is_before_first(span["end"]))
        ]

    def more(self, number: int) -> BatchCommit:
        """Return the record of an addition to this micro-batch (see ``table.repeated_rejects``);
        the first has the number 1.
        """
        return replace(self, query=f"{self.query}{_MORE}{number}")

    @property
    def outcome_digest(self) -> int:
        """Return 63 bits of a hash over the micro-batch and its outcomes."""
        known = [VERSION, self.batch_id, self.range_digest, self.outcomes]
        return _hash_of(json.dumps(known, sort_keys=True))

    def is_of(self, known: dict[str, Any]) -> bool:
        """Return whether a commit is the one of this micro-batch.

        Args:
            known: the JSON in the commit's metadata.
        """
        own = (self.query, self.batch_id, self.range_digest)
        return (known.get("query"), known.get("batch"), known.get("range_digest")) == own

    def to_json(self) -> str:
        """Return the JSON for the table's history."""
        return json.dumps(
            {
                "version": VERSION,
                "stream": self.stream,
                "query": self.query,
                "checkpoint": self.checkpoint,
                "batch": self.batch_id,
                "range_digest": self.range_digest,
                "ranges": self.ranges,
                "outcomes": self.outcomes,
            }
        )


def number_of(stream: str) -> int:
    """Return 63 bits of a hash over a stream's name; a table has it for each topic's writer."""
    return _hash_of(stream)


def _hash_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def _is_unread(offset: dict[str, Any] | None) -> bool:
    return offset is None or offset["ledger"] < 0


def _is_before_first(offset: dict[str, Any]) -> bool:
    return offset["entry"] < 0 and offset.get("batch") is None


def _ids(offset: dict[str, Any] | None) -> Any:
    return offset and [offset.get(name) for name in ("ledger", "entry", "batch")]


@dataclass(frozen=True)
class Recorded:
    """The last micro-batch of a query in a table; ``range_digest`` is None if the table does not
    know it.
    """

    batch_id: int
    range_digest: int | None

    def is_batch(self, batch: BatchCommit) -> bool:
        """Return whether it is this very micro-batch."""
        return self.batch_id == batch.batch_id and self.range_digest in (None, batch.range_digest)


@dataclass(frozen=True)
class SeenBatch:
    """The last micro-batch that a checkpoint saw in the table at ``path``. A table with an earlier
    one is an older copy.
    """

    path: str
    batch_id: int
