"""Where a compacted topic ends for a reader (PIP-429): told by the entry behind the answer, or
found where nobody tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.client.cluster import Cluster
from ledgerlake.client.reader import EntryReader
from ledgerlake.decode.codecs import compress
from ledgerlake.decode.crypto import CryptoSettings
from ledgerlake.errors import SetupError
from ledgerlake.options.read_settings import ReadSettings
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.source import topic_end as last_entry
from ledgerlake.wire.entry import encode_batch, encode_entry
from ledgerlake.wire.last_message import LastEntry
from ledgerlake.wire.message_id import AFTER_ALL, MessageId, Position
from tests.encryption import encrypted, key_folder
from tests.entries import broker, metadata, single
from tests.peer import TOPIC, Peer

if TYPE_CHECKING:
    from pathlib import Path


def compacted_batch(slot_signs: str, codec: int = pb.NONE) -> bytes:
    """A batch as compaction leaves it: ``x`` for a message, ``-`` for a slot without one."""
    slots = [
        (pb.SingleMessageMetadata(compacted_out=sign == "-"), b"" if sign == "-" else b"v")
        for sign in slot_signs
    ]
    plain = encode_batch(slots)
    entry_metadata = metadata(
        compression=codec, uncompressed_size=len(plain), num_messages_in_batch=len(slot_signs)
    )
    return encode_entry(entry_metadata, compress(codec, plain), broker())


def encrypted_batch(count: int) -> bytes:
    entry_metadata = metadata(num_messages_in_batch=count, encryption_param=b"0" * 12)
    entry_metadata.encryption_keys.add(key="k", value=b"wrapped")
    return encode_entry(entry_metadata, b"nobody can read this", broker())


def found_by(peer: Peer, **settings: Any) -> MessageId | None:
    cluster = Cluster(ReadSettings(peer.url, give_up_after_s=2, read_compacted=True, **settings))
    reader = EntryReader(cluster, TOPIC, AFTER_ALL)
    try:
        return last_entry.last_message(reader)
    finally:
        cluster.close()


def topic(peer: Peer, last: bytes) -> None:
    """Add three entries; compaction left two. The batch of the last one is ``last``."""
    peer.add(single(b"a"), single(b"b"), compacted_batch("xxxx"))
    peer.compacted = [peer.entries[0], (peer.entries[2][0], last)]


def test_on_a_topic_whose_entries_do_not_end_the_broker_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer(unreadable_last=True) as peer:
        peer.add(single(b"a"), single(b"b"))
        read: list[None] = []

        class Endless(EntryReader):
            def next_together(self, timeout_s: float) -> Any:
                read.append(None)
                peer.unreadable_last = len(read) < 5
                return super().next_together(timeout_s) or "another entry"

        monkeypatch.setattr(last_entry, "EntryReader", Endless)
        monkeypatch.setattr(last_entry, "_ASK_AGAIN_S", 0.0)
        monkeypatch.setattr(last_entry, "_QUIET_AT_END_S", 0.0)
        cluster = Cluster(ReadSettings(peer.url, give_up_after_s=2))
        try:
            assert last_entry.last_message(EntryReader(cluster, TOPIC, AFTER_ALL)) == MessageId(
                7, 1
            )
        finally:
            cluster.close()
        assert len(read) == 5


def test_a_topic_whose_last_entry_is_never_readable_and_that_does_not_end_has_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Peer(unreadable_last=True) as peer:
        peer.add(*[single(b"before")] * 3)

        class Growing(EntryReader):
            def next_together(self, timeout_s: float) -> Any:
                assert len(peer.entries) < 100, "it reads for ever"
                peer.add(single(b"since"), first=len(peer.entries))
                return super().next_together(timeout_s)

        monkeypatch.setattr(last_entry, "EntryReader", Growing)
        monkeypatch.setattr(last_entry, "_ASK_AGAIN_S", 0.0)
        cluster = Cluster(ReadSettings(peer.url, give_up_after_s=2))
        try:
            end = last_entry.last_position(EntryReader(cluster, TOPIC, AFTER_ALL))
        finally:
            cluster.close()
    assert end is not None
    assert end >= Position(7, 2)


def test_an_older_broker_tells_the_id_and_sends_no_entry() -> None:
    with Peer() as peer:
        topic(peer, compacted_batch("-x--"))
        assert found_by(peer) == MessageId(7, 2)


@pytest.mark.parametrize("codec", [pb.NONE, pb.LZ4, pb.ZLIB, pb.ZSTD, pb.SNAPPY])
def test_the_entry_behind_the_answer_decides(codec: int) -> None:
    with Peer() as peer:
        peer.last_entry = compacted_batch("-x--", codec)
        topic(peer, peer.last_entry)
        assert found_by(peer) == MessageId(7, 2, 1)


def test_an_encrypted_entry_ends_with_its_last_slot() -> None:
    with Peer() as peer:
        peer.last_entry = encrypted_batch(5)
        topic(peer, peer.last_entry)
        assert found_by(peer) == MessageId(7, 2, 4)


def test_an_entry_that_our_key_opens_is_looked_into(tmp_path: Path) -> None:
    with Peer() as peer:
        peer.last_entry = encrypted(compacted_batch("-x--", pb.LZ4), "ours")
        topic(peer, peer.last_entry)
        assert found_by(peer, crypto=CryptoSettings(key_folder(tmp_path, "ours"))) == MessageId(
            7, 2, 1
        )
        assert found_by(peer, crypto=CryptoSettings(key_folder(tmp_path / "none"))) == MessageId(
            7, 2, 3
        )


def second_slot(last: LastEntry) -> MessageId:
    assert pb.MessageMetadata.FromString(last.metadata).num_messages_in_batch == 4
    assert last.partition == -1
    return MessageId(last.ledger_id, last.entry_id, 2)


def refuse(_: LastEntry) -> MessageId:
    raise ValueError("this is no format of mine")


def test_a_converter_of_the_users_decides_for_a_compaction_of_its_own() -> None:
    with Peer() as peer:
        peer.last_entry = compacted_batch("-x--")
        topic(peer, peer.last_entry)
        assert found_by(peer, converter=f"{__name__}:second_slot") == MessageId(7, 2, 2)


def test_a_converter_that_raises_fails_the_call_with_its_own_words() -> None:
    with Peer() as peer:
        peer.last_entry = compacted_batch("-x--")
        topic(peer, peer.last_entry)
        with pytest.raises(
            SetupError, match=r"refuse failed on the last entry .*: this is no format of mine"
        ):
            found_by(peer, converter=f"{__name__}:refuse")
        with pytest.raises(SetupError, match="nowhere:at_all cannot be imported"):
            found_by(peer, converter="nowhere:at_all")


@pytest.mark.parametrize(
    "garbage", [b"\x00", b"\xff" * 50, compacted_batch("----"), compacted_batch("x")[:-3]]
)
def test_behind_garbage_the_end_is_looked_for(garbage: bytes) -> None:
    with Peer() as peer:
        topic(peer, compacted_batch("-x--"))
        peer.last_entry = garbage
        assert found_by(peer) == MessageId(7, 2, 1)


def test_where_the_broker_cannot_tell_the_end_is_looked_for() -> None:
    with Peer(cannot_tell_last=True) as peer:
        topic(peer, compacted_batch("-x--", pb.LZ4))
        assert found_by(peer) == MessageId(7, 2, 1)


def test_the_end_is_found_also_where_the_last_entries_were_compacted_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_entry, "_QUIET_S", 0.2)
    with Peer(cannot_tell_last=True) as peer:
        peer.add(*(single(b"v") for _ in range(100)))
        peer.compacted = [peer.entries[entry_id] for entry_id in (3, 40, 57)]
        assert found_by(peer) == MessageId(7, 57)


def test_of_a_topic_where_nothing_was_kept_there_is_no_last_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(last_entry, "_QUIET_S", 0.05)
    with Peer(cannot_tell_last=True, compacted=[]) as peer:
        peer.add(single(b"v"), single(b"v"))
        assert found_by(peer) is None


def test_an_empty_compacted_topic_ends_nowhere() -> None:
    with Peer(compacted=[], last_position=Position(-1, -1)) as peer:
        assert found_by(peer) is None
