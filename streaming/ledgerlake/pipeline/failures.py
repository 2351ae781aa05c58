"""What went wrong in a query, as an error of ours: Spark hands Python's errors on as text."""

from __future__ import annotations

import re

from ledgerlake import errors as _errors
from ledgerlake.errors import LedgerlakeError, ProcessLostError, SetupError

# What Spark says of a process that does not answer any more.
_CLOSED = re.compile(r"java\.io\.EOFException|Broken pipe|Connection reset")


def cause_of(error: BaseException) -> LedgerlakeError:
    """The error of ours inside Spark's, which carries Python tracebacks as text."""
    text = str(error)
    found = re.findall(r"^(?:E\s+)?ledgerlake\.errors\.(\w+): (.*)$", text, flags=re.MULTILINE)
    if found:
        name, message = found[-1]
        kind = getattr(_errors, name, SetupError)
        return kind(message.strip())
    # Text of Java's that tells where the exception comes from.
    trace = str(getattr(error, "_stackTrace", ""))
    if "PythonStreamingSourceRunner" in trace and _CLOSED.search(trace):
        return ProcessLostError(
            "the Python process that plans the micro-batches was ended from outside, by hand or because memory ran out; start "
            "the pipeline again, and it goes on where it was"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return SetupError(f"the query failed: {lines[0][:300] if lines else type(error).__name__}")
