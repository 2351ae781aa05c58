"""Histories written by hand: one topic, one broker, and the steps of a test."""

from __future__ import annotations

from tests.simulation.history import Script, Step


def by_hand(*steps: Step, has_metadata: bool = True, starting: str = "earliest") -> Script:
    """A script of one topic, one broker and one core."""
    return Script(1, 0, 1, 8, has_metadata, starting, 0, 0, False, False, 20.0, steps, cores=(1,))


def put(at_s: float, kind: str = "plain", count: int = 1) -> Step:
    return Step(at_s, "put", {"kind": kind, "count": count})
