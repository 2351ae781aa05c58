"""Whether the stream of a configuration reads what a command sends, and lets it wait.

A command that names a configuration says what its stream will do. So it asks here before it sends:
a message that has no effect there is an error, and nothing is sent.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ledgerlake.client.topics import join_partition
from ledgerlake.errors import UsageError
from ledgerlake.options.bounds import AtTime
from ledgerlake.schedules.repetition import parse_repetition, rate_of
from ledgerlake.schedules.schedules import is_hit
from ledgerlake.stored.offsets import time_text
from ledgerlake.wire.entry import peek_metadata
from ledgerlake.wire.schedules import properties_of

if TYPE_CHECKING:
    from ledgerlake.decode.messages import TopicPartition
    from ledgerlake.options.config import Config


def check_reads(config: Config, topic_partition: str) -> None:
    """Check that the stream reads a message that is sent to a topic partition now.

    Raises:
        UsageError: it does not; the error names the key.
    """
    if not config.source.topics.includes(topic_partition):
        raise UsageError(
            f"the configuration does not read the topic {topic_partition}; add it to [source] "
            "topics first"
        )
    end = config.source.ending_of(topic_partition)
    # Whether an id or an index is still to come, only the broker could tell.
    is_later = isinstance(end, AtTime) and end.time_ms > time.time() * 1000
    if end != "latest" and not is_later:
        raise UsageError(
            f"[source] ending is {config.source.ending_offsets}, so the stream reads nothing that "
            "is sent now; leave it out first"
        )


def check_delays(config: Config) -> None:
    """Check that the stream lets a message wait that is sent as it waits in the checkpoint.

    Raises:
        UsageError: it does not; the error names the key.
    """
    if config.source.message_payload_processor is not None:
        raise UsageError(
            "the checkpoint has what [source] message_payload_processor made of the message, "
            "decrypted, which does not belong on the topic; send the message anew under its id"
        )
    if not config.delay.enabled:
        raise UsageError(
            "with [delay] enabled = false the message would be delivered at once; what waits stays "
            "as it is; set enabled = true first"
        )


def check_moves(config: Config, source: TopicPartition, entry: bytes, due_ms: int) -> None:
    """Check that the stream reads an entry if it is sent to a topic partition, lets it wait, and
    delivers it in place of the one that waits. If that one repeats, it ends, whatever is due.

    Args:
        due_ms: when the one that waits is due.

    Raises:
        UsageError: it does not; the error names the key or the time.
    """
    check_delays(config)
    check_reads(config, join_partition(source.topic, source.partition))
    metadata = peek_metadata(memoryview(entry))
    rule = parse_repetition(properties_of(metadata))
    if rule is None and not is_hit(due_ms, int(time.time() * 1000)):
        raise UsageError(
            f"the message was due at {time_text(due_ms)}, so nothing that is sent now replaces it, "
            "and the stream delivers it when it goes on, or rejects it if it has expired; "
            "ledgerlake schedule sends another one"
        )
    if rule is None:
        return
    rate = rate_of(rule, max(len(entry), metadata.uncompressed_size))
    if not config.delay.of_messages.repetition_limit.allows(rate):
        raise UsageError(
            "the message repeats more often, or with more bytes, than [delay] "
            "max_repetitions_per_second and max_repeated_bytes_per_second allow, so the stream "
            "would refuse it; raise them first"
        )
