"""The reference of all options, ``docs/options.md``, made from their declarations: ``make
reference``.
"""

from __future__ import annotations

from dataclasses import MISSING
from typing import TYPE_CHECKING, Any

from ledgerlake.options.config import SECTION_CLASSES, SECTIONS
from ledgerlake.options.connector_options import (
    INSTEAD,
    INSTEAD_OF_PREFIX,
    PREFIX_WITHOUT_EFFECT,
    WITHOUT_EFFECT,
)
from ledgerlake.options.declared import declared
from ledgerlake.options.sink_options import SinkOptions
from ledgerlake.options.source_options import SourceOptions

if TYPE_CHECKING:
    from collections.abc import Callable

    from ledgerlake.options.declared import Option

_INTRODUCTION = """# Options

This page is made from the code by `make reference`.

If the Pulsar connectors for the JVM have an option, it has their name here. The case of a name does
not count. [Compatibility](compatibility.md) goes through the options of the JVM connectors one by
one. An unknown option is an error that names the nearest known one. A secret appears in no log,
plan or error.
"""


def reference() -> str:
    """The whole page, in Markdown."""
    parts = [
        _INTRODUCTION,
        "## Reading\n",
        '`spark.readStream.format("ledgerlake")`, `spark.read.format("ledgerlake")`:\n',
        _spark_table(SourceOptions),
        "## Writing\n",
        '`df.writeStream.format("ledgerlake")`, `df.write.format("ledgerlake").mode("append")`:\n',
        _spark_table(SinkOptions),
        "## The configuration file of `ledgerlake run`\n",
        "A whole file is in [configure and run a pipeline](pipeline.md#your-own-topic).\n",
    ]
    for section in SECTIONS:
        parts += [f"### `[{section}]`\n", _section_table(section)]
    return "\n".join([*parts, _spellings(), _options_of_others()])


def _spellings() -> str:
    """Return the options that have more than one name."""
    rows = {
        (
            f"`{option.spark}`" if option.spark else "",
            f"`[{option.section}] {option.key}`" if option.key else "",
            ", ".join(f"`{name}`" for name in option.same_as),
        ): None
        for options in (*SECTION_CLASSES, SourceOptions, SinkOptions)
        for _, option in declared(options)
        if option.spark and (option.key or option.same_as) and not option.is_internal
    }
    lines = [
        "## One option, several names\n",
        "| Spark | configuration file | other connectors |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _options_of_others() -> str:
    """Return the options of other connectors that have no counterpart."""
    lines = [
        "## Options of other connectors\n",
        "These are accepted in a read, and have no effect, because they set up the Java client:",
        f"{', '.join(f'`{name}`' for name in sorted(WITHOUT_EFFECT))}, "
        f"`{PREFIX_WITHOUT_EFFECT}*`.\n",
        "These are refused:\n",
        "| option | what to do |",
        "|---|---|",
        *(f"| `{name}` | {advice.replace(chr(39), '`')} |" for name, advice in INSTEAD.items()),
        *(
            f"| `{prefix}*` | {advice.replace(chr(39), '`')} |"
            for prefix, advice in INSTEAD_OF_PREFIX.items()
        ),
    ]
    return "\n".join(lines) + "\n"


def _spark_table(options: type) -> str:
    return _table(
        [
            (
                option.spark,
                option.kind.takes,
                option.meaning,
                _default(option, field.default, option.kind.text),
            )
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
    lines += [
        f"| `{name}` | {takes} | {meaning} | {default} |" for name, takes, meaning, default in rows
    ]
    return "\n".join(lines) + "\n"


def _default(option: Option, default: Any, text: Callable[[Any], str]) -> str:
    if option.shown_default is not None:
        return option.shown_default
    if default is MISSING:
        return "required"
    return "none" if default in (None, "", ()) else f"`{text(default)}`"
