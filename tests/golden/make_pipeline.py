"""Write ``pipeline-v1.tar.gz`` anew: ``python -m tests.golden.make_pipeline [FOLDER]``.

A pipeline runs twice over a topic of an embedded broker. What then waits in its state: two of three
chunks of a large message, two delayed messages that are due in the year 2100, and a cancel of a
third. A delayed message was due between the runs, so it is in the table and went through the
outbox. The archive holds the checkpoint, both tables, and the outbox.
"""

from __future__ import annotations

import os
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

from ledgerlake.client.producer import EntryProducer
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.chunks import encode_chunks
from ledgerlake.wire.entry import encode_entry
from tests.live.pipelines import config_file, ledgerlake_process
from tests.live.runtime import Runtime, start_runtime

TOPIC = "persistent://public/default/golden"
DUE_TOPIC = "persistent://public/default/golden-due"
FAR_MS = 4_102_444_800_000
FOLDERS = ("checkpoint", "messages", "rejects")


def publish(runtime: Runtime) -> None:
    """Publish five plain messages, four delayed ones, a cancel, and the beginning of a large
    message.
    """
    producer = EntryProducer(runtime.cluster(), TOPIC, "golden")
    now_ms = int(time.time() * 1000)

    def metadata(
        number: int, deliver_at_ms: int | None = None, **properties: str
    ) -> pb.MessageMetadata:
        message_metadata = pb.MessageMetadata(
            producer_name="golden", sequence_id=number, publish_time=now_ms
        )
        message_metadata.properties.extend(
            pb.KeyValue(key=name, value=text) for name, text in properties.items()
        )
        if deliver_at_ms is not None:
            message_metadata.deliver_at_time = deliver_at_ms
        return message_metadata

    producer.send_and_wait(
        [encode_entry(metadata(number), b"plain-%d" % number) for number in range(5)]
    )
    producer.send_and_wait([encode_entry(metadata(5, now_ms + 1000), b"soon")])
    (cancelled, *_) = producer.send_and_wait(
        [
            encode_entry(metadata(number, FAR_MS + number), b"far-%d" % number)
            for number in range(6, 9)
        ]
    )
    cancel: dict[str, Any] = {"ledgerlake.cancel": f"id={cancelled.ledger_id}:{cancelled.entry_id}"}
    producer.send_and_wait([encode_entry(metadata(9, **cancel), b"")])
    chunks = encode_chunks(metadata(10), b"x" * 3000, 1000)
    producer.send_and_wait(list(chunks)[:2])
    producer.close()


def make(folder: Path) -> None:
    """Run the pipeline in ``folder``, with paths below the current one in its configuration."""
    with start_runtime(broker_metadata=True) as runtime:
        for topic in (TOPIC, DUE_TOPIC):
            runtime.admin("PUT", topic)
        data = runtime.config(Path(), TOPIC, name="golden")
        data["deliver"] = {"topic": DUE_TOPIC}
        config = config_file(folder, data)
        publish(runtime)
        for _ in range(2):
            ended = ledgerlake_process("run", config, "--once")
            assert ended.returncode == 0, ended.stderr
            time.sleep(2)


def pack(folder: Path, archive: Path) -> None:
    """Put what the pipeline wrote into one file."""

    def without_crc(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith(".crc") else member

    with tarfile.open(archive, "w:gz") as packed:
        for name in FOLDERS:
            packed.add(folder / name, name, filter=without_crc)


if __name__ == "__main__":
    archive = Path(__file__).parent / "pipeline-v1.tar.gz"
    with tempfile.TemporaryDirectory() as temporary:
        chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(temporary)
        os.chdir(chosen)
        make(chosen)
        pack(chosen, archive)
