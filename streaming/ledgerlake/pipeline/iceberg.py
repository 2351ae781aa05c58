"""The Iceberg tables of a pipeline: a thread of the driver has them follow the Delta tables (see
``table.iceberg_table``), while the pipeline runs and once more at its end.

A failure ends nothing: it is logged, and the next attempt catches up.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ledgerlake.errors import SetupError
from ledgerlake.pipeline.attempts import Attempts
from ledgerlake.table.iceberg_table import IcebergTable

if TYPE_CHECKING:
    from ledgerlake.options.config import Config


_log = logging.getLogger(__name__)

# How long the end of a pipeline waits for the last step.
_LAST_S = 60.0


@dataclass(frozen=True)
class Followed:
    """An Iceberg table, and the version of the Delta table that it has got; None if it has nothing
    new.
    """

    iceberg_table: str
    version: int | None


def follow(config: Config) -> list[Followed]:
    """Bring all Iceberg tables of a configuration to the current versions of their Delta tables.

    Raises:
        SetupError: ``pyiceberg`` is missing.
        TableError: a table cannot be read or written.
    """
    return [Followed(table.name, table.follow()) for table in iceberg_tables(config)]


class IcebergTables:
    """The thread of a running pipeline.

    Raises:
        SetupError: ``pyiceberg`` is missing.
    """

    def __init__(self, config: Config) -> None:
        self._interval_s = config.iceberg.interval_ms / 1000
        self._tables = iceberg_tables(config)
        self._attempts = Attempts("an Iceberg table")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, if there is an Iceberg table. A catalog may accept a request and never
        answer, so Python does not wait for the thread at its end.
        """
        if self._tables:
            self._thread = threading.Thread(
                target=self._run, name="ledgerlake-iceberg", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Follow once more, and end; wait a while for it."""
        self._stopping.set()
        if self._thread is None:
            return
        self._thread.join(_LAST_S)
        if self._thread.is_alive():
            _log.warning(
                "the Iceberg catalog does not answer, so its tables are behind; the next run "
                "catches up"
            )

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._follow()
            self._stopping.wait(self._interval_s)
        self._follow()

    def _follow(self) -> None:
        for table in self._tables:
            self._attempts.attempt(table.name, table.follow)


def iceberg_tables(config: Config) -> list[IcebergTable]:
    """Return the Iceberg tables of a configuration.

    Raises:
        SetupError: ``pyiceberg`` is missing.
    """
    settings = config.iceberg
    tables = [
        IcebergTable(
            options.place,
            options.iceberg_table,
            settings.catalog,
            dict(settings.settings),
            settings.retention_ms,
        )
        for options in config.table_options
        if options.iceberg_table
    ]
    if tables and importlib.util.find_spec("pyiceberg") is None:
        raise SetupError('an iceberg_table needs pyiceberg; install "ledgerlake[iceberg]"')
    return tables
