"""Learning curves of heads on frozen features: the tables on which benchmarks/halving.py and
benchmarks/thaw.py compare searches.

python -m benchmarks.curves OUT.csv [--data solar] [--configs 128] [--epochs 27]
[--run-dir runs/curves] [--minutes 3]

Every line is one configuration and its validation metrics after each epoch, trained by the
project's own `train_rank`. Ray and the backbone are needed once for each resolution, for the
features of the images (60 % for training, 40 % for validation, stratified); then each head takes
two to five seconds of one thread. Configurations are drawn by a fixed seed, and a file that has
some of them already gets the rest.

solar    2,624 solar cells, two classes
emoji    1,500 of Google's emoji on white, their ten categories (npm: see domain_data.py)

`seconds` are a head's CPU seconds an epoch, validation included. They do not depend on the
resolution, for features are computed before. benchmarks/data/solar_curves.csv is older than this
column.

The schedule is constant. A cosine over three epochs is another curve than the first three epochs of
a cosine over 27, while a search that stops trials sees the beginning of long ones: with a constant
rate one table holds the curves of every budget. The cost is a last per cent of accuracy that
falling rates find, and more jumps from epoch to epoch, which make ranking harder.

Only metrics are written: no image, no feature. The licences of the cells (CC BY-NC-SA) and of the
emoji (Apache-2.0) are those of the images.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raypipe.cluster import connect

connect.prepare_environment()  # before anything imports Ray, which reads its switches at import

import numpy as np  # noqa: E402
import torch  # noqa: E402

from benchmarks import domain_data  # noqa: E402
from raypipe.config import replace, validate  # noqa: E402
from raypipe.feed.dataset import pin  # noqa: E402
from raypipe.feed.feed import Source, fetch  # noqa: E402
from raypipe.tables.ingest import IngestConfig, ingest  # noqa: E402
from raypipe.tables.table import ImageTable  # noqa: E402
from raypipe.train.job import TrainJob  # noqa: E402
from raypipe.train.trainer import prepare  # noqa: E402
from raypipe.train.worker import Data, train_rank  # noqa: E402

METRICS = ("val_accuracy", "val_loss")
SEED = 7


@dataclass(frozen=True)
class Images:
    """What a table is made of."""

    source: str
    """The function that lists the images, as ingest.from wants it."""

    sides_px: tuple[int, ...]
    """What an image search draws first, and what few of its trials draw well."""


IMAGES = {
    "solar": Images("raypipe.quickstart.elpv:cells", (48, 64, 96, 128, 224)),
    "emoji": Images("benchmarks.curves:emoji", (48, 96, 160)),
}


def emoji() -> tuple[Path, list[dict[str, str]]]:
    """(the folder of the pictures on white, a row for each)."""
    categories = domain_data.emoji_categories()
    folder = Path(tempfile.gettempdir()) / "raypipe-emoji-on-white"
    folder.mkdir(exist_ok=True)
    rows = []
    for picture, label in zip(domain_data.emoji_files("google"), categories, strict=True):
        if not (folder / picture.name).exists():
            domain_data.on_white(picture).save(folder / picture.name)
        rows.append({"file": picture.name, "label": str(label)})
    return folder, rows


def space(rng: np.random.Generator, sides_px: tuple[int, ...]) -> dict[str, Any]:
    """One draw: wide, as somebody would search who does not know the data."""
    return {
        "model.side_px": int(rng.choice(sides_px)),
        "train.lr": float(f"{10 ** rng.uniform(-5, 0):.3g}"),
        "train.weight_decay": float(f"{10 ** rng.uniform(-5, 0.5):.3g}"),
        "train.batch_size": int(rng.choice([16, 32, 64, 128, 256])),
        "model.dropout": float(f"{rng.uniform(0, 0.8):.3g}"),
        "train.label_smoothing": float(f"{rng.uniform(0, 0.3):.3g}"),
    }


def job_in(folder: Path, epochs: int) -> TrainJob:
    return validate(
        TrainJob,
        {
            "table": {"uri": str(folder / "images")},
            "run": {"dir": str(folder), "seed": SEED},
            "model": {"name": "efficientnet_lite0", "mode": "frozen"},
            "train": {
                "epochs": epochs,
                "schedule": "constant",
                "warmup": 0.0,
                "stopping": {"patience": None},
            },
        },
    )


def features(job: TrainJob, images: Images) -> dict[int, Data]:
    """By resolution: what the heads are trained on, in this process. The cluster that computed it
    has gone again.
    """
    source = {"kind": "python", "images": images.source}
    if not ImageTable.exists(job.table.uri):
        ingest(
            job.table,
            validate(
                IngestConfig,
                {"from": source, "splits": {"train": 0.6, "val": 0.4}, "stratify": True},
            ),
        )
    connect.connect(job.cluster)
    found = {}
    for side_px in images.sides_px:
        data = prepare(replace(job, {"model.side_px": side_px}), pin(job.table, job.feed))
        found[side_px] = Data(data.classes, data.features, _here(data.train), _here(data.val))
    connect.close()
    return found


def _here(source: Source) -> Source:
    return Source(
        "memory",
        fetch(source.rows),
        source.side_px,
        source.cfg,
        inputs=np.array(fetch(source.inputs)),
    )


def curve(job: TrainJob, data: Data) -> list[dict[str, float]]:
    return train_rank(
        job, data, None, lambda state, engine: None, lambda metrics, state: None
    ).history


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", choices=IMAGES, default="solar")
    parser.add_argument("--configs", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=27)
    parser.add_argument("--minutes", type=float, default=1e9, help="of heads; then go on later")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/curves"))
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    job, rng = job_in(chosen.run_dir.absolute(), chosen.epochs), np.random.default_rng(SEED)
    images = IMAGES[chosen.data]
    data = features(job, images)
    text = chosen.out.read_text(encoding="utf-8") if chosen.out.exists() else ""
    done = max(0, len(text.splitlines()) - 2)  # below the comment and the names
    with chosen.out.open("a", newline="", encoding="utf-8") as file:
        table, started = csv.writer(file), time.perf_counter()
        for number in range(chosen.configs):
            drawn = space(rng, images.sides_px)
            if number < done:
                continue
            if time.perf_counter() - started > 60 * chosen.minutes:
                return
            if number == 0:
                file.write(_comment(chosen, data[images.sides_px[0]]))
                table.writerow([*drawn, "seconds", *_names(chosen.epochs)])
            table.writerow([*drawn.values(), *_row(replace(job, drawn), data)])
            file.flush()
            print(
                f"{number + 1}/{chosen.configs} {time.perf_counter() - started:.0f} s", flush=True
            )


def _comment(chosen: argparse.Namespace, any_side: Data) -> str:
    return (
        f"# python -m benchmarks.curves --data {chosen.data} --configs {chosen.configs} "
        f"--epochs {chosen.epochs}, seed {SEED}: "
        f"{len(any_side.train.rows)} training, {len(any_side.val.rows)} validation images\n"
    )


def _names(epochs: int) -> list[str]:
    return [f"{metric}@{epoch}" for metric in METRICS for epoch in range(1, epochs + 1)]


def _row(job: TrainJob, data: dict[int, Data]) -> list[str]:
    """Seconds an epoch, and each metric after each epoch."""
    before_s = time.process_time()
    history = curve(job, data[job.model.side_px])
    epoch_s = (time.process_time() - before_s) / len(history)
    return [f"{epoch_s:.4f}", *(f"{e[metric]:.4f}" for metric in METRICS for e in history)]


if __name__ == "__main__":
    main()
