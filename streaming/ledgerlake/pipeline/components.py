"""Creates the components of a pipeline from its configuration. Nothing is opened, and nothing
outside this process is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.decode import schema
from ledgerlake.operators.results import TaskSettings
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.start import Start
from ledgerlake.pipeline.wakeups import Wakeups
from ledgerlake.publish.outbox import Outbox
from ledgerlake.table.record_table import RecordTable
from ledgerlake.table.spark_table import open_table

if TYPE_CHECKING:
    from ledgerlake.options.config import Config
    from ledgerlake.table.delta_table import Table


@dataclass(frozen=True)
class Components:
    """The components of a pipeline; there is an outbox only if due messages are published, and
    ``records`` only of a table of records.
    """

    cluster: Cluster
    checkpoint: Checkpoint
    cursors: CursorKeeper
    outbox: Outbox | None
    sink: DeltaSink
    start: Start
    wakeups: Wakeups
    task_settings: TaskSettings
    records: RecordSchemas | None


def make_components(config: Config) -> Components:
    """Return the components of the pipeline that a configuration describes.

    Raises:
        TableError: a table cannot be written with ``[delta] writer``.
    """
    cluster = Cluster(config.source.client)
    checkpoint = Checkpoint(config.checkpoint_place)
    cursors = CursorKeeper(cluster, config.subscription, checkpoint)
    outbox = Outbox(config.outbox_place) if config.outbox_place else None
    staging, writer = checkpoint.folder / "ledgerlake" / "staging", config.delta.writer
    messages: Table
    if config.delta.shape == "record":
        messages = RecordTable(config.messages_place)
        records = RecordSchemas(cluster, messages)
    else:
        messages = open_table(config.messages_place, schema.MESSAGES, writer, staging / "messages")
        records = None
    rejects = open_table(config.rejects_place, schema.REJECTS, writer, staging / "rejects")
    sink = DeltaSink(messages, rejects, outbox)
    return Components(
        cluster,
        checkpoint,
        cursors,
        outbox,
        sink,
        Start(config, cluster, checkpoint, cursors, sink.tables),
        Wakeups(checkpoint),
        TaskSettings(
            messages.folder,
            rejects.folder,
            config.chunks.limits,
            config.delay_options,
            config.source,
            config.outbox_place,
            config.delta.on_mismatch == "stop",
        ),
        records,
    )
