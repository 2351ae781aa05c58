"""Places of files: one URI, and what pyarrow, delta-rs and Spark call it.

    written                                    pyarrow              delta-rs              Spark (Hadoop)
    /lake/orders  file:///lake/orders          LocalFileSystem      the path              file: and the absolute path
    s3://bucket/orders   s3a://bucket/orders   S3FileSystem         s3://bucket/orders    s3a://bucket/orders
    gs://bucket/orders                         GcsFileSystem        the same              the same
    abfss://container@account.../orders        AzureFileSystem      the same              the same

Credentials come from the environment (variables, profile, instance role) unless the place has
settings of its own. The settings hold secrets by reference if the user wrote references, and are
resolved whenever a file system or a table is opened, so a renewed secret is seen (see ``secrets``).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import uuid
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies

from pyarrow import fs

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.stored.local_paths import expand_home
from ledgerlake.stored.secrets import said
from ledgerlake.stored.stores import (
    ENVIRONMENT,
    STORES,
    StorageSettings,
    Store,
    delta_options,
    hadoop_settings,
    open_bucket,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Without the slash it is a folder with a colon in its name.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)")
# The libraries encode other characters differently, so the log and the files would have two keys.
_PATH = re.compile(r"[A-Za-z0-9._=+-]+(/[A-Za-z0-9._=+-]+)*/?")
# delta-rs makes a URL of a local path. There it takes these for other characters, or for none.
_NOT_OF_TABLES = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]|^\\\x00-\x1f\x7f]")
_BRACES = re.compile(r"\{(\w*)\}")
_KNOWN = "a local path, file:, s3://, s3a://, gs:// or abfss://"

# Keys before the name of a host, and the text behind a question mark.
_MAYBE_SECRET = re.compile(r"(?<=//)[^/@]*:[^/@]*(?=@)|(?<=\?).*", re.DOTALL)

# Spark redacts a value with this word in it.
_SECRET_PREFIX = "secret:"

_MOST_CHARACTERS = 200

# The arrow before a cause, which delta-rs may colour, and the end of the colour.
_CAUSE, _PLAIN = "\u21b3", "\x1b[0m"

_UNREACHABLE = (
    "{endpoint} cannot be reached; check the network, and [storage] endpoint_url if it is set there"
)
_CONNECT_S = 5.0

# What the libraries' errors have in common, the most telling first.
_STORE_ERRORS = (
    (
        re.compile(r"NoSuchBucket|NO_SUCH_BUCKET|ContainerNotFound"),
        "the bucket {bucket} does not exist at {endpoint}; make it first",
    ),
    (
        # The last places that the libraries look at are the services that give a machine its role.
        re.compile(
            r"instance metadata|CredentialsNotLoaded|no providers in chain|no credentials "
            r"found|IMDS|169\.254\.169\.254"
            r"|computeMetadata|metadata\.google|metadata/identity|Error performing token request",
            re.IGNORECASE,
        ),
        "there are no credentials for the bucket {bucket}; set {keys}",
    ),
    (
        re.compile(
            r"InvalidAccessKeyId|INVALID_ACCESS_KEY_ID|SignatureDoesNotMatch|SIGNATURE_DOES_NOT_MATCH|ExpiredToken|EXPIRED_TOKEN"
            r"|AccessDenied|ACCESS_DENIED|AuthorizationFailure|AuthenticationFailed|PERMISSION_DENIED|UNAUTHENTICATED"
            r"|403 Forbidden|401 Unauthorized|lacked the necessary privileges"
        ),
        "{endpoint} refuses the credentials for the bucket {bucket}; check {keys}, and what they "
        "may do",
    ),
    (
        re.compile(r"incorrectly configured region|PermanentRedirect|AuthorizationHeaderMalformed"),
        "the bucket {bucket} is in another region; set [storage] region, or the variable "
        "AWS_REGION",
    ),
    (
        re.compile(
            r"NETWORK_CONNECTION|error sending request|tcp connect|dns error|Could not connect to "
            r"server"
        ),
        _UNREACHABLE,
    ),
    (
        re.compile(r"<html|<!doctype html", re.IGNORECASE),
        "{endpoint} answers, but not as an object store; check [storage] endpoint_url",
    ),
)


@dataclass(frozen=True)
class Place:
    """A folder or file by its URI: an absolute local path, or ``s3://bucket/path``."""

    uri: str
    settings: StorageSettings = ENVIRONMENT

    def __str__(self) -> str:
        return self.uri

    def __truediv__(self, name: str) -> Place:
        return replace(self, uri=f"{self.uri.rstrip('/')}/{name}")

    @property
    def store(self) -> Store | None:
        """Return the object store that it is in; None for this machine's own file system."""
        return STORES.get(self.uri.partition("://")[0])

    @property
    def is_local(self) -> bool:
        """Return whether it is on this machine's own file system."""
        return self.store is None

    @property
    def root(self) -> str:
        """Return the path inside the file system."""
        if self.store is None:
            return self.uri
        return f"{self._container}/{self._below_bucket}"

    @property
    def hadoop_uri(self) -> str:
        """Return what Spark calls it."""
        if self.store is None:
            return self.uri
        return f"{self.store.hadoop_scheme}://{self._bucket}/{self._below_bucket}"

    def filesystem(self) -> fs.FileSystem:
        """Return the file system in which ``root`` is a path.

        Raises:
            SetupError: a secret cannot be read.
        """
        if self.store is None:
            return fs.LocalFileSystem()
        return self.store.filesystem(self._bucket, self.settings.resolved())

    def create_file(self, content: bytes) -> bool:
        """Create the file with its content in one step; return False if it exists already.

        Raises:
            SetupError: a secret cannot be read.
            OSError: it cannot be created; a store may have done it all the same.
        """
        from obstore.exceptions import AlreadyExistsError

        try:
            with self._object_store() as (put, _, name):
                put(name, content, mode="create")
        except AlreadyExistsError:
            return False
        return True

    def check_exists(self) -> None:
        """Check that the file exists, with the library and the keys of ``create_file``.

        Raises:
            SetupError: a secret cannot be read.
            FileNotFoundError: it does not exist.
            OSError: that cannot be told.
        """
        with self._object_store() as (_, head, name):
            head(name)

    @contextlib.contextmanager
    def _object_store(self) -> Iterator[tuple[Callable[..., Any], Callable[..., Any], str]]:
        """Yield requests of ``obstore`` to the folder of this file, put and head, and the file's
        name.

        Raises:
            OSError: in place of the library's errors but one, that a file exists.
        """
        # The import takes a tenth of a second, and tasks do not need it.
        import obstore
        from obstore.exceptions import AlreadyExistsError, BaseError
        from obstore.store import LocalStore

        folder, _, name = self.uri.rpartition("/")
        try:
            store = (
                LocalStore(folder)
                if self.store is None
                else open_bucket(self.store, folder, self._bucket, self.settings)
            )
            yield partial(obstore.put, store), partial(obstore.head, store), name
        except AlreadyExistsError:
            raise
        except BaseError as error:
            raise OSError(str(error).strip().partition("\n")[0]) from None

    def check_answers(self) -> None:
        """Check that the store at the configured address takes a connection. The libraries would
        try for more than a minute.

        Raises:
            SetupError: it does not.
        """
        if self.store is None:
            return
        endpoint = self.store.endpoint(self.settings)
        url = urlsplit(endpoint)
        # A proxy may know hosts that this machine does not.
        if url.hostname is None or {url.scheme, "all"} & getproxies().keys():
            return
        try:
            port = url.port or (443 if url.scheme == "https" else 80)
            socket.create_connection((url.hostname, port), _CONNECT_S).close()
        except (OSError, UnicodeError):
            shown = _MAYBE_SECRET.sub("...", endpoint)
            raise SetupError(_UNREACHABLE.format(endpoint=shown)) from None

    def check_bucket(self) -> None:
        """Check that the bucket exists: pyarrow finds nothing in a bucket that does not.

        Raises:
            FileNotFoundError: it does not.
        """
        if self.store is None:
            return
        try:
            bucket = self.filesystem().get_file_info(self._container)
        except OSError:
            # Who may list one folder of a bucket may not ask for the bucket.
            return
        if bucket.type == fs.FileType.NotFound:
            raise FileNotFoundError(f"NoSuchBucket: {self._container}")

    def make(self) -> None:
        """Make the folder if it is missing; in a store there are no folders.

        Raises:
            OSError: it cannot be made.
        """
        if self.is_local:
            self.filesystem().create_dir(self.root, recursive=True)

    def nearest_folder(self) -> str:
        """Return the path of the folder on this machine, or of the first one above it that
        exists.
        """
        return self._nearest(os.path.exists)

    def _nearest(self, exists: Callable[[str], bool]) -> str:
        folder = os.path.abspath(self.root)
        while not exists(folder):
            folder = os.path.dirname(folder)
        return folder

    def check_writable(self) -> None:
        """Check that files can be written into the folder, or, if it does not exist, that it can be
        made; the file of the check is removed.

        Raises:
            SetupError: a secret cannot be read.
            OSError: they cannot.
        """
        # Spark and Delta pass over a file of such a name.
        name = f"_probe-{uuid.uuid4().hex}"
        if self.is_local:
            # pyarrow's errors name the file. No folder can be made where a link leads nowhere.
            probe = os.path.join(self._nearest(os.path.lexists), name)
            with open(probe, "xb"):
                pass
            os.remove(probe)
            return
        filesystem = self.filesystem()
        with filesystem.open_output_stream(f"{self.root}/{name}"):
            pass
        filesystem.delete_file(f"{self.root}/{name}")

    def refusal(self, error: OSError) -> str:
        """Return why the folder cannot be read or written, and what to do."""
        return (
            f"{error.strerror or error}; choose another path"
            if self.is_local
            else self.reason(error)
        )

    def reason(self, error: Exception) -> str:
        """Return what went wrong at this place, and what to look at."""
        text = str(error).removeprefix("Kernel error -> ")
        if self.is_local and os.path.isfile(self.root):
            return "it is a file, and not a folder"
        if self.store is not None:
            endpoint = _MAYBE_SECRET.sub("...", self.store.endpoint(self.settings))
            for pattern, sentence in _STORE_ERRORS:
                if pattern.search(text):
                    return sentence.format(
                        endpoint=endpoint, bucket=self._container, keys=self.store.keys
                    )
        lines = text.strip().splitlines() or [type(error).__name__]
        if _CAUSE in text:
            # delta-rs writes what an error was caused by below it; the last is the first cause, and
            # may be an answer of many lines.
            causes = [
                cause.removeprefix(_PLAIN).strip().split("\n")[0]
                for cause in text.split(_CAUSE)[1:]
            ]
            lines = [
                f"{lines[0]}: "
                f"{next((cause for cause in reversed(causes) if not cause.startswith('<')), '')}"
            ]
        # A secret that is cut would not be found.
        return said(lines[0])[:_MOST_CHARACTERS]

    def delta_options(self) -> dict[str, str] | None:
        """Return delta-rs's storage options.

        Raises:
            SetupError: a secret cannot be read.
        """
        return (
            None if self.store is None else delta_options(self.store, self._bucket, self.settings)
        )

    def hadoop_settings(self) -> dict[str, str]:
        """Return the settings with which Spark's connector reaches it; none for a local path.

        Raises:
            SetupError: a secret cannot be read.
        """
        return (
            {} if self.store is None else hadoop_settings(self.store, self._bucket, self.settings)
        )

    @property
    def _bucket(self) -> str:
        return self.uri.split("/")[2]

    @property
    def _container(self) -> str:
        # Azure's account is not part of a path.
        return self._bucket.partition("@")[0]

    @property
    def _below_bucket(self) -> str:
        return self.uri.split("/", 3)[3]


