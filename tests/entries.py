"""Building bundles of entries for tests, as a broker would send them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ledgerlake.decode.codecs import compress
from ledgerlake.decode.messages import Decoded, TopicPartition, decode_bundle
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.entry import encode_batch, encode_entry

if TYPE_CHECKING:
    from collections.abc import Sequence

SOURCE = TopicPartition("persistent://public/default/t", 3)
BROKER_TIME_MS = 1_700_000_000_000


def metadata(**fields: Any) -> pb.MessageMetadata:
    defaults: dict[str, Any] = {
        "producer_name": "p",
        "sequence_id": 1,
        "publish_time": 1_700_000_000_500,
    }
    return pb.MessageMetadata(**defaults | fields)


def broker(index: int = 0) -> pb.BrokerEntryMetadata:
    return pb.BrokerEntryMetadata(broker_timestamp=BROKER_TIME_MS + index, index=index)


def single(payload: bytes, index: int = 0, **fields: Any) -> bytes:
    """One unbatched entry with broker metadata; ``index`` is the broker's."""
    return encode_entry(metadata(**fields), payload, broker(index))


def batch(payloads: Sequence[bytes], codec: int = pb.NONE, index: int = 0, **fields: Any) -> bytes:
    """One batched entry; ``index`` is the broker's, of the last message."""
    plain = encode_batch(
        [(pb.SingleMessageMetadata(payload_size=0), payload) for payload in payloads]
    )
    entry_metadata = metadata(
        **{
            "compression": codec,
            "uncompressed_size": len(plain),
            "num_messages_in_batch": len(payloads),
        }
        | fields
    )
    return encode_entry(entry_metadata, compress(codec, plain), broker(index))


def bundle(entries: Sequence[bytes], ledger_id: int = 7) -> bytes:
    """Consecutive MESSAGE frames, entry ids from 0."""
    return b"".join(
        commands.message(1, ledger_id, number, entry) for number, entry in enumerate(entries)
    )


def decoded(
    entries: Sequence[bytes], **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Message rows and reject rows of some entries."""
    parts: list[Decoded] = list(decode_bundle(bundle(entries), SOURCE, **options))
    messages = [row for part in parts for row in part.messages.to_pylist()]
    rejects = [row for part in parts for row in part.rejects.to_pylist()]
    return messages, rejects
