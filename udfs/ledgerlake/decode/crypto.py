"""End-to-end encryption, as in Pulsar's clients.

A producer encrypts each entry's payload, after compression, with its data key: AES-256 in GCM,
without additional data, followed by the 16-byte tag; the nonce is in ``encryption_param``. The
metadata contains the data key once for each recipient, wrapped by RSA-OAEP (SHA-1), with the name
of the recipient's key. Each chunk of a large message is encrypted as its own entry.

Keys are in ``data_keys``, which needs a large library. So it is imported when the first encrypted
entry comes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ledgerlake.errors import CorruptEntryError, DecryptionError
from ledgerlake.wire.entry import RawEntry

TAG_BYTES = 16

FailureAction = Literal["reject", "fail", "pass"]


@dataclass(frozen=True)
class CryptoSettings:
    """The place of private keys, and the treatment of entries that none of them decrypts.

    With the ``failure_action`` ``reject`` these entries become rejects, with ``fail`` the read
    ends, and with ``pass`` each becomes one message of the encrypted bytes. Without a folder or a
    function (``package.module:name``) no entry is decrypted.
    """

    key_folder: str | None = None
    key_reader: str | None = None
    failure_action: FailureAction = "reject"


NO_KEYS = CryptoSettings()


def open_entry(entry: RawEntry, settings: CryptoSettings) -> RawEntry:
    """Return the decrypted entry; the entry itself if it is not encrypted.

    Raises:
        CorruptEntryError: ``encrypted`` if no key was configured, ``undecryptable`` if none fits.
        DecryptionError: the same, if the settings say to fail.
    """
    if not entry.metadata.encryption_keys:
        return entry
    from ledgerlake.decode.data_keys import decrypted

    try:
        return decrypted(entry, settings)
    except CorruptEntryError as error:
        if settings.failure_action == "fail":
            raise DecryptionError(
                f"{error.message}; see cryptoKeyFolder and cryptoFailureAction, in a configuration "
                "file crypto_key_folder and crypto_failure_action"
            ) from None
        raise
