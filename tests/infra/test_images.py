"""infra/ray/docker/Dockerfile, built by docker where it runs.

Elsewhere the RUN lines of the image `app` run as they stand, as root, in a copy-on-write view of
this machine (an overlay in a mount namespace of its own, in memory): with Debian's own list of
users, an empty /src and /opt, and the files that the COPY lines name. Then a training runs in it as
the image's user, with a root that nobody can write.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "infra" / "ray" / "docker" / "Dockerfile"
LIMIT_S = 900

pytestmark = [pytest.mark.cloud, pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


def has_builder() -> bool:
    if shutil.which("docker") is None:
        return False
    return subprocess.run(["docker", "info"], capture_output=True).returncode == 0


def stages() -> dict[str, list[str]]:
    """The instructions of each stage, those of the stages it is built on first."""
    text = re.sub(r"\\\n\s*", "", DOCKERFILE.read_text("utf-8"))
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("FROM "):
            _, source, _, name = line.split()
            lines = found[name] = list(found.get(source, []))
        elif line and not line.startswith(("#", "ARG ")):
            lines.append(line)
    return found


def script(lines: list[str]) -> str:
    """A shell script of a stage: WORKDIR, ENV, COPY from the context in /context, RUN."""
    said = ["set -e"]
    for line in lines:
        word, _, rest = line.partition(" ")
        if word == "WORKDIR":
            said.append(f"mkdir -p {rest} && cd {rest}")
        elif word == "ENV":
            said += [f"export {pair}" for pair in rest.split() if "=" in pair]
        elif word == "COPY" and "--from" not in rest:
            *sources, target = rest.split()
            for source in sources:
                place = f"{target}{source}" if target.endswith("/") else target
                said.append(f"mkdir -p $(dirname {place}) && cp -rT /context/{source} {place}")
        elif word == "RUN":
            said.append(f"( {rest} )")
        elif word not in ("COPY", "USER", "EXPOSE", "HEALTHCHECK", "CMD"):
            raise AssertionError(f"What does {word} do?")
    return "\n".join(said)


VIEW = r"""
set -e
mount -t tmpfs -o size=8g,mode=755 view {view}
cd {view}
mkdir upper work root context
mount -t overlay overlay -o lowerdir=/,upperdir=upper,workdir=work root
cd root
rm -rf src opt/raypipe home/raypipe context && mkdir -p src context mine runs
mount --bind {context} context
cp usr/share/base-passwd/passwd.master etc/passwd
cp usr/share/base-passwd/group.master etc/group
: > etc/shadow; : > etc/gshadow
# A script, because a link would be taken for a Python that is installed there.
rm -f usr/local/bin/python && printf '#!/bin/sh\nexec %s "$@"\n' {python} > usr/local/bin/python
chmod 755 usr/local/bin/python
# This machine's Python may lie in root's home; the image's does not.
part=.; for each in $(dirname {python} | tr / ' '); do part=$part/$each; chmod o+x $part; done
mount -t proc proc proc
mount --rbind /dev dev
cp -r {mine}/. mine
export PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
chroot . bash -c {files}
chroot . bash -c {base}
# As in the manifests: the user by its number, a root for reading, and folders in memory.
chown -R 1000:1000 mine runs
mount --bind runs runs && mount -t tmpfs -o mode=1777 tmp tmp
mount -t tmpfs -o mode=1777 shm dev/shm && mount -t tmpfs -o uid=1000,gid=1000 home home/raypipe
mount --bind mine mine
mount -o remount,ro,bind . 2>/dev/null || mount -o remount,ro {view}/root
exec chroot --userspec=1000:1000 . env -i HOME=/home/raypipe PATH=/opt/raypipe/bin:/usr/bin:/bin \
    OMP_NUM_THREADS=1 bash -c {check}
"""
CHECK = r"""
set -e
cd /home/raypipe
for file in /opt/raypipe/x /etc/x; do
    if touch $file 2> /dev/null; then echo "$file can be written"; exit 1; fi
done
test "$(id -u):$(id -g)" = 1000:1000
ray --version
raypipe ingest /mine/tiny.yaml ingest.workers=0 run.dir=/runs/x
raypipe train /mine/tiny.yaml run.dir=/runs/x cluster.address=local train.workers=1 --json
du -sm /opt/raypipe | cut -f1
"""


def test_the_images_are_built_or_their_run_lines_run(tmp_path: Path, photos: Path) -> None:
    if has_builder():
        for target in ("app", "server"):
            build = ["docker", "build", "--file", str(DOCKERFILE), "--target", target]
            subprocess.run([*build, str(ROOT)], check=True, timeout=LIMIT_S)
        return
    assert os.geteuid() == 0, "without docker this needs root, for an overlay"
    mine, view, context = tmp_path / "mine", tmp_path / "view", tmp_path / "context"
    view.mkdir()
    shutil.copytree(photos, mine / "photos")
    (mine / "tiny.yaml").write_text(
        yaml.safe_dump(
            {
                "run": {"name": "tiny"},
                "table": {"uri": "/runs/cells"},
                "ingest": {
                    "from": {"images": "/mine/photos", "labels": "/mine/photos/labels.csv"},
                    "splits": {"train": 0.5, "val": 0.25, "test": 0.25},
                },
                "model": {
                    "name": "small_cnn",
                    "mode": "finetune",
                    "pretrained": False,
                    "side_px": 16,
                },
                "train": {"epochs": 1, "batch_size": 8, "precision": "fp32"},
            }
        )
    )
    _context(context)
    found = stages()
    words = {
        "view": view,
        "context": context,
        "mine": mine,
        "python": Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}",
        "files": script(found["app-files"]),
        "base": script(found["base"]),
        "check": CHECK,
    }
    quoted = {name: shlex.quote(str(word)) for name, word in words.items()}
    alone = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c"]
    # Nothing of this environment but what pip is told here.
    env = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
    done = subprocess.run(
        [*alone, re.sub(r"\{(\w+)\}", lambda part: quoted[part[1]], VIEW)],
        env={**env, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    *_, summary, size_mb = done.stdout.strip().splitlines()
    assert json.loads(summary)["test"]
    assert int(size_mb) < 3000, "the image's own files; torch is most of them"


def _context(folder: Path) -> None:
    """What Dockerfile.dockerignore lets through."""
    for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines():
        if line.startswith("!"):
            source, target = ROOT / line[1:], folder / line[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)


def test_every_stage_has_its_lines() -> None:
    found = stages()
    runs = {name: [each for each in found[name] if each.startswith("RUN ")] for name in found}
    assert len(runs["app-files"]) == len(runs["server-files"]) == 3
    assert len(runs["base"]) == len(runs["app"]) == len(runs["server"]) == 1
    assert not re.search(r"\bpip\b", " ".join(found["app"]))  # what builds stays behind
