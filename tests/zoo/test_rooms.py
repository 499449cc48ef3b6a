"""The packages below zoo/ are rooms or families, and nothing imports in a circle."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import zoo

ROOT = Path(zoo.__file__).parents[1]


def graph(root: Path, *rooms: str) -> dict[str, set[str]]:
    """Return each module of the rooms with the modules that it imports, type-only and late imports too. A
    module's own package is left out: it always runs first."""
    files = {
        ".".join(path.relative_to(root).with_suffix("").parts): path
        for room in rooms
        for path in (root / room).rglob("*.py")
    }
    files = {name.removesuffix(".__init__"): path for name, path in files.items()}
    return {
        name: imported(path.read_text(), files.keys()) - {name, name.rpartition(".")[0]}
        for name, path in files.items()
    }


def imported(source: str, known: Set[str]) -> set[str]:
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inside & known
            names |= {node.module} if inside - known else set()
    return names & known


def test_every_subpackage_is_a_room_or_a_family():
    found = {module.name for module in pkgutil.iter_modules(zoo.__path__) if module.ispkg}
    assert found >= zoo.ROOMS and set(zoo.families()) == found - zoo.ROOMS
    assert all("claims" in vars(folder) for folder in zoo.families().values())
    assert not any("claims" in vars(importlib.import_module(f"zoo.{name}")) for name in zoo.ROOMS)


def test_no_module_imports_itself_in_a_circle():
    TopologicalSorter(graph(ROOT, "zoo", "compile_cache")).prepare()


def test_a_circle_of_type_only_imports_is_found(tmp_path):
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("from room.b import B")
    (tmp_path / "room" / "b.py").write_text("if TYPE_CHECKING:\n    from room import a")
    with pytest.raises(CycleError):
        TopologicalSorter(graph(tmp_path, "room")).prepare()
