"""The cause in an error of the JVM, which py4j and PySpark hand on as text with a stack trace."""

from __future__ import annotations

import re

from ledgerlake.stored.secrets import said

_MOST_CHARACTERS = 300

# The last line of a traceback, in a text that begins one.
_TRACEBACK = "Traceback (most recent call last):"
_PYTHON_ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception)(: .*)?")


def root_cause(error: BaseException) -> str:
    """Return the sentence of the innermost exception in the text of a JVM's error."""
    lines = str(error).strip().splitlines()
    causes = [line.partition(": ")[2] for line in lines if line.startswith((": ", "Caused by: "))]
    cause = (causes or lines or [type(error).__name__])[-1 if causes else 0]
    if cause.endswith(_TRACEBACK):
        # An error of Python in a task, with its own traceback.
        cause = next((line for line in reversed(lines) if _PYTHON_ERROR.fullmatch(line)), cause)
    # A secret that is cut would not be found.
    return said(cause)[:_MOST_CHARACTERS]
