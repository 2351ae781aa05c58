"""The options that say how to reach a cluster; the source and the sink have them both."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from functools import cached_property

from ledgerlake.client.auth import parse_authentication, tls_files
from ledgerlake.client.cluster import ClientSettings
from ledgerlake.client.transport import TlsSettings, parse_service_url
from ledgerlake.errors import UsageError
from ledgerlake.options.declared import option
from ledgerlake.options.kinds import FLAG, MILLISECONDS, PATH, TEXT, URL, choice


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """The options of the connection to a cluster.

    Raises:
        UsageError: values that cannot be, or that exclude each other; the message names the
            options.
    """

    service_url: str = option(
        URL,
        MISSING,
        "`pulsar://host:6650`, or `pulsar+ssl://host:6651` for TLS. Several hosts are separated by "
        "commas.",
        spark="service.url",
        toml="source.service_url",
    )
    auth_plugin: str | None = option(
        TEXT,
        None,
        "`token`, `oauth2`, `basic` or `tls`, or the Java class of that name.",
        spark="pulsar.client.authPluginClassName",
    )
    auth_params: str | None = option(
        TEXT,
        None,
        "The plugin's parameters: `file:PATH`, `env:NAME`, or a secret behind `token:` or "
        "`secret:`. OAuth2 and TLS take the same texts as the Java client.",
        spark="pulsar.client.authParams",
        is_secret=True,
    )
    tls_ca_file: str | None = option(
        PATH,
        None,
        "A PEM file with the authorities that are trusted.",
        spark="pulsar.client.tlsTrustCertsFilePath",
        toml="tls.ca_file",
        shown_default="the machine's",
    )
    tls_cert_file: str | None = option(
        PATH,
        None,
        "A PEM file with the client's own certificate.",
        spark="pulsar.client.tlsCertificateFilePath",
        toml="tls.cert_file",
    )
    tls_key_file: str | None = option(
        PATH,
        None,
        "A PEM file with the private key of that certificate, without a pass phrase.",
        spark="pulsar.client.tlsKeyFilePath",
        toml="tls.key_file",
    )
    tls_checks_hostname: bool = option(
        FLAG,
        True,
        "Check that the broker's certificate is for the host.",
        spark="pulsar.client.tlsHostnameVerificationEnable",
        toml="tls.checks_hostname",
    )
    tls_allows_insecure: bool = option(
        FLAG, False, "Accept any certificate.", spark="pulsar.client.tlsAllowInsecureConnection"
    )
    proxy_url: str | None = option(
        URL,
        None,
        "A proxy that routes by the host name in TLS (SNI): `pulsar+ssl://host:port`.",
        spark="pulsar.client.proxyServiceUrl",
        toml="tls.proxy_url",
    )
    proxy_protocol: str = option(
        choice("SNI"), "SNI", "The protocol of that proxy.", spark="pulsar.client.proxyProtocol"
    )
    listener_name: str | None = option(
        TEXT,
        None,
        "The advertised listener of the broker whose addresses are used.",
        spark="pulsar.client.listenerName",
        shown_default="the internal one",
    )
    operation_timeout_ms: int = option(
        MILLISECONDS,
        30_000,
        "How long to wait for an answer.",
        spark="pulsar.client.operationTimeoutMs",
    )
    connection_timeout_ms: int = option(
        MILLISECONDS,
        10_000,
        "How long to wait for a connection.",
        spark="pulsar.client.connectionTimeoutMs",
    )
    retry_timeout_ms: int = option(
        MILLISECONDS,
        120_000,
        "How long to try again after a connection breaks.",
        spark="retryTimeoutMs",
        toml="source.retry_timeout_s",
    )

    def __post_init__(self) -> None:
        self.connection  # noqa: B018 - what cannot be is refused at once

    @cached_property
    def connection(self) -> ClientSettings:
        """Return the client's settings by these options."""
        parse_service_url(self.service_url)
        return ClientSettings(
            self.service_url,
            connect_timeout_s=self.connection_timeout_ms / 1000,
            request_timeout_s=self.operation_timeout_ms / 1000,
            give_up_after_s=self.retry_timeout_ms / 1000,
            authentication=parse_authentication(
                self.auth_plugin, self.auth_params, "the option 'pulsar.client.authParams'"
            ),
            tls=self._tls(),
            listener_name=self.listener_name,
        )

    def _tls(self) -> TlsSettings:
        cert_file, key_file = tls_files(self.auth_params or "")
        cert_file, key_file = self.tls_cert_file or cert_file, self.tls_key_file or key_file
        if (cert_file is None) != (key_file is None):
            raise UsageError("a client certificate needs both its file and its key's")
        is_tls = parse_service_url(self.service_url)[0].is_tls
        if (self.tls_ca_file or cert_file) and not is_tls:
            raise UsageError(
                "a file of certificates is given, and 'service.url' is not pulsar+ssl://, so "
                "nothing would be encrypted; write "
                "pulsar+ssl:// with the port of TLS, or leave the files out"
            )
        self._check_proxy(is_tls)
        return TlsSettings(
            self.tls_ca_file,
            cert_file,
            key_file,
            checks_hostname=self.tls_checks_hostname,
            allows_insecure=self.tls_allows_insecure,
            proxy_url=self.proxy_url,
        )

    def _check_proxy(self, is_tls: bool) -> None:
        url = self.proxy_url
        if url is None:
            return
        if not (len(parse_service_url(url)) == 1 and url.startswith("pulsar+ssl://")):
            raise UsageError(
                "the option 'pulsar.client.proxyServiceUrl' is one address, pulsar+ssl://host:port"
            )
        if not is_tls:
            raise UsageError("an SNI proxy needs a 'service.url' with pulsar+ssl://")
