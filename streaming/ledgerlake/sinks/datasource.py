"""The former place of ``ledgerlake.api.LedgerlakeDataSource``."""

from ledgerlake.publish.datasource import LedgerlakeDataSource

__all__ = ["LedgerlakeDataSource"]
