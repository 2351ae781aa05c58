"""What ``warm_up`` compiles is all that a bundle needs, whatever its shape."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
from ledgerlake.decode import kernels
from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.warm_up import warm_up
from ledgerlake.decode.scan import scan
from ledgerlake.decode.split import split_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_batch, encode_entry


def compiled():
    found = {name: getattr(one, "signatures", None) for name, one in vars(kernels).items()}
    return {name: len(types) for name, types in found.items() if types is not None}


def frames(entries, messages, **fields):
    metadata = pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=messages, schema_version=b"1"
    )
    message = pb.SingleMessageMetadata(payload_size=0, event_time=2, **fields)
    raw = encode_entry(metadata, encode_batch([(message, b"x" * 100)] * messages))
    return b"".join(commands.message(0, 5, entry_id, raw) for entry_id in range(entries))


warm_up()
before = compiled()
properties = [pb.KeyValue(key="a", value="b")] * 3
for fields in ({}, {"partition_key": "k", "ordering_key": b"o", "properties": properties}, {"compacted_out": True}):
    for entries, messages in ((3, 4), (1, 1), (1, 5), (5, 1)):
        bundle = frames(entries, messages, **fields)
        scan(memoryview(bundle), len(bundle))
        list(split_bundle(bundle))
        list(decode_bundle(bundle, TopicPartition("t", 0)))
print({name: count - before[name] for name, count in compiled().items() if count != before[name]})
"""


def test_nothing_more_is_compiled_for_bundles_of_other_shapes() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == "{}"
