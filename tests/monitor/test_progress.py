"""The progress of a running pipeline on a terminal and elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from ledgerlake.delay.due_times import DueSpan
from ledgerlake.monitor import progress_screen
from ledgerlake.monitor.live_screen import live_screen, sparkline
from ledgerlake.monitor.progress import Behind, Reading, progress_line
from ledgerlake.monitor.progress_screen import ProgressScreen
from ledgerlake.operators.stage_rows import Incomplete
from ledgerlake.pipeline.commit import BatchResult
from ledgerlake.stored.offsets import PartitionOffset, to_json
from ledgerlake.table.batch_commit import BatchCommit
from ledgerlake.wire.message_id import Position
from tests.waiting import wait_until

_HOUR_MS = 3_600_000


def query(topic_partitions: int = 2) -> Any:
    """A query that has read each topic partition up to an index, and the last one to its end."""
    names = [
        f"persistent://public/default/orders-partition-{number}"
        for number in range(topic_partitions)
    ]
    latest = {name: PartitionOffset(Position(1, 900), None, 2 * _HOUR_MS, 5_000) for name in names}
    taken = {
        name: PartitionOffset(Position(1, number), None, 2 * _HOUR_MS - 1_500, 4_000 + number)
        for number, name in enumerate(names[:-1])
    }
    source = SimpleNamespace(
        endOffset=json.dumps(to_json(taken | {names[-1]: latest[names[-1]]})),
        latestOffset=json.dumps(to_json(latest)),
    )
    return SimpleNamespace(lastProgress=SimpleNamespace(sources=[source]))


def screen_after_a_batch(out: io.StringIO | None = None, **options: Any) -> ProgressScreen:
    screen = ProgressScreen(out or io.StringIO(), name="orders", **options)
    name = "persistent://public/default/orders-partition-0"
    result = BatchResult(
        17,
        1_200,
        3,
        Counter(no_table=2, checksum=1),
        delayed_counts={name: 40},
        next_due_ms={name: int(time.time() * 1000) + 90_500},
        incomplete={name: Incomplete(2, 7_000_000)},
        commit_s=0.25,
    )
    screen.add(result)
    return screen


def shown(
    screen: ProgressScreen, query: Any, height: int = 40, width: int = 140, **options: Any
) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height)
    console.print(live_screen(screen.progress(query), width, height, **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_what_waits_since_an_earlier_run_is_shown_until_its_topic_partition_has_a_micro_batch() -> (
    None
):
    name = "persistent://public/default/orders-partition-0"
    screen = screen_after_a_batch()
    before = {
        name: [DueSpan(5_000, 1000, 7)],
        "other": [DueSpan(5_000, 1000, 2), DueSpan(90_000, 60_000, 3)],
    }
    screen.add_delayed(before)
    assert screen.totals.delayed_counts == {name: 40, "other": 5}


def test_the_live_screen_has_rate_lag_what_waits_rejects_and_commits() -> None:
    lines = shown(screen_after_a_batch(), query())
    assert [line.split(maxsplit=1)[0] for line in lines[:7]] == [
        "Ledgerlake",
        "messages",
        "rate",
        "lag",
        "delayed",
        "rejects",
        "large",
    ]
    assert [line[12:] for line in lines[:2]] == [
        "orders",
        "1,200, up to 02:00:00 UTC by the broker's clock",
    ]
    assert [line[12:] for line in lines[3:7]] == [
        "1,000 messages, at most 1.5 s",
        "40 messages, the next is due in 1.5 min, unless cancelled or replaced",
        "3: no_table 2, checksum 1",
        "2 incomplete messages, 7.0 MB kept",
    ]
    assert lines[8].split() == ["topic", "partition", "lag", "lag", "in", "time", "delayed"]
    assert lines[9].split() == ["public/default/orders", "0", "1,000", "1.5", "s", "40", "▇" * 60]
    assert lines[10].split() == ["public/default/orders", "1", "0", "0", "ms", "0"]
    assert lines[13].split()[1:] == ["UTC", "#17", "1,200", "3", "250", "ms"]


def test_messages_that_a_running_micro_batch_reads_are_lag_until_it_ends() -> None:
    name = "persistent://public/default/orders-partition-1"
    span = {
        "start": {"ledger": 1, "entry": 900, "index": 5_000},
        "end": {"ledger": 1, "entry": 990, "index": 5_700},
    }
    old = {"start": None, "end": {"ledger": 1, "entry": 2, "index": 30}}
    batch = BatchCommit(
        "s", "q", 1, 1, {name: span, "persistent://public/default/orders-partition-0": old}
    )
    screen = screen_after_a_batch()
    screen._reading = lambda: Reading(batch, time.monotonic())
    assert shown(screen, query())[3][12:].startswith("1,700 messages")
    nothing_yet = SimpleNamespace(lastProgress=None)
    assert shown(screen, nothing_yet)[3][12:].startswith("731 messages")


def test_while_the_broker_is_down_the_lag_is_not_known_and_since_when_is_said() -> None:
    screen = screen_after_a_batch()
    owned = iter([False, False, False, True])
    screen._is_owner = lambda: next(owned)
    lost_ms = screen.progress(query()).lost_ms
    assert lost_ms is not None
    since = time.strftime(
        "no connection to the broker since %H:%M:%S UTC", time.gmtime(lost_ms / 1000)
    )
    lines = shown(screen, query())
    assert lines[3][12:] == f"not known, {since}"
    assert lines[10].split()[2:4] == ["?", "?"]
    progress = screen.progress(query())
    assert f"lag orders-p0:? orders-p1:?  rejects 3  delayed 40  {since}" in progress_line(progress)
    assert json.loads(progress.as_json())["lag_unknown_since_ms"] == lost_ms
    assert screen.progress(query()).lost_ms is None


@pytest.mark.parametrize(("width", "height"), [(80, 24), (60, 24), (200, 50)])
def test_the_live_screen_is_no_higher_and_no_wider_than_the_terminal(
    width: int, height: int
) -> None:
    screen = screen_after_a_batch()
    for _ in range(20):
        screen.add(BatchResult(18, 1, 1, Counter({f"reason-{number}": 1 for number in range(50)})))
    lines = shown(screen, query(topic_partitions=500), height=height, width=width)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert any(f"{500 - (height - 17)} more" in line for line in lines)


def test_topic_partitions_keep_their_order_if_all_are_shown_else_those_with_the_most_lag_are() -> (
    None
):
    few = shown(screen_after_a_batch(), query(topic_partitions=12))
    assert [line.split()[:3] for line in few[9:13]] == [
        ["public/default/orders", str(number), f"{1_000 - number:,}"] for number in range(4)
    ]
    assert few[19].split()[1] == "10"
    many = shown(screen_after_a_batch(), query(topic_partitions=13), height=17 + 12)
    assert "1 more" in many[21]
    assert not any(line.startswith("public/default/orders 12") for line in many)


def test_of_a_long_name_the_end_is_shown() -> None:
    name = f"persistent://public/default/{'long-' * 40}orders-partition-399"
    latest = json.dumps(to_json({name: PartitionOffset(Position(1, 900), None, _HOUR_MS, 5_000)}))
    source = SimpleNamespace(endOffset="{}", latestOffset=latest)
    for ascii_only, mark in ((False, "…"), (True, "..")):
        lines = shown(
            screen_after_a_batch(),
            SimpleNamespace(lastProgress=SimpleNamespace(sources=[source])),
            width=80,
            ascii_only=ascii_only,
        )
        assert lines[9].startswith(mark)
        assert "-orders 399 " in lines[9]


def test_columns_keep_their_places_while_numbers_change() -> None:
    screen = screen_after_a_batch()
    before = shown(screen, query())
    for number in range(5):
        screen.add(BatchResult(number, 1_234_567_890, 1_000_000, Counter(), commit_s=3_000.0))
    after = shown(screen, query())
    for line, title in ((8, "lag in time"), (8, "delayed"), (12, "took")):
        assert after[line].index(title) == before[line].index(title)


def test_a_topic_is_shown_by_its_name_alone_whatever_characters_it_has() -> None:
    name = "persistent://public/default/[bold]x[/red]\x1b[2J"
    latest = json.dumps(to_json({name: PartitionOffset(Position(1, 900), None, _HOUR_MS, 5_000)}))
    source = SimpleNamespace(endOffset="{}", latestOffset=latest)
    lines = shown(
        screen_after_a_batch(), SimpleNamespace(lastProgress=SimpleNamespace(sources=[source]))
    )
    assert "public/default/[bold]x[/red]\\x1b[2J" in lines[9]


def test_before_the_first_micro_batch_the_live_screen_has_nothing_to_show() -> None:
    screen = ProgressScreen(io.StringIO(), name="orders")
    lines = shown(screen, SimpleNamespace(lastProgress=None))
    assert [line[12:32].strip() for line in lines[:4]] == [
        "orders",
        "0",
        "0 messages/s",
        "not known",
    ]


def test_a_terminal_without_unicode_gets_letters() -> None:
    assert "\n".join(shown(screen_after_a_batch(), query(), ascii_only=True)).isascii()


@pytest.mark.parametrize(
    ("values", "line"), [([], ""), ([0.0, 0.0], "▁▁"), ([0, 50, 100], "▁▅█"), ([7], "█")], ids=str
)
def test_a_sparkline_is_relative_to_the_greatest_value(values: list[float], line: str) -> None:
    assert sparkline(values) == line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_the_screen_is_live_and_one_line_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress_screen, "_LIVE_S", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    screen = screen_after_a_batch(out)
    screen.start(query())
    wait_until(lambda: out.getvalue().count("no_table 2, checksum 1") > 2)
    screen.stop()
    assert out.getvalue().endswith("1,200 messages and 3 rejects in 1 batch\n")


_PROGRAM = """
import subprocess, sys, threading, types
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.monitor import progress_screen
from ledgerlake.monitor.progress_screen import ProgressScreen
from ledgerlake.monitor.shared_terminal import shared_terminal

