"""Secrets by reference: ``env:NAME`` is a variable, ``file:PATH`` a file; any other text is the
secret itself.

A reference is resolved where and when the secret is needed, so a secret that is renewed in its file
is seen at the next use. A variable is the exception, since tasks on other machines do not have it:
in a configuration file it is read at once, and the secret travels (``read_variable``).

Libraries and servers repeat secrets in their errors, and spell them in their own way. ``blanked``
compares texts after all escapes are taken out of both. So each text of theirs goes through ``said``
before it is shown: it knows the secrets that this process has resolved, and some of its variables.
"""

from __future__ import annotations

import base64
import html
import os
import re
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote, urlsplit

from ledgerlake.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

T = TypeVar("T")

# What an error shows in place of a secret.
BLANK = "..."

# So short a secret, line or part of one tells nothing, and is in many words.
_SHORT_CHARACTERS = 2

# Of a longer text, only the beginning is shown.
_LONG_CHARACTERS = 20_000

# How many secrets of one reference are known, and of how many references.
_OF_REFERENCE_MOST = 10
_REFERENCES_MOST = 500

# Of how many secrets the spellings are kept.
_SPELLED_MOST = 1000

# A type and a line of another's error.
_LINE_CHARACTERS = 300

# PWD is the working folder.
_SECRET_VARIABLE = re.compile(
    r"(secret|token|password|passwd|_pwd|credentials?|key|connection_?string)$",
    re.IGNORECASE,
)
# A key in base64 may begin with a slash, but has no dot.
_NO_SECRET = re.compile(
    r"\s*(true|false|[+-]?[0-9.]{1,5}|(file:(//)?|[A-Za-z]:)?[.~]{0,2}([/\\][\w .-]+)+[.]\w+)\s*",
    re.IGNORECASE,
)
_PROXY_VARIABLE = re.compile(r"(?<!no)_proxy$", re.IGNORECASE)

# The escapes of URLs and HTML; one that was escaped again counts as one.
_OF_URLS_AND_HTML = re.compile(
    rb"%(?:25)*(?P<byte>[0-9A-Fa-f]{2})"
    rb"|&(?:amp;)*(?P<entity>#[0-9]{1,7}|#[xX][0-9A-Fa-f]{1,6}|amp|lt|gt|quot|apos);"
)
# The escapes of Python and JSON. Any other character after a backslash stands for itself.
_OF_LITERALS = re.compile(
    rb"\\+u(?P<high>[dD][89abAB][0-9A-Fa-f]{2})\\+u(?P<low>[dD][c-fC-F][0-9A-Fa-f]{2})"
    rb"|\\+(?:u(?P<four>[0-9A-Fa-f]{4})|U(?P<eight>[0-9A-Fa-f]{8})|x(?P<two>[0-9A-Fa-f]{2})"
    rb"|(?P<letter>[abfnrtv0])|(?P<nothing>))"
)
_LETTERS = dict(zip(b"abfnrtv0", b"\a\b\f\n\r\t\v\0", strict=True))


def is_reference(text: str) -> bool:
    """Return whether a text refers to a secret."""
    return text.startswith(("env:", "file:"))


def resolve_secret(text: str, what: str = "a secret") -> str:
    """Return the secret that a text is or refers to.

    Args:
        what: what it is, for the error.

    Raises:
        SetupError: the variable is not set, the file cannot be read, or the secret is blank.
    """
    if not text.strip():
        raise SetupError(f"{what} is blank; write it, file:PATH or env:NAME")
    secret = text
    if text.startswith("env:"):
        name = text.removeprefix("env:")
        secret = os.environ.get(name, "").strip()
        if not secret:
            raise SetupError(
                f"the variable {name}, which should hold a secret, is not set in this process; set "
                "it"
            )
    if text.startswith("file:"):
        secret = read_text(text).strip()
        if not secret:
            raise SetupError(
                f"the file {text.removeprefix('file:')}, which should hold a secret, is empty"
            )
    remember(secret, reference=text)
    return secret


