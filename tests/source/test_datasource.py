"""What the format's readers need of Spark."""

from __future__ import annotations

import sys

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.publish.datasource import LedgerlakeDataSource


def test_a_streaming_read_on_an_older_spark_is_refused_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ledgerlake.source.stream_reader", raising=False)
    # As if Spark had no such module.
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    source = LedgerlakeDataSource({"service.url": "pulsar://h:1", "topic": "orders"})
    with pytest.raises(UsageError, match=r"a streaming read needs Spark 4\.2 or later"):
        source.streamReader(source.schema())
