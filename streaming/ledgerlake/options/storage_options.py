"""``[storage]``: how to reach the object store of tables, delayed messages and the checkpoint.

Without the section the usual variables, profile or instance role of the environment count.
"""

from __future__ import annotations

from dataclasses import dataclass

from ledgerlake.options.declared import option
from ledgerlake.options.kinds import SECRET, TEXT
from ledgerlake.stored.secrets import read_variable
from ledgerlake.stored.stores import StorageSettings


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """``[storage]``: a store at an address of its own, and keys that the environment does not have.
    A key is given as ``file:PATH``, as ``env:NAME``, or as it is.
    """

    endpoint_url: str = option(
        TEXT,
        "",
        "The address of a store, if it is not the usual one of AWS, Google or Azure, such as "
        "`http://minio:9000`.",
        toml="storage.endpoint_url",
        shown_default="`$AWS_ENDPOINT_URL`",
    )
    region: str = option(
        TEXT, "", "The region; for S3.", toml="storage.region", shown_default="`$AWS_REGION`"
    )
    access_key_id: str = option(
        SECRET,
        "",
        "The id of the key; for S3.",
        toml="storage.access_key_id",
        is_secret=True,
        shown_default="the environment's credentials",
    )
    secret_access_key: str = option(
        SECRET,
        "",
        "The secret of the key; for S3. A file is read again whenever the store is opened.",
        toml="storage.secret_access_key",
        is_secret=True,
        shown_default="the environment's credentials",
    )
    session_token: str = option(
        SECRET,
        "",
        "The session token of temporary credentials; for S3.",
        toml="storage.session_token",
        is_secret=True,
        shown_default="the environment's credentials",
    )
    account_key: str = option(
        SECRET,
        "",
        "The key of the account; for Azure.",
        toml="storage.account_key",
        is_secret=True,
        shown_default="`$AZURE_STORAGE_ACCOUNT_KEY`",
    )

    @property
    def settings(self) -> StorageSettings:
        """Return the same for places, with the secrets of variables."""
        return StorageSettings(**{name: read_variable(text) for name, text in vars(self).items()})
