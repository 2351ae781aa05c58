"""The reference of all options, ``docs/options.md``, made from their declarations: ``python -m
ledgerlake.options.reference``.
"""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from ledgerlake.options.config import SECTION_CLASSES, SECTIONS
from ledgerlake.options.declared import declared
from ledgerlake.options.sink_options import SinkOptions
from ledgerlake.options.source_options import SourceOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.declared import Option

_INTRODUCTION = """# Options

This page is made from the code by `python -m ledgerlake.options.reference`.

The names of Spark's options are those of the Pulsar connectors for the JVM where these have the option, and their case does not
count. [compatibility.md](compatibility.md) goes through the options of the JVM connectors one by one. An unknown option is an
error that names the nearest known one. A secret appears in no log, plan or error.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    parts = [
        _INTRODUCTION,
        '## Reading: `spark.readStream.format("ledgerlake")`, `spark.read.format("ledgerlake")`\n',
        _spark_table(SourceOptions),
        '## Writing: `df.writeStream.format("ledgerlake")`, `df.write.format("ledgerlake")`\n',
        _spark_table(SinkOptions),
        "## The configuration file of `ledgerlake run`\n",
        "A whole file is in the [README](../README.md#your-own-topic).\n",
    ]
    for section in SECTIONS:
        parts += [f"### `[{section}]`\n", _section_table(section)]
    return "\n".join(parts)


def _spark_table(options: type) -> str:
    return _table(
        [
            (option.spark, option.kind.takes, option.meaning, _default(option, field.default, option.kind.text))
            for field, option in declared(options)
            if option.spark is not None and not option.is_internal
        ]
    )


def _section_table(section: str) -> str:
    return _table(
        [
            (
                str(option.key),
                option.kind.takes_in_toml or option.kind.takes,
                option.meaning,
                _default(option, field.default, option.kind.text_in_toml or option.kind.text),
            )
            for options in SECTION_CLASSES
            for field, option in declared(options)
            if option.section == section
        ]
    )


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    lines = ["| option | value | meaning | default |", "|---|---|---|---|"]
    lines += [f"| `{name}` | {takes} | {meaning} | {default} |" for name, takes, meaning, default in rows]
    return "\n".join(lines) + "\n"


def _default(option: Option, default: Any, text: Callable[[Any], str]) -> str:
    if option.shown_default is not None:
        return option.shown_default
    if default is MISSING:
        return "required"
    return "none" if default in (None, "", ()) else f"`{text(default)}`"


if __name__ == "__main__":
    print(reference(), end="")
