"""Functions that a user supplies by name, as ``package.module:name``; they must be importable where
Spark's workers run.
"""

from __future__ import annotations

import importlib
import re
from functools import cache
from typing import Any

from ledgerlake.errors import SetupError, UsageError

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def check_path(path: str, where: str) -> str:
    """The name, if it looks like one.

    Raises:
        UsageError: it does not.
    """
    if not _PATH.fullmatch(path):
        raise UsageError(f"{where} cannot be '{path}'; write package.module:name")
    return path


@cache
def load(path: str) -> Any:
    """Return the object that a name stands for.

    Raises:
        SetupError: it cannot be imported here.
    """
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise SetupError(f"{path} cannot be imported: {error}; is it installed where Spark's workers run?") from None
    return found
