"""Commands as bytes: each function returns one frame, ready to send.

Field numbers and defaults are the protocol's. If a default would change the broker, the safe value
is sent: no lookup and no subscription creates a topic.
"""

from __future__ import annotations

from ledgerlake.pb import pulsar_pb2 as pb
from ledgerlake.wire.framing import encode_frame

# From v18 on brokers send broker entry metadata to clients; v21 is the version of the newest
# releases.
PROTOCOL_VERSION = 21

# The version that PIP-429 proposed: from here on a broker sends the last compacted entry itself. No
# release has this number. The version of a peer decides nothing here, and brokers treat a number
# above their own as their own.
LAST_ENTRY_PROTOCOL_VERSION = 22

_Type = pb.BaseCommand


def encode(command: pb.BaseCommand, payload: bytes = b"") -> bytes:
    return encode_frame(command.SerializeToString(), payload)


def connect(
    client_version: str,
    auth_method: str = "none",
    auth_data: bytes | None = None,
    proxy_to_broker_url: str | None = None,
    protocol_version: int = PROTOCOL_VERSION,
) -> bytes:
    """Return CONNECT, which asks for broker entry metadata and announces support of auth
    challenges.
    """
    flags = pb.FeatureFlags(
        supports_auth_refresh=True,
        supports_broker_entry_metadata=True,
        supports_topic_watchers=True,
        supports_get_partitioned_metadata_without_auto_creation=True,
    )
    body = pb.CommandConnect(
        client_version=client_version,
        auth_method_name=auth_method,
        auth_data=auth_data,
        protocol_version=protocol_version,
        proxy_to_broker_url=proxy_to_broker_url,
        feature_flags=flags,
    )
    return encode(pb.BaseCommand(type=_Type.CONNECT, connect=body))


def connected(
    server_version: str,
    max_message_size: int | None = None,
    protocol_version: int = PROTOCOL_VERSION,
    watches_topics: bool = False,
) -> bytes:
    body = pb.CommandConnected(
        server_version=server_version,
        protocol_version=protocol_version,
        max_message_size=max_message_size,
        feature_flags=pb.FeatureFlags(
            supports_topic_watchers=watches_topics,
            supports_get_partitioned_metadata_without_auto_creation=True,
        ),
    )
    return encode(pb.BaseCommand(type=_Type.CONNECTED, connected=body))


def partition_metadata(topic: str, request_id: int, creates: bool = False) -> bytes:
    body = pb.CommandPartitionedTopicMetadata(
        topic=topic, request_id=request_id, metadata_auto_creation_enabled=creates
    )
    return encode(pb.BaseCommand(type=_Type.PARTITIONED_METADATA, partition_metadata=body))


def topics_of_namespace(namespace: str, request_id: int) -> bytes:
    """Return GET_TOPICS_OF_NAMESPACE for the persistent topics."""
    mode = pb.CommandGetTopicsOfNamespace.PERSISTENT
    body = pb.CommandGetTopicsOfNamespace(request_id=request_id, namespace=namespace, mode=mode)
    return encode(pb.BaseCommand(type=_Type.GET_TOPICS_OF_NAMESPACE, get_topics_of_namespace=body))


def watch_topics(watcher_id: int, namespace: str, pattern: str, request_id: int) -> bytes:
    """Return WATCH_TOPIC_LIST: the broker tells which matching topics come and go."""
    body = pb.CommandWatchTopicList(
        request_id=request_id, watcher_id=watcher_id, namespace=namespace, topics_pattern=pattern
    )
    return encode(pb.BaseCommand(type=_Type.WATCH_TOPIC_LIST, watch_topic_list=body))


def get_schema(topic: str, version: bytes | None, request_id: int) -> bytes:
    """Return GET_SCHEMA for one version of a topic's schema; for the newest if none is given."""
    body = pb.CommandGetSchema(request_id=request_id, topic=topic, schema_version=version)
    return encode(pb.BaseCommand(type=_Type.GET_SCHEMA, get_schema=body))


def auth_response(client_version: str, auth_method: str, auth_data: bytes | None) -> bytes:
    """Return the answer to AUTH_CHALLENGE: credentials that are valid now."""
    body = pb.CommandAuthResponse(
        client_version=client_version,
        response=pb.AuthData(auth_method_name=auth_method, auth_data=auth_data),
        protocol_version=PROTOCOL_VERSION,
    )
    return encode(pb.BaseCommand(type=_Type.AUTH_RESPONSE, auth_response=body))


def lookup(
    topic: str, request_id: int, authoritative: bool = False, listener_name: str | None = None
) -> bytes:
    body = pb.CommandLookupTopic(
        topic=topic,
        request_id=request_id,
        authoritative=authoritative,
        advertised_listener_name=listener_name,
    )
    return encode(pb.BaseCommand(type=_Type.LOOKUP, lookup_topic=body))


def subscribe_reader(
    topic: str,
    subscription: str,
    consumer_id: int,
    request_id: int,
    start: pb.MessageIdData,
    read_compacted: bool,
) -> bytes:
    """Return SUBSCRIBE for a non-durable exclusive subscription. The broker delivers the entries
    after the one before ``start``.
    """
    body = pb.CommandSubscribe(
        topic=topic,
        subscription=subscription,
        sub_type=pb.CommandSubscribe.Exclusive,
        consumer_id=consumer_id,
        request_id=request_id,
        durable=False,
        start_message_id=start,
        read_compacted=read_compacted,
        force_topic_creation=False,
    )
    return encode(pb.BaseCommand(type=_Type.SUBSCRIBE, subscribe=body))


