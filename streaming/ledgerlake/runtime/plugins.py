"""Functions that a user supplies by name, as ``package.module:name``; they must be importable where
Spark's workers run. The working folder is searched only for a function whose module is nowhere
else. It is searched last, so that no file in it replaces an installed module, and from then on,
since a module may import its neighbours late.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from functools import cache
from importlib.machinery import PathFinder
from importlib.util import find_spec
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
    _search_working_folder(module.partition(".")[0])
    try:
        value: Any = importlib.import_module(module)
        for attribute in name.split("."):
            value = getattr(value, attribute)
    except (ImportError, AttributeError) as error:
        raise SetupError(
            f"{path} cannot be imported: {error}; is it installed where Spark's workers run?"
        ) from None
    return value


def _search_working_folder(package: str) -> None:
    """Search the working folder from now on if it has a package that is nowhere else."""
    folder = os.getcwd()
    if (
        folder in sys.path
        or package in sys.modules
        or PathFinder.find_spec(package, [folder]) is None
    ):
        return
    if find_spec(package) is None:
        sys.path.append(folder)
