"""Who we are to a broker: token, OAuth2 client credentials, basic, or a client certificate.

Methods as the protocol names them; data is what goes into CONNECT and AUTH_RESPONSE:

    none     -
    token    a JSON Web Token
    token    OAuth2: an access token, fetched with a client's id and secret and again before it expires
    basic    user:password
    tls      nothing; the certificate of the connection is the identity

Plugins and parameters are spelled as for Pulsar's Java client. A token or password may be given as
``token:...``, as ``file:PATH`` (read again each time) or ``env:NAME``. What is secret shows in no
``repr``, and no error repeats it. Spark redacts an option in its plans if it looks like a secret,
by words such as "token" or "secret" in it. So an inline secret needs the prefix ``token:`` or
``secret:``, or must be in JSON that says ``password`` or ``client_secret``.
"""

from __future__ import annotations

import base64
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from ledgerlake.errors import SetupError, TransportError, UsageError
from ledgerlake.stored.secrets import read_text, resolve_secret

_TIMEOUT_S = 10.0

# What Spark does not show, or is no secret.
_HIDDEN = re.compile(r"secret|password|token|^file:|^env:|file:", re.IGNORECASE)

# Timeouts and limits of rate, which pass; a status from 500 on is the issuer's own trouble, and may
# pass too.
_BUSY_STATUS = frozenset({408, 429})

# The longest wait that an issuer may ask for; a nonsense value would hold up the stream.
_PAUSE_MOST_S = 60.0

# An access token is not used in its last seconds.
_SPARE_S = 30.0


@dataclass(frozen=True)
class Authentication:
    """``method`` is the protocol's name; ``parameters`` are the plugin's own, whatever their form."""

    method: str = "none"
    parameters: str = field(default="", repr=False)
    is_oauth2: bool = False

    def data(self) -> bytes | None:
        """Return the credentials to send now; they are fetched or read again if they can change.

        Raises:
            SetupError: a file, variable or answer is not there or not usable, or the OAuth2 issuer
                refused us.
            TransportError: the OAuth2 issuer cannot be reached, or is busy.
        """
        if self.is_oauth2:
            return _access_token(self.parameters).encode()
        if self.method in ("token", "basic"):
            return resolve_secret(_inline(self.parameters)).encode()
        return b"" if self.method == "tls" else None


NO_AUTHENTICATION = Authentication()

_PLUGINS = {
    "authenticationtoken": Authentication("token"),
    "token": Authentication("token"),
    "authenticationbasic": Authentication("basic"),
    "basic": Authentication("basic"),
    "authenticationtls": Authentication("tls"),
    "tls": Authentication("tls"),
    "authenticationoauth2": Authentication("token", is_oauth2=True),
    "oauth2": Authentication("token", is_oauth2=True),
}


def parse_authentication(plugin: str | None, parameters: str | None, where: str) -> Authentication:
    """From a plugin's name (its Java class, or token, oauth2, basic, tls) and its parameters.

    Raises:
        UsageError: no such plugin, or parameters that it cannot have.
    """
    if not plugin:
        return NO_AUTHENTICATION
    known = _PLUGINS.get(plugin.rpartition(".")[2].lower())
    if known is None:
        raise UsageError(f"{where}: '{plugin}' is not known; it is token, oauth2, basic or tls, or their Java class")
    given = (parameters or "").strip()
    text = given.removeprefix("secret:")
    if known.is_oauth2:
        _oauth2_parameters(text, where)
    elif known.method == "basic":
        text = _basic(text, where)
    elif known.method == "token" and not text:
        raise UsageError(f"{where}: the token is missing; write token:..., file:PATH or env:NAME")
    if known.method != "tls" and not _HIDDEN.search(given):
        raise UsageError(f"{where}: Spark would show this secret in its plans; write secret: before it")
    return Authentication(known.method, text, known.is_oauth2)


def hint(authentication: Authentication, now_s: float) -> str:
    """Return the likely fault of credentials that a broker refused, as the end of a sentence."""
    if authentication == NO_AUTHENTICATION:
        return "; no authentication is configured"
    if authentication.method != "token":
        return "; check the credentials"
    until_s = _expires_s((authentication.data() or b"").decode())
    if until_s is not None and until_s <= now_s:
        moment = datetime.fromtimestamp(until_s, tz=timezone.utc)
        return f"; the token expired at {moment.isoformat().replace('+00:00', 'Z')}"
    return "; check the token, and that it is signed with a key that this broker knows"


