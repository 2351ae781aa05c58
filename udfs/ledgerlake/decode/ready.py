"""Compiled code made ready before there is work for it: compiled where it never was, else loaded from where numba keeps it."""

from __future__ import annotations

from ledgerlake.decode.messages import TopicPartition, decode_bundle
from ledgerlake.decode.scan import scan
from ledgerlake.decode.split import split_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_batch, encode_entry


def make_ready() -> None:
    """Take a message with all that has a kernel through every one of them."""
    entry = pb.MessageMetadata(producer_name="p", sequence_id=0, publish_time=0, num_messages_in_batch=1)
    message = pb.SingleMessageMetadata(payload_size=0, partition_key="k", properties=[pb.KeyValue(key="a", value="b")])
    frame = commands.message(0, 0, 0, encode_entry(entry, encode_batch([(message, b"value")])))
    scan(memoryview(frame), len(frame))
    list(split_bundle(frame))
    list(decode_bundle(frame, TopicPartition("t", -1)))
