"""infra/README.md, followed in a clean clone as far as a machine without an account can go.

A line with `# cloud` is not run: each thing that it names is looked for. What .ci/run runs is
not run twice, and a quickstart has a test of its own (test_sql_story.py).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra import ci_references
from tests.infra.ci_references import Repository

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "infra" / "README.md"
TEXT = PAGE.read_text("utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.M | re.S)
LINES = [line for block in BLOCKS for line in block.splitlines()]
IN_CI = {"make check": "make check", "make install": "make check"}
ELSEWHERE = {"make quickstart": "test_a_real_quickstart_says_the_same"}


def command(line: str) -> str:
    """Without its comment."""
    return re.sub(r"\s+#.*", "", line)


def is_cloud(line: str) -> bool:
    return re.search(r"# cloud$", line) is not None


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is committed, and nothing else."""
    folder = tmp_path_factory.mktemp("clone") / "raypipe"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True, timeout=120)
    return folder


def test_it_is_one_page() -> None:
    assert len(TEXT.splitlines()) <= 110
    assert len(BLOCKS) == 5


def test_what_needs_no_account_runs_in_a_clean_clone(clone: Path) -> None:
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    ran, folder = [], clone
    for line in LINES:
        one = command(line)
        if is_cloud(line) or not one:
            continue
        if one in IN_CI:
            assert IN_CI[one] in (ROOT / ".ci" / "run").read_text("utf-8")
            continue
        if one in ELSEWHERE:
            assert ELSEWHERE[one] in (ROOT / "tests/infra/test_sql_story.py").read_text("utf-8")
            continue
        if one.startswith("cd "):
            folder = (folder / one.removeprefix("cd ")).resolve()
            assert folder.is_dir() and folder.is_relative_to(clone)
            continue
        if one.startswith("terraform ") and shutil.which("terraform") is None:
            # Debian, PyPI and npm have no Terraform; tests/infra/test_terraform.py reads the files.
            assert " fmt -check " in one
            continue
        done = subprocess.run(
            ["bash", "-euc", one], cwd=folder, env=env, capture_output=True, text=True, timeout=300
        )
        # A variable that a person has to set is one here, too.
        unset = "unbound variable" in done.stderr and one.startswith("export ")
        assert done.returncode == 0 or unset, f"{one}\n{done.stdout}{done.stderr}"
        ran.append(one)
    assert folder == clone
    assert len(ran) >= 5
    assert list(clone.glob("dist/databricks/raypipe-*.whl"))
    assert {path.name for path in clone.glob(".github/workflows/*.yml")} > {"deploy.yml", "sit.yml"}


def test_what_needs_an_account_names_what_is_there() -> None:
    """Jobs, targets, folders, files and subcommands."""
    from typer.main import get_command

    from raypipe.main import app

    verbs = frozenset(get_command(app).commands)  # type: ignore[attr-defined]
    here = Repository.read(ROOT, verbs)
    folder, wrong = "", []
    for line in LINES:
        one = command(line).replace("$STAGE", '"$STAGE"')
        if one.startswith("cd "):
            folder = "" if folder else one.removeprefix("cd ")
        elif not one.startswith(("az ", "cp ", "mkdir ")):
            wrong += ci_references.commands(one.replace('"$STAGE"', "$STAGE"), folder, here)
        for name in re.findall(r"BUNDLE_VAR_(\w+)=", one):
            wrong += [] if name in here.variables else [f"variable {name}"]
        for stage in re.findall(r"--target (\w+)|environments/(\w+)", one):
            wrong += [] if {*stage} - {""} <= ci_references.STAGES else [f"stage {stage}"]
    assert wrong == []
    assert sum(map(is_cloud, LINES)) > 10


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)", TEXT)
    assert len(links) > 5
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
