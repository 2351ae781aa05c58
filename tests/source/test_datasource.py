"""What the format's readers need of Spark, and with which rejects the view ``compat`` goes on."""

from __future__ import annotations

import sys

import pytest

from ledgerlake.errors import DataLossError, DecryptionError, UsageError
from ledgerlake.options.source_options import parse_options
from ledgerlake.publish.datasource import LedgerlakeDataSource
from ledgerlake.source.planning import EntryRange
from ledgerlake.source.views import read_view
from ledgerlake.wire.message_id import Position
from tests.encryption import encrypted
from tests.entries import single
from tests.peer import TOPIC, Peer


def test_a_streaming_read_on_an_older_spark_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "ledgerlake.source.stream_reader", raising=False)
    # As if Spark had no such module.
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    source = LedgerlakeDataSource({"service.url": "pulsar://h:1", "topic": "orders"})
    with pytest.raises(UsageError, match=r"a streaming read needs Spark 4\.2 or later"):
        source.streamReader(source.schema())


def compat_values(peer: Peer, options: dict[str, str]) -> list[bytes]:
    """Return the values that a batch read gives in the columns of the connectors."""
    given = {"service.url": peer.url, "topic": TOPIC, "view": "compat", "schema": "bytes"}
    source = LedgerlakeDataSource(given | options)
    reader = source.reader(source.schema())
    parts = [part for partition in reader.partitions() for part in reader.read(partition)]
    return [value for part in parts for value in part["value"].to_pylist()]


@pytest.mark.parametrize("name", ["cryptoFailureAction", "pulsar.reader.cryptoFailureAction"])
def test_the_connectors_columns_leave_out_what_no_key_opens_only_if_the_user_says_so(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Peer() as peer:
        peer.add(single(b"a", 0), encrypted(single(b"secret", 1), "key"), single(b"b", 2))
        with pytest.raises(DecryptionError):
            compat_values(peer, {})
        assert compat_values(peer, {name: "DISCARD"}) == [b"a", b"b"]
        assert "the first one is 7:1: encrypted" in caplog.text


def test_the_connectors_columns_go_on_after_a_loss_that_the_user_allows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Peer() as peer:
        peer.add(single(b"10", 10), ledger_id=9)
        given = {"service.url": peer.url, "topic": TOPIC, "view": "compat", "schema": "bytes"}
        span = EntryRange(TOPIC, Position(7, 3), Position(9, 0), after_index=3)
        with pytest.raises(DataLossError):
            list(read_view(parse_options(given), span))
        parts = list(read_view(parse_options(given | {"failOnDataLoss": "false"}), span))
        assert [value for part in parts for value in part["value"].to_pylist()] == [b"10"]
        assert "the first one is 7:4: data_loss" in caplog.text
