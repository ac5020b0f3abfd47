"""The name and the folder of a run without a config file."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.work.names import run_of


@pytest.mark.parametrize("content", ["", "{", "[]", "table: cells", "table: {uri: 3}"])
def test_a_damaged_config_of_an_earlier_run_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    """It was a traceback, before anything else, in each command for that table."""
    monkeypatch.chdir(tmp_path)
    for key, text in (("abc", content), ("def", "table: {uri: other/cells}")):
        folder = tmp_path / "runs" / "cells" / "search" / key
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(text)
    assert run_of("other/cells") == {"name": "cells", "dir": "runs/cells"}
    assert run_of("tables/cells")["dir"].startswith("runs/cells-")
