"""infra/terraform in Terraform's own hands, and in checkov's.

The providers are out of reach of many machines. Terraform gets doubles that know nothing but their
schema (provider_double.py); `terraform test` mocks what they would do. So Terraform itself says
what it thinks of types, references, conditions, what is known at plan time, and of the way back.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.infra import misspelling, terraform_shapes
from tests.infra.provider_double import terraform_home
from tests.infra.terraform_check import SOURCES
from tests.infra.terraform_files import parse
from tests.infra.test_terraform import KNOWN, ROOT, STAGES, TREE, check

pytestmark = pytest.mark.cloud
HERE = Path(__file__).parent
CHECKOV = "3.3.30"
TERRAFORM = shutil.which("terraform")
needs_terraform = pytest.mark.skipif(TERRAFORM is None, reason="terraform is not on the PATH")


class Copy:
    """A copy of infra/terraform that may be changed, and Terraform with doubled providers."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "terraform"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns(".terraform*", "*.tfvars"))
        self.environment = terraform_home(folder / "home", SOURCES)

    def terraform(self, where: str, *command: str) -> tuple[int, str]:
        done = subprocess.run(
            [str(TERRAFORM), f"-chdir={self.root / where}", *command],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env=self.environment,
        )
        return done.returncode, done.stdout + done.stderr

    def validate(self, where: str) -> tuple[int, str]:
        # `init` would ask the registry; only the modules are needed.
        code, said = self.terraform(where, "get")
        return (code, said) if code else self.terraform(where, "validate", "-no-color")

    def test(self, where: str, text: str) -> tuple[int, str]:
        """`terraform test` with the runs of `text`."""
        (self.root / where / "this.tftest.hcl").write_text(text, "utf-8")
        code, said = self.terraform(where, "get")
        return (code, said) if code else self.terraform(where, "test", "-no-color")

    def unguard(self) -> None:
        """The README's own command, without which nothing that holds data goes away."""
        text = (ROOT / "README.md").read_text("utf-8")
        (command,) = re.findall(r"^grep -rl prevent_destroy .*$", text, re.M)
        parts = command.replace("infra/terraform", str(self.root))
        subprocess.run(["bash", "-c", parts], check=True, timeout=30)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


@needs_terraform
@pytest.mark.parametrize("where", ["bootstrap", *(f"environments/{stage}" for stage in STAGES)])
def test_terraform_plans_applies_and_takes_back(copy: Copy, where: str) -> None:
    copy.unguard()
    text = (HERE / f"{where.partition('/')[0].removesuffix('s')}.tftest.hcl").read_text("utf-8")
    if where.endswith(STAGES[1:]):
        text = text[: text.index('run "a_region')]  # what is wrong is wrong for all stages alike
    code, said = copy.test(where, text)
    passed = re.search(r"Success! (\d+) passed, 0 failed", said)
    runs = text.count('\nrun "')
    assert (code, passed and int(passed[1])) == (0, runs), said
    assert "tearing down" in said and "could not be destroyed" not in said


@needs_terraform
def test_terraform_destroys_nothing_that_holds_data(copy: Copy) -> None:
    text = (HERE / "environment.tftest.hcl").read_text("utf-8")
    _, said = copy.test("environments/sit", text[: text.index('run "a_region')])
    for held in ("databricks_catalog.this", 'azapi_resource.table["Raypipe'):
        assert re.search(
            re.escape(held) + r"[^.]*\s+has\s+lifecycle\.prevent_destroy\s+set", said
        ), said


@needs_terraform
@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ({"A_CL": [("RunId", "string")]}, "needs the column TimeGenerated"),
        ({"A_CL": [("TimeGenerated", "string")]}, "needs the column TimeGenerated"),
        ({"A": [("TimeGenerated", "datetime")]}, "A table of one's own is called NAME_CL"),
        (
            {"A_CL": [("TimeGenerated", "datetime"), ("Id", "guid")]},
            "cannot carry these columns: A_CL.Id",
        ),
    ],
)
def test_terraform_refuses_columns_that_azure_would_refuse_later(
    copy: Copy, stream: dict[str, list[tuple[str, str]]], message: str
) -> None:
    columns = {
        table: {"columns": [{"name": name, "type": type_} for name, type_ in given]}
        for table, given in stream.items()
    }
    (copy.root / "modules/monitoring/streams.json").write_text(json.dumps(columns))
    text = (HERE / "environment.tftest.hcl").read_text("utf-8")
    code, said = copy.test("environments/sit", text[: text.index('run "what_the_bundle')])
    assert code != 0
    assert message in re.sub(r"\s+", " ", said)


