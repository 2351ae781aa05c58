"""The last run of ``bench.throughput`` as a picture: ``docs/throughput.svg``, bars of rates and of CPU, one block a workload.

python -m bench.plot
"""

from __future__ import annotations

import json
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.throughput import LATEST

PICTURE = Path(__file__).parent.parent / "docs" / "throughput.svg"

_LINE, _LABEL, _BAR, _GAP = 22, 230, 300, 150
_MEASURES = (
    ("messages_per_s", "{:,.0f} messages/s", "#2b6cb0"),
    ("cpu_s_per_million", "{:.1f} CPU s a million", "#c05621"),
)


def main() -> None:
    rows: list[dict[str, Any]] = json.loads(LATEST.read_text())
    lines: list[str] = []
    y = 0
    for workload, block in groupby(rows, key=lambda row: row["name"].partition(" (")[2].rstrip(")")):
        y += _LINE
        lines.append(_text(0, y, workload, "bold"))
        y = _block(list(block), y, lines)
    width = _LABEL + 2 * (_BAR + _GAP)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + _LINE}" font-family="sans-serif" font-size="13">'
    PICTURE.write_text("\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>"]) + "\n")
    print(f"wrote {PICTURE.name}")


def _block(rows: list[dict[str, Any]], y: int, lines: list[str]) -> int:
    for row in rows:
        y += _LINE
        lines.append(_text(0, y, row["name"].partition(" (")[0]))
        for place, (measure, words, colour) in enumerate(_MEASURES):
            x = _LABEL + place * (_BAR + _GAP)
            width = _BAR * row[measure] / max(one[measure] for one in rows)
            lines.append(f'<rect x="{x}" y="{y - 12}" width="{width:.1f}" height="14" fill="{colour}"/>')
            lines.append(_text(x + width + 6, y, words.format(row[measure])))
    return y + _LINE


def _text(x: float, y: int, words: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(words)}</text>'


if __name__ == "__main__":
    main()
