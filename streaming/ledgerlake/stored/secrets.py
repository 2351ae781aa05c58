"""Secrets by reference: ``env:NAME`` is a variable, ``file:PATH`` a file; any other text is the
secret itself.

A reference is resolved where and when the secret is needed, so a secret that is renewed in its file
is seen at the next use. A variable is the exception, since tasks on other machines do not have it: in
a configuration file it is read at once, and the secret travels (``read_variable``).
"""

from __future__ import annotations

import os
from urllib.parse import unquote

from ledgerlake.errors import SetupError


def is_reference(text: str) -> bool:
    """Return whether a text refers to a secret."""
    return text.startswith(("env:", "file:"))


def resolve_secret(text: str) -> str:
    """Return the secret that a text is or refers to.

    Raises:
        SetupError: the variable is not set, the file cannot be read, or there is nothing in it.
    """
    if text.startswith("env:"):
        name = text.removeprefix("env:")
        if not os.environ.get(name, "").strip():
            raise SetupError(f"the variable {name}, which should hold a secret, is not set in this process; set it")
        return os.environ[name].strip()
    if text.startswith("file:"):
        secret = read_text(text).strip()
        if not secret:
            raise SetupError(f"the file {text.removeprefix('file:')}, which should hold a secret, is empty")
        return secret
    return text


def read_variable(text: str) -> str:
    """Return the secret of a reference to a variable of this process. Other texts, and a variable that
    is not set here, stay as they are.
    """
    is_variable = text.startswith("env:")
    return (os.environ.get(text.removeprefix("env:"), "").strip() if is_variable else "") or text


def read_text(url: str) -> str:
    """Return the content of the file at a ``file:`` URL, which may have a relative path.

    Raises:
        SetupError: the file cannot be read, or is not text.
    """
    path = unquote(url.removeprefix("file:"))
    path = path.removeprefix("//") if path.startswith("//") else path
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise SetupError(
            f"the file {path}, which should hold a secret, cannot be read ({error.strerror}); check its path and its rights"
        ) from None
    except (UnicodeDecodeError, ValueError):
        raise SetupError(f"the file {path}, which should hold a secret, is not text") from None
