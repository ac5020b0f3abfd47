"""docs/tutorial.ipynb runs from its first cell to its last, and shows what it says."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def run(code: str, names: dict[str, Any]) -> Any:
    """Run a cell; returns the value of its last line, as a notebook shows it."""
    tree = ast.parse(code)
    last = tree.body[-1]
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "cell", "exec"), names)
        return None
    before = ast.Module(tree.body[:-1], type_ignores=[])
    exec(compile(before, "cell", "exec"), names)
    return eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
@pytest.mark.share
@pytest.mark.usefixtures("ray_session")
def test_the_notebook_runs_and_finds_the_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The notebook changes into a folder of its own; monkeypatch changes back.
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in CELLS:
        if cell["cell_type"] == "code" and "raypipe.close()" not in cell["source"]:
            shown.append(run("".join(cell["source"]), names))
    assert len(names["best"].leaderboard.rows) == 4
    assert names["best"].result.best.metrics["val_accuracy"] > 0.8
    assert names["day"].is_drift and not names["night"].is_drift
    pictures = [value for value in shown if hasattr(value, "_repr_png_")]
    tables = [value for value in shown if hasattr(value, "_repr_html_")]
    assert len(pictures) == 2 and len(tables) == 5


def test_its_outputs_name_no_machine() -> None:
    text = NOTEBOOK.read_text(encoding="utf-8")
    for word in ("/root", "/tmp", "/work", "file:///"):
        assert word not in text, word
