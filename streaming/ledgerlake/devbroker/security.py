"""Certificates and tokens for an embedded broker that asks who everybody is: for development and
tests alone.

Files of the folder ``security`` in a broker's data folder:

    ca.pem                       the authority that signed the others
    broker.pem broker.key.pem    the broker's, for localhost and 127.0.0.1
    client.pem client.key.pem    a client's, whose common name is its role
    token.secret                 what tokens are signed with (HS256)
    admin.token                  the token of the role that may do everything

No other user can read them, from their first byte on. Files that another user has made, or may
change, are not used.
"""

from __future__ import annotations

import datetime
import ipaddress
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import NameOID

from ledgerlake.errors import SetupError
from ledgerlake.runtime.private_files import is_trusted, only_owner_reads

if TYPE_CHECKING:
    from pathlib import Path

ADMIN_ROLE = "admin"

_DAYS = 3650


@dataclass(frozen=True)
class Security:
    """The folder of one broker's certificates and tokens."""

    folder: Path

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.pem")

    @property
    def admin_token(self) -> str:
        return (self.folder / "admin.token").read_text()

    def token(self, role: str, valid_s: float | None = None) -> str:
        """A token of a role; ``valid_s`` below 0 makes one that has expired.

        Raises:
            SetupError: PyJWT is not installed.
        """
        try:
            import jwt
        except ImportError:
            raise SetupError(
                "PyJWT is missing; install it with: pip install 'ledgerlake[demo]'"
            ) from None
        claims: dict[str, object] = {"sub": role}
        if valid_s is not None:
            claims["exp"] = int(time.time() + valid_s)
        return jwt.encode(claims, (self.folder / "token.secret").read_bytes(), algorithm="HS256")

    def settings(self, port_tls: int, web_port_tls: int) -> dict[str, str]:
        """Lines of the broker's configuration that switch TLS, authentication and
        authorization on.
        """
        return {
            "brokerServicePortTls": str(port_tls),
            "webServicePortTls": str(web_port_tls),
            "tlsCertificateFilePath": str(self.folder / "broker.pem"),
            "tlsKeyFilePath": str(self.folder / "broker.key.pem"),
            "tlsTrustCertsFilePath": self.ca_file,
            "authenticationEnabled": "true",
            "authorizationEnabled": "true",
            "authenticationProviders": "org.apache.pulsar.broker.authentication.AuthenticationProviderToken,"
            "org.apache.pulsar.broker.authentication.AuthenticationProviderTls",
            "tokenSecretKey": f"file://{self.folder / 'token.secret'}",
            "superUserRoles": ADMIN_ROLE,
            "brokerClientAuthenticationPlugin": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "brokerClientAuthenticationParameters": f"file://{self.folder / 'admin.token'}",
        }


def make_security(folder: Path) -> Security:
    """Make certificates and tokens in a folder, or return those that are there.

    Raises:
        OSError: it cannot be written.
        SetupError: PyJWT is not installed, or other users can write to the files.
    """
    security = Security(folder)
    for path in (folder, *folder.glob("*")):
        if path.exists() and not is_trusted(path):
            raise SetupError(
                f"other users of this machine can write to {path}, which the broker would trust; "
                f"remove {folder}, and it is made again, or choose another --data-dir"
            )
    if (folder / "admin.token").exists():
        return security
    with only_owner_reads():
        _make(security)
    return security


def _make(security: Security) -> None:
    folder = security.folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token.secret").write_bytes(secrets.token_bytes(32))
    ca_key, ca_name = _key(), _name("ledgerlake development authority")
    ca = _signed(ca_name, ca_key, ca_name, ca_key, is_authority=True)
    (folder / "ca.pem").write_bytes(_pem(ca))
    for file, common_name in (("broker", "localhost"), ("client", ADMIN_ROLE)):
        key = _key()
        (folder / f"{file}.pem").write_bytes(
            _pem(_signed(_name(common_name), key, ca_name, ca_key))
        )
        (folder / f"{file}.key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    (folder / "admin.token").write_text(security.token(ADMIN_ROLE))


def _key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _signed(
    subject: x509.Name,
    key: rsa.RSAPrivateKey,
    issuer: x509.Name,
    issuer_key: rsa.RSAPrivateKey,
    *,
    is_authority: bool = False,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.timezone.utc)
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()),
            critical=False,
        )
        .sign(issuer_key, hashes.SHA256())
    )
