"""docs/architecture.md is true: the rooms are those of the import contract, every name exists."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

tomllib = pytest.importorskip("tomllib")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
# `feed/order.py` `Order.rank`: a file, and a name in it.
FILE = re.compile(r"`((?:[a-z_]+/)*[a-z_]+\.py)`(?:\s+`([A-Za-z_.]+)`)?")


def names_of(file: Path) -> set[str]:
    """Functions, classes, and methods as Class.method."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [inner.name for inner in node.body if isinstance(inner, ast.FunctionDef)]
            names |= {f"{node.name}.{method}" for method in methods}
    return names


def test_every_file_and_name_on_the_page_exists() -> None:
    found = FILE.findall(PAGE)
    assert len(found) > 20
    for file, name in found:
        path = ROOT / "raypipe" / file
        assert path.exists(), file
        assert not name or name in names_of(path), f"{file} {name}"


def test_every_room_is_on_the_page_on_its_floor() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [re.findall(r"raypipe\.(\w+)", layer) for layer in contracts["contracts"][0]["layers"]]
    floor_of = {room: -i for i, layer in enumerate(layers) for room in layer}
    rows = re.findall(r"^\| (\d+) \| ([`\w ]+) \|", PAGE, re.MULTILINE)
    seen = {room: int(floor) for floor, rooms in rows for room in re.findall(r"\w+", rooms)}
    packages = {p.parent.name for p in (ROOT / "raypipe").glob("*/__init__.py")}
    assert packages <= set(seen), packages - set(seen)
    modules = {p.stem for p in (ROOT / "raypipe").glob("*.py")} - {"__init__"}
    assert packages | modules <= set(floor_of), "no contract checks what these import"
    # The page may leave out modules, and joins the two lowest layers.
    order = sorted(seen, key=lambda room: (seen[room], floor_of[room]))
    for low, high in pairwise(order):
        assert floor_of[low] <= floor_of[high], f"{low} stands below {high}"
