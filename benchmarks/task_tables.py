"""The six development tasks as Delta tables with frozen random splits, and one held-back task.

python -m benchmarks.task_tables [--tasks digits …] [--seeds 1 2] [--home runs/tasks]

| task | images | classes | source |
|---|---|---|---|
| elpv-binary | 2,624 | defective or not | solar cells, Deitsch et al. 2019 |
| elpv-levels | 2,624 | the experts' four probabilities | the same |
| elpv-mono | 1,074 | defective or not | their monocrystalline cells |
| elpv-poly | 1,550 | defective or not | their polycrystalline cells |
| emoji | 1,892 | 9 categories | Google's emoji, without skin tones |
| digits | 1,797 | 10 | scikit-learn's digits, 8 px, drawn at 32 px |

A seed draws the split: 60 % for training, 15 for validation, 25 for testing, stratified by class;
near-duplicates stay in one split. The same seed gives the same rows in the same splits on every
machine: `digest` shows it, and records hold it. All tasks read images where they are installed
(pip, npm); only the digits are written as files, into the user's cache.

Nothing is decided by a test split: docs/evaluation.md. `emoji-twitter` is held back: the same
emoji, drawn by another vendor. Nothing is trained on them before a method is frozen.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.tables.table import TableConfig

SPLITS = {"train": 0.6, "val": 0.15, "test": 0.25}
DIGITS_PX = 32
# A category with fewer pictures than this has too few for a test split.
FEWEST_OF_CLASS = 20
Row = dict[str, str]


@dataclass(frozen=True)
class Task:
    """Where a task's images come from, and what is asked about them."""

    images: str
    """`module:function`, a source of the kind python."""
    classes: int
    label_column: str = "label"
    where: tuple[tuple[str, str], ...] = ()
    near_bits: int = 12
    """As ingest.near_bits. Digits look alike without being copies: only equal ones are grouped."""

    def ingest(self, seed: int) -> dict[str, Any]:
        """The section `ingest` of this task's table."""
        source: dict[str, Any] = {
            "kind": "python",
            "images": self.images,
            "label_column": self.label_column,
        }
        if self.where:
            source["where"] = dict(self.where)
        return {
            "from": source,
            "splits": SPLITS,
            "stratify": True,
            "seed": seed,
            "near_bits": self.near_bits,
            "workers": 0,
        }


_HERE = "benchmarks.task_tables"
DEVELOPMENT = {
    "elpv-binary": Task(f"{_HERE}:solar_cells", 2),
    "elpv-levels": Task(f"{_HERE}:solar_cells", 4, label_column="level"),
    "elpv-mono": Task(f"{_HERE}:solar_cells", 2, where=(("type", "mono"),)),
    "elpv-poly": Task(f"{_HERE}:solar_cells", 2, where=(("type", "poly"),)),
    "emoji": Task(f"{_HERE}:emoji_google", 9),
    "digits": Task(f"{_HERE}:digits", 10, near_bits=0),
}
HELD_BACK = {"emoji-twitter": Task(f"{_HERE}:emoji_twitter", 9)}
TASKS = DEVELOPMENT | HELD_BACK


def table(task: str, seed: int, home: Path) -> TableConfig:
    """The task's table with this seed's splits, made in `home` unless it is there.

    A killed ingest is finished by the next call: an ingest adds only what is missing.
    """
    from raypipe.config import validate
    from raypipe.tables.ingest import IngestConfig, ingest
    from raypipe.tables.table import TableConfig

    cfg = TableConfig(uri=str((home / f"{task}-{seed}" / "images").absolute()))
    done = home / f"{task}-{seed}" / "done"
    if not done.exists():
        ingest(cfg, validate(IngestConfig, TASKS[task].ingest(seed)))
        done.write_text(digest(cfg))
    return cfg


def digest(cfg: TableConfig) -> str:
    """Twelve hex digits that stand for the table's images, their labels and their splits."""
    rows = _columns(cfg, ["image_id", "label", "split"])
    lines = sorted(f"{row['image_id']} {row['label']} {row['split']}" for row in rows)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]


