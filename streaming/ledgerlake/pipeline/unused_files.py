"""What removes unused files of a pipeline's tables: the upkeep of a running pipeline, and the
commands ``upkeep`` and ``vacuum``. All of them ask here, so one rule holds for all (see
``table.vacuum``): a file stays for as long as the configuration or its table says, and while an
Iceberg table names it.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

from ledgerlake.errors import TableAccessError
from ledgerlake.pipeline.iceberg import iceberg_tables
from ledgerlake.table.vacuum import vacuum

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.config import Config
    from ledgerlake.stored.places import Place
    from ledgerlake.table.iceberg_table import IcebergTable
    from ledgerlake.table.vacuum import Vacuumed

# How long a catalog may take to say which files its tables name, and how often a stop is looked
# for.
_ANSWER_S = 600.0
_LOOK_S = 0.2


class UnusedFiles:
    """The unused files of a configuration's tables.

    Args:
        retention_hours: what holds instead of the configuration and the tables' properties.
        is_stopped: whether nothing waits for a catalog any more.

    Raises:
        SetupError: there are Iceberg tables, and ``pyiceberg`` is missing.
    """

    def __init__(
        self,
        config: Config,
        retention_hours: int | None = None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._hours = config.upkeep.retention_hours if retention_hours is None else retention_hours
        self._overrules_tables = retention_hours is not None
        self._is_stopped = is_stopped
        self._iceberg = {table.place.uri: table for table in iceberg_tables(config)}
        self._asked: dict[str, Future[set[str]]] = {}

    def remove(self, place: Place, *, dry_run: bool = False) -> Vacuumed:
        """Remove the unused files of a table, or only list them.

        Raises:
            UsageError, TableError: as ``table.vacuum.vacuum``.
        """
        return vacuum(
            place,
            self._hours,
            overrules_table=self._overrules_tables,
            named_elsewhere=partial(self._named_by_iceberg, place),
            dry_run=dry_run,
        )

    def _named_by_iceberg(self, place: Place) -> set[str]:
        """Return the names of a table's files that its Iceberg table has.

        A catalog may accept a request and never answer. So a thread asks it for which nothing waits
        at the end of the process, and there is no second one while the first has no answer.

        Raises:
            TableError: it is not known.
        """
        table = self._iceberg.get(place.uri)
        if table is None:
            return set()
        asked = self._asked.get(place.uri)
        if asked is None or asked.done():
            asked = self._asked[place.uri] = _ask(table)
        ends_s = time.monotonic() + _ANSWER_S
        while not asked.done():
            if self._is_stopped() or time.monotonic() >= ends_s:
                raise TableAccessError(
                    f"no unused file of the table at {place} is removed, because the catalog of "
                    f"the Iceberg table {table.name} does not answer"
                )
            wait([asked], _LOOK_S)
        return asked.result()


def _ask(table: IcebergTable) -> Future[set[str]]:
    answer: Future[set[str]] = Future()

    def ask() -> None:
        try:
            answer.set_result(table.named_files())
        # It is raised to who waits for the answer.
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, name="ledgerlake-iceberg-files", daemon=True).start()
    return answer
