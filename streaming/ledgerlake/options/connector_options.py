"""The options of the JVM connectors for Spark (StreamNative's and Databricks') that have no
counterpart here.

An option that means the same under another name is declared with the option (``same_as``).
``docs/compatibility.md`` goes through them one by one.
"""

from __future__ import annotations

from ledgerlake.errors import UsageError

# They tune the Java client, which is not used here. The admin address is not needed for anything.
WITHOUT_EFFECT = frozenset(
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
PREFIX_WITHOUT_EFFECT = "pulsar.admin."

# Options without a counterpart, and the advice for each.
INSTEAD = {
    "subscriptionPrefix": "nothing is left on the broker unless 'subscription' names a durable "
    "cursor",
    "pulsar.client.serviceUrl": "write 'service.url'",
    "pulsar.client.authParamMap": "write 'pulsar.client.authParams'",
    "pulsar.client.tlsTrustStorePath": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsTrustStoreType": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsTrustStorePassword": "write PEM files: 'pulsar.client.tlsTrustCertsFilePath'",
    "pulsar.client.tlsKeyStorePath": "write PEM files: 'pulsar.client.tlsCertificateFilePath' and "
    "'pulsar.client.tlsKeyFilePath'",
    "pulsar.client.socks5ProxyAddress": "Pulsar's own proxy works: name it in 'service.url'",
    "pulsar.reader.startMessageId": "write 'startingOffsets'",
    "maxEntriesPerTrigger": "write 'maxRowsPerTrigger' or 'maxBytesPerTrigger'",
    "maxOffsetsPerTrigger": "write 'maxRowsPerTrigger'",
    "minOffsetsPerTrigger": "write 'minRowsPerTrigger'",
}
INSTEAD_OF_PREFIX = {
    "pulsar.failover.": "name several brokers in 'service.url'",
    "pulsar.producer.": "it is for writing",
    "kafka.": "this is no Kafka source: write 'service.url' and 'topic'",
}


def is_ours(name: str) -> bool:
    """Return whether an option means something here; one that only sets up the JVM connectors'
    machinery does not.

    Raises:
        UsageError: the option is theirs, and there is none like it; the message names the nearest
            one of ours.
    """
    word = name.lower()
    if word in WITHOUT_EFFECT or word.startswith(PREFIX_WITHOUT_EFFECT):
        return False
    # Spark hands over names in lower case.
    for option, advice in INSTEAD.items():
        if word == option.lower():
            raise UsageError(f"the source has no option '{option}': {advice}")
    for prefix, advice in INSTEAD_OF_PREFIX.items():
        if word.startswith(prefix):
            raise UsageError(f"the source has no option '{name}': {advice}")
    return True
