"""Which entries are in rejects."""

from __future__ import annotations

import numpy as np

from ledgerlake.verify.entry_set import EntrySet


def test_an_entry_is_in_the_set_by_ledger_and_number() -> None:
    entries = EntrySet(np.array([[300, 1], [1, 256], [1, 2], [1, 2], [-1, 5]]))
    asked = np.array([[1, 2], [2, 1], [256, 1], [300, 1], [1, 256], [1, 1], [-1, 5], [2**40, 0]])
    assert entries.contains(asked).tolist() == [True, False, False, True, True, False, True, False]


def test_nothing_is_in_an_empty_set() -> None:
    entries = EntrySet(np.empty((0, 2), dtype=np.int64))
    assert entries.contains(np.array([[1, 2]])).tolist() == [False]
    assert len(entries.contains(np.empty((0, 2), dtype=np.int64))) == 0
