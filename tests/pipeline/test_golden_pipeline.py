"""A whole checkpoint with its tables, as ``tests/golden/make_pipeline.py`` wrote it, is understood
as it was.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from ledgerlake.decode.schema import MESSAGES
from ledgerlake.delay.due_times import DueSpan
from ledgerlake.errors import SetupError
from ledgerlake.inspect.delayed_counts import delayed_counts
from ledgerlake.inspect.delayed_messages import waiting
from ledgerlake.inspect.due_counts import due_counts
from ledgerlake.inspect.incomplete_messages import incomplete_messages
from ledgerlake.options.config import parse_config
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.moved_state import adopt_state
from ledgerlake.publish.outbox import Outbox
from ledgerlake.source.wakeup_files import load_wakeup_times
from ledgerlake.stored.places import Place
from ledgerlake.table.delta_table import Table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from ledgerlake.options.config import Config

TOPIC = "persistent://public/default/golden"
ARCHIVE = Path(__file__).parents[1] / "golden" / "pipeline-v1.tar.gz"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    with tarfile.open(ARCHIVE) as packed:
        packed.extractall(tmp_path, filter="data")
    return parse_config(
        {
            "source": {"service_url": "pulsar://127.0.0.1:1", "topics": [TOPIC]},
            "stream": {"name": "golden", "checkpoint": str(tmp_path / "checkpoint")},
            "delta": {
                "path": str(tmp_path / "messages"),
                "rejects_path": str(tmp_path / "rejects"),
            },
            "deliver": {"topic": f"{TOPIC}-due"},
        }
    )


def test_the_files_of_a_checkpoint_say_what_they_said(config: Config) -> None:
    checkpoint = Checkpoint(Place(config.stream.checkpoint))
    checkpoint.check_stream("golden")
    start, end = checkpoint.start(), checkpoint.log.committed_offset()
    assert start is not None
    assert end is not None
    assert (start[TOPIC].position.entry_id, end[TOPIC].position.entry_id) == (-1, 11)
    assert (
        checkpoint.log.last_planned(),
        checkpoint.log.last_committed(),
        checkpoint.log.state_version(),
    ) == (1, 1, 2)
    wakeups = load_wakeup_times(Place(f"{checkpoint.folder}/ledgerlake/wakes"))
    assert wakeups is not None
    assert set(wakeups.times_ms) == {TOPIC}


def test_what_is_due_when_is_counted(config: Config) -> None:
    (span,) = due_counts(config, 60_000)
    assert span == DueSpan(4_102_444_800_006, 60_000, 3)


def test_the_table_knows_its_batch(config: Config) -> None:
    checkpoint = Checkpoint(Place(config.stream.checkpoint))
    table = Table(Place(config.delta.path), MESSAGES)
    query = f"ledgerlake:golden:{checkpoint.log.query_id()}"
    assert table.last_writer("golden") == checkpoint.number()
    recorded = table.recorded(query)
    assert recorded is not None
    assert recorded.is_batch(checkpoint.log.record("golden", query, 1, checkpoint.number()))
    values = DeltaTable(config.delta.path).to_pyarrow_table(columns=["value"])["value"].to_pylist()
    assert sorted(values) == [b"", *(b"plain-%d" % number for number in range(5)), b"soon"]


def test_the_outbox_goes_on_from_its_count(config: Config) -> None:
    assert config.outbox_place is not None
    outbox = Outbox(config.outbox_place)
    outbox.begin(1, Checkpoint(Place(config.stream.checkpoint)).outbox())
    assert (outbox.last_sent, outbox.messages_up_to(1)) == (1, 1)


@pytest.mark.spark
def test_what_waits_in_the_state_is_there_after_a_move(config: Config, spark: SparkSession) -> None:
    with pytest.raises(
        SetupError, match=r"was moved from file:/.*/checkpoint, and the pipeline has not run since"
    ):
        incomplete_messages(spark, config)
    adopt_state(config.checkpoint_place)
    (large,) = incomplete_messages(spark, config)
    assert (large.present, large.missing, large.total_bytes) == (2, 1, 3000)
    (delayed,) = delayed_counts(spark, config)
    assert (delayed.delayed, delayed.cancels, delayed.horizon["later"]) == (3, 1, 3)
    # One of them is cancelled.
    assert sorted(row.value for row in waiting(spark, config).collect()) == [b"far-7", b"far-8"]
    assert waiting(spark, config, due_before_ms=4_102_444_800_008).count() == 1
