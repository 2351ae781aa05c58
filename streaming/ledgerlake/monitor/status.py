"""What the status page shows, as one JSON document, and the page itself (``status_page.html``).

    {"version": 1, "time_ms": ..., "started_ms": ...,
     "queries": [{"name": "orders", "lag_messages": 0, "topic_partitions": [...], "history": {...},
     ...}], "problems": [{"time_ms": ..., "level": "WARNING", "text": "...", "times": 1}]}

Rules kept here:
  - It has names, numbers and the sentences of the log, which name no secret. It has no message, and
    nothing of the configuration but the broker's address and the places of the tables.
  - Its size is bounded: a hundred topic partitions, those with the most lag first, a hundred
    tables, and the last twenty problems.
  - The page loads nothing but this document. Its policy lets it run its own script alone.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import time
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from ledgerlake.monitor.history import Sample
from ledgerlake.monitor.http_server import page

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

    from ledgerlake.monitor.metrics import Metrics, PipelineState, QueryNumbers
    from ledgerlake.monitor.progress import Behind

VERSION = 1
_MOST_ROWS = 100
_MOST_PROBLEMS = 20
_MOST_TEXT = 500

_DUE = (
    "overdue",
    "1 minute",
    "10 minutes",
    "1 hour",
    "6 hours",
    "1 day",
    "7 days",
    "30 days",
    "later",
)


@dataclass(frozen=True)
class Problem:
    """A warning or error of the log, and how often it came in a row."""

    time_ms: int
    level: str
    text: str
    times: int = 1


class Problems(logging.Handler):
    """Keeps the last warnings and errors of Ledgerlake's loggers in this process."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._last: list[Problem] = []
        self._logger = logging.getLogger("ledgerlake")
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.add(int(record.created * 1000), record.levelname, record.getMessage())
        # Python writes warnings to standard error only as long as there is no handler.
        handlers = [*self._logger.handlers, *logging.getLogger().handlers]
        if (
            logging.lastResort is not None
            and handlers[:1] == [self]
            and all(isinstance(handler, Problems) for handler in handlers)
        ):
            logging.lastResort.handle(record)

    def add(self, time_ms: int, level: str, text: str) -> None:
        """Add a problem."""
        problem = Problem(time_ms, level, text.partition("\n")[0][:_MOST_TEXT])
        last = self._last[-1] if self._last else None
        if last is not None and (last.level, last.text) == (problem.level, problem.text):
            problem = replace(problem, times=last.times + 1)
        self._last = [*(self._last[:-1] if problem.times > 1 else self._last), problem][
            -_MOST_PROBLEMS:
        ]

    @property
    def last(self) -> list[Problem]:
        """Return the last problems, the newest first."""
        return self._last[::-1]

    def close(self) -> None:
        self._logger.removeHandler(self)
        super().close()


class Status:
    """The status of a session's queries."""

    def __init__(self, metrics: Metrics) -> None:
        self.problems = Problems()
        self._metrics = metrics
        self._started_ms = int(time.time() * 1000)

    @property
    def pages(self) -> dict[str, WSGIApplication]:
        """Return the status page and its document, by path."""
        content = _page()
        return {
            "/": page(
                "text/html; charset=utf-8",
                lambda: content,
                {"Content-Security-Policy": policy_of(content)},
            ),
            "/status.json": page("application/json", lambda: json.dumps(self.document()).encode()),
        }

    def document(self) -> dict[str, Any]:
        """Return what the page shows now."""
        now_ms = int(time.time() * 1000)
        return {
            "version": VERSION,
            "time_ms": now_ms,
            "started_ms": self._started_ms,
            "queries": self._metrics.read(
                lambda name, numbers, state: _query(name, numbers, state, now_ms)
            ),
            "problems": [vars(problem) for problem in self.problems.last],
        }


