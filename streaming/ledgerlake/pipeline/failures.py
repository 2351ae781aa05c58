"""What went wrong in a query, as an error of ours: Spark hands Python's errors on as text."""

from __future__ import annotations

import re

from ledgerlake import errors as _errors
from ledgerlake.errors import LedgerlakeError, ProcessLostError, SetupError
from ledgerlake.runtime.java_errors import root_cause

# What Spark says of a process that does not answer any more.
_CLOSED = re.compile(r"java\.io\.EOFException|Broken pipe|Connection reset")


def own_error(error: BaseException) -> LedgerlakeError | None:
    """The error of ours that it is, or that stands in its text; None if there is none."""
    if isinstance(error, LedgerlakeError):
        return error
    found = re.findall(r"^(?:E\s+)?ledgerlake\.errors\.(\w+): (.*)$", str(error), flags=re.MULTILINE)
    if not found:
        return None
    name, message = found[-1]
    kind: type[LedgerlakeError] = getattr(_errors, name, SetupError)
    return kind(message.strip())


def cause_of(error: BaseException) -> LedgerlakeError:
    """The error of ours inside Spark's, which carries Python tracebacks as text."""
    ours = own_error(error)
    if ours is not None:
        return ours
    # Text of Java's that tells where the exception comes from.
    trace = str(getattr(error, "_stackTrace", ""))
    if "PythonStreamingSourceRunner" in trace and _CLOSED.search(trace):
        return ProcessLostError(
            "the Python process that plans the micro-batches was ended from outside, by hand or because memory ran out; start "
            "the pipeline again, and it goes on where it was"
        )
    return SetupError(f"the query failed: {root_cause(error)}")
