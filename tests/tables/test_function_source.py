"""`kind: python`: a function names images and labels; what it does wrong is one message."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from raypipe.config import validate
from raypipe.errors import ConfigError, DataError
from raypipe.tables.sources import SourceConfig, candidates
from tests.conftest import encode

MODULE = """
from pathlib import Path
HERE = Path(__file__).parent
ROWS = [{"file": f"{i}.png", "label": "ab"[i % 2], "site": i % 2} for i in range(4)]
def all(): return HERE / "photos", ROWS
ODD = [["b", "a"], 1.0, True, None]
def odd(): return HERE / "photos", [
    {"file": f"{i}.png", "label": "a", "x": x} for i, x in enumerate(ODD)]
SPELLED = ["1", "1.0", "b|a", "a | b"]
def spelled(): return HERE / "photos", [
    {"file": f"{i}.png", "label": x, "x": x} for i, x in enumerate(SPELLED)]
def missing(): return HERE / "photos", [*ROWS, {"file": "9.png", "label": "a", "site": 0}]
def outside(): return HERE / "photos", [{"file": "../secret.png", "label": "a", "site": 0}]
def twice(): return HERE / "photos", [*ROWS, {"file": "0.png", "label": "b", "site": 0}]
def nothing(): return None
def no_dicts(): return HERE / "photos", ["0.png"]
def nowhere(): return HERE / "not", ROWS
def broken(): raise KeyError("site")
def exits(): raise SystemExit(3)
def late():
    def rows():
        yield ROWS[0]
        raise ValueError("late")
    return HERE / "photos", rows()
"""


def picture(shade: int) -> bytes:
    return encode(Image.new("RGB", (8, 8), (shade, 0, 0)))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "photos").mkdir()
    for i in range(4):
        (tmp_path / "photos" / f"{i}.png").write_bytes(picture(i))
    (tmp_path / "secret.png").write_bytes(picture(9))
    (tmp_path / "my_cells.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_cells", raising=False)

    def listed(function: str, **settings: Any) -> list[tuple[str, str | None]]:
        tree = {"kind": "python", "images": f"my_cells:{function}", **settings}
        (part,) = candidates(validate(SourceConfig, tree)).parts
        return [(c.path, c.label) for c in part.candidates]

    return listed


def test_rows_become_candidates_in_their_order(source: Any) -> None:
    assert source("all") == [("0.png", "a"), ("1.png", "b"), ("2.png", "a"), ("3.png", "b")]
    assert source("all", where={"site": "1"}) == [("1.png", "b"), ("3.png", "b")]
    assert source("all", labelled=False)[0] == ("0.png", None)


@pytest.mark.parametrize(
    ("condition", "files"),
    [("a|b", ["0.png"]), ("b|a", ["0.png"]), ("1", ["1.png"]), ("true", ["2.png"]), ("None", [])],
)
def test_a_condition_means_what_it_means_in_a_table(
    condition: str, files: list[str], source: Any
) -> None:
    """Values were compared as Python writes them: True, 1.0, ['b', 'a']."""
    try:
        found = source("odd", where={"x": condition})
    except DataError as e:
        assert "nothing to ingest" in str(e)
        found = []
    assert [path for path, _ in found] == files


def test_a_condition_on_labels_finds_each_spelling_of_a_class(source: Any) -> None:
    """As `table.where` does; other texts are compared as they are."""

    def found(**where: str) -> list[str]:
        return [path for path, _ in source("spelled", where=where)]

    assert found(label="1") == found(label="1.0") == ["0.png", "1.png"]
    assert found(label="a|b") == found(label="b|a") == ["2.png", "3.png"]
    assert (found(x="1.0"), found(x="b|a")) == (["1.png"], ["2.png"])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("missing", r"9\.png"),
        ("outside", r"outside of"),
        ("twice", r"0\.png two labels"),
        ("nothing", r"function of the source failed: TypeError"),
        ("no_dicts", r"a row that is no dict"),
        ("nowhere", r"folder of the source's images does not exist"),
        ("broken", r"function of the source failed: KeyError"),
        ("exits", r"function of the source failed: SystemExit"),
        ("late", r"function of the source failed: ValueError: late"),
        ("al", r"no function 'al'.*Did you mean 'all'"),
    ],
)
def test_what_a_function_does_wrong_is_one_message(source: Any, function: str, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        source(function)
    assert "\n" not in str(caught.value)


def test_a_column_that_is_missing_is_named(source: Any) -> None:
    with pytest.raises(DataError, match=r"no column 'place'"):
        source("all", where={"place": "1"})


@pytest.mark.parametrize(
    ("images", "says"), [("", "names no function"), ("no_such:f", "cannot be")]
)
def test_a_function_that_does_not_exist_is_named(images: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        candidates(validate(SourceConfig, {"kind": "python", "images": images}))


def test_settings_that_a_kind_would_ignore_are_refused() -> None:
    with pytest.raises(ConfigError, match="where is for delta and python, not for folder"):
        validate(SourceConfig, {"images": "photos", "where": {"site": "1"}})
    with pytest.raises(ConfigError, match="labels is a table for folder and paths"):
        validate(SourceConfig, {"kind": "python", "images": "a:b", "labels": "x.csv"})
    with pytest.raises(ConfigError, match="version is that of a delta source"):
        validate(SourceConfig, {"images": "photos", "version": 3})
