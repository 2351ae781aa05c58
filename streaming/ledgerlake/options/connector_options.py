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
    "subscriptionPrefix": "nothing is left on the broker unless 'subscription' names a durable cursor",
    "pulsar.client.serviceUrl": "write 'service.url'",
    "pulsar.client.authParamMap": "write 'pulsar.client.authParams'",
    "pulsar.client.tlsTrustStorePath": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsTrustStoreType": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsTrustStorePassword": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsKeyStorePath": "write PEM files: 'pulsar.client.tlsCertificateFilePath' and 'pulsar.client.tlsKeyFilePath'",
    "pulsar.client.socks5ProxyAddress": "Pulsar's own proxy works: name it in 'service.url'",
    "pulsar.reader.startMessageId": "write 'startingOffsets'",
    "maxEntriesPerTrigger": "write 'maxRowsPerTrigger' or 'maxBytesPerTrigger'",
    "maxOffsetsPerTrigger": "write 'maxRowsPerTrigger'",
    "minOffsetsPerTrigger": "write 'minRowsPerTrigger'",
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
    # Spark hands over names in lower case.
    for known, advice in _INSTEAD.items():
        if word == known.lower():
            raise UsageError(f"the source has no option '{known}': {advice}")
    for prefix, advice in _INSTEAD_OF_PREFIX.items():
        if word.startswith(prefix):
            raise UsageError(f"the source has no option '{name}': {advice}")
    return name, value
