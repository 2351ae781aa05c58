"""What reaches the terminal of a person is plain text, whatever others have written."""

from __future__ import annotations

import argparse
import io
import json
import logging
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from ledgerlake import cli
from ledgerlake.decode import schema
from ledgerlake.errors import BrokerError, TableError
from ledgerlake.inspect import lag
from ledgerlake.runtime.guarded_output import GuardedStream, guarded_output, unguarded
from ledgerlake.stored.secrets import resolve_secret

if TYPE_CHECKING:
    from collections.abc import Callable

EVIL = "\x1b]0;title\x07\x1b[2J\x1b[1;1H\x9b32m\u202eall is well\r\nledgerlake: done\x7f\x00"
HOSTILE = st.text(st.sampled_from([*EVIL, "a", "\U000e0001", "\ud800", "\u2028"]), max_size=20)


def is_plain(text: str) -> bool:
    """Whether a terminal only shows a text."""
    return all(line.replace("\t", "").isprintable() for line in text.split("\n"))


def raise_(text: str) -> None:
    raise ValueError(text)


def refuse(text: str) -> None:
    raise BrokerError(f"the broker said {text}", code="AuthorizationError")


def warn_in_a_thread(text: str) -> None:
    thread = threading.Thread(
        target=logging.getLogger("ledgerlake.test").warning, args=("topic %s", text)
    )
    thread.start()
    thread.join()


WAYS: list[Callable[[str], object]] = [
    print,
    lambda text: print(text, text, sep="\n", file=sys.stderr),
    # The stream is that of the time of the call.
    lambda text: sys.stdout.write(text),  # noqa: PLW0108
    lambda text: sys.stderr.writelines([text]),
    lambda text: logging.getLogger("ledgerlake.test").warning("the topic %s", text),
    lambda text: print(json.dumps({"text": text}, ensure_ascii=False)),
    warn_in_a_thread,
    raise_,
    refuse,
]


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("debug", [False, True])
@given(text=HOSTILE)
def test_no_way_of_a_command_reaches_the_terminal_with_raw_text(
    way: int, debug: bool, text: str
) -> None:
    def command(_: argparse.Namespace) -> int:
        WAYS[way](text)
        return 0

    options = argparse.Namespace(debug=debug, command=command)
    written = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", written)
        patch.setattr(sys, "stderr", written)
        patch.setattr(cli, "parser", lambda: argparse.Namespace(parse_args=lambda _: options))
        patch.setattr(logging.getLogger(), "handlers", [])
        cli.main([])
    assert is_plain(written.getvalue())


@pytest.mark.parametrize("debug", [False, True])
def test_no_error_of_a_command_shows_a_secret_of_its_process(
    debug: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "swordfish"
    long = "x" * 290

    def command(_: argparse.Namespace) -> int:
        raise_(f"{long} {resolve_secret(secret)} is wrong")
        return 0

    options = argparse.Namespace(debug=debug, command=command)
    monkeypatch.setattr(cli, "parser", lambda: argparse.Namespace(parse_args=lambda _: options))
    assert cli.main([]) == 2
    said = capsys.readouterr().err
    assert ("Traceback" in said) == debug
    assert f"ledgerlake: the query failed: {long} ..." in said
    assert "sword" not in said


@given(text=HOSTILE.map(lambda text: text.replace("\n", "")), end=st.sampled_from(["", "\n"]))
def test_a_text_is_one_line(text: str, end: str) -> None:
    raw = io.StringIO()
    GuardedStream(raw).write(f"a\n{text}b{end}")
    assert raw.getvalue().count("\n") == len(end)


def test_json_stays_json() -> None:
    raw = io.StringIO()
    print(json.dumps(EVIL), file=GuardedStream(raw))
    assert json.loads(raw.getvalue()) == EVIL
    assert is_plain(raw.getvalue())


def test_the_screen_has_the_terminal_itself() -> None:
    before = sys.stderr
    with guarded_output(), guarded_output():
        assert unguarded(sys.stderr) is before
    assert sys.stderr is before


def config_of(folder: Path) -> str:
    text = f"""
[source]
service_url = "pulsar://localhost:1"
topics = ["t"]
[stream]
name = "s"
checkpoint = "{folder}/checkpoint"
[delta]
path = "{folder}/table"
"""
    (folder / "c.toml").write_text(text)
    return str(folder / "c.toml")


def test_a_rejects_detail_is_shown_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row: dict[str, Any] = dict.fromkeys(schema.REJECTS.names) | {
        "topic": f"persistent://public/default/{EVIL}",
        "partition": -1,
        "message_id": "1:1",
        "ledger_id": 1,
        "entry_id": 1,
        "reason": "transform_failed",
        "detail": EVIL,
        "entry": b"",
    }
    write_deltalake(f"{tmp_path}/table_rejects", pa.Table.from_pylist([row], schema=schema.REJECTS))
    assert cli.main(["rejects", config_of(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert is_plain(out)
    assert "all is well" in out
    assert out.count("\n") == 1


def test_names_of_topics_are_shown_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def find_lags(_: object) -> None:
        raise TableError(f"the topic {EVIL} is not there")

    monkeypatch.setattr(lag, "find_lags", find_lags)
    monkeypatch.setattr("ledgerlake.pipeline.start.check_reachable", lambda _: None)
    assert cli.main(["lag", config_of(tmp_path)]) == TableError.exit_code
    assert is_plain(capsys.readouterr().err)


def test_help_and_completions_have_their_lines() -> None:
    for arguments, least in (
        (["--help"], 20),
        (["run", "--help"], 10),
        (["completion", "bash"], 100),
    ):
        command = [sys.executable, "-m", "ledgerlake.cli", *arguments]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert out.count("\n") >= least
        assert not re.search(r"\\u[0-9a-f]{4}", out)
