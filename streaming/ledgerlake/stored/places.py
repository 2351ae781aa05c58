"""Places of files: one URI, and what pyarrow, delta-rs and Spark call it.

    written                                    pyarrow              delta-rs              Spark (Hadoop)
    lake/orders   file:///lake/orders          LocalFileSystem      the path              file: and the absolute path
    s3://bucket/orders   s3a://bucket/orders   S3FileSystem         s3://bucket/orders    s3a://bucket/orders

Credentials are those of the environment (variables, profile, instance role) unless the place has
settings of its own. The settings hold secrets by reference if the user wrote references, and are
resolved whenever a file system or a table is opened, so a renewed secret is seen (see ``secrets``).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from pyarrow import fs

from ledgerlake.errors import UsageError
from ledgerlake.stored.secrets import resolve_secret

# Without the slash it is a folder with a colon in its name.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)")
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")

_S3_SCHEMES = ("s3", "s3a")
_KNOWN = "a local path, file:, s3:// or s3a://"

# Spark redacts a value with this word in it.
_SECRET_PREFIX = "secret:"

# How often a request to a store is tried: with the pauses between, about a minute.
_S3_ATTEMPTS = 9
_RETRY_TIMEOUT = "90s"


_MOST_CHARACTERS = 200

# What the libraries' errors have in common, the most telling first.
_STORE_ERRORS = (
    (re.compile(r"NoSuchBucket|NO_SUCH_BUCKET"), "the bucket {bucket} does not exist at {endpoint}; make it first"),
    (
        re.compile(
            r"InvalidAccessKeyId|INVALID_ACCESS_KEY_ID|SignatureDoesNotMatch|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|EXPIRED_TOKEN"
            r"|AccessDenied|ACCESS_DENIED|403 Forbidden|401 Unauthorized"
        ),
        "{endpoint} refuses the credentials for the bucket {bucket}; check [storage], or the variables AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, and what they may do",
    ),
    (
        re.compile(r"NETWORK_CONNECTION|error sending request|tcp connect|dns error"),
        "{endpoint} cannot be reached; check [storage] endpoint_url, or the variable AWS_ENDPOINT_URL",
    ),
    (
        re.compile(r"instance metadata|CredentialsNotLoaded|no providers in chain|169\.254\.169\.254", re.IGNORECASE),
        "there are no credentials for the bucket {bucket}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or [storage]",
    ),
)


@dataclass(frozen=True)
class StorageSettings:
    """How to reach a store. What is empty is taken from the environment.

    Args:
        endpoint_url: the address of a store that is not AWS's own, such as ``http://minio:9000``.
        access_key_id, secret_access_key, session_token: texts or references (see ``secrets``).
    """

    endpoint_url: str = ""
    region: str = ""
    access_key_id: str = field(default="", repr=False)
    secret_access_key: str = field(default="", repr=False)
    session_token: str = field(default="", repr=False)

    def resolved(self) -> StorageSettings:
        """Return the same with each reference replaced by its secret, and the endpoint and the
        region of the environment where it has none.

        Raises:
            SetupError: a variable or file that holds a secret cannot be read.
        """
        return StorageSettings(
            self.endpoint_url or _variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
            self.region or _variable("AWS_REGION", "AWS_DEFAULT_REGION"),
            resolve_secret(self.access_key_id),
            resolve_secret(self.secret_access_key),
            resolve_secret(self.session_token),
        )


ENVIRONMENT = StorageSettings()


@dataclass(frozen=True)
class Place:
    """A folder or file by its URI: a local path as it was written, or ``s3://bucket/key``."""

    uri: str
    settings: StorageSettings = ENVIRONMENT

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Place:
        return replace(self, uri=f"{self.uri.rstrip('/')}/{name}")

    @property
    def is_local(self) -> bool:
        """Return whether it is on this machine's own file system."""
        return not self.uri.startswith("s3://")

    @property
    def root(self) -> str:
        """Return the path inside the file system."""
        return self.uri if self.is_local else self.uri.removeprefix("s3://")

    @property
    def hadoop_uri(self) -> str:
        """Return what Spark calls it. A local path stays a path, so that Spark names it as before
        in a checkpoint.
        """
        return self.uri if self.is_local else f"s3a://{self.root}"

    def filesystem(self) -> fs.FileSystem:
        """Return the file system in which ``root`` is a path.

        Raises:
            SetupError: a secret cannot be read.
        """
        return fs.LocalFileSystem() if self.is_local else _s3(self.settings.resolved())

    def make(self) -> None:
        """Make the folder if it is missing; in a store there are no folders.

        Raises:
            OSError: it cannot be made.
        """
        if self.is_local:
            self.filesystem().create_dir(self.root, recursive=True)

    def reason(self, error: Exception) -> str:
        """Return what went wrong at this place, and what to look at."""
        text = str(error)
        if self.is_local and os.path.isfile(self.root):
            return "it is a file, and not a folder"
        if not self.is_local:
            endpoint = self.settings.endpoint_url or _variable("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") or "AWS"
            bucket = self.root.partition("/")[0]
            for pattern, sentence in _STORE_ERRORS:
                if pattern.search(text):
                    return sentence.format(endpoint=endpoint, bucket=bucket)
        lines = text.strip().splitlines() or [type(error).__name__]
        return lines[0][:_MOST_CHARACTERS]

    def delta_options(self) -> dict[str, str] | None:
        """Return delta-rs's storage options.

        Raises:
            SetupError: a secret cannot be read.
        """
        if self.is_local:
            return None
        settings = self.settings.resolved()
        options = {
            "aws_endpoint_url": settings.endpoint_url,
            "aws_region": settings.region or "us-east-1",
            "aws_access_key_id": settings.access_key_id,
            "aws_secret_access_key": settings.secret_access_key,
            "aws_session_token": settings.session_token,
            "allow_http": "true" if settings.endpoint_url.startswith("http:") else "",
            # Without it, two commits at once could both succeed.
            "aws_conditional_put": "etag",
            "retry_timeout": _RETRY_TIMEOUT,
        }
        return {name: value for name, value in options.items() if value}


