"""The files of infra/ray, as far as they can be checked without the machines that they are for.

elsewhere.py says what is wrong with a file. Here all files are right, and 30 random misspellings
are found.
"""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

from tests.infra import elsewhere
from tests.infra.elsewhere import PLACEHOLDER, RAY, ROOT, VALUES

BIN = Path(sys.executable).parent
FILES = elsewhere.files()
NAMES = [path.relative_to(RAY).as_posix() for path in FILES]
# Anyscale's package brings 200 MB of others.
HEAVY = "anyscale/job.yaml"
SEED, MISSPELLINGS = 18, 30
KEY = r"^ *(?:- )*([A-Za-z][\w/.-]{2,}):(?= |$)"
# Names that refer to something.
REFERENCES = [
    r"- name: (runs|config|shm|tmp|home)$",
    r"claimName: (\S+)",
    r"secretName: (\S+)",
    r" name: (raypipe-(?:storage|config|serve-token|ray-token))$",
    r" key: (token)$",
    r" port: (serve)$",
    r"^kind: (\S+)",
    r"^apiVersion: (\S+)",
    r"submissionMode: (\S+)",
    r"concurrencyPolicy: (\S+)",
    r"import_path: (\S+)",
    r"head_node_type: (\S+)",
    r"- name: ([A-Z][A-Z_]{5,})",
    r"\b([a-z_]+\.[a-z_]+)=",
    r"(?:args|command): \[raypipe, (\w+)",
    r"entrypoint: (raypipe-(?!\$)\w+)",
    r"\$\{([A-Z_]+):\?",
    r"(--[a-z-]{5,})=",
    r"nvidia\.com/(gpu)",
]
# Keys that are the file's own names: another one is no mistake.
OWN = {"worker", "project"}


def places(text: str) -> list[tuple[int, int]]:
    """Where names stand that may be misspelt: keys and references, outside of comments."""
    found = set()
    for pattern in (KEY, *REFERENCES):
        for match in re.finditer(pattern, text, re.MULTILINE):
            line = text[text.rfind("\n", 0, match.start(1)) + 1 : match.start(1)]
            if "#" not in line and match[1] not in OWN:
                found.add(match.span(1))
    return sorted(found)


def misspell(word: str, rng: random.Random) -> str:
    """A letter less, one twice, one for another, or two swapped; never the word itself."""
    while True:
        at = rng.randrange(len(word))
        other = rng.choice("abcdefghijklmnopqrstuvwxyz")
        swapped = word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :]
        less, twice = word[:at] + word[at + 1 :], word[:at] + word[at] * 2 + word[at + 1 :]
        wrong = rng.choice([less, twice, swapped, word[:at] + other + word[at + 1 :]])
        if wrong != word and word[at].isalpha():
            return wrong


def is_named(word: str, said: list[str]) -> bool:
    """Is it in what is said, as a word of its own?"""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", problem) for problem in said)


@pytest.mark.parametrize("name", [name for name in NAMES if name != HEAVY])
def test_a_file_is_right(name: str) -> None:
    path = RAY / name
    assert elsewhere.problems(path, path.read_text("utf-8")) == []


@pytest.mark.cloud
def test_anyscales_file_is_right() -> None:
    path = RAY / HEAVY
    assert elsewhere.problems(path, path.read_text("utf-8")) == []


def misspelt(seed: int, count: int, skip: str = "") -> list[tuple[str, str, str, list[str]]]:
    """So many misspellings: file, name, misspelt name, and what is said against it."""
    rng = random.Random(seed)
    texts = {name: (RAY / name).read_text("utf-8") for name in NAMES if name != skip}
    candidates = [(name, span) for name, text in texts.items() for span in places(text)]
    found = []
    for name, (start, end) in rng.sample(candidates, count):
        text = texts[name]
        wrong = misspell(text[start:end], rng)
        changed = text[:start] + wrong + text[end:]
        found.append((name, text[start:end], wrong, elsewhere.problems(RAY / name, changed)))
    return found


@pytest.mark.cloud
def test_30_random_misspellings_are_found_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = misspelt(SEED, MISSPELLINGS)
    unnamed = []
    for name, right, wrong, said in found:
        named = is_named(wrong, said) or is_named(right, said)
        with capsys.disabled():
            print(f"\n{name}: {right} as {wrong}: {said[0][:120] if said else 'NOT FOUND'}", end="")
        if not named:
            unnamed.append((name, right, wrong, said))
    assert unnamed == []
    assert len({name for name, *_ in found}) >= 6