def read_variable(text: str) -> str:
    """Return the secret of a reference to a variable of this process. Other texts, and a variable
    that is not set here, stay as they are.
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
            f"the file {path}, which should hold a secret, cannot be read ({error.strerror}); "
            "check its path and its rights"
        ) from None
    except (UnicodeDecodeError, ValueError):
        raise SetupError(f"the file {path}, which should hold a secret, is not text") from None


# The secrets that this process has resolved by what they were resolved from, the newest last: one
# that was renewed since may still be repeated, and one that is resolved once for much longer.
_known: dict[str, dict[str, None]] = {}
_lock = threading.Lock()


def remember(*secrets: str, reference: str = "") -> None:
    """Know secrets that ``said`` leaves out.

    Args:
        reference: what the secrets were resolved from, if they may be renewed.
    """
    for secret in secrets:
        # Now, and not when an answer waits for the text of an error.
        _searched_for(secret)
    with _lock:
        for secret in secrets:
            of_reference = _known.pop(reference or secret, {})
            _add_newest(of_reference, secret, None, _OF_REFERENCE_MOST)
            _add_newest(_known, reference or secret, of_reference, _REFERENCES_MOST)


def _add_newest(kept: dict[str, T], key: str, value: T, most: int) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > most:
        del kept[next(iter(kept))]


def said(text: str) -> str:
    """Return the text of a library, a server or a proxy without the secrets of this process."""
    with _lock:
        known = [secret for of_reference in _known.values() for secret in of_reference]
    return blanked(text, [*known, *_secrets_of_environment()])


def said_in_short(error: BaseException) -> str:
    """Return the type of another's error, and the first line of what it says."""
    line = said(str(error).strip()).partition("\n")[0][:_LINE_CHARACTERS]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def _secrets_of_environment() -> Iterator[str]:
    """Yield what libraries may read by themselves: keys of stores, and who asks a proxy."""
    for name, value in os.environ.items():
        if _PROXY_VARIABLE.search(name):
            yield from secrets_of_address(value if "://" in value else f"http://{value}")
        elif _SECRET_VARIABLE.search(name) and may_be_secret(value):
            yield from secrets_of_address(value) if _is_url(value) else _secrets_of_pairs(value)


def _secrets_of_pairs(value: str) -> Iterator[str]:
    """Yield a secret, and those in it if it is a text such as ``Host=HOST;Password=SECRET``."""
    yield value
    for pair in value.split(";"):
        name, _, secret = pair.partition("=")
        if _SECRET_VARIABLE.search(f"_{name.strip()}"):
            yield secret


def may_be_secret(value: str) -> bool:
    """Return whether a value may be a secret as its name says: not a switch, a small number or the
    path of a file.
    """
    return _NO_SECRET.fullmatch(value) is None


def secrets_of_address(address: str) -> Iterator[str]:
    """Yield what no error shows of an address: user, password and query of a URL. Any other text
    may be a password, and so may each of its words.
    """
    if not _is_url(address):
        words = re.split(r"[\s:;,=&@/?#\[\]]", address)
        yield from (address, *words)
        return
    # A password with a sign such as ``/`` ends the host for some libraries, which quote a part of
    # it.
    user, _, host = address.partition("://")[2].rpartition("@")
    query = host.partition("?")[2]
    password = user.partition(":")[2]
    for part in (user, password, *re.split("[/?#]", password), query):
        yield from (part, unquote(part))


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        # What follows a colon is read only when it is asked for.
        return bool(parts.scheme) and "://" in text and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def parts_of(secret: str) -> Iterator[str]:
    """Yield a secret such as ``id:secret``, and each of its parts."""
    yield secret
    yield from secret.split(":")


