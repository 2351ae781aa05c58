"""How Spark finds ``format("ledgerlake")`` without registration: it imports every top-level
``pyspark_*`` module.
"""

from ledgerlake.publish.datasource import LedgerlakeDataSource as DefaultSource

__all__ = ["DefaultSource"]
