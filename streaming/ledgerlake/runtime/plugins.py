"""Functions that a user supplies by name, as ``package.module:name``; they must be importable where
Spark's workers run. The working folder is searched last, so that no file in it replaces an
installed module.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
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
    """Return the object of a name.

    Raises:
        SetupError: it cannot be imported here.
    """
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value: Any = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        raise SetupError(f"{path} cannot be imported: {error}; is it installed where Spark's workers run?") from None
    return value