def blanked(text: str, secrets: Collection[str]) -> str:
    """Return a text to be shown without secrets, nor one of their lines, in whatever way these are
    escaped there, or as base64. A very long text is cut.
    """
    secrets = [secret for secret in secrets if len(secret.strip()) > _SHORT_CHARACTERS]
    if not secrets:
        return text
    if len(text) > _LONG_CHARACTERS:
        # Half of it, so that no secret is cut and passed over.
        return blanked(text[:_LONG_CHARACTERS], secrets)[: _LONG_CHARACTERS // 2]
    hidden = bytearray(len(text))
    for number, unescaped in enumerate(_UNESCAPED):
        searched = unescaped(text)
        for spelling in {each for secret in secrets for each in _searched_for(secret)[number]}:
            begin = searched.content.find(spelling)
            while begin >= 0:
                first = searched.places[begin][0]
                last = searched.places[begin + len(spelling) - 1][1]
                hidden[first:last] = bytes([1]) * (last - first)
                begin = searched.content.find(spelling, begin + 1)
    parts = groupby(zip(text, hidden, strict=True), itemgetter(1))
    return "".join(
        BLANK if is_hidden else "".join(sign for sign, _ in signs) for is_hidden, signs in parts
    )


def _spellings(secret: str) -> Iterator[str]:
    """Yield a secret and each of its lines, as they are and as base64."""
    whole = secret.strip()
    lines = [line.strip() for line in whole.splitlines()]
    for part in (whole, *(line for line in lines if len(line) > _SHORT_CHARACTERS)):
        yield part
        yield base64.b64encode(part.encode(errors="replace")).decode().rstrip("=")
        yield base64.urlsafe_b64encode(part.encode(errors="replace")).decode().rstrip("=")


@lru_cache(_SPELLED_MOST)
def _searched_for(secret: str) -> tuple[frozenset[bytes], ...]:
    """Return what a secret is searched for as, for each of ``_UNESCAPED``. It takes longer than the
    search, and each text is searched for the same secrets.
    """
    spellings = set(_spellings(secret))
    return tuple(
        frozenset(
            content
            for content in (unescaped(spelling).content for spelling in spellings)
            if len(content) > _SHORT_CHARACTERS
        )
        for unescaped in _UNESCAPED
    )


@dataclass(frozen=True)
class _Plain:
    """The bytes of a text, perhaps without escapes, and the begin and the end in the text of what
    each byte comes from.
    """

    content: bytes
    places: list[tuple[int, int]]

    @classmethod
    def of(cls, text: str) -> _Plain:
        signs = [sign.encode(errors="surrogatepass") for sign in text]
        return cls(b"".join(signs), [(at, at + 1) for at, sign in enumerate(signs) for _ in sign])

    def without(
        self, escapes: re.Pattern[bytes], meant: Callable[[re.Match[bytes]], bytes]
    ) -> _Plain:
        """Return the same with what escapes stand for in their places."""
        content, places, done = bytearray(), list[tuple[int, int]](), 0
        for escape in escapes.finditer(self.content):
            begin, end = escape.span()
            stands_for = meant(escape)
            content += self.content[done:begin] + stands_for
            places += self.places[done:begin]
            places += [(self.places[begin][0], self.places[end - 1][1])] * len(stands_for)
            done = end
        return _Plain(bytes(content) + self.content[done:], places + self.places[done:])


def _unescaped(text: str, *, x_is_byte: bool) -> _Plain:
    """Return a text without escapes.

    Args:
        x_is_byte: whether ``\\xe4`` is a byte, as in Python's bytes, or a character.
    """
    plain = _Plain.of(text).without(_OF_URLS_AND_HTML, _of_url_or_html)
    plain = plain.without(_OF_LITERALS, partial(_of_literal, x_is_byte=x_is_byte))
    # A form has a plus for each space.
    return _Plain(plain.content.replace(b"+", b" "), plain.places)


def _of_url_or_html(escape: re.Match[bytes]) -> bytes:
    if escape["byte"]:
        return bytes([int(escape["byte"], 16)])
    return html.unescape(f"&{escape['entity'].decode()};").encode(errors="surrogatepass")


def _of_literal(escape: re.Match[bytes], *, x_is_byte: bool) -> bytes:
    if escape["low"]:
        return bytes.fromhex((escape["high"] + escape["low"]).decode()).decode("utf-16-be").encode()
    if escape["letter"]:
        return bytes([_LETTERS[escape["letter"][0]]])
    digits = escape["four"] or escape["eight"] or escape["two"]
    if not digits:
        return b""
    number = int(digits, 16)
    if escape["two"] and x_is_byte:
        return bytes([number])
    return chr(number).encode(errors="surrogatepass") if number <= sys.maxunicode else b""


# The ways in which a text and a secret are compared.
_UNESCAPED: tuple[Callable[[str], _Plain], ...] = (
    _Plain.of,
    partial(_unescaped, x_is_byte=True),
    partial(_unescaped, x_is_byte=False),
)
