"""Due messages on a topic too, each once: read back by pulsar-client alone."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import pulsar
import pytest

from ledgerlake.api import run
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.client.producer import EntryProducer, NumberedEntry, NumberedProducer
from ledgerlake.client.reader import EntryReader
from ledgerlake.errors import LedgerlakeError
from ledgerlake.options.config import parse_config
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.publish.outbox import Outbox
from ledgerlake.publish.republisher import Republisher, _Known, _Sender
from ledgerlake.publish.routing import java_hash
from ledgerlake.source.read_until import next_until
from ledgerlake.source.topic_end import last_position
from ledgerlake.stored.places import Place
from ledgerlake.verify.verify import verify
from ledgerlake.wire.entry import encode_entry
from ledgerlake.wire.message_id import BEFORE_ALL
from tests.live.pipelines import (
    config_file,
    ledgerlake,
    ledgerlake_process,
    now_ms,
    publish_delayed,
    run_and_verify,
    small_buckets,
    wait_for_rows,
)
from tests.live.runtime import commits, start_runtime, wait_for_commits
from tests.publish.outboxes import filled
from tests.waiting import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

    from tests.live.runtime import Runtime

pytestmark = [pytest.mark.live, pytest.mark.spark]


def read_all(runtime: Runtime, topic: str) -> list[Any]:

    messages = []
    for partition in runtime.client().get_topic_partitions(topic):
        reader = runtime.client().create_reader(partition, pulsar.MessageId.earliest)
        while reader.has_message_available():
            messages.append(reader.read_next(10_000))
        reader.close()
    return messages


def read_entries(runtime: Runtime, topic: str) -> list[bytes]:
    """What the broker stores, chunk by chunk."""
    cluster = runtime.cluster()
    reader = EntryReader(cluster, topic, BEFORE_ALL)
    end = last_position(reader, BEFORE_ALL) or BEFORE_ALL
    entries = []
    while (received := next_until(reader, end)) is not None:
        entries.append(bytes(received.entry))
    reader.close()
    cluster.close()
    return entries


def test_each_output_gets_each_message_once_also_when_one_failed_for_a_while(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    source = runtime.topic(partitions=2)
    target = f"persistent://public/later-{os.getpid()}/due"
    data = small_buckets(runtime, tmp_path, source)
    data["deliver"] = {"topic": target}
    pipeline = run(spark, parse_config(data))
    try:
        publish_delayed(
            runtime, source, [(b"first %d" % number, now_ms() + 3000) for number in range(200)]
        )
        wait_for_rows(tmp_path, 200)
        assert (
            len(list((tmp_path / "checkpoint" / "ledgerlake" / "outbox").glob("*.parquet"))) > 0
        ), "nowhere to send it"
        runtime.deduplicating("later")
        publish_delayed(
            runtime, source, [(b"second %d" % number, now_ms() + 3000) for number in range(200)]
        )
        wait_for_rows(tmp_path, 400)
        wait_until(lambda: len(read_all(runtime, target)) >= 400)
    finally:
        pipeline.stop()
        pipeline.close()
    values = [message.data() for message in read_all(runtime, target)]
    assert sorted(values) == sorted(
        b"%s %d" % (part, number) for part in (b"first", b"second") for number in range(200)
    )
    verdict = verify(parse_config(data))
    assert verdict.clean, verdict.sentence()
    assert (verdict.messages, verdict.not_due) == (400, 0)


def test_a_message_keeps_what_it_has_and_says_where_it_comes_from(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    source, target = runtime.topic(), runtime.topic(partitions=3)
    data = small_buckets(runtime, tmp_path, source)
    data["deliver"] = {"topic": target}
    producer = runtime.client().create_producer(
        source, chunking_enabled=True, batching_enabled=False
    )
    due_ms = now_ms() + 100
    large = bytes(6 * 1024 * 1024)
    sent = {}
    for number in range(10):
        content = large if number == 0 else b"%d" % number
        message_id = producer.send(
            content,
            properties={"own": "yes"},
            partition_key=f"key-{number}",
            ordering_key="order",
            event_timestamp=1_700_000_000_123 + number,
            deliver_at=due_ms + number,
        )
        sent[f"key-{number}"] = (content, message_id)
    producer.send(b"at once", partition_key="key-0")
    time.sleep(1)
    verdict = run_and_verify(spark, data)
    assert verdict.clean, verdict.sentence()
    messages = read_all(runtime, target)
    assert sorted(delivered.partition_key() for delivered in messages) == sorted(sent)
    for message in messages:
        content, message_id = sent[message.partition_key()]
        number = int(message.partition_key().removeprefix("key-"))
        assert message.data() == content
        assert (message.ordering_key(), message.event_timestamp()) == (
            "order",
            1_700_000_000_123 + number,
        )
        properties = message.properties()
        stored_ms = int(properties.pop("ledgerlake.broker_timestamp"))
        assert due_ms - 5000 < stored_ms <= now_ms()
        assert properties == {
            "own": "yes",
            "ledgerlake.topic": source,
            "ledgerlake.message_id": f"{message_id.ledger_id()}:{message_id.entry_id()}",
            "ledgerlake.deliver_at": str(due_ms + number),
        }
        assert message.message_id().partition() == java_hash(message.partition_key()) % 3


def test_an_output_that_joins_at_the_end_gets_what_is_published_from_then_on(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    source, target = runtime.topic(), runtime.topic()
    data = small_buckets(runtime, tmp_path, source)
    due_ms = now_ms() + 45_000
    publish_delayed(runtime, source, [(b"before", due_ms)])
    assert run_and_verify(spark, data).not_due == 1
    data["deliver"] = {"topic": target, "starting": "latest"}
    assert run_and_verify(spark, data).not_due == 1
    publish_delayed(runtime, source, [(b"after", due_ms)])
    assert run_and_verify(spark, data).not_due == 2
    time.sleep(max(0, due_ms + 500 - now_ms()) / 1000)
    verdict = run_and_verify(spark, data)
    assert (verdict.clean, verdict.messages) == (True, 2), verdict.sentence()
    assert [message.data() for message in read_all(runtime, target)] == [b"after"]


def test_a_message_that_the_target_does_not_take_has_a_stand_in_there_and_holds_up_no_other(
    runtime: Runtime, spark: SparkSession, tmp_path: Path
) -> None:
    source, target = runtime.topic(), runtime.deduplicating().topic()
    data = small_buckets(runtime, tmp_path, source)
    data["deliver"] = {"topic": target}
    due_ms = now_ms() + 100
    publish_too_large(runtime, source, due_ms)
    publish_delayed(runtime, source, [(b"before", due_ms + 1)])
    publish_too_large(runtime, source, due_ms + 2)
    publish_delayed(runtime, source, [(b"after", due_ms + 3)])
    time.sleep(1)
    verdict = run_and_verify(spark, data)
    assert (verdict.clean, verdict.messages) == (True, 4), verdict.sentence()
    messages = read_all(runtime, target)
    assert [delivered.data() for delivered in messages] == [b"", b"before", b"", b"after"]
    for stand_in in (messages[0], messages[2]):
        properties = stand_in.properties()
        assert (properties["ledgerlake.too_large"], "own" in properties) == ("true", False)
        assert properties["ledgerlake.topic"] == source


def publish_too_large(runtime: Runtime, topic: str, due_ms: int) -> None:
    """Publish a message with an ordering key of four megabytes, which is published as base64."""
    cluster = runtime.cluster()
    producer = EntryProducer(cluster, topic)
    metadata = pb.MessageMetadata(
        producer_name=producer.name,
        sequence_id=0,
        publish_time=now_ms(),
        ordering_key=b"\xff" * 4_200_000,
        deliver_at_time=due_ms,
        properties=[pb.KeyValue(key="own", value="yes")],
    )
    producer.send_and_wait([encode_entry(metadata, b"too large")])
    producer.close()
    cluster.close()


@pytest.mark.parametrize("large", [0, 1])
def test_a_large_message_is_whole_on_a_topic_that_is_unloaded_amid_its_chunks(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    target = runtime.deduplicating().topic()
    value, sent = random.Random(1).randbytes(14 * 2**20), itertools.count(1)
    send = NumberedProducer._send

    def unloads(self: NumberedProducer, entry: NumberedEntry) -> None:
        if entry.is_chunk and next(sent) == 3:
            wait_until(lambda: len(read_entries(runtime, target)) >= large + 2)
            runtime.admin("PUT", target, "/unload")
        send(self, entry)

    monkeypatch.setattr(NumberedProducer, "_send", unloads)
    ended: list[LedgerlakeError] = []
    outbox = filled(tmp_path, 3, others={large: value})
    republisher = Republisher(
        outbox, ClientSettings(runtime.service_url), target, "s", lambda: True, ended.append
    )
    republisher.start()
    try:
        republisher.drain(60.0)
    finally:
        republisher.stop()
    assert next(sent) > 4, "the chunks were sent again"
    expected = [value if number == large else b"%d" % number for number in range(3)]
    assert [message.data() for message in read_all(runtime, target)] == expected


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("deduplicates", [True, False])
def test_a_target_that_is_suspended_amid_many_messages_gets_all_of_them_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deduplicates: bool
) -> None:
    count = 20_000
    with start_runtime() as runtime:
        target = (runtime.deduplicating() if deduplicates else runtime).topic()
        assert runtime.broker is not None
        process = runtime.broker.start().pid
        outbox = filled(tmp_path, count)
        suspended = threading.Event()
        answered = _Sender._answered
        answers = itertools.count()

        def suspend(*arguments: Any) -> None:
            answered(*arguments)
            if next(answers) == 3000:
                os.kill(process, signal.SIGSTOP)
                suspended.set()

        monkeypatch.setattr(_Sender, "_answered", suspend)
        republisher = Republisher(
            outbox,
            ClientSettings(runtime.service_url),
            target,
            "s",
            lambda: True,
            lambda _error: None,
        )
        republisher.start()
        try:
            republisher.notify()
            assert suspended.wait(60)
            time.sleep(40)
            os.kill(process, signal.SIGCONT)
            republisher.drain(240)
        finally:
            os.kill(process, signal.SIGCONT)
            republisher.stop()
        values = [message.data() for message in read_all(runtime, target)]
        expected = [b"%d" % number for number in range(count)]
        if deduplicates:
            assert values == expected
        # Only messages that were not confirmed are sent again.
        assert list(dict.fromkeys(values)) == expected
        assert len(values) <= count + 500


@pytest.mark.slow
@pytest.mark.long
def test_each_message_is_on_the_topic_once_after_kills(tmp_path: Path) -> None:
    kills = 10
    seed = int(os.environ.get("LEDGERLAKE_SEED", "0")) or random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    with start_runtime(broker_metadata=True) as runtime:
        source, target = runtime.topic(partitions=2), runtime.deduplicating().topic()
        data = small_buckets(runtime, tmp_path, source)
        data["deliver"] = {"topic": target}
        config = config_file(tmp_path, data)
        checkpoint = tmp_path / "checkpoint"
        for kill in range(kills):
            # Due from the start of this run to some time after its end, so that there is always
            # something to commit.
            due_ms = now_ms() + 8000
            numbers = range(kill * 1500, (kill + 1) * 1500)
            publish_delayed(
                runtime,
                source,
                [(b"%d" % number, due_ms + place * 20) for place, number in enumerate(numbers)],
            )
            log = tmp_path / f"run-{kill}.log"
            with open(log, "wb") as errors:
                process = subprocess.Popen(
                    [sys.executable, "-m", "ledgerlake.cli", "run", config], stderr=errors
                )
            try:
                wait_for_commits(checkpoint, commits(checkpoint) + 1, process)
                time.sleep(rng.uniform(0, 6))
                assert process.poll() is None, log.read_text()
            finally:
                process.send_signal(signal.SIGKILL)
                process.wait()
        time.sleep(max(0, due_ms + 31_000 - now_ms()) / 1000)
        last = ledgerlake_process("run", config, "--once")
        assert last.returncode == 0, last.stderr
        verified = ledgerlake("verify", config, "--json")
        assert verified.returncode == 0, verified.stdout
        values = [message.data() for message in read_all(runtime, target)]
        print(
            f"{len(values)} messages on the topic, {len(set(values))} of them different, after "
            f"{kills} kills"
        )
        assert sorted(values) == sorted(b"%d" % number for number in range(kills * 1500))


@pytest.mark.slow
@pytest.mark.long
def test_a_micro_batch_that_was_sent_before_the_broker_forgot_its_producer_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgets = {
        "brokerDeduplicationEnabled": "true",
        "brokerDeduplicationProducerInactivityTimeoutMinutes": "1",
    }
    with start_runtime(forgets, keeps_everything=True) as runtime:
        target = runtime.topic(partitions=1)
        outbox = filled(tmp_path, 500)

        def killed(_batch: Any) -> None:
            raise ConnectionError("killed before it was recorded")

        monkeypatch.setattr(outbox, "sent", killed)
        settings = ClientSettings(runtime.service_url)
        republisher = Republisher(outbox, settings, target, "s", lambda: True, lambda _error: None)
        republisher.start()
        wait_until(lambda: len(read_all(runtime, target)) == 500)
        republisher.stop()
        time.sleep(110)
        reopened_outbox = Outbox(Place(str(tmp_path)))
        reopened_outbox.begin(0, outbox.name)
        probe = _Sender(
            settings, target, republisher._name, reopened_outbox, _Known(), threading.Event()
        )
        with closing(probe):
            (batch,) = reopened_outbox.ready()
            probe.route(batch, *reopened_outbox.begin_sending(batch, probe.would_begin()))
            assert probe._producer("t", f"{target}-partition-0").stored == -1, (
                "the broker still knows it"
            )
        second_republisher = Republisher(
            reopened_outbox, settings, target, "s", lambda: True, lambda _error: None
        )
        second_republisher.start()
        second_republisher.drain(60)
        second_republisher.stop()
        assert [message.data() for message in read_all(runtime, target)] == [
            b"%d" % number for number in range(500)
        ]
