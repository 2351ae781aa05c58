"""Chunks of large messages for tests, entry by entry, so that their order, doubles and gaps can be
chosen.
"""

from __future__ import annotations

import time
from typing import Any

from ledgerlake.decode.codecs import compress
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry


def chunk_entries(
    payload: bytes,
    count: int,
    uuid: str = "p-1",
    producer_name: str = "p",
    codec: int = pb.NONE,
    **fields: Any,
) -> list[bytes]:
    """A message in ``count`` chunks of about the same size, as a producer sends them."""
    packed = compress(codec, payload)
    size = -(-len(packed) // count)
    publish_time = int(time.time() * 1000)
    parts = [packed[size * number : size * (number + 1)] for number in range(count)]
    common_fields: dict[str, Any] = {
        "producer_name": producer_name,
        "sequence_id": 1,
        "publish_time": publish_time,
        "compression": codec,
        "uncompressed_size": len(payload),
        "uuid": uuid,
        "num_chunks_from_msg": count,
        "total_chunk_msg_size": len(packed),
    }
    return [
        encode_entry(pb.MessageMetadata(**common_fields | {"chunk_id": number} | fields), part)
        for number, part in enumerate(parts)
    ]
