"""infra/ray/runtime_env.yaml goes through Ray's own validation and packer."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import yaml
from ray._private.runtime_env.packaging import create_package
from ray.runtime_env import RuntimeEnv

ROOT = Path(__file__).parents[2]


def test_ray_accepts_the_runtime_env_and_packs_only_the_code(tmp_path: Path) -> None:
    env = yaml.safe_load((ROOT / "infra" / "ray" / "runtime_env.yaml").read_text())
    assert set(env) <= RuntimeEnv.known_fields  # RuntimeEnv lets an unknown key pass
    assert RuntimeEnv(**env)["env_vars"]["RAY_AUTH_MODE"] == "token"
    with pytest.raises(TypeError, match="env_vars"):
        RuntimeEnv(**env | {"env_vars": {"RAY_USAGE_STATS_ENABLED": 0}})
    wanted = ["jobs/train.py", "raypipe/watch/runs.py", "infra/ray/README.md"]
    unwanted = [
        ".git/HEAD",
        ".venv/bin/python",
        "runs/a.pt",
        "mlflow.db",
        "raypipe/__pycache__/x.pyc",
        "dist/a.whl",
    ]
    for file in wanted + unwanted:
        (tmp_path / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / file).touch()
    for name, excludes, expected in (
        ("some", env["excludes"], wanted),
        ("all", [], wanted + unwanted),
    ):
        create_package(
            str(tmp_path / "tree"),
            tmp_path / f"{name}.zip",
            include_gitignore=True,
            excludes=excludes,
        )
        packed = zipfile.ZipFile(tmp_path / f"{name}.zip").namelist()
        assert sorted(file for file in packed if not file.endswith("/")) == sorted(expected)
