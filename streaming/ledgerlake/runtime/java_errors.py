"""The cause in an error of the JVM, which py4j and PySpark hand on as text with a stack trace."""

from __future__ import annotations

_MOST_CHARACTERS = 300


def root_cause(error: BaseException) -> str:
    """Return the sentence of the innermost exception in the text of a JVM's error."""
    lines = str(error).strip().splitlines()
    causes = [line.partition(": ")[2] for line in lines if line.startswith((": ", "Caused by: "))]
    return (causes or lines or [type(error).__name__])[-1 if causes else 0][:_MOST_CHARACTERS]
