"""The map of the code is true, and no two files import each other."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
MAP = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")


def test_no_circle_of_imports() -> None:
    """Not for annotations either; looking an alias up by its name is no import."""
    graph = grimp.build_graph("lightning_offload", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    packages = {module for module in graph.modules if graph.find_children(module)}
    for package in packages:  # whose own lazy imports of what lies in them run nothing
        imports[package] = set()
    graphlib.TopologicalSorter(imports).prepare()


def test_files_on_the_map_exist() -> None:
    """Every file that it names."""
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", MAP))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (ROOT / "lightning_offload" / name).exists()] == []


def test_stations_on_the_map_exist() -> None:
    """Every function that it names beside a file."""
    rows = re.findall(r"^\|[^|]*\| `([a-z_/]+)\.py` \| `([A-Za-z_.]+)`", MAP, re.MULTILINE)
    assert len(rows) > 8
    for file, name in rows:
        found = importlib.import_module("lightning_offload." + file.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)


def test_rooms_on_the_map_are_the_rooms_there_are() -> None:
    """Every folder of the package is in its table."""
    folders = {path.name for path in (ROOT / "lightning_offload").iterdir() if (path / "__init__.py").exists()}
    table = "".join(line.split("|")[1] for line in MAP.splitlines() if line.startswith("| `"))
    assert folders == set(re.findall(r"`([a-z]+)/`", table))


def test_docstrings_say_what_they_are_about() -> None:
    """No module is without one, and none points to another place for it."""
    for path in sorted((ROOT / "lightning_offload").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                assert not re.match("see the module's docstring", text, re.IGNORECASE), path
                assert not re.search(r": Likewise\b", text), path
