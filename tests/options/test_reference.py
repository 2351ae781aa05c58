"""The table of options: one declaration gives the parser of Spark's options and that of TOML."""

from __future__ import annotations

from dataclasses import MISSING, dataclass

import pytest

from ledgerlake.errors import UsageError
from ledgerlake.options.config import parse_config
from ledgerlake.options.declared import Sections, from_spark, from_toml, option, to_spark
from ledgerlake.options.kinds import COUNT, LIST, MILLISECONDS, TEXT
from ledgerlake.options.source_options import parse_options


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Some options."""

    name: str = option(TEXT, MISSING, "The name.", spark="theName", toml="section.name")
    words: tuple[str, ...] = option(
        LIST, (), "Words.", spark="words", toml="section.words", same_as=("terms",)
    )
    timeout_ms: int = option(
        MILLISECONDS, 5000, "A timeout.", spark="timeoutMs", toml="section.timeout_s"
    )
    count: int | None = option(COUNT, None, "A count.", spark="count")
    token: str = option(TEXT, "", "A secret.", spark="token", is_secret=True)


def test_a_declaration_parses_options_of_spark_and_of_toml_to_the_same_values() -> None:
    of_spark = from_spark(
        Declared, {"THENAME": "n", "terms": "a, b,", "timeoutms": "3000"}.items(), "source"
    )
    sections = Sections({"section": {"name": "n", "words": ["a", "b"], "timeout_s": 3}}, "/")
    of_toml = from_toml(Declared, "section", sections)
    assert of_spark == of_toml == Declared(name="n", words=("a", "b"), timeout_ms=3000)


def test_options_of_spark_parse_to_the_values_that_they_were_made_from() -> None:
    values = Declared(name="n", words=("a", "b"), timeout_ms=1, count=7, token="t")
    assert from_spark(Declared, to_spark(values).items(), "source") == values
    assert to_spark(Declared(name="n")) == {"theName": "n"}


def test_the_read_of_a_configuration_is_that_of_its_spark_options() -> None:
    config = parse_config(
        {
            "source": {
                "service_url": "pulsar+ssl://h",
                "topics": ["a", "b"],
                "starting": "12:3",
                "ending": "index 7",
                "retry_timeout_s": 7,
                "max_trigger_delay": "3 minutes",
                "read_compacted": True,
                "crypto_failure_action": "fail",
            },
            "auth": {"method": "token", "token": "env:TOKEN"},
            "tls": {"ca_file": "ca.pem", "checks_hostname": False},
            "stream": {"name": "s"},
            "delta": {"path": "lake/s"},
        }
    )
    assert parse_options(config.source_options()) == config.source


def test_an_empty_text_is_an_option_that_is_not_given() -> None:
    assert from_spark(
        Declared, {"theName": "n", "token": " ", "words": ""}.items(), "source"
    ) == Declared(name="n")
    with pytest.raises(UsageError, match="the option 'theName' is missing"):
        from_spark(Declared, {"theName": ""}.items(), "source")
    with pytest.raises(UsageError, match=r"\[section\] name is missing"):
        from_toml(Declared, "section", Sections({"section": {"name": ""}}, "/"))
    with pytest.raises(UsageError, match="the option 'count' cannot be ''"):
        from_spark(Declared, {"theName": "n", "count": ""}.items(), "source")


def test_a_secret_is_in_no_repr() -> None:
    assert "hidden" not in repr(Declared(name="n", token="hidden"))