def policy_of(content: bytes) -> str:
    """Return the policy by which a browser loads nothing else, and runs only what the page has. Its
    icon is data of the page.
    """
    hashes = {}
    for kind in ("script", "style"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>".encode(), content, re.DOTALL)
        hashes[kind] = base64.b64encode(hashlib.sha256(text).digest()).decode()
    sources = " ".join(f"{kind}-src 'sha256-{digest}';" for kind, digest in hashes.items())
    return (
        f"default-src 'none'; {sources} img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _page() -> bytes:
    return (files("ledgerlake.monitor") / "status_page.html").read_bytes()


def _query(
    name: str, numbers: QueryNumbers, state: PipelineState | None, now_ms: int
) -> dict[str, Any]:
    lags = numbers.lags_now(state)
    partitions = _partitions(numbers, lags)
    numbers.sample(now_ms, lags)
    shown = {
        "name": name,
        "lag_messages": _together(sum, [row["lag_messages"] for row in partitions]),
        "lag_ms": _together(max, [row["lag_ms"] for row in partitions]),
        "topic_partitions": partitions[:_MOST_ROWS],
        "topic_partitions_count": len(partitions),
        "durations_ms": numbers.durations_ms,
        "history": _history(list(numbers.history.samples)),
        "rows_per_second": numbers.rows_per_second,
        "pipeline": None if state is None else _pipeline(numbers, state, now_ms),
    }
    return shown


def _pipeline(numbers: QueryNumbers, state: PipelineState, now_ms: int) -> dict[str, Any]:
    within = numbers.due_within(now_ms)
    counts = [count - before for count, before in zip(within, [0, *within[:-1]], strict=True)]
    tables = _tables(state)
    return {
        "broker": state.broker,
        "is_owner": state.is_owner,
        "messages": numbers.messages,
        "rejects": numbers.rejects,
        "batches": numbers.batches,
        "last_batch_ms": _ms(numbers.last_batch_timestamp_seconds) if numbers.batches else None,
        "messages_per_second": numbers.messages_per_second,
        "commit_ms": _ms(numbers.commits.last_s),
        "mean_commit_ms": _ms(numbers.commits.mean_s),
        "incomplete_messages": numbers.incomplete_messages,
        "kept_bytes": numbers.kept_bytes,
        "delayed": sum(numbers.delayed_counts.values()),
        "most_late_ms": _ms(numbers.most_late_seconds),
        "next_due_ms": min(
            (due_ms for due_ms in numbers.next_due_ms.values() if due_ms is not None), default=None
        ),
        "due": [
            {"within": label, "messages": count} for label, count in zip(_DUE, counts, strict=True)
        ],
        "rejects_by_reason": dict(numbers.reasons.most_common(_MOST_ROWS)),
        "tables": tables[:_MOST_ROWS],
        "tables_count": len(tables),
        "upkeep": {
            "failures": state.upkeep.failed_attempts,
            "last_success_ms": state.upkeep.last_round_ms,
        },
    }


def _partitions(numbers: QueryNumbers, lags: dict[str, Behind]) -> list[dict[str, Any]]:
    names = sorted({*lags, *numbers.delayed_counts})
    rows = []
    for name in names:
        lag = lags.get(name)
        rows.append(
            {
                "name": name,
                "lag_messages": None if lag is None else lag.messages,
                "lag_ms": None if lag is None else lag.time_ms,
                "delayed": numbers.delayed_counts.get(name, 0),
                "next_due_ms": numbers.next_due_ms.get(name),
            }
        )
    return sorted(rows, key=lambda row: -(row["lag_messages"] or 0))


def _tables(state: PipelineState) -> list[dict[str, Any]]:
    known = {table.table: table for table in state.upkeep.tables}
    rows = []
    for name, path in {
        **state.tables,
        **{name: table.path for name, table in known.items()},
    }.items():
        table = known.get(name)
        size = None if table is None else table.size
        rows.append(
            {
                "name": name,
                "path": path,
                "files": None if size is None else size.files,
                "bytes": None if size is None else size.size_bytes,
                "merged_files": 0 if table is None else table.merged_files,
                "removed_files": 0 if table is None else table.removed_files,
                "obstacles": [] if table is None else list(table.obstacles),
            }
        )
    return rows


def _history(samples: list[Sample]) -> dict[str, list[int | None]]:
    return {
        name: [getattr(sample, name) for sample in samples] for name in Sample.__dataclass_fields__
    }


def _together(how: Any, values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return how(known) if known else None


def _ms(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1000)
