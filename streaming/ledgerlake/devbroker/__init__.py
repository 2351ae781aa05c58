"""The embedded development broker: a real Pulsar standalone, fetched once and run on free ports."""

from ledgerlake.devbroker.standalone import Broker, BrokerAddress

__all__ = ["Broker", "BrokerAddress"]
