"""Entries as an encrypting producer makes them, and keys for it."""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING

import pulsar
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ledgerlake.wire.entry import encode_entry, parse_entry

if TYPE_CHECKING:
    from pathlib import Path

DATA_KEY, NONCE = os.urandom(32), os.urandom(12)


@cache
def private_key(name: str) -> rsa.RSAPrivateKey:
    """One for each name and run."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def private_pem(name: str) -> bytes:
    return private_key(name).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def public_pem(name: str) -> bytes:
    return (
        private_key(name)
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def key_folder(folder: Path, *names: str) -> str:
    """A folder with the private keys of these names."""
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.pem").write_bytes(private_pem(name))
    return str(folder)


def encrypted(entry: bytes, *names: str) -> bytes:
    """A stored entry, encrypted for some recipients."""
    raw = parse_entry(entry)
    metadata = raw.metadata
    metadata.encryption_param = NONCE
    scheme = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
    for name in names:
        wrapped = private_key(name.rpartition("/")[2]).public_key().encrypt(DATA_KEY, scheme)
        metadata.encryption_keys.add(key=name, value=wrapped)
    return encode_entry(
        metadata, AESGCM(DATA_KEY).encrypt(NONCE, bytes(raw.payload), None), raw.broker
    )


def crypto_key_reader(folder: Path, name: str) -> pulsar.CryptoKeyReader:
    """pulsar-client's, with a key of this name made if it is new."""
    public, private = folder / f"{name}.public", folder / f"{name}.pem"
    public.write_bytes(public_pem(name))
    private.write_bytes(private_pem(name))
    return pulsar.CryptoKeyReader(str(public), str(private))
