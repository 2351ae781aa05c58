"""Print which rooms of the package import which, as a Mermaid picture: ``python
tools/import_graph.py [FOLDER]``.

The folder is a checkout, this one by default. An arrow is left out if a longer way says it already.
Circles of imports are named below the picture; imports for types alone do not count.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import grimp

_PACKAGE = "ledgerlake"


def room_of(module: str) -> str:
    """The folder of a module; a module that lies in the package itself is a room of its own."""
    return module.split(".")[1]


def imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    """The modules that each module imports."""
    modules = [module for module in graph.modules if module != _PACKAGE]
    return {
        module: graph.find_modules_directly_imported_by(module) - {_PACKAGE} for module in modules
    }


def circles(imported: dict[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach each other."""
    reached = {module: _reach(imported, module) for module in imported}
    groups = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in imported
        if module in reached[module]
    }
    return sorted(sorted(group) for group in groups)


def rooms(imported: dict[str, set[str]]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {}
    for module, others in imported.items():
        room = room_of(module)
        found.setdefault(room, set()).update(
            room_of(other) for other in others if room_of(other) != room
        )
    return found


def without_detours(found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the graph without the arrows that a longer way implies; all arrows of a circle stay."""
    return {
        room: {
            other
            for other in others
            if room in _reach(found, other)
            or not any(other in _reach(found, via) for via in others - {other})
        }
        for room, others in found.items()
    }


def _reach(imported: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [*imported.get(start, ())]
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imported.get(module, ())
    return seen


def graph_of(checkout: Path) -> grimp.ImportGraph:
    """The graph of a checkout, whose source roots are laid together first, as the wheel
    lays them.
    """
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, _PACKAGE)
        for root in ("proto", "udfs", "streaming"):
            shutil.copytree(checkout / root / _PACKAGE, package, dirs_exist_ok=True)
        (package / "__init__.py").touch()
        sys.path.insert(0, folder)
        try:
            return grimp.build_graph(_PACKAGE, exclude_type_checking_imports=True, cache_dir=None)
        finally:
            sys.path.remove(folder)


def picture(checkout: Path) -> str:
    """The picture and the circles, in Markdown."""
    imported = imports(graph_of(checkout))
    arrows = [
        f"  {room} --> {other}"
        for room, others in sorted(without_detours(rooms(imported)).items())
        for other in sorted(others)
    ]
    of_modules, of_rooms = circles(imported), circles(rooms(imported))
    lines = ["```mermaid", "flowchart TD", *arrows, "```", ""]
    lines.append(
        f"Circles of rooms: {_listed(of_rooms)}. Circles of modules: {_listed(of_modules)}."
    )
    return "\n".join(lines)


def _listed(groups: list[list[str]]) -> str:
    return (
        "; ".join(
            ", ".join(f"`{name.removeprefix(_PACKAGE + '.')}`" for name in group)
            for group in groups
        )
        or "none"
    )


if __name__ == "__main__":
    print(picture(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1]))
