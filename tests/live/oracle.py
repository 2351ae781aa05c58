"""An oracle for campaigns that shares no code with the pipeline.

What pulsar-client's producers had confirmed, payload by payload, is compared with what
``deltalake`` and ``pyarrow`` read from the table, and with what a consumer of pulsar-client got
from the topic of due messages. When a row became visible is read from the table's log: the
timestamp of the commit that added its file. Upkeep replaces files; so the files that the table has
at the end are compared with those as they were committed.

A payload begins with ``<producer>|<number>|<time to deliver in ms, 0 for at once>|``.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from pyarrow import fs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Keys = NDArray[np.int64]

_PLACE_COLUMNS = [
    "partition",
    "ledger_id",
    "entry_id",
    "batch_index",
    "broker_timestamp",
    "publish_time",
    "late",
    "deliver_at",
    "delivered_at",
]
_HEAD_BYTES = 80

Place = tuple[int, int, int]


@dataclass(frozen=True)
class StoredTable:
    """A Delta table on this machine, or in a store that ``filesystem`` and
    ``delta_options`` reach.
    """

    uri: str
    filesystem: fs.FileSystem = field(default_factory=fs.LocalFileSystem)
    delta_options: dict[str, str] | None = None

    @property
    def exists(self) -> bool:
        return DeltaTable.is_deltatable(self.uri, self.delta_options)

    def delta_table(self) -> DeltaTable:
        return DeltaTable(self.uri, storage_options=self.delta_options)

    def open(self, name: str) -> pq.ParquetFile:
        # With ``pre_buffer`` pyarrow reads all values of a file at once.
        return pq.ParquetFile(f"{self._root}/{name}", filesystem=self.filesystem, pre_buffer=False)

    def log(self) -> list[str]:
        """The commits, in order; campaigns never let them expire."""
        folder = fs.FileSelector(f"{self._root}/_delta_log")
        paths = sorted(
            file.path for file in self.filesystem.get_file_info(folder) if file.extension == "json"
        )
        return [self._text(path) for path in paths]

    def merges(self) -> int:
        """How many commits are of upkeep that has merged files."""
        return sum('"operation":"OPTIMIZE"' in commit for commit in self.log())

    @property
    def _root(self) -> str:
        return self.uri.rpartition("://")[2]

    def _text(self, path: str) -> str:
        with self.filesystem.open_input_stream(path) as stream:
            return bytes(stream.read()).decode()


@dataclass(frozen=True)
class Sent:
    """A confirmed message: where the broker put it, and when it is due (0: at once)."""

    place: Place
    partition: int
    due_ms: int


class Confirmed:
    """What the broker confirmed; filled by the callbacks of producers."""

    def __init__(self) -> None:
        self.messages: dict[str, Sent] = {}
        self.twice: list[str] = []
        self._lock = threading.Lock()

    def add(self, payload: bytes, message_id: Any, due_ms: int) -> None:
        place = (message_id.ledger_id(), message_id.entry_id(), message_id.batch_index())
        with self._lock:
            self.messages[head(payload)] = Sent(place, message_id.partition(), due_ms)

    def __len__(self) -> int:
        return len(self.messages)


@dataclass
class Verdict:
    """Counts of what must not be, with some examples of each."""

    confirmed: int = 0
    rows: int = 0
    missing: int = 0
    duplicate: int = 0
    early: int = 0
    out_of_order: int = 0
    misplaced: int = 0
    merges: int = 0
    rejects: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        return not (
            self.missing or self.duplicate or self.early or self.out_of_order or self.misplaced
        )

    def note(self, kind: str, what: object) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {what}")

    def __str__(self) -> str:
        counts = ", ".join(
            f"{getattr(self, name):,} {name}"
            for name in (
                "confirmed",
                "rows",
                "missing",
                "duplicate",
                "early",
                "out_of_order",
                "misplaced",
                "merges",
            )
        )
        return f"{counts}, rejects {dict(self.rejects)}" + "".join(
            f"\n  {example}" for example in self.examples
        )


@dataclass(frozen=True)
class Row:
    """One row of the table, with the commit that made it visible."""

    payload: str
    partition: int
    place: Place
    stored_us: int
    due_us: int | None
    late: bool
    committed_ms: int


def head(payload: bytes) -> str:
    """What tells a payload apart."""
    return b"|".join(payload[:_HEAD_BYTES].split(b"|", 3)[:3]).decode()


def judge(confirmed: Confirmed, table: StoredTable, rejects: StoredTable) -> Verdict:
    """Compare the table with the confirmed messages."""
    verdict = Verdict(confirmed=len(confirmed))
    payload_counts: Counter[str] = Counter()
    places: Counter[tuple[int, Place]] = Counter()
    reached: dict[int, tuple[int, Place]] = {}
    for row in read_rows(table):
        verdict.rows += 1
        payload_counts[row.payload] += 1
        places[row.partition, row.place] += 1
        sent = confirmed.messages.get(row.payload)
        due_ms = int(row.payload.split("|")[2])
        if due_ms and row.committed_ms < due_ms:
            verdict.note("early", f"{row.payload} was visible at {row.committed_ms}")
        if sent is not None and sent.place[0] >= 0 and sent.place[:2] != row.place[:2]:
            verdict.note(
                "misplaced", f"{row.payload} stands at {row.place}, the broker said {sent.place}"
            )
        effective_us = max(row.stored_us, row.due_us or 0)
        key = (effective_us, row.place)
        if not row.late:
            if key < reached.get(row.partition, key):
                verdict.note(
                    "out_of_order", f"{row.payload} at {key} behind {reached[row.partition]}"
                )
            reached[row.partition] = max(key, reached.get(row.partition, key))
    verdict.merges = table.merges()
    for payload in confirmed.messages:
        if payload not in payload_counts:
            verdict.note("missing", f"{payload} at {confirmed.messages[payload]}")
    for payload, count in payload_counts.items():
        if count > 1:
            verdict.note("duplicate", f"{payload} {count} times")
    for where, count in places.items():
        if count > 1:
            verdict.note("duplicate", f"message id {where} {count} times")
    _judge_current_files(table, set(places), verdict)
    if rejects.exists:
        rejects_table = rejects.delta_table().to_pyarrow_table(columns=["reason"])
        verdict.rejects.update(rejects_table["reason"].to_pylist())
    return verdict


def _judge_current_files(
    table: StoredTable, places: set[tuple[int, Place]], verdict: Verdict
) -> None:
    """Check that the table's files have the rows that were committed, once each and in order."""
    spans: dict[int, list[tuple[Keys, Keys]]] = {}
    found: set[tuple[int, Place]] = set()
    rows = 0
    for name in pa.table(table.delta_table().get_add_actions())["path"].to_pylist():
        with table.open(name) as opened:
            file = opened.read(_PLACE_COLUMNS)
        rows += file.num_rows
        for partition in pc.unique(file["partition"]).to_pylist():
            of_partition = file.filter(pc.equal(file["partition"], partition))
            found.update(
                (partition, (place[0], place[1], place[2]))
                for place in _places(of_partition).tolist()
            )
            keys = _keys(of_partition.filter(pc.invert(of_partition["late"])))
            for number in np.flatnonzero(_descends(keys[:-1], keys[1:])):
                verdict.note("out_of_order", f"{keys[number + 1]} behind {keys[number]} in {name}")
            if len(keys):
                spans.setdefault(partition, []).append((keys[:1], keys[-1:]))
    for of_partition in spans.values():
        of_partition.sort(key=lambda span: tuple(span[0][0]))
        for (_, last), (first, _) in pairwise(of_partition):
            if _descends(last, first).any():
                verdict.note(
                    "out_of_order", f"a file from {first[0]} on behind one up to {last[0]}"
                )
    if rows != len(found):
        verdict.note("duplicate", f"the files have {rows} rows of {len(found)} messages")
    for place in places - found:
        verdict.note("missing", f"{place} is in no file any more")


