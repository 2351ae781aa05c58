"""Authentication at a broker: token, OAuth2 client credentials, basic, or a client certificate.

The methods have the protocol's names; the data is sent in CONNECT and AUTH_RESPONSE:

    none     -
    token    a JSON Web Token
    token    OAuth2: an access token, fetched with a client's id and secret and again before it
             expires
    basic    user:password
    tls      nothing; the certificate of the connection is the identity

Plugins and parameters are spelled as for Pulsar's Java client. A token or password may be given as
``token:...``, as ``file:PATH`` (read again each time) or ``env:NAME``. No ``repr`` and no error
shows a secret. Spark redacts an option in its plans if it contains words such as "token" or
"secret". So an inline secret needs the prefix ``token:`` or ``secret:``, or must be in JSON that
says ``password`` or ``client_secret``.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
import time
import urllib.parse
from dataclasses import dataclass, field
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any
from urllib.parse import quote

from ledgerlake.client import bounded_http
from ledgerlake.errors import SetupError, TransportError, UsageError
from ledgerlake.stored.secrets import is_reference, read_text, remember, resolve_secret

# Where an issuer names its token endpoint.
_DISCOVERY = "/.well-known/openid-configuration"

# The limits of one request to an issuer.
_TIMEOUT_S = 10.0
_ANSWER_MOST_BYTES = 1_000_000

# Spark redacts an option with one of these words in its value.
_REDACTED = re.compile(r"secret|password|token", re.IGNORECASE)

# Timeouts and rate limits, which are temporary; so may be a status from 500 on.
_BUSY_STATUS = frozenset({408, 429})

# The longest wait that an issuer may ask for, so that a wrong value does not stop the stream.
_PAUSE_MOST_S = 60.0

# An access token is not used in its last seconds, and not for longer than a day.
_SPARE_S = 30.0
_LIFETIME_MOST_S = 24 * 60 * 60.0

# A token that an issuer has given just now is refused for a reason that another one has too.
_FRESH_S = 30.0

# The last second of the year 9999, since 1970.
_LAST_S = 253_402_300_799

# RFC 6749, appendix A.12: visible ASCII characters. The limit is our own.
_ACCESS_TOKEN = re.compile(r"[\x20-\x7e]{1,65536}")


@dataclass(frozen=True)
class Authentication:
    """A method by the protocol's name, and the parameters in the plugin's own format."""

    method: str = "none"
    parameters: str = field(default="", repr=False)
    is_oauth2: bool = False

    def data(self) -> bytes | None:
        """Return the credentials to send now; they are fetched or read again if they can change.

        Raises:
            SetupError: a file, variable or answer is missing or not usable, or the OAuth2 issuer
                refused the credentials.
            TransportError: the OAuth2 issuer cannot be reached, or is busy.
        """
        if self.method not in ("token", "basic"):
            return b"" if self.method == "tls" else None
        if self.is_oauth2:
            data = _access_token(self.parameters)
        elif self.method == "basic":
            data = _with_password(self.parameters)
            remember(data.partition(":")[2], reference=f"password {self.parameters}")
        else:
            return resolve_secret(_inline(self.parameters), "the token").encode()
        remember(data, reference=self.parameters)
        return data.encode()

    def forget(self) -> bool:
        """Forget credentials that a broker refused; return whether they were kept for a while, so
        that others may be accepted.
        """
        if not self.is_oauth2:
            return False
        token, now_s = _cached_token(self.parameters), time.monotonic()
        token.until_s = now_s
        return now_s - token.since_s > _FRESH_S


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
    """Return the authentication of a plugin's name (its Java class, or token, oauth2, basic, tls)
    and its parameters.

    Raises:
        UsageError: there is no such plugin, or it cannot have these parameters.
    """
    if not plugin:
        return NO_AUTHENTICATION
    authentication = _PLUGINS.get(plugin.rpartition(".")[2].lower())
    if authentication is None:
        # It may be a secret in the wrong place.
        raise UsageError(
            f"{where}: the plugin is not known; it is token, oauth2, basic or tls, or their Java "
            "class"
        )
    stripped = (parameters or "").strip()
    text = stripped.removeprefix("secret:")
    secret = text
    if authentication.is_oauth2:
        secret = str(_oauth2_parameters(text, where).get("privateKey", ""))
    elif authentication.method == "basic":
        text = _basic(text, where)
        secret = text if is_reference(text) else text.partition(":")[2]
    elif authentication.method == "token" and not _inline(text).strip():
        raise UsageError(f"{where}: the token is missing; write token:..., file:PATH or env:NAME")
    if (
        authentication.method != "tls"
        and not is_reference(secret)
        and not _REDACTED.search(stripped)
    ):
        raise UsageError(
            f"{where}: Spark would show this secret in its plans; write secret: before it"
        )
    return Authentication(authentication.method, text, authentication.is_oauth2)


def hint(authentication: Authentication, sent: str, now_s: float) -> str:
    """Return the likely reason why a broker refused the credentials that were sent, as the end of a
    sentence.
    """
    if authentication == NO_AUTHENTICATION:
        return "; no authentication is configured; set one, in a configuration file by [auth]"
    if authentication.method != "token":
        return "; check the credentials"
    until_s = _expires_s(sent)
    if until_s is not None and until_s <= now_s:
        moment = datetime.fromtimestamp(until_s, tz=timezone.utc)
        return f"; the token expired at {moment.isoformat().replace('+00:00', 'Z')}; get a new one"
    return "; check the token, and that it is signed with a key that this broker knows"


def _expires_s(token: str) -> float | None:
    """Return the expiry time in a JSON Web Token; None if there is none."""
    try:
        claims = token.split(".")[1]
        until_s = float(
            json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"]
        )
    except (IndexError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    return until_s if 0 <= until_s <= _LAST_S else None


def tls_files(parameters: str) -> tuple[str | None, str | None]:
    """Return certificate and key of ``tlsCertFile:PATH,tlsKeyFile:PATH``; None if the parameters
    are of another plugin.
    """
    paths = dict(part.split(":", 1) for part in parameters.split(",") if ":" in part)
    return paths.get("tlsCertFile"), paths.get("tlsKeyFile")


def _inline(text: str) -> str:
    return text.removeprefix("token:")


def _basic(text: str, where: str) -> str:
    if text.startswith("{"):
        fields = _json(text, where)
        text = f"{fields.get('userId', '')}:{fields.get('password', '')}"
    if not is_reference(text) and not text.partition(":")[2].strip():
        raise UsageError(f"{where}: write user:password, or file:PATH or env:NAME of that")
    return text


def _with_password(parameters: str) -> str:
    """Return user and password; both may be a reference, or the password alone."""
    if is_reference(parameters):
        return resolve_secret(parameters)
    user, _, password = parameters.partition(":")
    return f"{user}:{resolve_secret(password, 'the password')}"


def _oauth2_parameters(text: str, where: str = "the OAuth2 parameters") -> dict[str, Any]:
    parameters = _json(text, where)
    if not parameters.get("issuerUrl") or not (
        parameters.get("privateKey")
        or (parameters.get("client_id") and parameters.get("client_secret"))
    ):
        raise UsageError(
            f"{where}: OAuth2 needs issuerUrl, and privateKey or client_id with client_secret, as "
            "JSON"
        )
    if "@" in str(parameters["issuerUrl"]):
        raise UsageError(f"{where}: issuerUrl holds no user and no password")
    try:
        bounded_http.check_url(str(parameters["issuerUrl"]))
    except bounded_http.UnsafeUrlError:
        raise UsageError(
            f"{where}: issuerUrl does not begin with https://, and the client's secret would be "
            "sent in plain text"
        ) from None
    return parameters


def _json(text: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{where}: the parameters are no JSON object")
    return value


@dataclass
class _AccessToken:
    """The token of a client at its issuer, and when the issuer may be asked again, by the monotonic
    clock.
    """

    token: str = ""
    since_s: float = 0.0
    until_s: float = 0.0
    ask_from_s: float = 0.0
    failure: str = ""


@cache
def _cached_token(_parameters: str) -> _AccessToken:
    return _AccessToken()


def _access_token(parameters: str) -> str:
    token = _cached_token(parameters)
    now_s = time.monotonic()
    if now_s < token.until_s:
        return token.token
    if now_s < token.ask_from_s:
        raise TransportError(token.failure)
    try:
        answer = _client_credentials(_oauth2_parameters(parameters))
    except _IssuerBusyError as error:
        token.ask_from_s, token.failure = now_s + error.pause_s, error.message
        raise TransportError(error.message) from None
    token.token, token.since_s = answer["access_token"], now_s
    token.until_s = now_s + _lifetime_s(answer.get("expires_in")) - _SPARE_S
    return token.token


def _lifetime_s(expires_in: object) -> float:
    """Return how long a token is valid by its issuer's answer, at most a day; 0 if the answer has
    no valid time.
    """
    try:
        lifetime_s = float(str(expires_in))
    except ValueError:
        return 0.0
    return (
        min(lifetime_s, _LIFETIME_MOST_S) if math.isfinite(lifetime_s) and lifetime_s > 0 else 0.0
    )


def _client_credentials(parameters: dict[str, Any]) -> dict[str, Any]:
    issuer = str(parameters["issuerUrl"]).rstrip("/")
    credentials = (
        _credentials(str(parameters["privateKey"])) if parameters.get("privateKey") else parameters
    )
    form = {
        "grant_type": "client_credentials",
        "client_id": str(credentials.get("client_id", "")),
        "client_secret": resolve_secret(
            _inline(str(credentials.get("client_secret", ""))), "the OAuth2 client_secret"
        ),
        **{name: str(parameters[name]) for name in ("audience", "scope") if parameters.get(name)},
    }
    endpoint = _fetch(f"{issuer}{_DISCOVERY}", None, issuer).get("token_endpoint")
    answer = _fetch(str(endpoint), urllib.parse.urlencode(form).encode(), issuer)
    access_token = answer.get("access_token")
    if not isinstance(access_token, str) or not _ACCESS_TOKEN.fullmatch(access_token):
        raise SetupError(
            f"the OAuth2 issuer {issuer} gave no access token; check client id, secret and audience"
        )
    return answer


def _credentials(private_key: str) -> dict[str, Any]:
    """Return the JSON of a key file, which is given as ``file:PATH``, ``env:NAME``,
    ``data:application/json;base64,...``, a path, or the JSON itself.
    """
    if private_key.startswith("data:"):
        text = _base64_text(private_key.partition(",")[2])
    elif private_key.lstrip().startswith("{") or is_reference(private_key):
        text = resolve_secret(_inline(private_key))
    elif os.path.isfile(private_key):
        text = read_text(f"file:{quote(private_key)}")
    else:
        # The value may be the key itself in a wrong format, so the error does not show it.
        raise SetupError(
            "the OAuth2 privateKey is no path of a file that is there; give file:PATH, env:NAME, "
            "or the JSON of the key file"
        )
    return _json(text, "the OAuth2 privateKey")


def _base64_text(encoded: str) -> str:
    try:
        return base64.b64decode(encoded).decode()
    except ValueError:
        raise UsageError("the OAuth2 privateKey is no base64 of a text") from None


def _fetch(url: str, form: bytes | None, issuer: str) -> dict[str, Any]:
    try:
        answer = json.loads(bounded_http.fetch(url, form, _TIMEOUT_S, _ANSWER_MOST_BYTES))
    except bounded_http.UnsafeUrlError as error:
        raise SetupError(
            f"the OAuth2 issuer {issuer} named an address to which no secret is sent, as {error}; "
            f"correct token_endpoint in the issuer's {_DISCOVERY}, or its redirects"
        ) from None
    except bounded_http.StatusError as error:
        if error.status in _BUSY_STATUS or error.status >= 500:
            raise _IssuerBusyError(
                f"the OAuth2 issuer {issuer} is not available now, status {error.status}; check "
                "it if that lasts",
                pause_s=_pause_s(error.retry_after),
            ) from None
        raise SetupError(
            f"the OAuth2 issuer {issuer} refused us with status {error.status}; check client id, "
            "secret and audience"
        ) from None
    except OSError as error:
        raise TransportError(f"the OAuth2 issuer {issuer} cannot be reached ({error})") from None
    except (ValueError, RecursionError):
        raise TransportError(
            f"the OAuth2 issuer {issuer} did not answer with JSON; check issuerUrl"
        ) from None
    return answer if isinstance(answer, dict) else {}


def _pause_s(retry_after: str) -> float:
    """Return how long to wait before the issuer is asked again, by its header: seconds or a date;
    at most a minute.
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
    """The issuer is busy or down; ``pause_s`` is the wait that it asks for."""

    pause_s: float