@needs_terraform
@pytest.mark.parametrize("seed", range(8))
def test_terraform_agrees_that_a_misspelling_is_one(copy: Copy, seed: int) -> None:
    """The checker and Terraform, on the same broken tree. Words that only the checker minds (keys
    that an object type drops silently) are left out.
    """
    words = misspelling.words(TREE)
    chance = random.Random(f"agree-{seed}")
    word = chance.choice(
        [word for word in words if "locals.tf" not in word.file and "bootstrap" not in word.file]
    )
    made = misspelling.misspelt(word.text, chance, {word.text for word in words})
    broken = misspelling.with_misspelling(TREE, word, made)
    assert any(made in str(found) for found in check(broken, KNOWN))
    (copy.root / word.file).write_text(broken.texts[word.file])
    where = word.file.rpartition("/")[0]
    where = where if where.startswith("environments/") else "environments/sit"
    code, said = copy.validate(where)
    assert code != 0, (word, made, said)


@needs_terraform
def test_the_functions_are_terraforms() -> None:
    done = subprocess.run(
        [str(TERRAFORM), "metadata", "functions", "-json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    there = {
        name
        for name in json.loads(done.stdout)["function_signatures"]
        if not name.startswith("core::")
    }
    assert there == terraform_shapes.FUNCTIONS


@pytest.fixture(scope="module")
def checkov() -> Iterator[Path]:
    """checkov in an environment of its own, built once a machine: it pins half of what we use."""
    home = Path.home() / ".cache" / "raypipe" / f"checkov-{CHECKOV}"
    if not (home / "ready").is_file():
        shutil.rmtree(home, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True, timeout=120)
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, f"checkov=={CHECKOV}"], check=True, timeout=500)
        (home / "ready").touch()
    yield home / "bin" / "checkov"


def scan(checkov: Path, root: Path) -> dict[str, object]:
    done = subprocess.run(
        [
            str(checkov),
            "--directory",
            str(root),
            "--framework",
            "terraform",
            "--output",
            "json",
            "--compact",
        ],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        # It asks nobody for newer rules or modules.
        env={**os.environ, "CHECKOV_RUN_SCA_PACKAGE_SCAN": "false", "LOG_LEVEL": "ERROR"},
    )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_checkov_reads_every_file_and_finds_nothing(checkov: Path) -> None:
    found = scan(checkov, ROOT)
    summary, results = found["summary"], found["results"]
    assert isinstance(summary, dict) and isinstance(results, dict)
    assert (summary["parsing_errors"], results.get("parsing_errors", [])) == (0, [])
    assert summary["checkov_version"] == CHECKOV
    failed = [
        f"{one['check_id']} {one['resource']}: {one['check_name']}"
        for one in results["failed_checks"]
    ]
    assert failed == []
    resources = [block for text in TREE.texts.values() for block in parse(text).all("resource")]
    assert summary["resource_count"] >= len(resources) > 60
    assert summary["passed"] >= 40
    # Each skip says why, and there is something to skip.
    written = {
        (name, *skip)
        for name, text in TREE.texts.items()
        for skip in re.findall(r"# checkov:skip=(\w+):(.*)", text)
    }
    assert all(len(reason) > 15 for _, _, reason in written)
    skipped = {(one["file_path"].lstrip("/"), one["check_id"]) for one in results["skipped_checks"]}
    assert {(name, check_id) for name, check_id, _ in written} == skipped


def test_checkov_would_say_so(checkov: Path, tmp_path: Path) -> None:
    """Negative control: an open account is found, and a file that it cannot read is no pass."""
    shutil.copytree(ROOT / "modules" / "storage", tmp_path / "storage")
    main = tmp_path / "storage" / "main.tf"
    text = main.read_text("utf-8")
    main.write_text(text.replace('min_tls_version                   = "TLS1_2"', ""))
    found = scan(checkov, tmp_path)
    assert isinstance(found["results"], dict)
    assert "CKV_AZURE_44" in {one["check_id"] for one in found["results"]["failed_checks"]}
    main.write_text(text + "\nresource {{{\n")
    summary = scan(checkov, tmp_path)
    assert isinstance(summary.get("summary", {}), dict)
    assert summary.get("summary", {}).get("parsing_errors") == 1  # type: ignore[union-attr]
