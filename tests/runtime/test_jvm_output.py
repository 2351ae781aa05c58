"""Which lines of Spark's processes a person sees."""

from __future__ import annotations

from ledgerlake.runtime.jvm_output import news


def test_only_what_comes_with_every_start_is_left_out() -> None:
    lines = [
        b"WARNING: Using incubator modules: jdk.incubator.vector\n",
        b"\n",
        b"Starting Streaming TransformWithStateInPandas Python worker.\n",
        b"\n",
        b"12:00:00 ERROR Executor: no space left\n",
        b"\n",
        b"WARNING: Using incubator modules: another\n",
        b"cut",
    ]
    assert list(news(lines)) == [*lines[4:6], *lines[6:]]