def subscribe_durable(
    topic: str, subscription: str, consumer_id: int, request_id: int, from_earliest: bool
) -> bytes:
    """Return SUBSCRIBE for a durable exclusive subscription. A new one begins at the topic's first
    message or after its last.
    """
    initial = pb.CommandSubscribe.Earliest if from_earliest else pb.CommandSubscribe.Latest
    body = pb.CommandSubscribe(
        topic=topic,
        subscription=subscription,
        sub_type=pb.CommandSubscribe.Exclusive,
        consumer_id=consumer_id,
        request_id=request_id,
        durable=True,
        initial_position=initial,
        force_topic_creation=False,
    )
    return encode(pb.BaseCommand(type=_Type.SUBSCRIBE, subscribe=body))


def flow(consumer_id: int, message_permits: int) -> bytes:
    body = pb.CommandFlow(consumer_id=consumer_id, message_permits=message_permits)
    return encode(pb.BaseCommand(type=_Type.FLOW, flow=body))


def acknowledge_cumulative(
    consumer_id: int, request_id: int, message_id: pb.MessageIdData
) -> bytes:
    body = pb.CommandAck(
        consumer_id=consumer_id,
        ack_type=pb.CommandAck.Cumulative,
        message_id=[message_id],
        request_id=request_id,
    )
    return encode(pb.BaseCommand(type=_Type.ACK, ack=body))


def unsubscribe(consumer_id: int, request_id: int) -> bytes:
    body = pb.CommandUnsubscribe(consumer_id=consumer_id, request_id=request_id)
    return encode(pb.BaseCommand(type=_Type.UNSUBSCRIBE, unsubscribe=body))


def close_consumer(consumer_id: int, request_id: int) -> bytes:
    body = pb.CommandCloseConsumer(consumer_id=consumer_id, request_id=request_id)
    return encode(pb.BaseCommand(type=_Type.CLOSE_CONSUMER, close_consumer=body))


def get_last_message_id(consumer_id: int, request_id: int) -> bytes:
    body = pb.CommandGetLastMessageId(consumer_id=consumer_id, request_id=request_id)
    return encode(pb.BaseCommand(type=_Type.GET_LAST_MESSAGE_ID, get_last_message_id=body))


def consumer_stats(consumer_id: int, request_id: int) -> bytes:
    body = pb.CommandConsumerStats(consumer_id=consumer_id, request_id=request_id)
    return encode(pb.BaseCommand(type=_Type.CONSUMER_STATS, consumer_stats=body))


def ping() -> bytes:
    return encode(pb.BaseCommand(type=_Type.PING, ping=pb.CommandPing()))


def pong() -> bytes:
    return encode(pb.BaseCommand(type=_Type.PONG, pong=pb.CommandPong()))


def message(consumer_id: int, ledger_id: int, entry_id: int, entry: bytes) -> bytes:
    """Return MESSAGE as a broker sends it: the command, followed by the stored entry, unchanged."""
    body = pb.CommandMessage(
        consumer_id=consumer_id, message_id=pb.MessageIdData(ledger_id=ledger_id, entry_id=entry_id)
    )
    return encode(pb.BaseCommand(type=_Type.MESSAGE, message=body), entry)


def success(request_id: int) -> bytes:
    return encode(
        pb.BaseCommand(type=_Type.SUCCESS, success=pb.CommandSuccess(request_id=request_id))
    )


def error(request_id: int, code: pb.ServerError, text: str) -> bytes:
    body = pb.CommandError(request_id=request_id, error=code, message=text)
    return encode(pb.BaseCommand(type=_Type.ERROR, error=body))


def producer(topic: str, producer_id: int, request_id: int, name: str | None) -> bytes:
    body = pb.CommandProducer(
        topic=topic,
        producer_id=producer_id,
        request_id=request_id,
        producer_name=name,
        user_provided_producer_name=name is not None,
    )
    return encode(pb.BaseCommand(type=_Type.PRODUCER, producer=body))


def send(
    producer_id: int,
    sequence_id: int,
    message_count: int,
    entry: bytes,
    highest_sequence_id: int | None = None,
    is_chunk: bool = False,
) -> bytes:
    """Return SEND with an encoded entry (see ``entry.encode_entry``); ``highest_sequence_id`` is
    the sequence id of a batch's last message.
    """
    body = pb.CommandSend(
        producer_id=producer_id,
        sequence_id=sequence_id,
        num_messages=message_count,
        highest_sequence_id=highest_sequence_id,
        is_chunk=is_chunk,
    )
    return encode(pb.BaseCommand(type=_Type.SEND, send=body), entry)


def close_producer(producer_id: int, request_id: int) -> bytes:
    body = pb.CommandCloseProducer(producer_id=producer_id, request_id=request_id)
    return encode(pb.BaseCommand(type=_Type.CLOSE_PRODUCER, close_producer=body))