progress_screen._LIVE_S = 0.05
with shared_terminal() as terminal:
    screens = threading.Semaphore(0)
    screen = ProgressScreen(name="orders", terminal=terminal)
    progress = screen.progress
    screen.progress = lambda query: (screens.release(), progress(query))[1]
    screen.start(types.SimpleNamespace(lastProgress=None))
    for _ in range(3):
        for _ in range(5):
            screens.acquire()
        subprocess.run(["sh", "-c", "echo of another process >&2; echo >&2"], check=True)
        print("of this process", file=sys.stderr)
    for _ in range(5):
        screens.acquire()
    screen.stop()
print("afterwards", file=sys.stderr)
"""


def lines_of_terminal(output: str) -> list[str]:
    """What a terminal shows in the end that prints text and obeys what the screen uses."""
    lines, row, column = [""], 0, 0
    for code, argument, kind, char in re.findall(
        r"(\x1b\[([0-9;?]*)([A-Za-z]))|(.)", output, re.DOTALL
    ):
        if code and kind == "A":
            row = max(row - int(argument or 1), 0)
        elif code and kind == "K":
            lines[row] = ""
        elif char == "\r":
            column = 0
        elif char == "\n":
            row += 1
            lines += [""] * (row - len(lines) + 1)
        elif char:
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def test_a_carriage_return_of_another_process_begins_no_line_of_its_own() -> None:
    leader, terminal = pty.openpty()
    writes = r"printf 'said\r20 messages\n\r\n' >&2"
    program = f"""
