"""A little of every target's fuzzing, and everything that fuzzing found before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ledgerlake.errors import UsageError
from tests.fuzz.apart import run_apart
from tests.fuzz.engine import MIB, Target, input_of, judge, run
from tests.fuzz.seeds import GOLDEN
from tests.fuzz.targets import TARGETS, target_of

if TYPE_CHECKING:
    from pathlib import Path

CORPUS = sorted(path for path in GOLDEN.glob("*/*.hex") if path.parent.name != "keys")
COUNT = 60


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_inputs_are_read_or_refused_in_bounded_memory(target: Target) -> None:
    count = -(-COUNT // target.cost)
    result = run(target, 1, 0, count, traced_every=10)
    assert result.count == count
    assert [(failure.what, failure.command, failure.detail) for failure in result.failures] == []


def test_no_descriptor_ends_the_process() -> None:
    # The process of the tests would end too.
    result = run_apart(target_of("descriptor"), 1, 3000)
    assert result.count == 3000
    assert [(failure.what, failure.command) for failure in result.failures] == []
    assert min(result.taken, result.refused) > 300


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_what_was_found_once_stays_mended(path: Path) -> None:
    failure, _, _ = judge(target_of(path.parent.name), bytes.fromhex(path.read_text()))
    assert failure is None


def test_every_target_takes_valid_inputs_and_refuses_others() -> None:
    # One whose inputs are all refused at the door would test nothing behind it.
    for name in (
        "frames",
        "scan",
        "decode",
        "offset",
        "record",
        "configuration",
        "options",
        "snapshot-segment",
    ):
        result = run(target_of(name), 2, 0, 200, traced_every=1000)
        assert min(result.taken, result.refused) > 0, name


def test_an_input_is_made_of_seed_target_and_number_alone() -> None:
    for target in TARGETS:
        assert [input_of(target, 3, index) for index in range(5)] == [
            input_of(target, 3, index) for index in range(5)
        ]


# The judge itself.


def judged(read: object, data: bytes = b"x", **more: Any) -> str | None:
    target = Target("t", "a test's own", lambda rng: rng.randbytes(3), read, (UsageError,), **more)  # type: ignore[arg-type]
    failure, _, _ = judge(target, data)
    return failure[0] if failure else None


def test_a_documented_error_is_no_failure_and_any_other_is() -> None:
    def refuse(data: bytes) -> int:
        raise UsageError("no")

    assert judged(refuse) is None
    assert "IndexError" in str(judged(lambda data: data[9]))


def test_memory_and_work_beyond_the_ceiling_are_failures() -> None:
    assert judged(lambda data: len(bytearray(40 * MIB)) * 0) == "too much memory"
    assert judged(lambda data: len(bytearray(40 * MIB)) * 0, memory_bytes=64 * MIB) is None
    assert judged(lambda data: 10_000) == "too much work"
