"""Private keys of recipients, and the data keys of producers that they unwrap (see ``crypto``).

Rules kept here:
  - Private keys come from a folder, as ``<key name>.pem``, or from a function of the user. A key
    name is text from outside; no name leads out of the folder.
  - A limited number of unwrapped data keys is cached; producers change theirs every few hours.
  - A limited number of an entry's recipients is tried, each name once.
  - No error contains a key.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ledgerlake.errors import CorruptEntryError
from ledgerlake.outside import Unreadable, reading
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.reasons import ENCRYPTED, UNDECRYPTABLE
from ledgerlake.runtime.plugins import load

if TYPE_CHECKING:
    from ledgerlake.decode.crypto import CryptoSettings
    from ledgerlake.wire.entry import RawEntry

_KEY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_DATA_KEYS_MOST = 1000

# Only the first recipients of an entry are tried, and each name once: producers of Pulsar write it
# once, and an entry may have any number of recipients. Unwrapping a data key takes some
# milliseconds, four with a key of 4096 bits.
_RECIPIENTS_MOST = 100

# So many of them an error names.
_NAMED_MOST = 10


class _KeyReaderError(Exception):
    """The user's function has no answer."""


# Returns the PEM of the private key with this name (and the metadata that the producer gave it);
# None if there is no such key.
CryptoKeyReader = Callable[[str, Mapping[str, str]], "bytes | str | None"]


def decrypted(entry: RawEntry, settings: CryptoSettings) -> RawEntry:
    """Return the entry, which is encrypted, as it was before.

    Raises:
        CorruptEntryError: ``encrypted`` if no key was configured, ``undecryptable`` if none fits.
    """
    return _opener(settings).open(entry)


def unreadable_keys(folder: Path) -> str:
    """Return the fault of a folder of private keys as a phrase; empty if it has a key, and each can
    be read.
    """
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".pem")
        for file in files:
            if _private_key(file.read_bytes()) is None:
                return f"{file} is no RSA key"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return f"{file} is no private key, or needs a password"
    return "" if files else f"the folder {folder} has no file NAME.pem"


class _Opener:
    """The private keys and data keys of one process."""

    def __init__(self, settings: CryptoSettings) -> None:
        if settings.key_reader is not None:
            self._read_key: CryptoKeyReader | None = load(settings.key_reader)
        else:
            folder = settings.key_folder
            self._read_key = (
                None
                if folder is None
                else lambda name, _metadata: _key_of_folder(Path(folder), name)
            )
        self._data_keys: OrderedDict[bytes, AESGCM] = OrderedDict()

    def open(self, entry: RawEntry) -> RawEntry:
        metadata = pb.MessageMetadata()
        metadata.CopyFrom(entry.metadata)
        for field in ("encryption_keys", "encryption_algo", "encryption_param"):
            metadata.ClearField(field)
        return replace(entry, metadata=metadata, payload=memoryview(self._decrypt(entry)))

    def _decrypt(self, entry: RawEntry) -> bytes:
        if self._read_key is None:
            names = [str(wrapped.key) for wrapped in entry.metadata.encryption_keys[:_NAMED_MOST]]
            raise CorruptEntryError(
                f"the entry is encrypted for {', '.join(names)}, and no key is configured",
                reason=ENCRYPTED,
            )
        failure = "no key here opens it"
        recipients: dict[str, pb.EncryptionKeys] = {}
        for wrapped in entry.metadata.encryption_keys[:_RECIPIENTS_MOST]:
            recipients.setdefault(str(wrapped.key), wrapped)
        for wrapped in recipients.values():
            try:
                data_key = self._data_key(wrapped)
            except _KeyReaderError as error:
                failure = str(error)
                continue
            if data_key is None:
                continue
            try:
                with reading():
                    return data_key.decrypt(
                        entry.metadata.encryption_param, bytes(entry.payload), None
                    )
            except Unreadable:
                self._data_keys.pop(wrapped.value, None)
        raise CorruptEntryError(
            f"the entry is encrypted for {', '.join(recipients)}, and {failure}",
            reason=UNDECRYPTABLE,
        )

    def _data_key(self, wrapped: pb.EncryptionKeys) -> AESGCM | None:
        data_key = self._data_keys.get(wrapped.value)
        if data_key is None:
            data_key = self._unwrap(wrapped)
            if data_key is None:
                return None
            self._data_keys[wrapped.value] = data_key
            if len(self._data_keys) > _DATA_KEYS_MOST:
                self._data_keys.popitem(last=False)
        return data_key

    def _unwrap(self, wrapped: pb.EncryptionKeys) -> AESGCM | None:
        """Return the data key; None if no private key unwraps it.

        Raises:
            _KeyReaderError: the user's function failed.
        """
        pem = self._pem(str(wrapped.key), {entry.key: entry.value for entry in wrapped.metadata})
        if pem is None:
            return None
        try:
            with reading():
                private = _private_key(pem)
                if private is None:
                    return None
                scheme = padding.OAEP(padding.MGF1(hashes.SHA1()), hashes.SHA1(), None)
                return AESGCM(private.decrypt(wrapped.value, scheme))
        except Unreadable:
            return None

    def _pem(self, name: str, metadata: dict[str, str]) -> bytes | None:
        assert self._read_key is not None
        try:
            pem: object = self._read_key(name, metadata)
        except (
            Exception,
            SystemExit,
        ) as error:  # whatever a user's code raises; its text may have a key
            raise _KeyReaderError(
                f"the crypto_key_reader failed with {type(error).__name__}"
            ) from None
        pem = pem.encode() if isinstance(pem, str) else pem
        if pem is not None and not isinstance(pem, bytes):
            raise _KeyReaderError(
                f"the crypto_key_reader returned {type(pem).__name__} and not bytes"
            )
        return pem


@lru_cache(maxsize=100)
def _private_key(pem: bytes) -> rsa.RSAPrivateKey | None:
    """Return the RSA key in a PEM; None if the key has another type. Reading takes about 50 ms,
    because the key's numbers are checked.

    Raises:
        ValueError, TypeError, UnsupportedAlgorithm: it is not a key, or needs a password.
    """
    private = serialization.load_pem_private_key(pem, password=None)
    return private if isinstance(private, rsa.RSAPrivateKey) else None


@cache
def _opener(settings: CryptoSettings) -> _Opener:
    return _Opener(settings)


def _key_of_folder(folder: Path, name: str) -> bytes | None:
    if not _KEY_NAME.fullmatch(name):
        return None
    try:
        return (folder / f"{name}.pem").read_bytes()
    except OSError:
        return None
