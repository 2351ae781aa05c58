"""Secrets that a library or a server repeats in an error: no spelling of them is shown."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import time
from typing import TYPE_CHECKING
from urllib.parse import quote, quote_plus, urlencode

import pytest

from ledgerlake.errors import SetupError
from ledgerlake.stored.secrets import (
    BLANK,
    blanked,
    may_be_secret,
    parts_of,
    remember,
    resolve_secret,
    said,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SPELLINGS: dict[str, Callable[[str], str]] = {
    "as it is": str,
    "in a path": quote,
    "in a query": lambda secret: quote(secret, safe=""),
    "in a form": quote_plus,
    "in a form of two": lambda secret: urlencode({"a": secret}),
    "in a query that was quoted again": lambda secret: quote(quote(secret, safe=""), safe=""),
    "in small letters": lambda secret: re.sub(
        "%..", lambda found: found[0].lower(), quote(secret, safe="")
    ),
    "as Python shows it": repr,
    "as Python shows it twice": lambda secret: repr({"a": repr(secret)}),
    "as Python shows bytes": lambda secret: repr(secret.encode()),
    "as JSON": json.dumps,
    "as JSON with other letters": lambda secret: json.dumps(secret, ensure_ascii=False),
    "as JSON in JSON": lambda secret: json.dumps({"a": json.dumps(secret)}),
    "as HTML": html.escape,
    "as HTML twice": lambda secret: html.escape(html.escape(secret)),
    "as base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "as base64 of URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
    "as base64 in a query": lambda secret: quote(
        base64.b64encode(secret.encode()).decode(), safe=""
    ),
}
SIGNS = "aB3xnu059+/=%&#;<>'\"\\\\ \t\n:@?.-_\u00e4\u0085\u00a0\u20ac\U0001f511\x01"


def a_secret(rng: random.Random) -> str:
    inner = "".join(rng.choices(SIGNS, k=rng.randint(6, 24)))
    return f"{rng.choice('kQ7')}{inner}{rng.choice('kQ7')}"


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_secret_is_blanked_in_each_spelling(spelling: Callable[[str], str]) -> None:
    for seed in range(60):
        secret = a_secret(random.Random(seed))
        repeated = spelling(secret)
        # Quotes, brackets and the padding of base64 are around it.
        shown = blanked(f"before {repeated} after", [secret])
        assert re.fullmatch(
            r"before [\[{'\"b&quotax;:= \\]*\.\.\.[\]}'\"&quot;=%3D\\]* after", shown
        ), (secret, shown)


@pytest.mark.parametrize("spelling", SPELLINGS.values(), ids=SPELLINGS)
def test_a_part_and_a_line_of_a_secret_are_blanked(spelling: Callable[[str], str]) -> None:
    for seed in range(20):
        rng = random.Random(seed)
        first, second = (re.sub(r"[:\s\x85]", "", a_secret(rng)) for _ in range(2))
        for together in (f"{first}:{second}", f"{first}\n{second}"):
            for part in (first, second):
                assert part not in blanked(f"before {spelling(part)} after", [*parts_of(together)])


def test_a_secret_that_was_resolved_is_left_out_also_after_it_was_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_OWN", "of-a-variable")
    (tmp_path / "secret").write_text("of-a-file\n")
    for text in ("as-it-is", "env:MY_OWN", f"file:{tmp_path}/secret"):
        resolve_secret(text)
    (tmp_path / "secret").write_text("renewed")
    monkeypatch.delenv("MY_OWN")
    resolve_secret(f"file:{tmp_path}/secret")
    assert said("1 as-it-is 2 of-a-variable 3 of-a-file 4 renewed 5") == "1 ... 2 ... 3 ... 4 ... 5"


def test_the_secrets_that_are_known_are_bounded_and_a_used_one_stays() -> None:
    for number in range(2000):
        resolve_secret("swordfish")
        resolve_secret(f"secret-{number}-")
    assert said("swordfish secret-1- secret-1999-") == "... secret-1- ..."


def test_a_secret_that_is_renewed_often_pushes_out_none_that_is_resolved_once(
    tmp_path: Path,
) -> None:
    remember("resolved-once")
    for number in range(2000):
        (tmp_path / "secret").write_text(f"renewed-{number}-")
        resolve_secret(f"file:{tmp_path}/secret")
    assert said("resolved-once renewed-1- renewed-1998-") == "... renewed-1- ..."


def test_many_long_secrets_are_left_out_of_a_text_in_a_short_time() -> None:
    secrets = [f"secret-{number}-" + "x" * 1200 for number in range(100)]
    blanked("first", secrets)
    begin_s = time.thread_time()
    for _ in range(10):
        blanked("the topic persistent://public/default/orders is not available", secrets)
    assert time.thread_time() - begin_s < 0.3


def test_a_word_that_is_no_secret_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TLS_KEY", "/etc/tls/key.pem")
    monkeypatch.setenv("HTTPS_PROXY", "http://ab:x@proxy:3128")
    remember("ab", "x")
    text = "an example of /etc/tls/key.pem about x"
    assert said(text) == blanked(text, ["ab", "x", *parts_of("ab:x")]) == text


@pytest.mark.parametrize(
    "value",
    ["true", "False", "256", "/etc/tls/key.pem", "file:///a/b.jks", "C:\\a\\b c.key", "./a.b"],
)
def test_a_switch_a_number_and_a_path_are_no_secrets(value: str) -> None:
    assert not may_be_secret(value)


@pytest.mark.parametrize("value", ["truely", "12345678", "/k7MDENGbPxRfiCYEXAMPLE/KEY", "a.b", ""])
def test_other_values_may_be_secrets(value: str) -> None:
    assert may_be_secret(value)


@pytest.mark.parametrize(
    ("name", "value", "text", "shown"),
    [
        ("MINIO_PASSWORD", "abc", "refused: abc", "refused: ..."),
        ("MINIO_PASSWORD", "ab", "refused: ab", "refused: ab"),
        ("AWS_SECRET_ACCESS_KEY", "minio12", "no minio12", "no ..."),
        ("DB_PASSWD", "hunter2", "no hunter2", "no ..."),
        ("DB_PWD", "hunter2", "no hunter2", "no ..."),
        ("LAKE_CREDENTIALS", "hunter2", "no hunter2", "no ..."),
        (
            "LAKE_CREDENTIALS",
            "/etc/lake/key.json",
            "no /etc/lake/key.json",
            "no /etc/lake/key.json",
        ),
        ("PWD", "/home/lake", "no /home/lake/a", "no /home/lake/a"),
        ("DB_CONNECTION_STRING", "pg://lake:hunter2@db/a", "hunter2 at db/a", "... at db/a"),
        ("DB_CONNECTION_STRING", "pg://db/a", "no pg://db/a", "no pg://db/a"),
        (
            "AZURE_STORAGE_CONNECTION_STRING",
            "DefaultEndpointsProtocol=https;AccountName=lake;AccountKey=aHVudGVy==",
            "https lake aHVudGVy==",
            "https lake ...",
        ),
        ("DB_CONNECTION_STRING", "Host=db; Pwd=hunter2", "db hunter2", "db ..."),
        (
            "VAULT_TOKEN",
            "https://vault/a?t=hunter2",
            "https://vault/a t=hunter2",
            "https://vault/a ...",
        ),
    ],
)
def test_a_variable_is_a_secret_by_its_name_and_its_value(
    name: str, value: str, text: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert said(text) == shown


@pytest.mark.parametrize("blank", ["", "  ", "\n"])
def test_a_blank_secret_is_none(
    blank: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET", blank)
    (tmp_path / "secret").write_text(blank)
    for text in (blank, "env:MY_SECRET", f"file:{tmp_path}/secret"):
        with pytest.raises(SetupError, match=r"is blank|is not set|is empty"):
            resolve_secret(text)


def test_all_else_stays_as_it_is() -> None:
    text = "C:\\new\\table %20 100% &lt; a+b \u00e4 'x' \\u0041"
    assert blanked(text, []) == blanked(text, ["", "other"]) == text
    assert blanked("one abc two abcabc", ["abc"]) == f"one {BLANK} two {BLANK}"


def test_a_very_long_text_is_cut_but_no_secret_with_it() -> None:
    shown = blanked("x" * 9_998 + "swordfish" + "x" * 100_000, ["swordfish"])
    assert shown == "x" * 9_998 + ".."
