"""What Spark's Python workers may say when they end."""

from __future__ import annotations

import pytest

from ledgerlake.query.daemon import print_exc


def test_a_closed_pipe_leaves_no_traceback_and_another_error_does(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (BrokenPipeError("gone"), ConnectionResetError("gone"), ValueError("wrong")):
        try:
            raise error
        except OSError:
            print_exc()
        except ValueError:
            print_exc()
    said = capsys.readouterr().err
    assert "ValueError: wrong" in said
    assert "gone" not in said