def parse_place(text: str, where: str, settings: StorageSettings = ENVIRONMENT) -> Place:
    """Return the place that a user wrote.

    Args:
        where: the name of the option, for the error.

    Raises:
        UsageError: the scheme is not known, or the URI has no bucket.
    """
    matched = _SCHEME.match(text)
    if matched is None:
        return Place(text, settings)
    scheme = matched[1].lower()
    if scheme == "file":
        return Place(_local_path(text, where), settings)
    if scheme not in _S3_SCHEMES:
        raise UsageError(f"{where} cannot be '{text}': {scheme}: is not supported; write {_KNOWN}")
    bucket, _, key = text[len(matched[0]) :].removeprefix("//").partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{where} cannot be '{text}'; write s3://BUCKET/PATH")
    if not key.strip("/"):
        raise UsageError(f"{where} cannot be a whole bucket; write s3://{bucket}/PATH")
    return Place(f"s3://{bucket}/{key.rstrip('/')}", settings)


def to_text(place: Place) -> str:
    """Return a place as the text of an option, which Spark does not show if it has keys."""
    if place.is_local or place.settings == ENVIRONMENT:
        return place.uri
    return _SECRET_PREFIX + json.dumps({"uri": place.uri, "settings": asdict(place.settings)})


def from_text(text: str) -> Place:
    """Return the place of a text that ``to_text`` made."""
    if not text.startswith(_SECRET_PREFIX):
        return Place(text)
    fields = json.loads(text.removeprefix(_SECRET_PREFIX))
    return Place(fields["uri"], StorageSettings(**fields["settings"]))


def _local_path(text: str, where: str) -> str:
    split = urlsplit(text)
    if split.netloc not in ("", "localhost") or not split.path.startswith("/"):
        raise UsageError(f"{where} cannot be '{text}'; write file:///PATH")
    return unquote(split.path)


@lru_cache(maxsize=8)
def _s3(settings: StorageSettings) -> fs.FileSystem:
    arguments: dict[str, Any] = {
        "endpoint_override": settings.endpoint_url,
        "region": settings.region,
        "access_key": settings.access_key_id,
        "secret_key": settings.secret_access_key,
        "session_token": settings.session_token,
    }
    return fs.S3FileSystem(
        **{name: value for name, value in arguments.items() if value},
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=_S3_ATTEMPTS),
    )


def _variable(*names: str) -> str:
    return next((os.environ[name] for name in names if os.environ.get(name)), "")
