"""Extracts Ledgerlake's errors from the errors of a query: Spark passes Python's errors on
as text.
"""

from __future__ import annotations

import re

from ledgerlake import errors as _errors
from ledgerlake.errors import BrokerError, LedgerlakeError, ProcessLostError, SetupError
from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.runtime.java_errors import root_cause

# Spark's errors if a process no longer answers.
_CLOSED = re.compile(r"java\.io\.EOFException|Broken pipe|Connection reset")

# The operating system's words.
_NO_SPACE = "No space left on device"


def own_error(error: BaseException) -> LedgerlakeError | None:
    """Return an error if it is Ledgerlake's, or else the one in its text; None if there is none."""
    if isinstance(error, LedgerlakeError):
        return error
    matches = re.findall(
        r"^(?:E\s+)?ledgerlake\.errors\.(\w+): (.*)$", str(error), flags=re.MULTILINE
    )
    if not matches:
        return None
    name, message = matches[-1]
    kind: type[LedgerlakeError] = getattr(_errors, name, SetupError)
    attributes = {"code": code} if kind is BrokerError and (code := _broker_code(message)) else {}
    return kind(message.strip(), **attributes)


def _broker_code(message: str) -> str | None:
    """Return the protocol's name of a broker's error from its text (see
    ``wire.lookup.refused``).
    """
    names = re.findall(r"(?<=: )(\w+)(?=: )", message)
    return next((name for name in names if name in pb.ServerError.keys()), None)  # noqa: SIM118


def cause_of(error: BaseException) -> LedgerlakeError:
    """Return the cause of Spark's error: Ledgerlake's error in its text, or a new one."""
    own = own_error(error)
    if own is not None:
        return own
    # Java's stack trace shows the origin of the exception.
    trace = str(getattr(error, "_stackTrace", ""))
    if "PythonStreamingSourceRunner" in trace and _CLOSED.search(trace):
        return ProcessLostError(
            "the Python process that plans the micro-batches was ended from outside, by hand or "
            "because memory ran out; start the pipeline again, and it goes on where it was"
        )
    if _has_lost_java(error):
        return ProcessLostError(
            "Spark's Java process was ended from outside, by hand or because memory ran out; start "
            "the pipeline again, and it goes on where it was"
        )
    cause = root_cause(error)
    if _NO_SPACE in str(error):
        cause += (
            "; make room on the disks of tables, checkpoint and Spark's temporary files, and "
            "start again: it goes on where it was"
        )
    return SetupError(f"the query failed: {cause}")


def _has_lost_java(error: BaseException) -> bool:
    """Return whether Java gave no answer. An error of Java's own comes with its trace."""
    # By their names, since commands work without PySpark.
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "py4j.protocol"}
    if "Py4JNetworkError" in names:
        return True
    return "Py4JError" in names and "Py4JJavaError" not in names and "Trace:" not in str(error)
