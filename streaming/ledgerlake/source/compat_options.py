"""The options of the JVM connectors for Spark (StreamNative's and Databricks'): which mean what here.

Option by option, with what differs: ``docs/compatibility.md``.
"""

from __future__ import annotations

from ledgerlake.errors import UsageError

# Theirs -> ours, where the values mean the same.
_SAME = {
    "predefinedsubscription": "subscription",
    "pulsar.reader.readcompacted": "readCompacted",
}

_CRYPTO_ACTIONS = {"fail": "fail", "discard": "reject", "consume": "pass"}

# What is there to set up their machinery; here it changes nothing. The admin address is not needed for anything.
_WITHOUT_EFFECT = frozenset(
    {
        "admin.url",
        "pulsar.client.usetls",
        "pulsar.client.usekeystoretls",
        "pulsar.client.memorylimitbytes",
        "pulsar.client.numiothreads",
        "pulsar.client.numlistenerthreads",
        "pulsar.client.connectionsperbroker",
        "pulsar.client.usetcpnodelay",
        "pulsar.client.statsintervalseconds",
        "pulsar.client.keepaliveintervalseconds",
        "pulsar.client.concurrentlookuprequest",
        "pulsar.client.maxlookuprequest",
        "pulsar.client.maxlookupredirects",
        "pulsar.client.enabletransaction",
        "pulsar.client.enablebusywait",
        "pulsar.reader.receiverqueuesize",
        "pulsar.reader.readername",
        "pulsar.reader.subscriptionname",
        "pulsar.reader.subscriptionroleprefix",
        "pulsar.reader.poolmessages",
    }
)
_PREFIX_WITHOUT_EFFECT = "pulsar.admin."

# What we do not have, and what is nearest to it.
_INSTEAD = {
    "subscriptionprefix": "nothing is left on the broker unless 'subscription' names a durable cursor",
    "pulsar.client.serviceurl": "write 'service.url'",
    "pulsar.client.authparammap": "write 'pulsar.client.authParams'",
    "pulsar.client.tlstruststorepath": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlstruststoretype": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlstruststorepassword": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlskeystorepath": "write PEM files: 'pulsar.client.tlsCertificateFilePath' and 'pulsar.client.tlsKeyFilePath'",
    "pulsar.client.socks5proxyaddress": "Pulsar's own proxy works: name it in 'service.url'",
    "pulsar.reader.startmessageid": "write 'startingOffsets'",
    "maxentriespertrigger": "write 'maxRowsPerTrigger' or 'maxBytesPerTrigger'",
    "maxoffsetspertrigger": "write 'maxRowsPerTrigger'",
    "minoffsetspertrigger": "write 'minRowsPerTrigger'",
}
_INSTEAD_OF_PREFIX = {
    "pulsar.failover.": "name several brokers in 'service.url'",
    "pulsar.producer.": "it is for writing",
    "kafka.": "this is no Kafka source: write 'service.url' and 'topic'",
}


def translated(name: str, value: str) -> tuple[str, str] | None:
    """An option of theirs as ours; None for one without effect here, and as it is where it is not one of theirs.

    Raises:
        UsageError: we have none like it; says what is nearest.
    """
    word = name.lower()
    if word in _WITHOUT_EFFECT or word.startswith(_PREFIX_WITHOUT_EFFECT):
        return None
    if word == "pulsar.reader.cryptofailureaction":
        return "cryptoFailureAction", _CRYPTO_ACTIONS.get(value.strip().lower(), value)
    if word in _SAME:
        return _SAME[word], value
    advice = _INSTEAD.get(word) or next(
        (text for prefix, text in _INSTEAD_OF_PREFIX.items() if word.startswith(prefix)), None
    )
    if advice is not None:
        raise UsageError(f"the source has no option '{name}': {advice}")
    return name, value
