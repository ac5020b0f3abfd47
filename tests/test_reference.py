"""Every setting is explained, and what is made from the explanations is up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from raypipe.cli import reference
from raypipe.config import field_names
from raypipe.job import Job
from tests.conftest import Cli

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "jobs" / "configs").glob("*.yaml"))


def test_every_setting_says_what_it_does() -> None:
    short = []
    for section in reference.sections():
        if len(Job.model_fields[section].description or "") < 12:
            short.append(section)
        for setting in reference.settings(section):
            # A user has the pages and the command line, not the source.
            if len(setting.text) < 12 or ".py" in setting.text:
                short.append(setting.name)
    assert not short


def test_the_page_names_every_key_once() -> None:
    page = reference.page()
    for name in field_names(Job):
        if name not in reference.sections():
            assert page.count(f"\n`{name}`\n") == 1, name


def test_the_generated_files_are_up_to_date() -> None:
    for path, text in reference.files().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, reference.WRITE


def test_a_stale_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in reference.files():
        path.parent.mkdir(parents=True, exist_ok=True)
    assert reference.main(["--check"]) == 1
    assert "docs/config.md" in capsys.readouterr().err and not list(tmp_path.rglob("*.md"))
    assert reference.main([]) == 0 and reference.main(["--check"]) == 0
    (tmp_path / reference.PAGE).write_text("old")
    assert reference.main(["--check"]) == 1


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_the_schema_takes_every_example(config: Path) -> None:
    assert config.read_text().startswith("# yaml-language-server: $schema=schema.json\n")
    jsonschema.validate(yaml.safe_load(config.read_text()), reference.schema())


@pytest.mark.parametrize(
    "tree",
    [
        {"run": {"name": 12}},
        {"train": {"lr": "auto", "workers": [2, 8]}},
        {"search": {"space": {"train.lr": "loguniform(1e-4, 1)"}}},
        {"table": {"uri": "t", "version": 3, "where": {"site": ["a", "b"]}}},
    ],
)
def test_the_schema_takes_what_raypipe_takes(tree: dict[str, Any]) -> None:
    jsonschema.validate(tree, reference.schema())


@pytest.mark.parametrize(
    "tree",
    [
        {"trian": {}},
        {"train": {"lrr": 1}},
        {"train": {"precision": "fp17"}},
        {"train": {"epochs": 0}},
        {"gate": {"alpha": 2}},
    ],
)
def test_the_schema_refuses_what_raypipe_refuses(tree: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, reference.schema())


def test_the_terminal_shows_a_section(cli: Cli) -> None:
    code, out, _ = cli("config", "gate")
    assert code == 0 and "gate.least_rows" in out
    code, out, _ = cli("config")
    assert code == 0 and "train" in out and "gate" in out
    code, out, _ = cli("config", "--schema")
    assert code == 0 and json.loads(out) == reference.schema()
    code, _, err = cli("config", "trian")
    assert code == 2 and "no section 'trian'" in err and "'train'" in err
