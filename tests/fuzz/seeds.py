"""Valid entries and frames in the shapes that producers and brokers send, and entries taken apart
to be changed.

``an_entry`` repairs lengths and checksum behind a change, so that the change gets past them to
whatever reads behind.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import crc32c

from ledgerlake.decode.codecs import compress, decompress
from ledgerlake.errors import LedgerlakeError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire import commands
from ledgerlake.wire.chunks import encode_chunks, encode_marker, promise
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.message_id import Position
from tests.entries import BROKER_TIME_MS, batch, broker, metadata, single
from tests.fuzz import mutate

if TYPE_CHECKING:
    from tests.fuzz.mutate import Rng

GOLDEN = Path(__file__).parents[1] / "golden" / "fuzz"
KEYS = GOLDEN / "keys"

_U32 = struct.Struct(">I")
_CODECS = (pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY)

# What a changed entry may expand to where it is decompressed to be changed.
_MOST_PLAIN_BYTES = 1 << 20


def _slots() -> bytes:
    """A batch with all that a message of a batch can say; one slot was compacted away."""
    slots_metadata = [
        pb.SingleMessageMetadata(
            payload_size=0, partition_key="k", event_time=5, sequence_id=77, ordering_key=b"o"
        ),
        pb.SingleMessageMetadata(payload_size=0, null_value=True),
        pb.SingleMessageMetadata(
            payload_size=0, partition_key="AAH/", partition_key_b64_encoded=True
        ),
        pb.SingleMessageMetadata(payload_size=0, compacted_out=True, partition_key="gone"),
        pb.SingleMessageMetadata(
            payload_size=0, properties=[pb.KeyValue(key="ä", value="1")], null_partition_key=True
        ),
    ]
    return encode_batch(
        [
            (slot, b"" if slot.null_value or slot.compacted_out else b"value " * 5)
            for slot in slots_metadata
        ]
    )


def _of_java(**more: Any) -> pb.MessageMetadata:
    """Metadata as the Java client writes it."""
    entry_metadata = metadata(
        uncompressed_size=5, null_value=False, null_partition_key=False, **more
    )
    entry_metadata.properties.add(
        key="traceparent", value="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    )
    return entry_metadata


@cache
def plain_entries() -> tuple[bytes, ...]:
    slots = _slots()
    many = encode_batch(
        [
            (pb.SingleMessageMetadata(payload_size=0, sequence_id=number), b"%d" % number)
            for number in range(40)
        ]
    )
    entries = [
        single(b"value"),
        single(b""),
        single(b"v", partition_key="k", event_time=5, ordering_key=b"o"),
    ]
    for codec in _CODECS:
        entries.append(batch([b"a", b"", b"c" * 90], codec, index=10))
        entry_metadata = metadata(
            num_messages_in_batch=5, compression=codec, uncompressed_size=len(slots)
        )
        entries.append(encode_entry(entry_metadata, compress(codec, slots), broker(9)))
        entry_metadata = metadata(
            compression=codec, uncompressed_size=600, schema_version=b"\0" * 7 + b"\x02"
        )
        entries.append(encode_entry(entry_metadata, compress(codec, b"large " * 100), broker(3)))
    # As the Go client writes batches, and the C++ client single messages.
    go = metadata(num_messages_in_batch=40, highest_sequence_id=40, uncompressed_size=len(many))
    entries += [encode_entry(go, many, broker(60)), encode_entry(_of_java(), b"value", broker(5))]
    entries += [
        encode_entry(_of_java(replicated_from="west", replicate_to=["east"]), b"value", broker(5)),
        encode_entry(
            metadata(txnid_most_bits=0, txnid_least_bits=7, num_messages_in_batch=5),
            slots,
            broker(5),
        ),
        encode_entry(
            metadata(compacted_batch_indexes=[0, 4], num_messages_in_batch=5), slots, broker(5)
        ),
        encode_entry(metadata(), b"no broker metadata"),
        encode_entry(metadata(null_value=True), b"", pb.BrokerEntryMetadata(index=7)),
        single(b"", marker_type=21),
        _without_checksum(single(b"no checksum")),
    ]
    return tuple(entries)


def _without_checksum(entry: bytes) -> bytes:
    parts = take_apart(entry)
    assert parts is not None
    return replace(parts, has_checksum=False).put_together()


@cache
def large_entries() -> tuple[bytes, ...]:
    """Chunks of two producers, one of them encrypting nothing and promising a marker, and that
    marker.
    """
    entry_metadata = metadata(compression=pb.LZ4, uncompressed_size=900)
    packed = compress(pb.LZ4, bytes(range(256)) * 3 + b"x" * 132)
    promised = metadata(
        producer_name="q", properties=[promise()], deliver_at_time=1_800_000_000_000
    )
    chunks = [
        *encode_chunks(entry_metadata, packed, 200),
        *encode_chunks(promised, b"plain chunk " * 20, 100),
    ]
    marker = encode_marker(promised, 9, [Position(7, number) for number in range(4, 7)])
    return tuple(_stored(entry, number) for number, entry in enumerate([*chunks, marker]))


def _stored(entry: bytes, index: int) -> bytes:
    broker_metadata = broker(index).SerializeToString()
    return b"\x0e\x02" + _U32.pack(len(broker_metadata)) + broker_metadata + entry


@cache
def delayed_entries() -> tuple[bytes, ...]:
    times_ms = [BROKER_TIME_MS + 60_000, BROKER_TIME_MS - 5, 1, 9 * 10**15]
    return tuple(
        single(b"later", index=number, deliver_at_time=time_ms)
        for number, time_ms in enumerate(times_ms)
    )


@cache
def encrypted_entries() -> tuple[bytes, ...]:
    """Entries for the keys in ``KEYS``, stored since encryption is never twice the same."""
    return tuple(bytes.fromhex(path.read_text()) for path in sorted(KEYS.glob("*.hex")))


@cache
def all_entries() -> tuple[bytes, ...]:
    return (*plain_entries(), *large_entries(), *delayed_entries(), *encrypted_entries())


@dataclass(frozen=True)
class Parts:
    """An entry taken apart; ``payload`` is as it is stored."""

    broker: bytes | None
    has_checksum: bool
    metadata: bytes
    payload: bytes

    def put_together(self) -> bytes:
        body = _U32.pack(len(self.metadata)) + self.metadata + self.payload
        head = (
            b"" if self.broker is None else b"\x0e\x02" + _U32.pack(len(self.broker)) + self.broker
        )
        if self.has_checksum:
            head += b"\x0e\x01" + _U32.pack(crc32c.crc32c(body))
        return head + body


def take_apart(entry: bytes) -> Parts | None:
    """None if it is no entry. The checksum is not looked at."""
    broker_metadata = None
    if entry[:2] == b"\x0e\x02" and len(entry) >= 6:
        end = 6 + int.from_bytes(entry[2:6], "big")
        broker_metadata, entry = entry[6:end], entry[end:]
    has_checksum = entry[:2] == b"\x0e\x01"
    body = entry[6:] if has_checksum else entry
    if len(body) < 4 or (size := int.from_bytes(body[:4], "big")) > len(body) - 4:
        return None
    return Parts(broker_metadata, has_checksum, body[4 : 4 + size], body[4 + size :])


def an_entry(rng: Rng, seed_entries: tuple[bytes, ...] | None = None) -> bytes:
    """An entry, most often with something changed in it."""
    entries = seed_entries or all_entries()
    entry = rng.choice(entries)
    kind = rng.random()
    parts = take_apart(entry)
    if kind < 0.1 or parts is None:
        return entry
    if kind < 0.25:
        broken = mutate.some_bytes(rng, entry, entries)
        parts = take_apart(broken)
        return parts.put_together() if parts is not None and rng.random() < 0.7 else broken
    if kind < 0.3:
        other = take_apart(rng.choice(entries))
        parts = replace(parts, payload=other.payload) if other is not None else parts
    elif kind < 0.35:
        parts = replace(parts, has_checksum=not parts.has_checksum)
    if rng.random() < 0.25:
        broker_metadata = (
            parts.broker if parts.broker is not None else broker(3).SerializeToString()
        )
        parts = replace(
            parts, broker=mutate.message(rng, broker_metadata) if rng.random() < 0.9 else None
        )
    if rng.random() < 0.6:
        parts = replace(parts, metadata=mutate.message(rng, parts.metadata))
    if rng.random() < 0.4:
        parts = _with_changed_payload(rng, parts)
    return parts.put_together()


def _with_changed_payload(rng: Rng, parts: Parts) -> Parts:
    """Below the compression too, if that can be undone."""
    if rng.random() < 0.3:
        return replace(parts, payload=mutate.some_bytes(rng, parts.payload))
    try:
        entry_metadata = pb.MessageMetadata.FromString(parts.metadata)
        size = min(entry_metadata.uncompressed_size, _MOST_PLAIN_BYTES)
        plain = bytes(
            decompress(
                entry_metadata.compression, memoryview(parts.payload), size, _MOST_PLAIN_BYTES
            )
        )
    except (LedgerlakeError, Exception):
        return replace(parts, payload=mutate.some_bytes(rng, parts.payload))
    plain = (
        a_batch(rng, plain)
        if entry_metadata.HasField("num_messages_in_batch")
        else mutate.some_bytes(rng, plain)
    )
    if rng.random() < 0.8:
        entry_metadata.uncompressed_size = len(plain)
    return replace(
        parts,
        metadata=entry_metadata.SerializePartialToString(),
        payload=compress(entry_metadata.compression, plain),
    )


def a_batch(rng: Rng, plain: bytes) -> bytes:
    """A batch's plain payload with slots changed."""
    slots = []
    place = 0
    while place + 4 <= len(plain):
        end = place + 4 + int.from_bytes(plain[place : place + 4], "big")
        single_metadata = plain[place + 4 : end]
        try:
            size = pb.SingleMessageMetadata.FromString(single_metadata).payload_size
        except Exception:
            break
        slots.append([single_metadata, plain[end : end + max(size, 0)]])
        place = end + max(size, 0)
    if not slots or rng.random() < 0.2:
        return mutate.some_bytes(rng, plain)
    for _ in range(rng.choice([1, 1, 3])):
        slot = rng.choice(slots)
        kind = rng.randrange(5)
        if kind < 2:
            slot[0] = mutate.message(rng, slot[0])
        elif kind == 2:
            slot[1] = mutate.some_bytes(rng, slot[1])
        elif kind == 3 and len(slots) > 1:
            slots.remove(slot)
        else:
            slots.append(list(slot))
    return b"".join(_U32.pack(len(slot[0])) + slot[0] + slot[1] for slot in slots)


def a_bundle(rng: Rng, seed_entries: tuple[bytes, ...] | None = None) -> bytes:
    """Frames with entries, each changed or not; now and then the frames themselves are."""
    first = rng.choice([0, 0, 0, 5, 2**31 - 1, 2**32 - 2, 2**62, 2**63 - 4])
    ledger_id = rng.choice([7, 7, 7, 0, 2**63 - 1])
    frames = [
        commands.message(1, ledger_id, first + number, an_entry(rng, seed_entries))
        for number in range(rng.choice([1, 2, 3]))
    ]
    data = b"".join(frames)
    return mutate.some_bytes(rng, data) if rng.random() < 0.03 else data
