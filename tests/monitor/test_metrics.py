"""The metrics of queries, as Prometheus reads them."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.monitor.metrics import Metrics, MetricsListener, PipelineState
from ledgerlake.monitor.progress import Behind, Reading, lags_of
from ledgerlake.operators.stage_rows import Incomplete, Released
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.pipeline.upkeep import TableUpkeep, UpkeepReport
from ledgerlake.stored.offsets import PartitionOffset, to_json
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.table.open_table import TableSize
from ledgerlake.wire.message_id import BEFORE_ALL, Position

NAME = "persistent://public/default/t"


def text(metrics: Metrics) -> list[str]:
    registry = CollectorRegistry()
    registry.register(metrics)
    return [
        line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")
    ]


def progress(taken: PartitionOffset, latest: PartitionOffset) -> SimpleNamespace:

    source = SimpleNamespace(
        endOffset=json.dumps(to_json({NAME: taken})),
        latestOffset=json.dumps(to_json({NAME: latest})),
    )
    return SimpleNamespace(
        sources=[source],
        name="orders",
        id="7",
        inputRowsPerSecond=12.5,
        durationMs={"addBatch": 80},
    )


def at(entry_id: int, time_ms: int | None, index: int | None) -> PartitionOffset:
    return PartitionOffset(Position(7, entry_id), None, time_ms, index)


def test_lag_is_by_the_brokers_numbers_and_unknown_without_them() -> None:
    assert lags_of(progress(at(1, 1000, 10), at(5, 4000, 50))) == {NAME: Behind(40, 3000)}
    began_again = at(5, 4000, 3)
    assert lags_of(progress(at(1, 1000, 10), began_again)) == {NAME: Behind(None, 3000)}
    assert lags_of(progress(at(5, 4000, 50), at(5, 4000, 50))) == {NAME: Behind(0, 0)}
    assert lags_of(progress(PartitionOffset(BEFORE_ALL), at(5, 4000, 50))) == {
        NAME: Behind(51, None)
    }
    assert lags_of(progress(at(1, None, None), at(5, None, None))) == {NAME: Behind(None, None)}
    foreign = SimpleNamespace(endOffset='{"0": 5}', latestOffset='{"0": 5}')
    assert lags_of(SimpleNamespace(sources=[foreign])) == {}


def test_a_query_of_the_bare_source_shows_its_lag_until_it_ends() -> None:
    metrics = Metrics()
    listener = MetricsListener(metrics)
    listener.onQueryStarted(SimpleNamespace(id="7", name="orders"))
    listener.onQueryProgress(SimpleNamespace(progress=progress(at(1, 1000, 10), at(5, 4000, 50))))
    assert text(metrics) == [
        f'ledgerlake_lag_messages{{query="orders",topic_partition="{NAME}"}} 40.0',
        f'ledgerlake_lag_seconds{{query="orders",topic_partition="{NAME}"}} 3.0',
        'ledgerlake_rows_per_second{query="orders"} 12.5',
    ]
    listener.onQueryTerminated(SimpleNamespace(id="7"))
    assert text(metrics) == []


def test_a_query_that_started_before_the_metrics_is_forgotten_when_it_ends() -> None:
    metrics = Metrics()
    listener = MetricsListener(metrics)
    listener.onQueryProgress(SimpleNamespace(progress=progress(at(1, 1000, 10), at(5, 4000, 50))))
    listener.onQueryTerminated(SimpleNamespace(id="7"))
    assert text(metrics) == []


def test_a_pipeline_shows_what_its_batches_brought() -> None:
    metrics = Metrics(clock=lambda: 2.0)
    first = BatchResult(
        0,
        100,
        2,
        Counter({"no_table": 2}),
        stored_bytes=5000,
        delayed_counts={NAME: 3},
        next_due_ms={NAME: 2500},
        due_spans={NAME: [DueSpan(2_500, 1000, 4), DueSpan(90_000, 60_000, 1)]},
        incomplete={NAME: Incomplete(1, 9), f"{NAME}-other": Incomplete(3, 7)},
        released=Released(3, 1_200, 1_000),
        commit_s=0.2,
    )
    metrics.add_batch("orders", first, 10.0, 1_500)
    repeated = BatchResult(
        1,
        50,
        repeated=True,
        incomplete={NAME: Incomplete()},
        next_due_ms={NAME: None},
        released=Released(9, 1, 1),
        commit_s=100,
    )
    metrics.add_batch("orders", repeated, 10.5, 2_000)
    metrics.add_batch("orders", BatchResult(2), 11.0, 2_500)
    metrics.add_progress("orders", {NAME: Behind(20, 1500)}, 3.0)
    samples = dict(line.rsplit(" ", 1) for line in text(metrics))
    labels = f'{{query="orders",topic_partition="{NAME}"}}'
    assert samples == {
        f"ledgerlake_lag_messages{labels}": "20.0",
        f"ledgerlake_lag_seconds{labels}": "1.5",
        f"ledgerlake_lag_bytes{labels}": "1000.0",
        f"ledgerlake_delayed_messages{labels}": "3.0",
        'ledgerlake_messages_per_second{query="orders"}': "0.0",
        'ledgerlake_messages_total{query="orders"}': "100.0",
        'ledgerlake_released_messages_total{query="orders"}': "3.0",
        'ledgerlake_late_seconds_total{query="orders"}': "0.9",
        'ledgerlake_most_late_seconds{query="orders"}': "0.5",
        'ledgerlake_rejects_total{query="orders"}': "2.0",
        'ledgerlake_rejects_by_reason_total{query="orders",reason="no_table"}': "2.0",
        'ledgerlake_batches_total{query="orders"}': "3.0",
        'ledgerlake_last_batch_timestamp_seconds{query="orders"}': "2.5",
        'ledgerlake_due_messages{query="orders",within="0"}': "0.0",
        'ledgerlake_due_messages{query="orders",within="60"}': "4.0",
        **{
            f'ledgerlake_due_messages{{query="orders",within="{within}"}}': "5.0"
            for within in ("600", "3600", "21600", "86400", "604800", "2592000", "+Inf")
        },
        **{
            f'ledgerlake_commit_seconds_bucket{{le="{bound}",query="orders"}}': "1.0"
            for bound in ("0.05", "0.1")
        },
        **{
            f'ledgerlake_commit_seconds_bucket{{le="{bound}",query="orders"}}': "2.0"
            for bound in ("0.25", "0.5", "1.0", "2.5", "5.0", "10.0", "30.0", "60.0")
        },
        'ledgerlake_commit_seconds_bucket{le="+Inf",query="orders"}': "3.0",
        'ledgerlake_commit_seconds_count{query="orders"}': "3.0",
        'ledgerlake_commit_seconds_sum{query="orders"}': "100.2",
        'ledgerlake_incomplete_messages{query="orders"}': "3.0",
        'ledgerlake_kept_bytes{query="orders"}': "7.0",
    }


def test_a_result_has_the_sums_of_its_topic_partitions() -> None:
    result = BatchResult(1, incomplete={"a": Incomplete(1, 9), "b": Incomplete(2, 1)})
    assert (result.incomplete_count, result.kept_bytes) == (3, 10)


def of_pipeline(metrics: Metrics) -> list[str]:
    return [
        line
        for line in text(metrics)
        if line.startswith(("ledgerlake_is_", "ledgerlake_upkeep", "ledgerlake_table"))
    ]


def test_a_pipeline_shows_whether_it_owns_the_stream_and_what_upkeep_did() -> None:
    metrics = Metrics()
    tables = [
        TableUpkeep("messages", "lake/orders", TableSize(7, 900), 24, 3),
        TableUpkeep("rejects", "lake/rejects"),
    ]
    reports = iter([UpkeepReport(), UpkeepReport(tables, 2, 5_000)])
    metrics.watch("orders", lambda: PipelineState(True, next(reports)))
    assert of_pipeline(metrics) == [
        'ledgerlake_is_owner{query="orders"} 1.0',
        'ledgerlake_upkeep_failures_total{query="orders"} 0.0',
    ]
    assert of_pipeline(metrics) == [
        'ledgerlake_is_owner{query="orders"} 1.0',
        'ledgerlake_upkeep_failures_total{query="orders"} 2.0',
        'ledgerlake_upkeep_last_success_timestamp_seconds{query="orders"} 5.0',
        'ledgerlake_table_files{query="orders",table="messages"} 7.0',
        'ledgerlake_table_bytes{query="orders",table="messages"} 900.0',
        'ledgerlake_upkeep_merged_files_total{query="orders",table="messages"} 24.0',
        'ledgerlake_upkeep_merged_files_total{query="orders",table="rejects"} 0.0',
        'ledgerlake_upkeep_removed_files_total{query="orders",table="messages"} 3.0',
        'ledgerlake_upkeep_removed_files_total{query="orders",table="rejects"} 0.0',
    ]
    metrics.forget("orders")
    assert text(metrics) == []


def test_counters_begin_at_zero_so_that_an_alert_sees_the_first_micro_batch() -> None:
    metrics = Metrics(clock=lambda: 2.0)
    metrics.watch("orders", lambda: PipelineState(True, UpkeepReport()))
    samples = dict(line.rsplit(" ", 1) for line in text(metrics))
    assert samples['ledgerlake_rejects_total{query="orders"}'] == "0.0"
    assert samples['ledgerlake_last_batch_timestamp_seconds{query="orders"}'] == "2.0"


def test_a_clock_behind_the_brokers_makes_no_message_early() -> None:
    metrics = Metrics()
    metrics.add_batch("orders", BatchResult(0, 1, released=Released(1, 1_000, 1_000)), 1.0, 400)
    samples = dict(line.rsplit(" ", 1) for line in text(metrics))
    assert samples['ledgerlake_late_seconds_total{query="orders"}'] == "0.0"
    assert samples['ledgerlake_most_late_seconds{query="orders"}'] == "0.0"


def test_topic_partitions_that_are_gone_are_forgotten_unless_something_waits() -> None:
    metrics = Metrics()
    names = [f"{NAME}-{number}" for number in range(100)]
    for number, name in enumerate(names):
        result = BatchResult(
            number,
            1,
            delayed_counts={name: int(number == 7)},
            next_due_ms={name: 5 if number == 7 else None},
            incomplete={name: Incomplete(int(number == 9), 3)},
        )
        metrics.add_batch("orders", result, float(number), number)
        metrics.add_progress("orders", {name: Behind(0, 0)}, 1.0)
    metrics.add_progress("orders", {NAME: Behind(0, 0)}, 1.0)
    waiting = [line for line in text(metrics) if line.startswith("ledgerlake_delayed_messages")]
    assert [line.rpartition(" ")[0].partition("topic_partition=")[2] for line in waiting] == [
        f'"{names[number]}"}}' for number in (7, 9)
    ]


def test_what_a_micro_batch_reads_is_lag_until_it_ends() -> None:
    metrics = Metrics()
    span = {
        "start": {"ledger": 1, "entry": 4, "index": 9},
        "end": {"ledger": 1, "entry": 80, "index": 59},
    }
    batch = BatchCommit(
        "orders", "q", 0, 1, {NAME: span, "persistent://public/default/other": span}
    )
    readings = iter([Reading(batch, 0.0), None])
    metrics.add_progress("orders", {NAME: Behind(70, 5)}, 0.0)
    metrics.watch("orders", lambda: PipelineState(True, UpkeepReport(), reading=next(readings)))
    lags = [
        [line for line in text(metrics) if line.startswith("ledgerlake_lag_messages")]
        for _ in range(2)
    ]
    of_first = f'ledgerlake_lag_messages{{query="orders",topic_partition="{NAME}"}} 70.0'
    of_other = of_first.replace(NAME, "persistent://public/default/other").replace("70.0", "50.0")
    assert lags == [[of_first, of_other], [of_first]]


def test_the_lag_of_a_pipeline_that_has_lost_the_broker_is_not_known() -> None:
    metrics = Metrics()
    metrics.add_progress("orders", {NAME: Behind(0, 0)}, 0.0)
    owned = iter([True, False, True])
    metrics.watch("orders", lambda: PipelineState(next(owned), UpkeepReport()))
    lags = [[line for line in text(metrics) if line.startswith("ledgerlake_lag")] for _ in range(3)]
    assert [len(lines) for lines in lags] == [2, 0, 2]


def test_what_waits_since_an_earlier_run_is_shown_before_its_topic_partition_has_a_micro_batch() -> (
    None
):
    metrics = Metrics(clock=lambda: 2.0)
    metrics.add_delayed("orders", {NAME: [DueSpan(2_500, 1000, 4), DueSpan(90_000, 60_000, 1)]})
    samples = dict(line.rsplit(" ", 1) for line in text(metrics))
    labels = f'{{query="orders",topic_partition="{NAME}"}}'
    assert samples[f"ledgerlake_delayed_messages{labels}"] == "5.0"
    assert samples['ledgerlake_due_messages{query="orders",within="60"}'] == "4.0"