def _places(rows: pa.Table) -> Keys:
    return np.stack(
        [rows[name].to_numpy() for name in ("ledger_id", "entry_id", "batch_index")], axis=1
    )


def _keys(rows: pa.Table) -> Keys:
    due = pc.if_else(pc.is_valid(rows["delivered_at"]), rows["deliver_at"].cast(pa.int64()), 0)
    stored = pc.coalesce(rows["broker_timestamp"], rows["publish_time"]).cast(pa.int64())
    effective = np.maximum(stored.to_numpy(), pc.fill_null(due, 0).to_numpy())
    return np.column_stack([effective, _places(rows)])


def _descends(before: Keys, after: Keys) -> NDArray[np.bool_]:
    """Return where a key is less than the one before."""
    differs = before != after
    column = differs.argmax(axis=1)
    row = np.arange(len(before))
    return differs.any(axis=1) & (after[row, column] < before[row, column])


def judge_topic(confirmed: Confirmed, received: list[tuple[bytes, int]]) -> Verdict:
    """Compare the topic of due messages with the delayed messages that were confirmed.

    Args:
        received: payloads with the time in ms at which the target's broker stored them.
    """
    verdict = Verdict(
        confirmed=sum(1 for sent in confirmed.messages.values() if sent.due_ms), rows=len(received)
    )
    payload_counts = Counter(head(payload) for payload, _ in received)
    for payload, stored_ms in received:
        if stored_ms < int(head(payload).split("|")[2]):
            verdict.note("early", head(payload))
    for name, sent in confirmed.messages.items():
        if sent.due_ms and name not in payload_counts:
            verdict.note("missing", f"{name} on the topic")
    for name, count in payload_counts.items():
        if count > 1:
            verdict.note("duplicate", f"{name} {count} times on the topic")
    return verdict