def _expires_s(token: str) -> float | None:
    """Return when a JSON Web Token says that it expires."""
    try:
        claims = token.split(".")[1]
        return float(json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"])
    except (IndexError, ValueError, KeyError, TypeError):
        return None


def tls_files(parameters: str) -> tuple[str | None, str | None]:
    """Certificate and key of ``tlsCertFile:PATH,tlsKeyFile:PATH``; None if the parameters are of
    another plugin.
    """
    given = dict(one.split(":", 1) for one in parameters.split(",") if ":" in one)
    return given.get("tlsCertFile"), given.get("tlsKeyFile")


def _inline(text: str) -> str:
    return text.removeprefix("token:")


def _basic(text: str, where: str) -> str:
    if text.startswith("{"):
        given = _json(text, where)
        text = f"{given.get('userId', '')}:{given.get('password', '')}"
    if not text.startswith(("env:", "file:")) and ":" not in text:
        raise UsageError(f"{where}: write user:password, or file:PATH or env:NAME of that")
    return text


def _oauth2_parameters(text: str, where: str = "the OAuth2 parameters") -> dict[str, Any]:
    given = _json(text, where)
    if not given.get("issuerUrl") or not (given.get("privateKey") or given.get("client_id")):
        raise UsageError(f"{where}: OAuth2 needs issuerUrl, and privateKey or client_id with client_secret, as JSON")
    return given


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise UsageError(f"{where}: the parameters are no JSON object")
    return given


@dataclass
class _AccessToken:
    """The token of one client at its issuer, and when the issuer may be asked again, on the
    monotonic clock.
    """

    token: str = ""
    until_s: float = 0.0
    ask_from_s: float = 0.0
    failure: str = ""


@cache
def _known_token(_parameters: str) -> _AccessToken:
    return _AccessToken()


def _access_token(parameters: str) -> str:
    known = _known_token(parameters)
    now_s = time.monotonic()
    if now_s < known.until_s:
        return known.token
    if now_s < known.ask_from_s:
        raise TransportError(known.failure)
    try:
        answer = _client_credentials(_oauth2_parameters(parameters))
    except _IssuerBusyError as error:
        known.ask_from_s, known.failure = now_s + error.pause_s, error.message
        raise TransportError(error.message) from None
    known.token = str(answer["access_token"])
    known.until_s = now_s + _lifetime_s(answer.get("expires_in")) - _SPARE_S
    return known.token


def _lifetime_s(expires_in: object) -> float:
    """Return how long a token is valid by its issuer's answer; 0 if that says no usable time."""
    try:
        lifetime_s = float(str(expires_in))
    except ValueError:
        return 0.0
    return lifetime_s if lifetime_s > 0 else 0.0


def _client_credentials(given: dict[str, Any]) -> dict[str, Any]:
    issuer = str(given["issuerUrl"]).rstrip("/")
    credentials = _credentials(str(given["privateKey"])) if given.get("privateKey") else given
    form = {
        "grant_type": "client_credentials",
        "client_id": str(credentials.get("client_id", "")),
        "client_secret": resolve_secret(_inline(str(credentials.get("client_secret", "")))),
        **{name: str(given[name]) for name in ("audience", "scope") if given.get(name)},
    }
    endpoint = _fetch(f"{issuer}/.well-known/openid-configuration", None, issuer).get("token_endpoint")
    answer = _fetch(str(endpoint), urllib.parse.urlencode(form).encode(), issuer)
    if not answer.get("access_token"):
        raise SetupError(f"the OAuth2 issuer {issuer} gave no access token; check client id, secret and audience")
    return answer


def _credentials(private_key: str) -> dict[str, Any]:
    """The JSON of a key file, given as ``file:PATH``, ``env:NAME``,
    ``data:application/json;base64,...``, as a path, or as it is.
    """
    if private_key.startswith("data:"):
        text = _base64_text(private_key.partition(",")[2])
    elif private_key.lstrip().startswith("{") or private_key.startswith(("file:", "env:")):
        text = resolve_secret(_inline(private_key))
    elif os.path.isfile(private_key):
        text = read_text(f"file:{quote(private_key)}")
    else:
        # It may be the key itself, wrongly written, so it is not repeated.
        raise SetupError(
            "the OAuth2 privateKey is no path of a file that is there; give file:PATH, env:NAME, or the JSON of the key file"
        )
    return _json(text, "the OAuth2 privateKey")


def _base64_text(encoded: str) -> str:
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        raise UsageError("the OAuth2 privateKey is no base64 of a text") from None


def _fetch(url: str, form: bytes | None, issuer: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=form), timeout=_TIMEOUT_S) as response:
            answer = json.loads(response.read(1_000_000))
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _BUSY_STATUS or error.code >= 500:
                raise _IssuerBusyError(
                    f"the OAuth2 issuer {issuer} is not available now, status {error.code}; check it if that lasts",
                    pause_s=_pause_s(error.headers.get("Retry-After", "")),
                ) from None
        raise SetupError(
            f"the OAuth2 issuer {issuer} refused us with status {error.code}; check client id, secret and audience"
        ) from None
    except (OSError, ValueError, HTTPException) as error:
        raise TransportError(f"the OAuth2 issuer {issuer} cannot be reached ({error})") from None
    return answer if isinstance(answer, dict) else {}


def _pause_s(retry_after: str) -> float:
    """Return how long not to ask an issuer again, by its header: seconds or a date, and a minute at
    most.
    """
    try:
        if retry_after.strip().isdecimal():
            pause_s = float(retry_after)
        else:
            pause_s = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError):
        return 0.0
    return min(max(pause_s, 0.0), _PAUSE_MOST_S)


class _IssuerBusyError(TransportError):
    """The issuer is busy or down; ``pause_s`` is how long it asks not to be asked again."""

    pause_s: float
