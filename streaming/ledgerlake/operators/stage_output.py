"""The output of the stateful stage for one topic partition and micro-batch.

In a pipeline the outcomes go into files (``operators.outcome_files``). For other sinks they are
rows (``operators.decoded_rows``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pandas as pd

    from ledgerlake.operators.outcome_types import Outcome
    from ledgerlake.operators.stage_rows import StageRow, StateSummary
    from ledgerlake.schedules.cancels import Cancels


class StageOutput(Protocol):
    """Takes the outcomes of the stateful stage for one topic partition, and yields frames for
    Spark.
    """

    def take(self, outcome: Outcome | Cancels) -> Iterator[pd.DataFrame]:
        """Take an outcome, and iterate its entries before the next outcome. Entries of a message
        that was not delayed stay in state if they are not iterated.
        """

    def finish(self, summary: StateSummary) -> Iterator[pd.DataFrame]:
        """Take the summary, which comes last."""

    def pass_on(self, rows: list[StageRow]) -> Iterator[pd.DataFrame]:
        """Take rows in which the stage changes nothing."""


def data_frame(columns: Sequence[str], *rows: Sequence[Any]) -> pd.DataFrame:
    # Spark starts a query with a process that only asks for the names of the state variables. That
    # process needs no pandas.
    import pandas as pd

    return pd.DataFrame(rows, columns=columns)
