"""The status page and its document: what they have, and what they do not."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.monitor.history import History, Sample
from ledgerlake.monitor.metrics import PipelineState, ServedMetrics, state_of
from ledgerlake.monitor.progress import Behind
from ledgerlake.monitor.status import Problems, policy_of
from ledgerlake.operators.stage_rows import Incomplete, Released
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.upkeep import TableUpkeep, UpkeepReport
from ledgerlake.table.open_table import TableSize

if TYPE_CHECKING:
    from collections.abc import Iterator

_VOID = {"meta", "link", "br"}


def session() -> Any:
    """What the server needs of a Spark session."""
    return SimpleNamespace(
        streams=SimpleNamespace(addListener=lambda _: None, removeListener=lambda _: None)
    )


@pytest.fixture
def metrics() -> Iterator[ServedMetrics]:
    metrics = ServedMetrics(session(), 0)
    yield metrics
    metrics.close()


def fetched(metrics: ServedMetrics, path: str, **headers: str) -> tuple[bytes, dict[str, str]]:
    request = urllib.request.Request(f"http://127.0.0.1:{metrics.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.read(), dict(response.headers)


def document(metrics: ServedMetrics) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(fetched(metrics, "/status.json")[0])
    return content


def watch_orders(metrics: ServedMetrics, tables: int = 0) -> None:
    upkeep = [
        TableUpkeep("messages", "lake/orders", TableSize(7, 900), 24, 3, ("checkConstraints",))
    ]
    upkeep += [TableUpkeep(f"t{number}", f"lake/t{number}") for number in range(tables)]
    places = {"messages": "lake/orders", "rejects": "lake/orders_rejects"}
    state = PipelineState(True, UpkeepReport(upkeep, 1, 5_000), "pulsar://broker:6650", places)
    metrics.watch("orders", lambda: state)


class Elements(HTMLParser):
    """Collects start tags and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def close(self) -> None:
        super().close()
        assert self._open == []


def test_the_page_is_one_small_file_that_loads_nothing(metrics: ServedMetrics) -> None:
    content, headers = fetched(metrics, "/")
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert len(content) < 200_000
    elements = Elements()
    elements.feed(content.decode())
    elements.close()
    assert [attributes for tag, attributes in elements.found if tag == "html"] == [{"lang": "en"}]
    assert {"main", "header", "footer", "h1", "title", "noscript"} <= {
        tag for tag, _ in elements.found
    }
    for tag, attributes in elements.found:
        assert "src" not in attributes, tag
        assert not (attributes.get("href") or "data:").startswith(("http:", "https:", "//")), (
            attributes
        )
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (
            attributes
        )
    # The namespace of SVG is a name, and is not fetched.
    assert re.findall(r"https?://[^\"']*", content.decode()) == ["http://www.w3.org/2000/svg"]
    assert b"@import" not in content
    assert b"url(" not in content


def test_a_browser_may_run_only_the_script_of_the_page(metrics: ServedMetrics) -> None:
    content, headers = fetched(metrics, "/")
    policy = headers["Content-Security-Policy"]
    assert policy == policy_of(content)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert policy_of(content.replace(b"refresh();", b"attack();")) != policy
    # Texts come from topics and logs, and are never taken as HTML.
    assert not re.search(rb"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", content)


def test_the_document_shows_a_pipeline(metrics: ServedMetrics) -> None:
    watch_orders(metrics)
    batch = BatchResult(
        0,
        100,
        3,
        Counter(no_table=2, checksum=1),
        delayed_counts={"t": 5},
        next_due_ms={"t": 7_000},
        due_spans={"t": [DueSpan(7_000, 1000, 5)]},
        incomplete={"t": Incomplete(1, 7)},
        commit_s=0.25,
        released=Released(2, 1_800, 1_500),
    )
    metrics.add_batch("orders", batch, 1.0, 2_000)
    metrics.add_progress(
        "orders", {"t": Behind(20, 1500), "u": Behind(50, None)}, 1.0, {"addBatch": 80}
    )
    shown = document(metrics)
    assert (shown["version"], shown["problems"]) == (1, [])
    (query,) = shown["queries"]
    assert (query["name"], query["lag_messages"], query["lag_ms"]) == ("orders", 70, 1500)
    assert query["topic_partitions"] == [
        {"name": "u", "lag_messages": 50, "lag_ms": None, "delayed": 0, "next_due_ms": None},
        {"name": "t", "lag_messages": 20, "lag_ms": 1500, "delayed": 5, "next_due_ms": 7_000},
    ]
    assert query["durations_ms"] == {"addBatch": 80}
    assert query["history"]["messages"][0] == 100
    assert {len(values) for values in query["history"].values()} == {3}
    pipeline = query["pipeline"]
    assert (pipeline["broker"], pipeline["is_owner"]) == ("pulsar://broker:6650", True)
    assert (pipeline["messages"], pipeline["rejects"], pipeline["batches"]) == (100, 3, 1)
    assert (pipeline["last_batch_ms"], pipeline["commit_ms"], pipeline["mean_commit_ms"]) == (
        2_000,
        250,
        250,
    )
    assert (pipeline["incomplete_messages"], pipeline["kept_bytes"]) == (1, 7)
    assert (pipeline["delayed"], pipeline["next_due_ms"], pipeline["most_late_ms"]) == (
        5,
        7_000,
        500,
    )
    assert [row for row in pipeline["due"] if row["messages"]] == [
        {"within": "overdue", "messages": 5}
    ]
    assert pipeline["rejects_by_reason"] == {"no_table": 2, "checksum": 1}
    assert pipeline["tables"] == [
        {
            "name": "messages",
            "path": "lake/orders",
            "files": 7,
            "bytes": 900,
            "merged_files": 24,
            "removed_files": 3,
            "obstacles": ["checkConstraints"],
        },
        {
            "name": "rejects",
            "path": "lake/orders_rejects",
            "files": None,
            "bytes": None,
            "merged_files": 0,
            "removed_files": 0,
            "obstacles": [],
        },
    ]
    assert pipeline["upkeep"] == {"failures": 1, "last_success_ms": 5_000}


