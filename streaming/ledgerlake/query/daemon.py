"""Spark's daemon of Python workers, started by Spark as ``python -m ledgerlake.query.daemon``; quiet as ``source.workers`` says."""

from __future__ import annotations

from pyspark import daemon

from ledgerlake.source.workers import quieten

if __name__ == "__main__":
    quieten(daemon)
    daemon.manager()
