"""The last runs of the benches as pictures in ``docs/``.

``bench.throughput``, ``growth``, ``large`` and ``latency`` are bars, one block a workload.
``bench.upkeep`` and ``bench.steady`` are lines over the commits and the minutes. Pictures of
benches that were not run stay as they are. If ``bench.limits`` was run, its limit is a line through
the bars of a workload.

python -m bench.plot
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import growth, large, latency, limits, steady, throughput, upkeep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

DOCS = Path(__file__).parent.parent / "docs"

_LINE, _LABEL, _BAR, _GAP = 22, 270, 300, 150


@dataclass(frozen=True)
class Measure:
    """What a bar shows: a field of the row, the words behind the bar, its colour."""

    field: str
    words: str
    colour: str


_RATE = Measure("messages_per_s", "{:,.0f} messages/s", "#2b6cb0")
_CPU = Measure("cpu_s_per_million", "{:,.1f} CPU s a million", "#c05621")
_BYTE_RATE = Measure("mb_per_s", "{:,.0f} MB/s", "#2b6cb0")
_BYTE_CPU = Measure("cpu_s_per_gb", "{:,.1f} CPU s a GB", "#c05621")

_PEAK = Measure("peak_mb", "{:,.0f} MB at most", "#718096")
_SECONDS = Measure("seconds", "{:.1f} s", "#2b6cb0")
_CPU_SECONDS = Measure("cpu_s", "{:.1f} CPU s", "#c05621")
_P50 = Measure("p50_ms", "p50 {:,.0f} ms", "#2b6cb0")
_P99 = Measure("p99_ms", "p99 {:,.0f} ms", "#c05621")

_UPKEEP_LINES = {
    "files": "files of the table",
    "queried": "files that a query over the last five minutes opens",
    "commit_ms": "a commit, ms",
    "log_mb": "the log, MB",
}
_COLOURS = ("#c05621", "#2b6cb0")
_WIDTH, _HEIGHT, _MARGIN = 420, 150, 60

_BYTES_OF_GROWTH = {"value bytes": (_BYTE_RATE, _BYTE_CPU)}
_LATENCY = {"from publishing": (_P50, _P99)}

# A title, the rows, what their bars show, and the limit of each of these fields, if it is known.
Block = tuple[str, list[tuple[str, dict[str, Any]]], tuple[Measure, ...], dict[str, Any]]


def main() -> None:
    drawings: list[tuple[Path, Callable[[Path], None]]] = [
        (throughput.LATEST, lambda latest: _draw("throughput.svg", _throughput_blocks(latest))),
        (
            growth.LATEST,
            lambda latest: _draw("growth.svg", _blocks(latest, _BYTES_OF_GROWTH, (_RATE, _CPU))),
        ),
        (large.LATEST, lambda latest: _draw("large.svg", _large_blocks(latest))),
        (
            latency.LATEST,
            lambda latest: _draw(
                "latency.svg", _blocks(latest, _LATENCY, (_SECONDS, _CPU_SECONDS))
            ),
        ),
        (
            upkeep.LATEST,
            lambda latest: _draw_lines("upkeep.svg", _rows(latest), "commits", _UPKEEP_LINES),
        ),
        (
            steady.LATEST,
            lambda latest: _draw_lines("steady.svg", _rows(latest), "minutes", steady.TITLES),
        ),
    ]
    for latest, draw in drawings:
        if latest.exists():
            draw(latest)


def _rows(latest: Path) -> Any:
    return json.loads(latest.read_text())


def _throughput_blocks(latest: Path) -> Iterable[Block]:
    for workload, block in groupby(
        _rows(latest), key=lambda row: row["name"].partition(" (")[2].rstrip(")")
    ):
        rows = [(row["name"].partition(" (")[0], row) for row in block]
        yield workload, rows, (_RATE, _CPU), _limit_of(workload)


def _large_blocks(latest: Path) -> Iterable[Block]:
    for title, rows, measures, _ in _blocks(latest, {}, (_BYTE_RATE, _BYTE_CPU, _PEAK)):
        yield title, rows, measures, _limit_of(limits.LARGE.name)


def _limit_of(workload: str) -> dict[str, Any]:
    """Return the limit of a workload; empty if it is not known."""
    rows = _rows(limits.LATEST) if limits.LATEST.exists() else []
    return next(
        (row for row in rows if row["block"] == workload and row["label"] == limits.LIMIT), {}
    )


def _blocks(
    latest: Path, special: Mapping[str, tuple[Measure, ...]], others: tuple[Measure, ...]
) -> Iterable[Block]:
    for name, block in groupby(_rows(latest), key=lambda row: row["block"]):
        yield name, [(row["label"], row) for row in block], special.get(name, others), {}


def _draw(name: str, blocks: Iterable[Block]) -> None:
    lines: list[str] = []
    y = width = 0
    for title, rows, measures, limit in blocks:
        y += _LINE
        lines.append(_text(0, y, title, "bold"))
        y = _bars(rows, measures, limit, y, lines)
        width = max(width, _LABEL + len(measures) * (_BAR + _GAP))
    _write(name, width, y + _LINE, lines)


def _draw_lines(
    name: str, series: dict[str, list[dict[str, float]]], x_field: str, titles: dict[str, str]
) -> None:
    """Draw a small picture for each field, with a line for each series; all begin at 0."""
    lines: list[str] = []
    for number, words in enumerate(series):
        lines.append(
            f'<rect x="{160 * number}" y="6" width="14" height="14" fill="{_COLOURS[number]}"/>'
        )
        lines.append(_text(160 * number + 20, 18, words))
    most_x = max(sample[x_field] for samples in series.values() for sample in samples)
    for place, (field, title) in enumerate(titles.items()):
        left, top = place % 2 * (_WIDTH + _MARGIN), _LINE + place // 2 * (_HEIGHT + _MARGIN) + _LINE
        most = max(sample[field] for samples in series.values() for sample in samples)
        lines.append(_text(left, top, f"{title} (at most {most:,.0f})", "bold"))
        bottom = top + 8 + _HEIGHT
        lines.append(
            f'<path d="M{left} {top + 8}V{bottom}H{left + _WIDTH}" stroke="#718096" fill="none"/>'
        )
        lines.append(_text(left + _WIDTH - 90, bottom + 16, f"{most_x:,.0f} {x_field}"))
        for number, samples in enumerate(series.values()):
            points = " ".join(
                f"{left + _WIDTH * sample[x_field] / most_x:.1f},{bottom - _HEIGHT * sample[field] / most:.1f}"
                for sample in samples
            )
            lines.append(
                f'<polyline points="{points}" fill="none" stroke-width="2" '
                f'stroke="{_COLOURS[number]}"/>'
            )
    rows = -(-len(titles) // 2)
    _write(name, 2 * _WIDTH + _MARGIN, 2 * _LINE + rows * (_HEIGHT + _MARGIN), lines)


def _write(name: str, width: int, height: int, lines: list[str]) -> None:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="13">'
    )
    (DOCS / name).write_text(
        "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>"])
        + "\n"
    )
    print(f"wrote docs/{name}")


def _bars(
    rows: list[tuple[str, dict[str, Any]]],
    measures: tuple[Measure, ...],
    limit: dict[str, Any],
    y: int,
    lines: list[str],
) -> int:
    """Draw a row of bars for each of the rows, and the limit through them; return where
    they end.
    """
    top = y + _LINE - 12
    for label, _ in rows:
        y += _LINE
        lines.append(_text(0, y, label))
    for place, measure in enumerate(measures):
        left = _LABEL + place * (_BAR + _GAP)
        values = [row[measure.field] for _, row in rows]
        per_unit = _BAR / max(*values, limit.get(measure.field, 0))
        for number, value in enumerate(values):
            row_y = top + number * _LINE
            width = per_unit * value
            lines.append(
                f'<rect x="{left}" y="{row_y}" width="{width:.1f}" height="14" '
                f'fill="{measure.colour}"/>'
            )
            lines.append(_text(left + width + 6, row_y + 12, measure.words.format(value)))
        if measure.field in limit:
            x = left + per_unit * limit[measure.field]
            lines.append(
                f'<path d="M{x:.1f} {top - 4}V{y + 6}" stroke="#1a202c" stroke-dasharray="4 3"/>'
            )
            lines.append(
                _text(x + 6, y + 18, f"limit: {measure.words.format(limit[measure.field])}")
            )
    return y + _LINE + (_LINE if limit else 0)


def _text(x: float, y: int, words: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
