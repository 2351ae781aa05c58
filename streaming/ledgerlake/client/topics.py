"""Topic names: expands short forms, and names partitions.

``orders`` means ``persistent://public/default/orders``; partition N of a partitioned topic is
``<topic>-partition-N``.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from functools import cached_property

from ledgerlake.errors import UsageError

_FULL = re.compile(r"persistent://([^/\s]+)/([^/\s]+)/(\S+)")
_NOT_STORED = "non-persistent://"
# As Pulsar reads names: ``orders-partition-3`` belongs to ``orders``, whether that has partitions
# or not, up to the largest number of Java's int. ``orders-partition-00`` is a topic of its own.
_PARTITION = re.compile(r"(.+)-partition-(0|[1-9][0-9]{0,9})")
_LARGEST_PARTITION = 2**31 - 1

# The most bytes of a folder's name beside its hash; file systems take 255.
_FOLDER_BYTES_MOST = 200
_PLAIN_FOLDER = re.compile(r"[A-Za-z0-9+-][A-Za-z0-9._+-]*")
_NOT_IN_A_FOLDER = re.compile(rb"[^A-Za-z0-9._+-]")


@dataclass(frozen=True)
class TopicSelection:
    """The topics to read: topics by name, or the topics of one namespace that match a pattern.

    The pattern is a regular expression after ``persistent://tenant/namespace/``, and must match a
    topic's entire local name, that of a partitioned topic without its ``-partition-N``. The
    cluster's own topics, which begin with ``__``, never match.
    """

    names: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def namespace(self) -> str:
        """Return tenant and namespace of the pattern."""
        return "/".join(self._parts[:2])

    @property
    def nothing_there(self) -> str:
        """Return the beginning of a sentence that says that there is no topic partition to read."""
        if self.pattern is not None:
            return f"no topic matches {self.pattern}"
        return f"no partition of {', '.join(self.names)} is there"

    def includes(self, topic_partition: str) -> bool:
        """Return whether a topic partition is selected."""
        if self.pattern is None:
            return not {topic_partition, split_partition(topic_partition)[0]}.isdisjoint(self.names)
        return topic_partition.rpartition("/")[0] == self.pattern.rpartition("/")[
            0
        ] and self.matches(topic_partition)

    def overlaps(self, topic: str) -> bool:
        """Return whether the topic of a name, or a topic partition of it, is selected."""
        topic = split_partition(topic)[0]
        return self.includes(topic) or topic in {split_partition(name)[0] for name in self.names}

    def matches(self, topic_partition: str) -> bool:
        """Return whether a topic partition of that namespace belongs to the pattern."""
        local_name = split_partition(topic_partition)[0].rpartition("/")[2]
        return not local_name.startswith("__") and self._local.fullmatch(local_name) is not None

    @cached_property
    def _parts(self) -> tuple[str, str, str]:
        matched = _FULL.fullmatch(self.pattern or "")
        assert matched is not None
        return matched.group(1), matched.group(2), matched.group(3)

    @cached_property
    def _local(self) -> re.Pattern[str]:
        return re.compile(self._parts[2])


def full_pattern(pattern: str) -> str:
    """Return the full form of a pattern of topic names.

    Raises:
        UsageError: it is not a pattern.
    """
    text = pattern.strip()
    _check_is_stored(text)
    if "://" not in text:
        text = (
            f"persistent://{text}"
            if text.count("/") == 2
            else f"persistent://public/default/{text}"
        )
    try:
        matched = _FULL.fullmatch(text)
        if matched is None or "/" in matched.group(3):
            raise UsageError(
                f"'{pattern}' is no pattern of topics; write "
                "persistent://tenant/namespace/orders-.*"
            )
        re.compile(matched.group(3))
    except (re.error, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"the pattern '{pattern}' is no regular expression: {error}") from None
    return text


def full_name(topic: str) -> str:
    """Return the full name of a topic given in any accepted form.

    Raises:
        UsageError: it is no topic name.
    """
    name = topic.strip()
    _check_is_stored(name)
    if "://" not in name:
        parts = name.split("/")
        if len(parts) == 1:
            name = f"persistent://public/default/{name}"
        elif len(parts) == 3:
            name = f"persistent://{name}"
    if not _FULL.fullmatch(name):
        raise UsageError(
            f"'{topic}' is not a topic name; write orders, tenant/namespace/orders or "
            "persistent://tenant/namespace/orders"
        )
    return name


def _check_is_stored(name: str) -> None:
    if name.startswith(_NOT_STORED):
        raise UsageError(
            f"brokers store no entries of '{name}', so it has no positions and nothing can be read "
            "again; name a persistent:// topic"
        )


def partition_name(topic: str, partition: int) -> str:
    return f"{topic}-partition-{partition}"


def join_partition(topic: str, partition: int) -> str:
    """Return the full name of a topic partition; the reverse of ``split_partition``."""
    return topic if partition < 0 else partition_name(topic, partition)


def split_partition(name: str) -> tuple[str, int]:
    """Return the topic and partition number of a topic partition; the number is -1 for a topic
    without partitions.
    """
    matched = _PARTITION.fullmatch(name)
    if matched is None or int(matched.group(2)) > _LARGEST_PARTITION:
        return name, -1
    return matched.group(1), int(matched.group(2))


def folder_name(name: str) -> str:
    """Return the name of a topic, or a part of it, as the name of a folder that every file system
    and object store takes. Two names never have the same folder.

    Other characters than letters, digits and ``. _ + -`` are written ``=3A``, by their bytes. So is
    the first character if it is ``.`` or ``_``, since such a folder is hidden, or Delta's. A long
    name ends with a hash of the whole.
    """
    if _PLAIN_FOLDER.fullmatch(name) and len(name) <= _FOLDER_BYTES_MOST:
        return name
    text = _NOT_IN_A_FOLDER.sub(lambda found: b"=%02X" % found[0][0], name.encode()).decode()
    text = f"={ord(text[0]):02X}{text[1:]}" if text.startswith((".", "_")) else text
    if len(text) <= _FOLDER_BYTES_MOST:
        return text
    return f"{text[:_FOLDER_BYTES_MOST]}={hashlib.sha256(name.encode()).hexdigest()[:16]}"