def test_the_document_shows_a_query_on_the_bare_source_by_its_lag_alone(
    metrics: ServedMetrics,
) -> None:
    metrics.add_progress("behind", {"t": Behind(None, None)}, 12.5)
    (query,) = document(metrics)["queries"]
    assert (query["name"], query["pipeline"], query["rows_per_second"]) == ("behind", None, 12.5)
    assert (query["lag_messages"], query["lag_ms"]) == (None, None)
    metrics.forget("behind")
    assert document(metrics)["queries"] == []


def test_of_many_topic_partitions_and_tables_the_document_has_a_hundred(
    metrics: ServedMetrics,
) -> None:
    watch_orders(metrics, tables=500)
    names = [f"persistent://public/default/topic-{number:04}" for number in range(5_000)]
    metrics.add_batch("orders", BatchResult(0, 1, delayed_counts=dict.fromkeys(names, 1)), 1.0, 1)
    metrics.add_progress(
        "orders", {name: Behind(number, number) for number, name in enumerate(names)}, 1.0
    )
    content, _ = fetched(metrics, "/status.json")
    assert len(content) < 100_000
    (query,) = json.loads(content)["queries"]
    assert (len(query["topic_partitions"]), query["topic_partitions_count"]) == (100, 5_000)
    assert query["topic_partitions"][0]["name"] == names[-1]
    assert query["lag_messages"] == sum(range(5_000))
    assert (len(query["pipeline"]["tables"]), query["pipeline"]["tables_count"]) == (100, 502)


def test_the_last_warnings_are_shown_with_the_newest_first_and_repetitions_counted(
    metrics: ServedMetrics,
) -> None:
    log = logging.getLogger("ledgerlake.pipeline.upkeep")
    log.warning("upkeep failed: %s\nTraceback", "no store")
    log.warning("upkeep failed: %s", "no store")
    log.error("x" * 5_000)
    log.info("nothing")
    newest, older = document(metrics)["problems"]
    assert (newest["level"], newest["text"], newest["times"]) == ("ERROR", "x" * 500, 1)
    assert (older["level"], older["text"], older["times"]) == (
        "WARNING",
        "upkeep failed: no store",
        2,
    )
    for number in range(50):
        log.warning("warning %d", number)
    problems = document(metrics)["problems"]
    assert [problem["text"] for problem in problems] == [
        f"warning {number}" for number in range(49, 29, -1)
    ]


def test_the_log_is_left_alone_after_the_end() -> None:
    problems = Problems()
    problems.close()
    logging.getLogger("ledgerlake.test").warning("later")
    assert problems.last == []


def test_page_and_document_need_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METRICS_TOKEN", "first")
    metrics = ServedMetrics(session(), 0, "127.0.0.1", "env:METRICS_TOKEN")
    assert metrics.url == f"http://127.0.0.1:{metrics.port}/"
    try:
        for path in ("/", "/status.json", "/metrics"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                fetched(metrics, path)
            assert fetched(metrics, path, Authorization="Bearer first")[0]
    finally:
        metrics.close()


def test_no_secret_of_the_configuration_is_in_the_document(metrics: ServedMetrics) -> None:
    data = {
        "source": {"service_url": "pulsar://broker:6650", "topics": ["t"]},
        "auth": {"method": "token", "token": "secret-1"},
        "stream": {"name": "orders", "checkpoint": "checkpoint"},
        "delta": {"path": "s3://lake/orders"},
        "storage": {"access_key_id": "secret-2", "secret_access_key": "secret-3", "region": "x"},
        "metrics": {"token": "secret-4"},
    }
    state = state_of(parse_config(data), is_owner=True, upkeep=UpkeepReport())
    metrics.watch("orders", lambda: state)
    content = fetched(metrics, "/status.json")[0].decode()
    assert "s3://lake/orders_rejects" in content
    assert "pulsar://broker:6650" in content
    assert "secret" not in content


def sample(time_s: float, messages: int) -> Sample:
    return Sample(int(time_s * 1000), messages, None, 0)


def test_the_history_has_a_sample_for_each_five_seconds_and_what_held_through_a_pause() -> None:
    history = History()
    for time_s, messages in ((10, 1), (12, 2), (15, 3), (600, 9), (601, 10)):
        history.add(sample(time_s, messages))
    assert list(history.samples) == [sample(12, 2), sample(15, 3), sample(595, 3), sample(601, 10)]
    for number in range(1_000):
        history.add(sample(1_000 + 5 * number, number))
    assert len(history.samples) == 180


def test_warnings_stay_on_standard_error_beside_the_page() -> None:
    code = (
        "import logging\nfrom ledgerlake.monitor.status import Problems\nkept = [Problems(), "
        "Problems()]\nlogging.getLogger('ledgerlake.a').warning('the store is "
        "away')\nlogging.getLogger('ledgerlake').addHandler(logging.NullHandler())\nlogging.getLogger('ledgerlake.a').warning('a "
        "handler of the user has this')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr == "the store is away\n"
