"""The digest of an outcome: neither order nor cut counts, and each other message does."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake.operators.outcome_digest import OutcomeDigest, Tally, reject_tally

KEYS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99), st.integers(-1, 9)), max_size=30)


def tally(keys: list[tuple[int, int, int]]) -> Tally:
    return Tally.of(*np.array(keys, dtype=np.int64).reshape(-1, 3).T)


@given(KEYS, st.integers(0, 30), st.randoms())
def test_neither_the_order_of_rows_nor_their_cut_counts(
    keys: list[tuple[int, int, int]], cut: int, random: st.DataObject
) -> None:
    shuffled = list(keys)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert tally(shuffled[:cut]) + tally(shuffled[cut:]) == tally(keys)


@given(KEYS, KEYS)
def test_other_rows_have_another_tally(
    keys: list[tuple[int, int, int]], others: list[tuple[int, int, int]]
) -> None:
    assert (tally(keys) == tally(others)) == (sorted(keys) == sorted(others))


@given(KEYS, KEYS, st.booleans())
def test_a_digest_is_read_as_it_was_written(
    rows: list[tuple[int, int, int]], released: list[tuple[int, int, int]], may_differ: bool
) -> None:
    digest = OutcomeDigest(rows=tally(rows), released=tally(released), may_differ=may_differ)
    assert OutcomeDigest.from_json(digest.to_json()) == digest
    assert digest.difference(digest) == ""


def test_rejects_that_depend_on_a_table_do_not_count() -> None:
    def rejects(*reasons: str) -> pa.Table:
        columns = {
            "ledger_id": [1] * len(reasons),
            "entry_id": [2] * len(reasons),
            "reason": reasons,
        }
        return pa.table({name: pa.array(values) for name, values in columns.items()})

    assert reject_tally(rejects("no_table", "schema_mismatch")) == Tally()
    assert reject_tally(rejects("no_key", "expired")) == reject_tally(rejects("expired"))
    assert reject_tally(rejects("cancelled")) != reject_tally(rejects("expired"))
