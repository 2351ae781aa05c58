"""Creates the components of a pipeline from its configuration. Nothing is opened, and nothing
outside this process is changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.client.cluster import Cluster
from ledgerlake.operators.results import TaskSettings
from ledgerlake.pipeline.checkpoint import Checkpoint
from ledgerlake.pipeline.commit import DeltaSink
from ledgerlake.pipeline.cursors import CursorKeeper
from ledgerlake.pipeline.record_schemas import RecordSchemas
from ledgerlake.pipeline.start import Start
from ledgerlake.pipeline.tables import Tables
from ledgerlake.pipeline.wakeups import Wakeups
from ledgerlake.publish.outbox import Outbox

if TYPE_CHECKING:
    from ledgerlake.options.config import Config


@dataclass(frozen=True)
class Components:
    """The components of a pipeline; there is an outbox only if due messages are published."""

    cluster: Cluster
    checkpoint: Checkpoint
    cursors: CursorKeeper
    outbox: Outbox | None
    tables: Tables
    sink: DeltaSink
    start: Start
    wakeups: Wakeups
    task_settings: TaskSettings
    schemas: RecordSchemas


def make_components(config: Config) -> Components:
    """Return the components of the pipeline that a configuration describes.

    Raises:
        TableError: a table cannot be written with ``[delta] writer``.
    """
    cluster = Cluster(config.source.client)
    checkpoint = Checkpoint(config.checkpoint_place)
    cursors = CursorKeeper(cluster, config.subscription, checkpoint)
    outbox = Outbox(config.outbox_place) if config.outbox_place else None
    tables = Tables(config, checkpoint.folder / "ledgerlake" / "staging")
    return Components(
        cluster,
        checkpoint,
        cursors,
        outbox,
        tables,
        DeltaSink(tables, outbox),
        Start(config, cluster, checkpoint, cursors, tables),
        Wakeups(checkpoint, config.chunks.limits.expire_after_ms),
        TaskSettings(
            config.chunks.limits,
            config.pipeline_delay,
            config.source,
            tables.for_tasks,
            tables.rejects.folder,
            config.outbox_place,
            config.delta.on_mismatch == "stop",
        ),
        RecordSchemas(cluster, tables),
    )