def source_of(task: str) -> str:
    """Where its images come from. Tasks of one source have the same images, or some of them."""
    return TASKS[task].images.partition(":")[2]


def test_ids(cfg: TableConfig) -> set[str]:
    """The beginnings of the ids of the test images, as records of single images have them."""
    rows = _columns(cfg, ["image_id", "split"])
    return {row["image_id"][:12] for row in rows if row["split"] == "test"}


def counts(cfg: TableConfig) -> dict[str, int]:
    """Images of each split."""
    found = dict.fromkeys(SPLITS, 0)
    for row in _columns(cfg, ["split"]):
        found[row["split"]] += 1
    return found


def solar_cells() -> tuple[Path, list[Row]]:
    """raypipe.quickstart.elpv's cells, with the column `level`: p000, p033, p067 or p100."""
    from raypipe.quickstart.elpv import cells

    folder, rows = cells()
    return folder, [row | {"level": f"p{100 * float(row['probability']):03.0f}"} for row in rows]


def emoji_google() -> tuple[Path, list[Row]]:
    return _emoji("google")


def emoji_twitter() -> tuple[Path, list[Row]]:
    return _emoji("twitter")


def digits() -> tuple[Path, list[Row]]:
    """Scikit-learn's digits as PNG files of DIGITS_PX pixels a side."""
    labels = _digit_labels()
    folder = Path.home() / ".cache" / "raypipe" / f"digits-{DIGITS_PX}"
    if not folder.exists():
        _write_digits(folder)
    rows = [{"file": _digit(at), "label": str(label)} for at, label in enumerate(labels)]
    return folder, rows


def _emoji(vendor: str) -> tuple[Path, list[Row]]:
    """The emoji that both vendors draw, without skin tones: five of one hand are one picture."""
    from benchmarks.domain_data import VENDORS, emoji_home

    home = emoji_home()
    folders = {
        name: home / f"node_modules/emoji-datasource-{name}/img/{name}/64" for name in VENDORS
    }
    listed = json.loads(
        (home / "node_modules/emoji-datasource-google/emoji.json").read_text(encoding="utf-8")
    )
    rows = []
    for one in sorted(listed, key=lambda one: one["image"]):
        if all((folder / one["image"]).exists() for folder in folders.values()):
            rows.append({"file": one["image"], "label": one["category"]})
    labels = [row["label"] for row in rows]
    return folders[vendor], [row for row in rows if labels.count(row["label"]) >= FEWEST_OF_CLASS]


@functools.cache
def _digit_labels() -> list[int]:
    from sklearn.datasets import load_digits

    return [int(label) for label in load_digits().target]


def _write_digits(folder: Path) -> None:
    """Write the files, whole or not at all: two processes may do it at once."""
    import numpy as np
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{folder.name}."))
    # Values are 0 to 16.
    pixels_NHW = (load_digits().images * (255 / 16)).round().astype(np.uint8)
    for at, pixels_HW in enumerate(pixels_NHW):
        large = Image.fromarray(pixels_HW).resize((DIGITS_PX, DIGITS_PX), Image.Resampling.NEAREST)
        large.save(partial / _digit(at))
    try:
        partial.rename(folder)
    except OSError:
        # Somebody else was faster; a folder is not renamed onto one with files.
        for file in partial.iterdir():
            file.unlink()
        partial.rmdir()


def _digit(at: int) -> str:
    return f"{at:04d}.png"


def _columns(cfg: TableConfig, names: list[str]) -> list[dict[str, Any]]:
    from raypipe.tables import scan
    from raypipe.tables.table import ImageTable

    opened, pinned = ImageTable.open_pinned(cfg)
    rows: list[dict[str, Any]] = scan.rows(opened, pinned, names).to_pylist()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(DEVELOPMENT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--home", type=Path, default=Path("runs/tasks"))
    chosen = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for task in chosen.tasks:
        for seed in chosen.seeds:
            made = table(task, seed, chosen.home)
            print(json.dumps({"task": task, "seed": seed, "digest": digest(made)} | counts(made)))


if __name__ == "__main__":
    main()