def test_a_placeholder_without_a_value_is_refused_with_what_it_is(tmp_path: Path) -> None:
    for path in FILES:
        text = path.read_text("utf-8")
        names = dict(PLACEHOLDER.findall(text))
        fill = [sys.executable, str(RAY / "fill.py"), str(path)]
        whole = subprocess.run(fill, env=VALUES, capture_output=True, text=True)
        assert whole.returncode == 0, whole.stderr
        assert "${" not in whole.stdout
        assert list(yaml.safe_load_all(whole.stdout))
        for name, what in names.items():
            for value in (None, "", "  "):
                env = {key: each for key, each in VALUES.items() if key != name}
                env |= {} if value is None else {name: value}
                done = subprocess.run(fill, env=env, capture_output=True, text=True)
                assert (done.returncode, done.stdout) == (2, "")
                assert f"{name} is not set: {what}" in done.stderr


@pytest.mark.parametrize(
    "value",
    ["a: b", "a\nkind: Secret", "x #", '"', "'", "a b", "${HOME}", "$(id)", "{a}", "a:", "*x", "-"],
)
def test_a_value_that_yaml_would_read_as_more_than_text_is_refused(value: str) -> None:
    fill = [sys.executable, str(RAY / "fill.py"), str(RAY / "kuberay" / "storage.yaml")]
    env = {"RAYPIPE_STORAGE_CLASS": value}
    done = subprocess.run(fill, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "RAYPIPE_STORAGE_CLASS has a character" in done.stderr
    assert value not in done.stderr or len(value) < 3


@pytest.mark.parametrize(
    "value",
    [
        *("~", "null", "Yes", "12", "1e3", "0x1F", "0b101", "12:30", "2026-11-25"),
        "2026-11-25T03:04:05Z",
    ],
)
def test_a_value_that_yaml_would_not_read_as_text_is_refused(value: str) -> None:
    fill = [sys.executable, str(RAY / "fill.py"), str(RAY / "kuberay" / "storage.yaml")]
    done = subprocess.run(
        fill, env={"RAYPIPE_STORAGE_CLASS": value}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "RAYPIPE_STORAGE_CLASS would be read as a number" in done.stderr


def test_a_file_is_filled_whatever_the_locale(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("a: ${NAME:?x}  # für dich\n", encoding="utf-8")
    env = {"NAME": "solar", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, str(RAY / "fill.py"), str(file)], env=env, capture_output=True
    )
    assert (done.returncode, done.stdout.decode()) == (0, "a: solar  # für dich\n")


def test_what_is_no_placeholder_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    for text in ("a: 1\nb: ${HOME}\n", "b: ${RAYPIPE_IMAGE}\n", "b: ${raypipe:?x}\n"):
        file.write_text(text)
        done = subprocess.run(
            [sys.executable, str(RAY / "fill.py"), str(file)],
            env=VALUES,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, done.stdout) == (2, "") and "no placeholder" in done.stderr


def test_every_placeholder_of_the_readme_is_used_and_described() -> None:
    used = dict(pair for path in FILES for pair in PLACEHOLDER.findall(path.read_text("utf-8")))
    table = elsewhere.README.split("| placeholder |")[1].split("\n\n")[0]
    assert set(re.findall(r"`([A-Z_]{5,})`", table)) == set(used) == set(VALUES)
    assert all(len(what) > 10 for what in used.values())


def test_no_host_user_or_secret_stands_in_a_file() -> None:
    files = [path for path in RAY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert len(files) > 14
    for path in files:
        text = path.read_text("utf-8")
        allowed = r"127\.0\.0\.1|HOST|http://127|docs\.|json-schema"
        for host in re.findall(r"(?:https?|s3|abfss|gs)://[^\s\"'`)]+", text):
            assert re.search(allowed, host), f"{path.name}: {host}"
        # A digest, a key, an account, an address of somebody.
        assert not re.search(r"[0-9a-f]{32}|AKIA|\b[\w.]+@[\w]+\.\w+\b|AccountKey", text), path.name
        assert not re.search(r"(?i)(password|secret|token): *[\"']?[\w+/=-]{16,}$", text), path.name


def test_what_a_pod_of_ray_gets() -> None:
    """Details that no schema knows."""
    trees = {path.stem: _filled(path) for path in (RAY / "kuberay").glob("*.yaml")}
    job, cron = trees["job"]["spec"], trees["drift"]["spec"]
    assert (job["submissionMode"], job["shutdownAfterJobFinishes"]) == ("K8sJobMode", True)
    assert job["ttlSecondsAfterFinished"] > 0
    assert cron["concurrencyPolicy"] == "Forbid"
    assert cron["jobTemplate"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"
    clusters = [
        trees["cluster"]["spec"],
        job["rayClusterSpec"],
        trees["serve"]["spec"]["rayClusterConfig"],
    ]
    pins = (ROOT / "infra" / "constraints.txt").read_text()
    for cluster in clusters:
        assert cluster["authOptions"] == {"mode": "token", "secretName": "raypipe-ray-token"}
        assert f"\nray=={cluster['rayVersion']}\n" in pins
        pods = list(elsewhere._pods(cluster))
        assert len(pods) == 2
        for pod in pods:
            (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
            assert shm["emptyDir"]["medium"] == "Memory"
            (box,) = pod["containers"]
            paths = {mount["name"]: mount["mountPath"] for mount in box["volumeMounts"]}
            assert paths["shm"] == "/dev/shm" and paths["runs"] == "/runs"
            assert box["resources"]["limits"]["memory"] == box["resources"]["requests"]["memory"]
    for cluster in clusters[:2]:
        (group,) = cluster["workerGroupSpecs"]
        (box,) = group["template"]["spec"]["containers"]
        assert box["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert _filled(RAY / "anyscale" / "job.yaml")["ray_version"] in pins


def _filled(path: Path) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(
        PLACEHOLDER.sub(lambda found: VALUES[found[1]], path.read_text("utf-8"))
    )
    return tree


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("raypipe-train /etc/raypipe/config.yaml train.workres=2", "train.workres"),
        ("raypipe-trian /etc/raypipe/config.yaml", "raypipe-trian is no command"),
        ("raypipe trian /etc/raypipe/config.yaml", "trian"),
        ("raypipe train /etc/raypipe/config.yaml --sumbit x", "--sumbit"),
        ("raypipe train /etc/raypipe/config.yaml train.workers=many", "train.workers"),
        ("raypipe train", "config"),
        ("python train.py", "python is no command"),
        ("raypipe train /etc/raypip/config.yaml", "not where the configuration is mounted"),
    ],
)
def test_a_command_line_that_raypipe_would_refuse_is_a_problem(line: str, match: str) -> None:
    (problem,) = elsewhere.command(line.split())
    assert match.lower() in problem.lower()


def test_the_commands_of_the_readme_and_the_script_are_raypipes() -> None:
    script = (RAY / "slurm" / "raypipe.sh").read_text("utf-8")
    lines = re.findall(r"raypipe\.sh ((?:train|tune|\w+) [^\n`\"|#]*)", script + elsewhere.README)
    lines += re.findall(r"^raypipe ([^\n`#]*)", elsewhere.README, re.MULTILINE)
    lines += re.findall(r" raypipe (train [^\n`#]*)", elsewhere.README)
    assert len(lines) >= 6
    for line in lines:
        words = ["raypipe", *line.replace("mine.yaml", "config.yaml").replace("…", "").split()]
        assert elsewhere.command(words) == [], line


def test_files_that_the_readme_and_headers_name_exist() -> None:
    texts = [path.read_text("utf-8") for path in RAY.rglob("*") if path.suffix in (".md", ".yaml")]
    named = {name for text in texts for name in re.findall(r"infra/ray/[\w/.]+\.\w+", text)}
    assert len(named) >= 12
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def test_extras_that_are_installed_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    files = [RAY / "requirements.txt", RAY / "docker" / "Dockerfile", *(RAY / "launcher").iterdir()]
    for path in files:
        lists = re.findall(r"(?:\.|raypipe)\[([\w,]+)\]", path.read_text("utf-8"))
        assert lists, path
        extras = {extra for each in lists for extra in each.split(",")}
        assert extras <= set(project["optional-dependencies"]), path
    # Constraints lie where the file that names them looks for them.
    (line,) = re.findall(r"--constraint (\S+)", files[0].read_text())
    assert (RAY / line).resolve() == ROOT / "infra" / "constraints.txt"
    assert (RAY / ".." / "..").resolve() == ROOT


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [str(path) for path in RAY.rglob("*.sh")]
    assert scripts
    done = subprocess.run([BIN / "shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_passes_hadolint(tmp_path: Path) -> None:
    file = RAY / "docker" / "Dockerfile"
    # DL3059: RUN lines that are apart are layers that are apart, on purpose.
    lint = [str(BIN / "hadolint"), "--ignore", "DL3059"]
    done = subprocess.run([*lint, str(file)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
    broken = tmp_path / "Dockerfile"
    broken.write_text(file.read_text().replace("WORKDIR /src", "WORKDIR src"))
    assert subprocess.run([*lint, str(broken)], capture_output=True).returncode == 1


def test_the_images_run_as_nobody_and_with_pins() -> None:
    text = (RAY / "docker" / "Dockerfile").read_text()
    assert re.findall(r"^USER (.*)", text, re.MULTILINE) == ["1000:1000"]
    stages = re.findall(r"^FROM (\S+) AS (\S+)", text, re.MULTILINE)
    assert {name: source for source, name in stages}["app"] == "base"
    assert {name: source for source, name in stages}["server"] == "base"
    installs = re.findall(r"^RUN .*pip install.*", text, re.MULTILINE)
    assert len(installs) == 2
    assert all("--constraint infra/constraints.txt" in line for line in installs)
    servers = re.search(r'^CMD \["raypipe", "serve".*\]', text, re.MULTILINE)
    assert servers is not None
    assert elsewhere.command(yaml.safe_load(servers[0].removeprefix("CMD "))) == []
    # What the recipe copies is what the builder is sent.
    sent = (RAY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    for source in " ".join(copied).split():
        assert f"!{source}" in sent
