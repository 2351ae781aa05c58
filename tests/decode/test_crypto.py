"""Encrypted entries: opened by whoever has a key, told apart where nobody has one."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.decode.crypto import CryptoSettings
from ledgerlake.decode.large import decode_large
from ledgerlake.decode.split import split_bundle
from ledgerlake.errors import CorruptEntryError, DecryptionError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.entry import encode_entry, parse_entry
from ledgerlake.wire.message_id import Position
from tests.chunks import chunk_entries
from tests.encryption import encrypted, key_folder, private_pem
from tests.entries import SOURCE, batch, bundle, decoded, single

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@pytest.fixture
def crypto(tmp_path: Path) -> CryptoSettings:
    return CryptoSettings(key_folder(tmp_path / "keys", "ours"))


ENTRIES = [
    single(b"plain"),
    encrypted(single(b"one", partition_key="k"), "ours"),
    encrypted(batch([b"a", b"b", b"c"], pb.LZ4, index=5), "theirs", "ours"),
    encrypted(batch([b"d"], pb.ZSTD), "ours", "theirs"),
    single(b"plain"),
]


def test_whoever_has_one_of_the_keys_reads_every_message(crypto: CryptoSettings) -> None:
    messages, rejects = decoded(ENTRIES, crypto=crypto)
    assert [row["value"] for row in messages] == [
        b"plain",
        b"one",
        b"a",
        b"b",
        b"c",
        b"d",
        b"plain",
    ]
    assert [row["broker_index"] for row in messages[2:5]] == [3, 4, 5]
    assert messages[1]["key"] == "k"
    assert rejects == []


def test_without_a_key_they_are_rejects_as_they_were_stored(tmp_path: Path) -> None:
    messages, rejects = decoded(ENTRIES)
    assert [row["value"] for row in messages] == [b"plain", b"plain"]
    assert [(row["reason"], row["entry"]) for row in rejects] == [
        ("encrypted", entry) for entry in ENTRIES[1:4]
    ]
    stranger = CryptoSettings(key_folder(tmp_path / "others", "another"))
    _, rejects = decoded(ENTRIES, crypto=stranger)
    assert [(row["reason"], row["entry"]) for row in rejects] == [
        ("undecryptable", entry) for entry in ENTRIES[1:4]
    ]
    assert (
        rejects[1]["detail"] == "the entry is encrypted for theirs, ours, and no key here opens it"
    )


def test_a_key_of_the_right_name_and_the_wrong_content_opens_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    key_folder(folder)
    for content in (private_pem("another"), b"no key at all", b""):
        (folder / "ours.pem").write_bytes(content)
        _, rejects = decoded(
            [ENTRIES[1]], crypto=CryptoSettings(str(folder), failure_action="reject")
        )
        assert [row["reason"] for row in rejects] == ["undecryptable"]


def test_what_nobody_opens_can_end_the_read_or_pass_as_its_bytes(crypto: CryptoSettings) -> None:
    foreign = [encrypted(batch([b"a", b"b"]), "theirs"), single(b"plain")]
    with pytest.raises(
        DecryptionError, match="encrypted for theirs, and no key here opens it; see cryptoKeyFolder"
    ):
        decoded(foreign, crypto=replace(crypto, failure_action="fail"))
    messages, rejects = decoded(foreign, crypto=replace(crypto, failure_action="pass"))
    assert (len(messages), messages[1]["value"], rejects) == (2, b"plain", [])
    assert dict(messages[0]["properties"]) == {"ledgerlake.encrypted_for": "theirs"}
    assert messages[0]["batch_index"] == -1
    assert foreign[0].endswith(messages[0]["value"])


def keys(name: str, metadata: Mapping[str, str]) -> bytes | None:
    assert metadata == {}
    return private_pem(name) if name == "ours" else None


def test_keys_can_come_from_a_function_of_the_users() -> None:
    messages, _ = decoded(ENTRIES, crypto=CryptoSettings(key_reader=f"{__name__}:keys"))
    assert len(messages) == 7


def raising(name: str, metadata: Mapping[str, str]) -> Any:
    if name == "exits":
        sys.exit(1)
    return {"ours": private_pem("ours").decode(), "number": 7}[name]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("theirs", "the crypto_key_reader failed with KeyError"),
        ("exits", "the crypto_key_reader failed with SystemExit"),
        ("number", "the crypto_key_reader returned int and not bytes"),
    ],
)
def test_an_entry_for_which_the_users_function_fails_is_a_reject_that_says_so(
    name: str, sentence: str
) -> None:
    settings = CryptoSettings(key_reader=f"{__name__}:raising")
    entries = [encrypted(single(b"one"), name), encrypted(single(b"two"), "ours")]
    messages, rejects = decoded(entries, crypto=settings)
    assert [message["value"] for message in messages] == [b"two"]
    assert [(row["reason"], row["detail"]) for row in rejects] == [
        ("undecryptable", f"the entry is encrypted for {name}, and {sentence}")
    ]
    with pytest.raises(DecryptionError, match=sentence):
        decoded(entries, crypto=replace(settings, failure_action="fail"))


@pytest.mark.parametrize("name", ["../ours", "/etc/ours", "..", "a/b", "", "x" * 300, "ours\0"])
def test_a_key_name_never_leads_out_of_the_folder(
    crypto: CryptoSettings, tmp_path: Path, name: str
) -> None:
    inner = tmp_path / "keys" / "inner"
    inner.mkdir()
    settings = CryptoSettings(str(inner))
    _, rejects = decoded([encrypted(single(b"one"), name)], crypto=settings)
    assert [row["reason"] for row in rejects] == ["undecryptable"]


def test_bytes_that_were_changed_open_nothing(crypto: CryptoSettings) -> None:
    entry = pb.MessageMetadata
    stored = bytearray(encrypted(single(b"one"), "ours"))
    for place in range(len(stored) - 20, len(stored)):
        changed = bytearray(stored)
        changed[place] ^= 1
        messages, rejects = decoded([bytes(changed)], crypto=crypto)
        assert (messages, len(rejects)) == ([], 1), entry


def test_each_chunk_of_a_large_message_is_opened(crypto: CryptoSettings) -> None:
    chunks = [encrypted(entry, "ours") for entry in chunk_entries(b"x" * 1000, 3)]
    positions = tuple(Position(7, number) for number in range(3))
    row = decode_large(chunks, positions, SOURCE, 10_000, crypto).to_pylist()[0]
    assert row["value"] == b"x" * 1000
    with pytest.raises(CorruptEntryError) as raised:
        decode_large(chunks, positions, SOURCE, 10_000)
    assert raised.value.reason == "encrypted"
    opaque = decode_large(
        chunks, positions, SOURCE, 10_000, CryptoSettings(failure_action="pass")
    ).to_pylist()[0]
    assert len(opaque["value"]) == 1000 + 3 * 16
    assert dict(opaque["properties"])["ledgerlake.encrypted_for"] == "ours"


def with_changed_payload(entry: bytes) -> bytes:
    raw = parse_entry(entry)
    return encode_entry(
        raw.metadata, bytes([raw.payload[0] ^ 1]) + bytes(raw.payload[1:]), raw.broker
    )


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("plain", [(), (0,), (1,), (2,)], ids=str)
def test_a_large_message_passes_opened_as_a_whole_or_as_it_is_stored(
    crypto: CryptoSettings, closed: tuple[int, ...], plain: tuple[int, ...]
) -> None:
    chunks = chunk_entries(b"a" * 300 + b"b" * 300 + b"c" * 300, 3, null_value=True)
    chunks = [
        entry if number in plain else encrypted(entry, "ours")
        for number, entry in enumerate(chunks)
    ]
    stored = [
        with_changed_payload(entry) if number in closed else entry
        for number, entry in enumerate(chunks)
    ]
    positions = tuple(Position(7, number) for number in range(3))
    (row,) = decode_large(
        stored, positions, SOURCE, 10_000, replace(crypto, failure_action="pass")
    ).to_pylist()
    if set(closed) <= set(plain):
        # A changed text opens as well as any other.
        assert (row["value"], row["properties"], row["is_null"]) == (None, [], True)
        return
    assert row["value"] == b"".join(bytes(parse_entry(entry).payload) for entry in stored)
    assert dict(row["properties"])["ledgerlake.encrypted_for"] == "ours"
    assert not row["is_null"]
    with pytest.raises(CorruptEntryError, match="no key here opens it"):
        decode_large(stored, positions, SOURCE, 10_000, crypto)


def test_an_encrypted_message_waits_like_any_other() -> None:
    entry = encrypted(single(b"later", deliver_at_time=1_800_000_000_000), "ours")
    assert [kind for kind, _, _ in split_bundle(bundle([entry]))] == ["delayed"]


def with_recipients(entry: bytes, *before: pb.EncryptionKeys) -> bytes:
    """An encrypted entry with other recipients before its own."""
    raw = parse_entry(entry)
    recipients = [*before, *raw.metadata.encryption_keys]
    del raw.metadata.encryption_keys[:]
    raw.metadata.encryption_keys.extend(recipients)
    return encode_entry(raw.metadata, bytes(raw.payload), raw.broker)


def test_an_entry_is_tried_for_a_bounded_number_of_recipients(crypto: CryptoSettings) -> None:
    entry = encrypted(single(b"secret"), "ours")
    others = [pb.EncryptionKeys(key=f"k{number}", value=bytes(256)) for number in range(150)]
    for before, opens in ((50, True), (150, False)):
        messages, rejects = decoded([with_recipients(entry, *others[:before])], crypto=crypto)
        assert [row["value"] for row in messages] == [b"secret"] * opens
        assert [row["reason"] for row in rejects] == ["undecryptable"] * (not opens)


def test_a_recipient_that_an_entry_names_many_times_is_tried_once(
    crypto: CryptoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ledgerlake.decode import data_keys as module

    read, tried = module._private_key, []

    def noted(pem: bytes) -> Any:
        tried.append(pem)
        return read(pem)

    monkeypatch.setattr(module, "_private_key", noted)
    wrong = [
        pb.EncryptionKeys(key="ours", value=number.to_bytes(256, "big")) for number in range(90)
    ]
    entry = encrypted(single(b"secret"), "theirs")
    messages, rejects = decoded([with_recipients(entry, *wrong)], crypto=crypto)
    assert (messages, [row["reason"] for row in rejects]) == ([], ["undecryptable"])
    assert 0 < len(tried) < 5


def test_a_private_key_is_read_once(
    crypto: CryptoSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cryptography.hazmat.primitives import serialization

    from ledgerlake.decode import data_keys as module

    module._private_key.cache_clear()
    load = serialization.load_pem_private_key
    calls: list[bytes] = []

    def noted(pem: bytes, password: bytes | None) -> Any:
        calls.append(pem)
        return load(pem, password)

    monkeypatch.setattr(serialization, "load_pem_private_key", noted)
    decoded(
        [encrypted(single(b"x", sequence_id=number), "ours") for number in range(5)], crypto=crypto
    )
    assert len(calls) <= 1


def test_what_is_damaged_below_its_encryption_is_rejected_as_it_was_stored(
    crypto: CryptoSettings,
) -> None:
    damaged = encrypted(single(b"secret and no batch", num_messages_in_batch=3), "ours")
    _, rejects = decoded([damaged], crypto=crypto)
    assert [(row["reason"], row["entry"]) for row in rejects] == [("truncated_batch", damaged)]
