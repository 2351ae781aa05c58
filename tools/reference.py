"""Writes the pages of the reference that the code determines: ``make reference``.

Names, types and defaults come from the code: the declarations of the options, the parser of the
command line, the schemas, the metrics, the error classes and the docstrings of ``ledgerlake.api``.
What they mean is in ``reference_texts``.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from tools.reference_texts import COLUMNS, ENTRY_COLUMNS, ERRORS, METRICS, WRITTEN_COLUMNS

from ledgerlake import api, cli, errors
from ledgerlake.decode import compat, schema
from ledgerlake.monitor.metrics import Metrics
from ledgerlake.options.reference import reference as options_page
from ledgerlake.publish.topic_writer import COLUMN_TYPES, CONNECTOR_COLUMNS
from ledgerlake.reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

_ROOT = Path(__file__).parents[1]

_MADE = "This page is made from the code by `make reference`.\n"


def pages() -> dict[str, str]:
    """Return the text of each page by the name of its file in ``docs``."""
    return {
        "options.md": options_page(),
        "cli.md": cli_page(),
        "columns.md": columns_page(),
        "reject-reasons.md": reasons_page(),
        "metrics.md": metrics_page(),
        "errors.md": errors_page(),
        "python-api.md": api_page(),
        "imports.md": imports_page(),
    }


def imports_page() -> str:
    """Return the page that shows which room of the package imports which.

    A process of its own draws the picture, since a package that was imported already is not looked
    for again.
    """
    drawn = subprocess.run(
        [sys.executable, _ROOT / "tools" / "import_graph.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    return (
        f"# Which room imports which\n\n{_MADE}\nAn arrow is left out if a path of other arrows "
        "connects the same rooms. `make check` enforces the order\nof the rooms with "
        f"import-linter.\n\n{drawn.stdout}"
    )


def cli_page() -> str:
    """Return the page of all commands."""
    parts = [
        "# Commands\n",
        _MADE,
        "An error is one sentence on standard error. `--debug` shows the traceback behind it. The "
        "exit codes are\nin [configure and run a pipeline](pipeline.md#exit-codes).\n",
    ]
    for name, command in commands().items():
        words = [
            str(action.metavar or action.dest)
            for action in command._actions
            if not action.option_strings
        ]
        example = " ".join(str(command.epilog).removeprefix("example: ").split())
        parts += [
            f"## {name}\n",
            f"{_sentence(str(command.description))}\n",
            f"```text\n{' '.join(['ledgerlake', name, '[OPTIONS]', *words])}\n```\n",
            "For example:\n",
            f"```sh\n{example}\n```\n",
            _table(("argument", "meaning"), [_argument(action) for action in arguments(command)]),
        ]
    return "\n".join(parts)


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command by its name."""
    choices = next(
        action.choices
        for action in cli.parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert isinstance(choices, dict)
    return choices


def arguments(command: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a command, those without a name first."""
    return sorted(
        (action for action in command._actions if action.dest != "help"),
        key=lambda it: bool(it.option_strings),
    )


def _argument(action: argparse.Action) -> tuple[str, str]:
    choices = f"{{{','.join(map(str, action.choices))}}}" if action.choices else ""
    if not action.option_strings:
        name = choices or str(action.metavar or action.dest)
    elif action.nargs == 0:
        name = ", ".join(action.option_strings)
    else:
        name = (
            f"{', '.join(action.option_strings)} {choices or action.metavar or action.dest.upper()}"
        )
    return f"`{name}`", _sentence(action.help) if action.help else ""


def columns_page() -> str:
    """Return the page of the columns of tables and views."""
    arrow: Iterable[tuple[str, str, pa.Schema, dict[str, str]]] = (
        (
            "The table of messages",
            'One row for each message. A table with `shape = "record"` has these columns in the '
            "struct `pulsar`, except\n"
            "`value`, and the fields of the record beside it: see [typed values](typed-values.md).",
            schema.MESSAGES,
            COLUMNS,
        ),
        (
            "The table of rejects",
            "The dead-letter table `rejects` has one row for each entry that could not become a "
            "message. One bad entry\nnever stops the stream. If a range ends inside such an entry, "
            "the range with its last\nmessage has the row.",
            schema.REJECTS,
            COLUMNS,
        ),
        (
            "The view `messages`",
            "The columns of the bare source with `view = messages`, its default. With `schema = "
            "auto`, `value` has the type of\n"
            "the topic's schema, and `value_bytes` has the bytes of values that do not fit it.",
            schema.VIEW,
            COLUMNS,
        ),
        (
            "The view `entries`",
            "The columns of the bare source with `view = entries`: one row for each stored entry.",
            schema.ENTRIES,
            ENTRY_COLUMNS,
        ),
    )
    parts = ["# Columns\n", _MADE, "The order of rows is in [ordering](ordering.md).\n"]
    for title, text, columns, meanings in arrow:
        rows = [
            (f"`{field.name}`", f"`{_sql_type(field.type)}`", meanings[field.name])
            for field in columns
        ]
        parts += [f"## {title}\n", f"{text}\n", _table(("column", "type", "meaning"), rows)]
    connectors = {ours: f"`{theirs}`" for theirs, ours in CONNECTOR_COLUMNS.items()}
    compat_rows = [
        (f"`{field.name}`", f"`{_sql_type(field.type)}`")
        for field in compat.compat_columns(schema.VIEW)
    ]
    parts += [
        "## The view `compat`\n",
        "The columns of the JVM connectors, with `view = compat`: see "
        "[compatibility](compatibility.md#columns).\n",
        _table(("column", "type"), compat_rows),
        "## Rows that are written to topics\n",
        'The columns that `writeStream.format("ledgerlake")` takes. Other columns are an error.\n',
        _table(
            ("column", "type", "name in the JVM connectors", "meaning"),
            [
                (
                    f"`{name}`",
                    " or ".join(f"`{kind}`" for kind in kinds),
                    connectors.get(name, ""),
                    WRITTEN_COLUMNS[name],
                )
                for name, kinds in COLUMN_TYPES.items()
            ],
        ),
    ]
    return "\n".join(parts)


def _sql_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"map<{_sql_type(kind.key_type)},{_sql_type(kind.item_type)}>"
    if pa.types.is_list(kind):
        return f"array<{_sql_type(kind.value_type)}>"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    return {"int32": "int", "int64": "bigint", "bool": "boolean"}.get(str(kind), str(kind))


def reasons_page() -> str:
    """Return the page of the reasons of rejects."""
    rows = [
        (f"`{reason}`", declared.cause, declared.cure, "yes" if declared.can_be_replayed else "no")
        for reason, declared in sorted(REASONS.items())
    ]
    return "\n".join(
        [
            "# Reasons of rejects\n",
            _MADE,
            "The column `reason` of `rejects` has one of these words. The bare source has them in "
            "`reject_reason`.\n`ledgerlake rejects CONFIG` counts them. [Replay "
            "rejects](replay.md) tells how messages come back after the\ncause is gone.\n",
            _table(("reason", "cause", "what to do", "can be replayed"), rows),
        ]
    )


def metrics_page() -> str:
    """Return the page of the metrics."""
    rows = [
        (f"`{name}`", kind, ", ".join(f"`{label}`" for label in labels), f"{text} {METRICS[name]}")
        for name, kind, labels, text in metrics()
    ]
    return "\n".join(
        [
            "# Metrics\n",
            _MADE,
            "`[metrics] port` serves them for Prometheus at `http://host:port/metrics`. "
            "[Monitoring](monitoring.md) has the\nalerts.\n",
            _table(("metric", "kind", "labels", "meaning"), rows),
        ]
    )


def metrics() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    """Yield name, kind, labels and help text of each metric, as Prometheus shows them."""
    for family in Metrics().collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels: tuple[str, ...] = getattr(family, "_labelnames")  # noqa: B009 (its stub has it not)
        yield name, family.type, labels, family.documentation


def errors_page() -> str:
    """Return the page of the error classes."""
    rows = []
    for error in error_classes():
        fault, cause, cure = ERRORS[error.__name__]
        base = error.__bases__[0].__name__
        name = f"`{error.__name__}`" + ("" if base == "LedgerlakeError" else f", a `{base}`")
        retry = (
            "by its code"
            if error is errors.BrokerError
            else "yes"
            if errors.is_retryable(error(""))
            else "no"
        )
        exit_code = (
            "3, or 2 if no retry helps" if error is errors.BrokerError else str(error("").exit_code)
        )
        rows.append((name, fault, cause, cure, retry, error.lost, exit_code))
    return "\n".join(
        [
            "# Errors\n",
            _MADE,
            "Each error is one sentence: the fault, its place, and the action that helps. The "
            "classes are in `ledgerlake.errors`; all are\na `LedgerlakeError`. *Retry* says whether "
            "Ledgerlake tries the same call again (`is_retryable(error)`), *lost*\nwhether data is gone "
            "(`error.lost`), *exit* the exit code of a command: 3 says that the command may "
            "succeed later.\n",
            _table(("error", "whose fault", "cause", "what to do", "retry", "lost", "exit"), rows),
            "## Codes of the broker\n",
            "A `BrokerError` has the protocol's name of its reason in `code`. Codes that pass with "
            "time are tried again for\n`retry_timeout_s` (`retryTimeoutMs`).\n",
            _table(
                ("code", "retry", "why"),
                [
                    (f"`{code}`", "yes" if passes else "no", why)
                    for code, (passes, why) in errors.BROKER_CODES.items()
                ],
            ),
        ]
    )


def error_classes() -> list[type[errors.LedgerlakeError]]:
    """Return the classes of the error tree below its base, in the order of the module."""
    classes = vars(errors).values()
    return [
        kind
        for kind in classes
        if inspect.isclass(kind)
        and issubclass(kind, errors.LedgerlakeError)
        and kind is not errors.LedgerlakeError
    ]


def api_page() -> str:
    """Return the page of ``ledgerlake.api``."""
    parts = [
        "# Python API\n",
        _MADE,
        "Everything here is imported from `ledgerlake.api`. Other modules may change in a later "
        "release, which says so.\n",
    ]
    for name in api.__all__:
        parts += _described(name, getattr(api, name), "##")
        if inspect.isclass(getattr(api, name)):
            for method, function in public_methods(getattr(api, name)):
                parts += _described(f"{name}.{method}", function, "###")
    return "\n".join(parts)


def public_methods(kind: type) -> list[tuple[str, Callable[..., Any]]]:
    """Return the methods that a class of the API defines by itself.

    Methods of the data source are for Spark, and methods of a configuration for the pipeline.
    """
    if kind in (api.LedgerlakeDataSource, api.Config):
        return []
    return [
        (name, value)
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def _described(name: str, value: Any, level: str) -> list[str]:
    parts = [f"{level} {name}\n"]
    if value not in (api.LedgerlakeDataSource, api.Config):
        parameters = (
            str(inspect.signature(value))
            .replace("'", "")
            .replace("(self, ", "(")
            .replace("(self)", "()")
        )
        shown = re.sub(r" -> None$", "", f"{name}{parameters}")
        parts.append(f"```text\n{shown}\n```\n")
    text = inspect.getdoc(value)
    return [*parts, _docstring(text)] if text else parts


def _docstring(text: str) -> str:
    """Return a docstring as Markdown: its sections become lists."""
    lines: list[str] = []
    section = ""
    for line in text.replace("``", "`").split("\n"):
        if line in ("Args:", "Raises:"):
            section = line
            lines += [f"*{line}*", ""]
        elif section and line.startswith("    ") and not line.startswith("     "):
            name, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{name}`: {meaning}" if meaning else f"- {name}")
        elif section and line.startswith("     "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    lines += [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


if __name__ == "__main__":
    for file, page in pages().items():
        (_ROOT / "docs" / file).write_text(page)
