"""Every code block and every setting on the pages for users is right.

It is run, validated, or named here with the reason why not.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from raypipe.config import field_names, load
from raypipe.job import Job
from tests.conftest import encode, striped
from tests.test_help import parsed

ROOT = Path(__file__).parents[2]
OWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES = sorted([*OWN, *ROOT.glob("infra/**/*.md"), *ROOT.glob("docs/*.md")])

# First line of a block -> why it is not run here.
ELSEWHERE = {
    "make quickstart   # the whole loop on 2,624 real photographs": "minutes: benchmarks/ runs the "
    "quickstart, CI runs make",
    "make install    # .venv with pinned versions": "CI runs make",
    "raypipe ingest mine.yaml     # images and labels become a Delta table": "its "
    "lines are lines of the tutorial's block, which is run",
    "make install                              # once": "a cluster "
    "for everybody on this host, on fixed ports: test_connect.py starts one on its own, "
    "search/test_clusters.py submits",
    "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0": "the same, in infra/ray",
    "export RAY_AUTH_MODE=token": "the same: search/test_clusters.py submits a job",
    "databricks secrets create-scope raypipe": "a Databricks workspace",
    "import raypipe\n\nbest = raypipe.tune(": "test_door.py runs it",
    "mlflow models serve -m": "serve/test_same_everywhere.py serves a model so",
    "curl http://127.0.0.1:5001/invocations": "the same: it asks with such a body",
    "import mlflow\n\npredict = mlflow.pyfunc.spark_udf(": "serve/test_spark.py runs it",
    "from collections.abc import Iterator\n\nimport mlflow": "serve/test_spark.py runs it",
    "import base64, hashlib, hmac, time": "watch/test_sinks.py runs it on a real request",
    "raypipe sidecars pack --python 3.12 --out": "cloud/test_sidecars.py packs into a store",
    "raypipe predict mine.yaml predict.table.uri": "serve/test_stream.py runs these commands",
    "raypipe train jobs/configs/solar.yaml run.dir=runs/cluster": "cluster/test_submit.py does",
    "# Two executors on this machine.": "cluster/test_spark.py starts Spark so",
    "export SPARK_LOCAL_IP=127.0.0.1\nexport PYSPARK_SUBMIT_ARGS": "train/test_spark_launch.py "
    "does",
    "from raypipe.cluster.connect import ClusterConfig, close": "cluster/test_spark.py does so",
    "raypipe train jobs/configs/solar.yaml --dry-run": "e2e/test_dry_run.py runs both",
    "raypipe serve mine.yaml": "serve/test_online.py starts the server",
    "curl -H 'Content-Type: image/jpeg'": "the same: it asks so",
    "raypipe export onnx": "serve/test_same_everywhere.py exports so",
    "raypipe doctor": "doctor/test_faults.py and its neighbours run it",
    "raypipe table prepare tables/photos": "tables/test_prepare.py runs this command",
    "raypipe promote mine.yaml --history": "registry/test_moves.py runs these verbs",
    "raypipe tune mine.yaml run.seed=1": "train/test_calibrated.py: only another seed is another "
    "version; registry/test_moves.py promotes it",
    "from benchmarks import looks": "search/test_looks.py notes looks, and reads benchmarks for it",
    "raypipe report model mine.yaml": "work/test_proof.py runs these verbs",
    "raypipe drift mine.yaml watch.batch.uri=tables/nightly": "chaos/test_nights.py runs both",
    "0 3 * * *": "a line of cron: chaos/test_nights.py runs the command in it",
    "raypipe evaluate models:/screws@champion": "serve/test_evaluate.py runs both forms",
    "docker build --file infra/ray/docker/Dockerfile": "infra/test_images.py builds the images",
    "kubectl create namespace raypipe": "a Kubernetes cluster: infra/test_ray_elsewhere.py checks "
    "the files, and that the secrets made here are those they name",
    "kubectl get rayjob,rayservice": "the same",
    "python infra/ray/fill.py infra/ray/anyscale": "the same, and an account of Anyscale",
    "export RAYPIPE_ENV=/shared/raypipe": "infra/test_slurm.py submits to a real SLURM",
    "cd infra/ray\n": "the tests' own environment is made of these pins; conda is not run",
    "export RAYPIPE_WHEEL_DIR=dist": "an account of AWS or Azure: infra/test_ray_elsewhere.py "
    "checks the files by Ray's own launcher",
    "export BUNDLE_VAR_host=$DATABRICKS_HOST": "a workspace: infra/test_bundle_runs.py runs what "
    "the jobs run",
    # infra/terraform/README.md
    "az login\nprintf": "an Azure account: infra/test_terraform.py validates and plans the files",
    "stage_subscription_ids = ": "values of bootstrap.tfvars",
    "rm infra/terraform/bootstrap": "an Azure account",
    "STAGE=sit\nterraform": "an Azure account",
    "databricks bundle destroy --target $STAGE": "an Azure account",
    "printf 'terraform {": "an Azure account",
    # infra/README.md
    "make install                                              #": "infra/test_readme.py runs it",
    "terraform -chdir=infra/terraform fmt": "infra/test_readme.py runs what needs no account",
    "cd infra/databricks\nexport BUNDLE_VAR_host": "a workspace: infra/test_readme.py checks names",
    "mkdir -p .github/workflows": "infra/test_readme.py runs what needs no account",
    "databricks bundle destroy --target sit ": "a workspace: infra/test_readme.py checks names",
}
RUN = ("source .venv/bin/activate\ncat > mine.yaml", "import mlflow, pandas as pd")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


DIRECTIVE = re.compile(r"^```\{.*?^```$", re.MULTILINE | re.DOTALL)  # of Sphinx: make docs runs it


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = DIRECTIVE.sub(lambda m: "\n" * m[0].count("\n"), page.read_text(encoding="utf-8"))
        for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, line, match[1], match[2]))
    return found


BLOCKS = blocks()
CODE = [b for b in BLOCKS if b.language != "yaml"]
YAMLS = [b for b in BLOCKS if b.language == "yaml"]


def block(start: str) -> str:
    (found,) = [b.text for b in BLOCKS if b.text.startswith(start)]
    return found


def test_every_record_of_a_measurement_is_in_their_list() -> None:
    records = ROOT / "benchmarks" / "results"
    listed = (records / "README.md").read_text()
    missing = [f.name for f in records.glob("2*.md") if f"]({f.name})" not in listed]
    assert not missing


def test_there_is_something_to_check() -> None:
    assert len(YAMLS) >= 3 and len(CODE) >= 5 and (ROOT / "README.md") in PAGES


@pytest.mark.parametrize("code", CODE, ids=str)
def test_every_block_is_run_or_named(code: Block) -> None:
    reasons = [start for start in (*RUN, *ELSEWHERE) if code.text.startswith(start)]
    assert reasons, f"{code} is neither run nor named with a reason"


@pytest.mark.parametrize("start", [*RUN, *ELSEWHERE])
def test_the_list_names_nothing_that_is_gone(start: str) -> None:
    assert any(b.text.startswith(start) for b in CODE)


def test_the_short_story_is_part_of_the_long_one() -> None:
    """The README's own-images block is not run: the tutorial's is, and has the same commands."""

    def commands_of(text: str) -> list[list[str]]:
        lines = text.replace("\\\n", " ").splitlines()
        return [shlex.split(line, comments=True) for line in lines if line.startswith("raypipe")]

    short = commands_of(block("raypipe ingest mine.yaml     # images"))
    long = [" ".join(words) for words in commands_of(block(RUN[0]))]
    for words in short:
        assert any(line.startswith(" ".join(words)) for line in long), words


@pytest.mark.parametrize("code", YAMLS, ids=str)
def test_every_yaml_block_is_a_configuration(code: Block, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(code.text, encoding="utf-8")
    given = yaml.safe_load(code.text)
    job = load(Job, file, [] if "table" in given else ["table.uri=t"])
    for section in given:
        assert getattr(job, section) is not None


def commands() -> list[tuple[str, list[str]]]:
    """Every `raypipe …` and `python jobs/….py …` of the blocks, as a shell splits it."""
    found = []
    for b in CODE:
        for line in b.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True) if "<<" not in line else []
            if "raypipe" in words[:1]:
                found.append((f"{b} {line.strip()}", words[1:]))
            for i, word in enumerate(words):
                if word.startswith("jobs/") and word.endswith(".py"):
                    found.append((f"{b} {line.strip()}", [Path(word).stem, *words[i + 1 :]]))
    return found


@pytest.mark.parametrize(("where", "words"), commands())
def test_every_command_is_one_that_the_command_line_takes(
    where: str, words: list[str], tmp_path: Path
) -> None:
    """Its verb, options and settings are parsed for real; the rest of the verb is left out."""
    heredoc = re.search(r"cat > mine.yaml <<'YAML'\n(.*?)^YAML$", block(RUN[0]), re.M | re.S)
    assert heredoc is not None
    (tmp_path / "mine.yaml").write_text(heredoc[1], encoding="utf-8")
    # The shell puts variables in.
    words = [re.sub(r"\$(\w+)", r"/\1", word) for word in words]
    settings = [w for w in words if re.match(r"^[a-z_]+\.[\w.]+=", w)]
    files = [w for w in words if w.endswith(".yaml")]
    for file in files:
        place = tmp_path / file if file == "mine.yaml" else ROOT / file
        load(Job, place, settings)
    assert parsed(words), where


INLINE = re.compile(r"`([a-z_]+\.[a-z_.]+)=([^`]*)`")
BRACES = "…", "$"


def settings_in_text() -> list[str]:
    """`a.b=1 c.d=2` within backticks, together as they stand there."""
    known = {name.partition(".")[0] for name in field_names(Job)}
    found = []
    for page in PAGES:
        for key, value in INLINE.findall(page.read_text(encoding="utf-8")):
            if key.partition(".")[0] in known and not any(b in value for b in BRACES):
                found.append(f"{key}={value}")
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("text", settings_in_text())
def test_every_setting_in_the_text_is_one(text: str) -> None:
    settings = re.split(r" (?=[a-z_]+\.[a-z_.]+=)", text)
    # Several are of fine-tuning, as their sentence says; a solver is of frozen features.
    mode = "frozen" if "train.solver=" in text else "finetune"
    given = ["table.uri=t", f"model.mode={mode}", *(s for s in settings if not s.endswith("="))]
    job = load(Job, None, given)
    for name in (s.partition("=")[0] for s in settings):
        free = name.startswith(("search.space.", "search.refit."))  # fields of the job below them
        assert free or name in field_names(Job), f"{name} of {job.run.name}"


# What makes the story small. It stands behind the page's own settings, which stay as they are.
MODEL = "model.name=small_cnn model.mode=finetune model.pretrained=false model.side_px=32"
SIZE = "cluster.address=local cluster.cpus=2 cluster.object_store_mb=200"
TRAIN = f"{MODEL} train.epochs=2 train.batch_size=16"
SMALL = {
    "ingest": "cluster.address=local",
    "clean": SIZE,
    "predict": SIZE,
    "tune": f"{SIZE} {TRAIN} search.samples=2 'search.space.train.lr=uniform(0.01, 0.02)'",
    "drift": SIZE,
    "retrain": f"{SIZE} watch.retrain_workers=1 watch.retrain_samples=1 watch.force=true",
}


@pytest.mark.parametrize("verb", SMALL)
def test_what_makes_the_story_small_is_a_configuration(verb: str) -> None:
    load(Job, None, ["table.uri=t", *shlex.split(SMALL[verb])])


@pytest.mark.slow
def test_your_own_images_and_the_registered_model(photos: Path, tmp_path: Path) -> None:
    """The two blocks as they are. Bash runs the first; Python runs the second on its model."""

    def drawn(folder: Path, seeds: range) -> None:
        folder.mkdir()
        lines = ["file,label"]
        for seed in seeds:
            label = ("warm", "cold")[seed % 2]
            (folder / f"{seed}.png").write_bytes(encode(striped(seed, label)))
            lines.append(f"{seed}.png,{label}")
        (folder / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")

    drawn(tmp_path / "photos", range(320))  # a drift test wants 20 images of validation
    drawn(tmp_path / "tonight", range(320, 380))
    shutil.copy(photos / "00.png", tmp_path / "cell.png")

    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "activate").write_text(f'export PATH="{tools}:$PATH"\n')
    cases = "\n".join(f'  {verb}) set -- "$@" {_quoted(more)};;' for verb, more in SMALL.items())
    shim = tools / "raypipe"
    shim.write_text(
        f'#!/bin/bash\ncase "$1" in\n{cases}\nesac\n[ "$1" = drift ] && set -- "$@" --json\n'
        f'{shlex.quote(sys.executable)} -m raypipe "$@"\n'
    )
    shim.chmod(0o755)
    # MLflow keeps the store that an earlier test of this process opened in the environment.
    earlier = {"RAY_ADDRESS", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"}
    environment = {k: v for k, v in os.environ.items() if k not in earlier}
    path = f"{ROOT}:{environment.get('PYTHONPATH', '')}"

    def run(*command: str) -> str:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    told = run("bash", "-euo", "pipefail", "-c", block(RUN[0]))
    # Tonight's are drawn as the others are.
    (verdict,) = (json.loads(line) for line in told.splitlines() if line.startswith("{"))
    assert verdict["is_drift"] is False
    code = (
        block(RUN[1])
        .replace("runs/solar", "runs/screws")
        .replace("models:/solar", "models:/screws")
    )
    answer = run(
        sys.executable,
        "-c",
        code + "\nimage = open('cell.png', 'rb').read()"
        "\nprint(model.predict(pd.DataFrame({'image': [image]}))['label'].tolist())",
    )
    assert "['warm']" in answer


def _quoted(words: str) -> str:
    return " ".join(shlex.quote(word) for word in shlex.split(words))
