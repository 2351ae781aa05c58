"""The warm-up of the kernels before the first data: numba compiles them, or loads them from its
cache.
"""

from __future__ import annotations

from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.scan import scan
from ledgerlake.decode.split import split_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_batch, encode_entry


def warm_up() -> None:
    """Run every kernel once, on messages that need all of them.

    There are two entries, because a column of a matrix with one row is contiguous, for which numba
    compiles another version.
    """
    entry = pb.MessageMetadata(
        producer_name="p", sequence_id=0, publish_time=0, num_messages_in_batch=1
    )
    message = pb.SingleMessageMetadata(
        payload_size=0, partition_key="k", properties=[pb.KeyValue(key="a", value="b")] * 2
    )
    raw = encode_entry(entry, encode_batch([(message, b"value")]))
    frames = b"".join(commands.message(0, 0, entry_id, raw) for entry_id in range(2))
    scan(memoryview(frames), len(frames))
    list(split_bundle(frames))
    list(decode_bundle(frames, TopicPartition("t", -1)))