def parse_place(text: str, where: str, settings: StorageSettings = ENVIRONMENT) -> Place:
    """Return the place of a URL or a path; ``~/`` begins in the user's own folder, and a relative
    path in this process's working folder.

    Args:
        where: the name of the option, for the error.

    Raises:
        UsageError: the scheme is not known, or the URI has no bucket.
    """
    matched = _SCHEME.match(text)
    if matched is None:
        return Place(os.path.abspath(expand_home(text)), settings)
    scheme = matched[1].lower()
    if scheme == "file":
        return Place(os.path.abspath(_local_path(text, where)), settings)
    store = STORES.get(scheme)
    shown = _MAYBE_SECRET.sub("...", text)
    if store is None:
        raise UsageError(f"{where} cannot be '{shown}': {scheme}: is not supported; write {_KNOWN}")
    bucket, _, path = text[len(matched[0]) :].removeprefix("//").partition("/")
    if not store.bucket.fullmatch(bucket):
        raise UsageError(f"{where} cannot be '{shown}'; write {store.shape}")
    if not path.strip("/"):
        raise UsageError(f"{where} cannot be a whole bucket; write {store.scheme}://{bucket}/PATH")
    if not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/")):
        raise UsageError(
            f"{where} cannot be '{shown}'; below the bucket write letters, digits and . _ = + - "
            "between single slashes"
        )
    return Place(f"{store.scheme}://{bucket}/{path.rstrip('/')}", settings)


def parse_template(text: str, where: str, settings: StorageSettings = ENVIRONMENT) -> Place:
    """Return a place whose path may have words in braces.

    Raises:
        UsageError: as ``parse_place``.
    """
    place = parse_place(_BRACES.sub(r"__\1__", text), where, settings)
    uri = place.uri
    for word in _BRACES.findall(text):
        uri = uri.replace(f"__{word}__", f"{{{word}}}")
    return replace(place, uri=uri)


def check_table_place(place: Place, where: str) -> None:
    """Check that all libraries take the path of a table for the same folder. Links count as the
    folders that they lead to.

    Args:
        where: the name of the option, for the error.

    Raises:
        UsageError: delta-rs would look elsewhere.
    """
    path = os.path.realpath(place.root) if place.is_local else ""
    found = _NOT_OF_TABLES.search(path)
    if found is not None:
        raise UsageError(
            f"{where} cannot be {path!r}: the folder of a table has no {found[0]!r} in its path; "
            "choose another path"
        )


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
