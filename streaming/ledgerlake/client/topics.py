"""Topic names: short forms made whole, partitions named and told apart.

``orders`` means ``persistent://public/default/orders``; partition N of a partitioned topic is ``<topic>-partition-N``.
"""

from __future__ import annotations

import re

from ledgerlake.errors import UsageError

_FULL = re.compile(r"(persistent|non-persistent)://([^/\s]+)/([^/\s]+)/(\S+)")
_PARTITION = re.compile(r"(.+)-partition-(\d{1,6})")


def full_name(topic: str) -> str:
    """The whole name of a topic given in any accepted form.

    Raises:
        UsageError: it is no topic name.
    """
    name = topic.strip()
    if "://" not in name:
        parts = name.split("/")
        if len(parts) == 1:
            name = f"persistent://public/default/{name}"
        elif len(parts) == 3:
            name = f"persistent://{name}"
    if not _FULL.fullmatch(name):
        raise UsageError(
            f"'{topic}' is not a topic name; write orders, tenant/namespace/orders or persistent://tenant/namespace/orders"
        )
    return name


def partition_name(topic: str, partition: int) -> str:
    return f"{topic}-partition-{partition}"


def join_partition(topic: str, partition: int) -> str:
    """The full name of a topic partition; ``split_partition`` takes it apart."""
    return topic if partition < 0 else partition_name(topic, partition)


def split_partition(name: str) -> tuple[str, int]:
    """The topic and partition number of a topic partition; the number is -1 for a topic without partitions."""
    matched = _PARTITION.fullmatch(name)
    return (matched.group(1), int(matched.group(2))) if matched else (name, -1)
