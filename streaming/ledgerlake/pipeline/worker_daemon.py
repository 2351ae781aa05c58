"""Spark's daemon of Python workers, started by Spark as ``python -m
ledgerlake.pipeline.worker_daemon``; quiet as ``runtime.workers`` says.

It imports what every worker needs and has the kernels ready, since a worker is a fork of it: a
batch uses several, and each would spend a second or more on that otherwise. Spark's own daemon
imports nothing, for fear of threads that a fork leaves behind. Here that is safe: Arrow and NumPy
make theirs at first use, and renew them after a fork.

A worker collects garbage after each task. What was imported here is no garbage: frozen, it is not
walked again, which took a tenth of a second of each task.
"""

from __future__ import annotations

import gc

import pandas as pd
import pyspark.worker
from pyspark import daemon

import ledgerlake.operators.finalize
import ledgerlake.operators.ingest
import ledgerlake.operators.stateful
from ledgerlake.decode.warm_up import warm_up
from ledgerlake.runtime.workers import quieten

__all__ = ["ledgerlake", "pd", "pyspark"]


def main() -> None:
    """Serve Spark until it closes the pipe."""
    quieten(daemon)
    warm_up()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
