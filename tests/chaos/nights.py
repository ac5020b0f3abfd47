"""A small world for the loop: a labelled table with its champion, and a table that grows by night.

Old pictures are bright stripes, lying ("a") or standing ("b"); new ones are dark, and their labels
the other way round: a model of the old calls them wrong.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
from PIL import Image

from raypipe.config import RunConfig
from raypipe.registry import promote, versions
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, append

ROOT = Path(__file__).parents[2]
SIDE = 32
CONFIG = """
run: {{name: cells, dir: {root}/run}}
table: {{uri: {root}/images}}
model: {{name: small_cnn, pretrained: false, mode: finetune, side_px: 32}}
train: {{epochs: 8, batch_size: 32, lr: 0.01, workers: 1}}
cluster: {{address: auto}}
drift: {{permutations: 400}}
watch:
  batch: {{uri: {root}/nightly}}
  min_images: 40
  retrain_samples: 1
  policy: {{min_images: 60, daily_cap: 30}}
gate: {{tolerance: 0.2}}
"""


def picture(domain: str, label: str, seed: int) -> bytes:
    rng = np.random.default_rng([seed, domain == "new", label == "a"])
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    lies = (label == "a") == (domain == "old")
    waves = np.sin(2 * np.pi * (rng.uniform(3, 5) * (y if lies else x) + rng.random()))
    light = 150 if domain == "old" else 60
    gray = light + 40 * waves + rng.normal(0, 10, (SIDE, SIDE))
    out = io.BytesIO()
    pixels = np.clip(gray, 0, 255).astype(np.uint8)
    Image.fromarray(np.stack([pixels] * 3, axis=-1)).save(out, "PNG")
    return out.getvalue()


@dataclass
class World:
    root: Path
    address: str

    @property
    def config(self) -> Path:
        return self.root / "job.yaml"

    @property
    def store(self) -> Store:
        run = RunConfig(name="cells", dir=str(self.root / "run"))
        # A pool would keep the file open that `again` puts away, and answer from it.
        with patch.dict(os.environ, MLFLOW_SQLALCHEMYSTORE_POOLCLASS="NullPool"):
            found = open_store(run, RegistryConfig())
            # The registry's own connections are made by the first question about models.
            found.client.search_registered_models(max_results=1)
        return found

    def images(self, domain: str, count: int, first: int) -> None:
        """Labelled images, in all splits."""
        kinds = ["train", "train", "val", "test"]
        columns: dict[str, list[Any]] = {
            "image_id": [f"{domain}-{n}" for n in range(first, first + count)],
            "image": [picture(domain, "ab"[n % 2], n) for n in range(first, first + count)],
            "label": ["ab"[n % 2] for n in range(count)],
            "split": [kinds[n // 2 % 4] for n in range(count)],
            "source": [domain] * count,
        }
        append(str(self.root / "images"), pa.table(columns), f"images of {domain}")

    def night(self, domain: str, count: int, number: int) -> None:
        """Unlabelled images arrive."""
        first = 100_000 + 1000 * number
        columns: dict[str, list[Any]] = {
            "image_id": [f"night-{number}-{n}" for n in range(count)],
            "image": [picture(domain, "ab"[n % 2], first + n) for n in range(count)],
            "label": [None] * count,
            "split": ["train"] * count,
            "source": [domain] * count,
        }
        schema = pa.schema(
            [(name, pa.binary() if name == "image" else pa.string()) for name in columns]
        )
        append(str(self.root / "nightly"), pa.table(columns, schema), f"night {number}")

    def begin(self, *command: str) -> subprocess.Popen[str]:
        env = os.environ | {"RAY_ADDRESS": self.address}
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def job(self, verb: str, *more: str) -> tuple[int, dict[str, Any], str]:
        """(exit code, the JSON line, stderr) of jobs/VERB.py, as a scheduler starts it."""
        process = self.begin(f"jobs/{verb}.py", str(self.config), "--json", *more)
        return ended(process)

    def killed(self, verb: str, where: str, when: str) -> None:
        """The verb, killed at a call."""
        command = ["-m", "tests.chaos.killed_at", where, when, verb, str(self.config), "--json"]
        process = self.begin(*command)
        out, err = process.communicate(timeout=300)
        assert process.returncode == -9, (where, when, out[-500:], err[-1500:])

    def rows(self, table: str) -> list[dict[str, Any]]:
        folder = self.root / "run" / table
        if not ImageTable.exists(str(folder)):
            return []
        opened = ImageTable(str(folder))
        names = [field.name for field in opened.delta().schema().fields]
        return scan.rows(opened, opened.pin(), names).to_pylist()

    def moves(self) -> list[dict[str, Any]]:
        table = ImageTable(self.store.moves)
        names = ["number", "version_from", "version_to", "why"]
        rows = scan.rows(table, table.pin(), names).to_pylist()
        return sorted(rows, key=lambda row: row["number"])

    def champion(self) -> int:
        return promote.require_champion(self.store).version

    def versions(self) -> int:
        return len(versions.every(self.store))

    def arrived(self) -> Counter[tuple[str, str]]:
        table = ImageTable(str(self.root / "nightly"))
        rows = scan.rows(table, table.pin(), ["image_id", "image"]).to_pylist()
        return Counter((row["image_id"], sha256(row["image"]).hexdigest()) for row in rows)

    def checked(self) -> Counter[tuple[str, str]]:
        """The images of all checked windows, each as often as it was in one."""
        keys = {row["prediction"] for row in self.rows("windows") if row["event"] == "checked"}
        rows = [row for row in self.rows("predictions") if row["key"] in keys]
        return Counter((row["image_id"], row["sha256"]) for row in rows)


def ended(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any], str]:
    out, err = process.communicate(timeout=300)
    lines = [line for line in out.splitlines() if line.startswith("{")]
    return process.returncode, json.loads(lines[-1]) if lines else {}, err


def world(root: Path, address: str, more: str = "") -> World:
    """240 old images, and the champion that was trained on them.

    more: lines of the configuration, of the section watch.
    """
    made = World(root, address)
    root.mkdir(parents=True, exist_ok=True)
    text = CONFIG.format(root=root)
    made.config.write_text(text.replace("watch:\n", f"watch:\n{more}"))
    made.images("old", 240, 0)
    code, result, err = made.job("train")
    assert code == 0, err
    assert result["metrics"]["val_accuracy"] > 0.9, result
    return made


def again(saved: Path, root: Path) -> None:
    """Put a saved world back in its place: MLflow knows its files by their addresses."""
    shutil.rmtree(root)
    shutil.copytree(saved, root)


def run_twice(made: World) -> None:
    """The second run looks at the same window again, with the new champion's eyes."""
    for _ in range(2):
        code, _, err = made.job("retrain")
        assert code == 0, err


def state(made: World) -> dict[str, Any]:
    """What must be the same however often it was killed."""
    return {
        "champion": made.champion(),
        "versions": made.versions(),
        "moves": [(m["version_from"], m["version_to"], m["why"]) for m in made.moves()],
        "evidence": [(r["window"], r["model"], r["is_drift"]) for r in made.rows("drift")],
        "decisions": [row["promoted"] for row in made.rows("decisions")],
        # The first answer of each check; two retrains at once have a second one.
        "calls": [(r["champion"], r["act"]) for r in made.rows("calls") if r["number"] == 1],
        "windows": [(row["event"], row["window"]) for row in made.rows("windows")],
        "ended": [row["cycle"] for row in made.rows("retrains") if row["event"] == "ended"],
        "checked": made.checked(),
    }
