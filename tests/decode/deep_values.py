"""``python -m tests.decode.deep_values``: run each allowed function that takes JSON, and each cast
of it, on values of very many levels. One that calls itself for each level ends the process; the
last line says which.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pyarrow as pa

from ledgerlake.errors import SetupError, UsageError
from ledgerlake.values import row_query
from ledgerlake.values.row_query import RowQuery

if TYPE_CHECKING:
    from collections.abc import Iterator

# A stack of 8 MiB has 40 bytes for each, less than a call takes.
_LEVELS = 200_000

_VALUES = ["[" * _LEVELS + "]" * _LEVELS, '{"a":' * _LEVELS + "1" + "}" * _LEVELS]

_ARGUMENTS = ["value::json", "'$.a'", """'{"a":"json"}'"""]

_TYPES = [
    "varchar",
    "json",
    "variant",
    "varchar[][]",
    "struct(a json)",
    "map(varchar, json)",
    "json[]",
    "blob",
    "bit",
]

_FUNCTIONS = r"""
    select distinct function_name, len(parameter_types), varargs is not null from duckdb_functions()
    where function_name similar to '[a-z]\w*'
      and (function_name like '%json%' or list_contains(parameter_types::varchar[], 'JSON'))
"""


def main() -> None:
    """Run all that a query may have."""
    columns = pa.schema([("value", pa.string())])
    messages = pa.RecordBatch.from_arrays([pa.array(_VALUES)], schema=columns)
    for expression in _expressions():
        try:
            query = RowQuery(f"select hash({expression})::varchar as a from messages", "sql")
            query.columns(columns)
        except (UsageError, SetupError):
            continue
        print(expression, flush=True)
        query.of(messages)


def _expressions() -> Iterator[str]:
    for name, count, has_more in sorted(row_query._connection().execute(_FUNCTIONS).fetchall()):
        for arguments in itertools.product(_ARGUMENTS, repeat=min(count + int(has_more), 2)):
            yield f"{name}({', '.join((*arguments, *['value::json'] * (count - 2)))})"
    for kind in _TYPES:
        yield f"value::json::{kind}::varchar"
        yield f"value::{kind}::json"
        yield f"value::json::{kind} = value::json::{kind}"


if __name__ == "__main__":
    main()
