"""What --fresh may delete, and whose table a story begins with."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import ConfigError
from raypipe.quickstart.folder import told_in


def test_a_story_deletes_only_what_it_made_itself(tmp_path: Path) -> None:
    """It marked any run.dir as its own, and a later --fresh deleted what had been there before."""
    root = tmp_path / "mine"
    root.mkdir()
    (root / "thesis.txt").touch()
    table = str(root / "tables" / "cells")
    with told_in(root, table, fresh=False):
        pass
    with pytest.raises(ConfigError, match="not made by a quickstart"):
        told_in(root, table, fresh=True).__enter__()
    assert (root / "thesis.txt").exists()

    own = tmp_path / "runs" / "solar"
    for _ in range(2):
        with told_in(own, str(own / "cells"), fresh=True):
            assert [file.name for file in own.iterdir()] == [".quickstart"]
            (own / "old.txt").touch()
    with told_in(own, str(own / "cells"), fresh=False):
        assert (own / "old.txt").exists(), "what was cut off goes on"


def test_a_story_that_is_told_is_not_deleted(tmp_path: Path) -> None:
    root, table = tmp_path / "solar", str(tmp_path / "solar" / "cells")
    with told_in(root, table, fresh=False):
        with told_in(root, table, fresh=False):
            pass  # two that go on wait for each other where they work
        with pytest.raises(ConfigError, match="Another quickstart is at work"):
            told_in(root, table, fresh=True).__enter__()
        assert root.exists()
    with told_in(root, table, fresh=True):
        pass


@pytest.mark.parametrize("fresh", [False, True])
def test_another_story_s_table_keeps_its_splits(tmp_path: Path, fresh: bool) -> None:
    """With run.dir alone, another seed was told about the cells and the splits of the first one."""
    table = tmp_path / "solar" / "tables" / "cells"
    (table / "_delta_log").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.dir is new, and the table is not .* table\.uri="):
        told_in(tmp_path / "other", str(table), fresh).__enter__()
    assert not (tmp_path / "other").exists()
    with told_in(tmp_path / "solar", str(table), fresh=False):
        pass
