"""Message ids: text, bytes as other clients write them, and order."""

from __future__ import annotations

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.wire.message_id import (
    BEFORE_ALL,
    MessageId,
    Position,
    from_bytes,
    parse_message_id,
    start_after,
    to_wire,
)


@pytest.mark.parametrize(
    ("serialised", "expected"),
    [
        pytest.param("080110023000", MessageId(1, 2), id="plain"),
        pytest.param("0801100218033000", MessageId(1, 2), id="with partition"),
        pytest.param("08011002180320043000", MessageId(1, 2, 4), id="batch"),
        pytest.param("08011002180320043005", MessageId(1, 2, 4), id="batch with size"),
        pytest.param("08041005180630003a080801100218033000", MessageId(4, 5), id="chunk: stands at its last"),
        pytest.param("08ffffffffffffffffff0110ffffffffffffffffff013000", MessageId(-1, -1), id="earliest"),
    ],
)
def test_ids_serialised_by_the_java_client_are_read(serialised: str, expected: MessageId) -> None:
    assert from_bytes(bytes.fromhex(serialised)) == expected
    assert parse_message_id(serialised) == expected


@pytest.mark.parametrize("text", ["7:8", "7:8:0", "0:0", "123456789012:42:999"])
def test_text_goes_there_and_back(text: str) -> None:
    assert str(parse_message_id(text)) == text


@pytest.mark.parametrize("text", ["", "7", "7:x", "7:8:9:10", "-1:3", "zz", "0a"])
def test_what_is_no_id_is_refused_with_the_forms_that_are(text: str) -> None:
    with pytest.raises(UsageError, match="write ledger:entry"):
        parse_message_id(text)


def test_positions_order_by_ledger_then_entry() -> None:
    assert BEFORE_ALL < Position(0, -1) < Position(0, 0) < Position(0, 9) < Position(1, -1)


def test_the_start_of_everything_is_the_protocols_earliest() -> None:
    wire = start_after(BEFORE_ALL)
    assert (wire.ledger_id, wire.entry_id) == (2**64 - 1, 2**64 - 1)


def test_a_start_asks_for_the_next_entry_because_brokers_step_back_one() -> None:
    assert start_after(Position(5, 9)) == to_wire(Position(5, 10))
    assert start_after(Position(5, -1)) == to_wire(Position(5, 0))
