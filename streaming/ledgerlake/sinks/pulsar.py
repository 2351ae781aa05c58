"""The former place of ``ledgerlake.api.LargeMessageProducer``."""

from ledgerlake.publish.large_messages import LargeMessageProducer

__all__ = ["LargeMessageProducer"]
