"""Object stores: how pyarrow, delta-rs and Spark are told the address and the keys of each.

    store    written                                              pyarrow            delta-rs's options
    S3       s3://bucket/path   s3a://bucket/path                 S3FileSystem       aws_...
    Google   gs://bucket/path                                     GcsFileSystem      google_...
    Azure    abfss://container@account.dfs.core.windows.net/path  AzureFileSystem    azure_...

Keys come from the environment (variables, profile, role of the machine) unless ``[storage]`` has
keys of its own. Both libraries search Google's application default credentials by themselves.
pyarrow has no place for a key of Google's, so there only the environment has one. pyarrow does not
read Azure's variable for a key, so it is read here. Azure's shared access signatures are not taken:
pyarrow puts them into the text of its errors.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pyarrow import fs

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.stored.secrets import resolve_secret

if TYPE_CHECKING:
    from collections.abc import Callable

    from obstore.store import ObjectStore

# A failed request is tried again for at least a minute. The time alone ends the tries of delta-rs
# and obstore: their own limit, ten tries, is reached in two to eight seconds.
_S3_RETRIES = fs.AwsStandardS3RetryStrategy(max_attempts=9)
_GOOGLE_RETRIES = timedelta(seconds=60)
_RETRY_TIMEOUT = timedelta(seconds=90)
_MOST_RETRIES = 1000
_LONGEST_PAUSE = timedelta(seconds=5)


@dataclass(frozen=True)
class StorageSettings:
    """How to reach a store. Empty settings are taken from the environment.

    Args:
        endpoint_url: an address that is not the store's usual one, such as ``http://minio:9000``.
        region, access_key_id, secret_access_key, session_token: for S3.
        account_key: for Azure.

    Keys are texts or references (see ``secrets``).
    """

    endpoint_url: str = ""
    region: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)
    account_key: str = field(default="", repr=False)

    def resolved(self) -> StorageSettings:
        """Return the same with each reference replaced by its secret.

        Raises:
            SetupError: a variable or file that holds a secret cannot be read.
        """
        keys = (self.access_key_id, self.secret_access_key, self.session_token, self.account_key)
        return StorageSettings(
            self.endpoint_url, self.region, *(resolve_secret(key) if key else "" for key in keys)
        )


ENVIRONMENT = StorageSettings()


@dataclass(frozen=True)
class Store:
    """One kind of object store.

    Args:
        scheme, hadoop_scheme: what its URIs begin with, and what they begin with for Spark. bucket:
        a valid first part of a URI; of Azure's, the container and the account. shape: a URI, for
        errors. keys: where its keys may come from, for errors. settings: the names of the settings
        that it takes. endpoint: its address with some settings. filesystem, delta_options,
        hadoop_settings: what pyarrow, delta-rs and Spark's connector need
            for a bucket, with resolved settings.
        connector: the Maven artifact of Spark's connector.
    """

    scheme: str
    hadoop_scheme: str
    bucket: re.Pattern[str]
    shape: str
    keys: str
    settings: tuple[str, ...]
    endpoint: Callable[[StorageSettings], str]
    filesystem: Callable[[str, StorageSettings], fs.FileSystem]
    delta_options: Callable[[str, StorageSettings], dict[str, str]]
    hadoop_settings: Callable[[str, StorageSettings], dict[str, str]]
    connector: str


# S3


def _s3_endpoint(settings: StorageSettings) -> str:
    return settings.endpoint_url or _variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")


def _s3_region(settings: StorageSettings) -> str:
    return settings.region or _variable("AWS_REGION", "AWS_DEFAULT_REGION")


def _s3_filesystem(_bucket: str, settings: StorageSettings) -> fs.FileSystem:
    arguments: dict[str, Any] = {
        "endpoint_override": _s3_endpoint(settings),
        "region": _s3_region(settings),
        "access_key": settings.access_key_id,
        "secret_key": settings.secret_access_key,
        "session_token": settings.session_token,
    }
    # A file of less than 5 MB is then one request, and a process that is killed leaves nothing.
    return _opened(
        fs.S3FileSystem, **_given(arguments), retry_strategy=_S3_RETRIES, allow_delayed_open=True
    )


def _s3_delta_options(bucket: str, settings: StorageSettings) -> dict[str, str]:
    if settings.access_key_id and not settings.session_token and _variable("AWS_SESSION_TOKEN"):
        # delta-rs would send it with the other keys.
        raise SetupError(
            "the variable AWS_SESSION_TOKEN does not belong to the keys of [storage]; unset it, or "
            "set [storage] session_token"
        )
    endpoint = _s3_endpoint(settings)
    return {
        "aws_endpoint_url": endpoint,
        # pyarrow also knows the region of a profile or of the machine.
        "aws_region": _s3_region(settings) or _s3_filesystem(bucket, settings).region,
        "aws_access_key_id": settings.access_key_id,
        "aws_secret_access_key": settings.secret_access_key,
        "aws_session_token": settings.session_token,
        # With an endpoint of its own, delta-rs would not look into profiles otherwise.
        "aws_force_credential_load": "" if settings.access_key_id else "true",
        "allow_http": _allow_http(endpoint),
        # Without it, two commits at once could both succeed.
        "aws_conditional_put": "etag",
    }


def _s3_hadoop_settings(bucket: str, settings: StorageSettings) -> dict[str, str]:
    endpoint = _s3_endpoint(settings)
    values = {
        "endpoint": endpoint,
        "endpoint.region": _s3_region(settings),
        # Other servers than AWS's seldom have a host for each bucket.
        "path.style.access": "true" if endpoint else "",
        "access.key": settings.access_key_id,
        "secret.key": settings.secret_access_key,
        "session.token": settings.session_token,
    }
    if settings.access_key_id:
        # Otherwise the connector would send a session token of the environment with them.
        kind = "Temporary" if settings.session_token else "Simple"
        values["aws.credentials.provider"] = (
            f"org.apache.hadoop.fs.s3a.{kind}AWSCredentialsProvider"
        )
    return {f"fs.s3a.bucket.{bucket}.{name}": value for name, value in values.items()}


# Google


def _google_filesystem(_bucket: str, settings: StorageSettings) -> fs.FileSystem:
    url = urlsplit(settings.endpoint_url)
    arguments = {
        "endpoint_override": url.netloc,
        "scheme": url.scheme,
        "anonymous": url.scheme == "http",
    }
    return _opened(fs.GcsFileSystem, **_given(arguments), retry_time_limit=_GOOGLE_RETRIES)


def _google_delta_options(_bucket: str, settings: StorageSettings) -> dict[str, str]:
    endpoint = settings.endpoint_url
    if _allow_http(endpoint):
        # An emulator, which knows no keys.
        key = {
            "gcs_base_url": endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
        }
        return {
            "google_service_account_key": json.dumps({**key, "private_key_id": ""}),
            "allow_http": "true",
        }
    return {"google_base_url": endpoint}


# Azure


def _azure_account(bucket: str) -> str:
    return bucket.partition("@")[2].partition(".")[0]


def _azure_key(settings: StorageSettings) -> str:
    return settings.account_key or _variable("AZURE_STORAGE_ACCOUNT_KEY")


def _azure_filesystem(bucket: str, settings: StorageSettings) -> fs.FileSystem:
    url = urlsplit(settings.endpoint_url)
    arguments = {
        "account_name": _azure_account(bucket),
        "account_key": _azure_key(settings),
        "blob_storage_authority": url.netloc,
        "dfs_storage_authority": url.netloc,
        "blob_storage_scheme": url.scheme,
        "dfs_storage_scheme": url.scheme,
    }
    return _opened(fs.AzureFileSystem, **_given(arguments))


def _azure_delta_options(bucket: str, settings: StorageSettings) -> dict[str, str]:
    account, endpoint = _azure_account(bucket), settings.endpoint_url
    return {
        "azure_storage_account_name": account,
        "azure_storage_account_key": _azure_key(settings),
        "azure_endpoint": endpoint and f"{endpoint.rstrip('/')}/{account}",
        "allow_http": _allow_http(endpoint),
    }


def _no_hadoop_settings(_bucket: str, _settings: StorageSettings) -> dict[str, str]:
    """Their connectors have not been tried; they find keys by themselves, or in ``[spark]
    settings``.
    """
    return {}


S3 = Store(
    "s3",
    "s3a",
    re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"),
    "s3://BUCKET/PATH",
    "[storage], or the variables AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ("endpoint_url", "region", "access_key_id", "secret_access_key", "session_token"),
    lambda settings: _s3_endpoint(settings) or "AWS",
    _s3_filesystem,
    _s3_delta_options,
    _s3_hadoop_settings,
    "hadoop-aws",
)
GOOGLE = Store(
    "gs",
    "gs",
    re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]"),
    "gs://BUCKET/PATH",
    "the variable GOOGLE_APPLICATION_CREDENTIALS",
    ("endpoint_url",),
    lambda settings: settings.endpoint_url or "Google Cloud Storage",
    _google_filesystem,
    _google_delta_options,
    _no_hadoop_settings,
    "hadoop-gcp",
)
AZURE = Store(
    "abfss",
    "abfss",
    re.compile(r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]@[a-z0-9]{3,24}\.dfs\.core\.windows\.net"),
    "abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PATH",
    "[storage], or the variable AZURE_STORAGE_ACCOUNT_KEY",
    ("endpoint_url", "account_key"),
    lambda settings: settings.endpoint_url or "Azure",
    _azure_filesystem,
    _azure_delta_options,
    _no_hadoop_settings,
    "hadoop-azure",
)
STORES = {store.scheme: store for store in (S3, GOOGLE, AZURE)} | {"s3a": S3}


def check_settings(settings: StorageSettings, stores: set[Store]) -> None:
    """Check that settings are complete, and that each is for one of the stores in use.

    Raises:
        UsageError: one is not.
    """
    given = {name for name, value in vars(settings).items() if value}
    if "endpoint_url" in given and not settings.endpoint_url.startswith(("http://", "https://")):
        raise UsageError(
            "[storage] endpoint_url is no address of a store; write http://HOST:PORT or "
            "https://HOST"
        )
    if "@" in settings.endpoint_url:
        raise UsageError("[storage] endpoint_url holds no user and no password")
    if ("access_key_id" in given) != ("secret_access_key" in given):
        raise UsageError("[storage] needs access_key_id and secret_access_key, or neither")
    for name in sorted(given):
        takers = [store for store in stores if name in store.settings]
        if not takers:
            schemes = " or ".join(
                f"{store.scheme}://" for store in (S3, GOOGLE, AZURE) if name in store.settings
            )
            raise UsageError(
                f"[storage] {name} is for {schemes}, and no path of this configuration is there"
            )
    if "endpoint_url" in given and len(stores) > 1:
        raise UsageError(
            "[storage] endpoint_url cannot be the address of two stores; put all paths into one"
        )


def delta_options(store: Store, bucket: str, settings: StorageSettings) -> dict[str, str]:
    """Return delta-rs's options for a bucket of a store.

    Raises:
        SetupError: a secret cannot be read.
    """
    return _given(store.delta_options(bucket, settings.resolved())) | {
        "retry_timeout": f"{_RETRY_TIMEOUT.total_seconds():.0f}s",
        "max_retries": str(_MOST_RETRIES),
        "backoff_config.max_backoff": f"{_LONGEST_PAUSE.total_seconds():.0f}s",
    }


def open_bucket(store: Store, uri: str, bucket: str, settings: StorageSettings) -> ObjectStore:
    """Return the store below a URI, for requests that pyarrow does not have.

    Raises:
        SetupError: a secret cannot be read.
    """
    # Its import takes a tenth of a second, and tasks do not need it.
    from obstore.store import from_url

    options: Any = _given(store.delta_options(bucket, settings.resolved()))
    # This is delta-rs's own.
    options.pop("aws_force_credential_load", None)
    client_options: Any = {"allow_http": options.pop("allow_http", "false")}
    opened: ObjectStore = from_url(
        uri,
        config=options,
        client_options=client_options,
        retry_config={
            "retry_timeout": _RETRY_TIMEOUT,
            "max_retries": _MOST_RETRIES,
            "backoff": {"max_backoff": _LONGEST_PAUSE},
        },
    )
    return opened


def hadoop_settings(store: Store, bucket: str, settings: StorageSettings) -> dict[str, str]:
    """Return the settings of Spark's connector for a bucket of a store.

    Raises:
        SetupError: a secret cannot be read.
    """
    return _given(store.hadoop_settings(bucket, settings.resolved()))


@lru_cache(maxsize=16)
def _opened(kind: Callable[..., fs.FileSystem], **arguments: Any) -> fs.FileSystem:
    return kind(**arguments)


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value}


def _allow_http(endpoint: str) -> str:
    return "true" if endpoint.startswith("http:") else ""


def _variable(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
