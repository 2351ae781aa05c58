"""State variables that a task declares when it first uses them.

For each variable that a task declares, Spark plans and compiles the encoders of its key and value
again, which costs far more than a call to it. Most micro-batches use few of the variables.

All variables are declared in two places. The driver's process does it, because Spark writes their
schemas into the checkpoint there. A worker does it in its first micro-batch of a state partition,
because Spark can only read variables whose column family is there.

Spark allows declarations only before the first key. So the state of the handle is set back for a
declaration. If a release of Spark has no access to that state, all variables are declared at the
beginning, as Spark's documentation asks.

Schemas are given to Spark as types, because it asks the JVM to parse each text.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

from ledgerlake.operators.bucket_folders import query_id_of_task

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark.sql.streaming.stateful_processor import (
        MapState,
        StatefulProcessorHandle,
        ValueState,
    )

_TYPES = {"bigint": LongType, "int": IntegerType, "string": StringType, "binary": BinaryType}

# The first micro-batch of a state partition in this process, by query and number. A micro-batch
# that fails may be tried again here, and its declarations are lost with it.
_first_batches: dict[tuple[str, int], str | None] = {}
_MOST_STATE_PARTITIONS = 10_000


class StateVariables:
    """The handle of a stateful processor, with variables that are declared at their first use."""

    def __init__(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._client = getattr(handle, "_statefulProcessorApiClient", None)
        self._waits = self._client is not None and _may_wait(self._client)

    def getMapState(self, name: str, key_schema: str, value_schema: str) -> MapState:
        schemas = _schema(key_schema), _schema(value_schema)
        return self._declare(lambda: self._handle.getMapState(name, *schemas))

    def getValueState(self, name: str, schema: str) -> ValueState:
        return self._declare(lambda: self._handle.getValueState(name, _schema(schema)))

    def _declare(self, declare: Callable[[], Any]) -> Any:
        return _Variable(self._client, declare) if self._waits else declare()


def _may_wait(client: Any) -> bool:
    """Return whether a process may declare variables at their first use."""
    from pyspark import TaskContext
    from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

    if client.handle_state != StatefulProcessorHandleState.CREATED:
        return False
    context = TaskContext.get()
    if len(_first_batches) >= _MOST_STATE_PARTITIONS:
        _first_batches.clear()
    batch_id: str | None = context.getLocalProperty("streaming.sql.batchId")
    return (
        _first_batches.setdefault((query_id_of_task(), context.partitionId()), batch_id) != batch_id
    )


class _Variable:
    """A state variable of a task, with the methods of Spark's variable."""

    def __init__(self, client: Any, declare: Callable[[], Any]) -> None:
        self._client = client
        self._declare = declare

    @cached_property
    def _declared(self) -> Any:
        from pyspark.sql.streaming.stateful_processor_api_client import StatefulProcessorHandleState

        before = self._client.handle_state
        self._client.set_handle_state(StatefulProcessorHandleState.CREATED)
        variable = self._declare()
        self._client.set_handle_state(before)
        return variable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._declared, name)


def _schema(fields: str) -> StructType:
    """Return the type of a schema such as ``ledger_id bigint, entry_id bigint``."""
    pairs = (field.split() for field in fields.split(", "))
    return StructType([StructField(name, _TYPES[kind]()) for name, kind in pairs])