import subprocess
from ledgerlake.monitor.shared_terminal import shared_terminal

with shared_terminal():
    subprocess.run(["sh", "-c", {writes!r}], check=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", program], stderr=terminal, env=environment, check=True, timeout=60
    )
    os.close(terminal)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    assert shown == "said\\r20 messages\r\n\r\n"


def test_what_other_processes_write_stays_above_the_live_screen_and_leaves_it_whole() -> None:
    leader, terminal = pty.openpty()
    output: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):
            while content := os.read(leader, 65536):
                output.append(content)

    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(
        [sys.executable, "-c", _PROGRAM], stderr=terminal, env=environment, check=True, timeout=60
    )
    os.close(terminal)
    reader.join()
    os.close(leader)
    assert lines_of_terminal(b"".join(output).decode()) == [
        *["of another process", "of this process"] * 3,
        "0 messages and 0 rejects in 0 batches",
        "afterwards",
    ]


@pytest.mark.parametrize(
    ("other", "shown"),
    [("b/c/pays", "orders:4 pays:7"), ("b/c/orders", "a/b/orders:4 b/c/orders:7")],
)
def test_the_lag_in_a_line_has_the_names_of_the_topics(other: str, shown: str) -> None:
    progress = screen_after_a_batch().progress(query())
    lags = {f"persistent://{other}": Behind(7, 0), "persistent://a/b/orders": Behind(4, 0)}
    assert f"  lag {shown}  rejects" in progress_line(replace(progress, lags=lags))


def test_elsewhere_there_are_lines_of_text_or_of_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress_screen, "_LINES_S", 0.01)
    for out, as_json in ((io.StringIO(), False), (io.StringIO(), True), (Terminal(), True)):
        screen = screen_after_a_batch(out, as_json=as_json)
        screen.start(query())
        wait_until(lambda out=out: out.getvalue().count("\n") > 2)  # type: ignore[misc]
        screen.stop()
        lines = out.getvalue().splitlines()
        if not as_json:
            assert lines[1].endswith(
                "broker time 02:00:00  lag orders-p0:1,000 orders-p1:0  rejects 3  delayed 40"
            )
            assert lines[-1] == "1,200 messages and 3 rejects in 1 batch"
            continue
        line = json.loads(lines[-1])
        assert (line["stream"], line["messages"], line["rejects"], line["batches"]) == (
            "orders",
            1_200,
            3,
            1,
        )
        assert list(line["lag_messages"].values()) == [1_000, 0]
        assert (line["broker_time_ms"], line["delayed"], line["incomplete_messages"]) == (
            2 * _HOUR_MS,
            40,
            2,
        )
        assert line["rejects_by_reason"] == {"no_table": 2, "checksum": 1}