def read_rows(table: StoredTable) -> Iterator[Row]:
    """Rows in the order of commits and, within a commit, of files as they follow each other by time
    and position.
    """
    for committed_ms, names in _commits(table):
        files = [list(_file_rows(table, name, committed_ms)) for name in names]
        for rows in sorted(
            (rows for rows in files if rows), key=lambda rows: (rows[0].partition, _key(rows[0]))
        ):
            yield from rows


def _key(row: Row) -> tuple[int, Place]:
    return max(row.stored_us, row.due_us or 0), row.place


def _file_rows(table: StoredTable, name: str, committed_ms: int) -> Iterator[Row]:
    columns = [
        "value",
        "partition",
        "ledger_id",
        "entry_id",
        "batch_index",
        "broker_timestamp",
        "late",
    ]
    columns += ["publish_time", "deliver_at", "delivered_at"]
    with table.open(name) as file:
        for batch in file.iter_batches(10_000, columns=columns):
            for row in batch.to_pylist():
                due_us = (
                    _microseconds(row["deliver_at"]) if row["delivered_at"] is not None else None
                )
                place = (row["ledger_id"], row["entry_id"], row["batch_index"])
                # If the broker adds no timestamps, the publish time gives the order.
                stored_us = _microseconds(row["broker_timestamp"] or row["publish_time"])
                payload = head(row["value"])
                yield Row(
                    payload,
                    row["partition"],
                    place,
                    stored_us,
                    due_us,
                    bool(row["late"]),
                    committed_ms,
                )


def _microseconds(moment: Any) -> int:
    return round(moment.timestamp() * 1_000_000)


def _commits(table: StoredTable) -> list[tuple[int, list[str]]]:
    """When each commit was made, and the files that it added with new rows."""
    commits = []
    for commit in table.log():
        actions = [json.loads(line) for line in commit.splitlines()]
        times = [action["commitInfo"]["timestamp"] for action in actions if "commitInfo" in action]
        names = [
            action["add"]["path"] for action in actions if action.get("add", {}).get("dataChange")
        ]
        if names:
            commits.append((max(times), names))
    return commits
