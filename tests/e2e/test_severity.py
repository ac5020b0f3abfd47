"""What a drift costs, from a training to a check: near the truth where it answers, and no answer to
garbage. With a real table, training, registry and prediction.

Pictures are stripes, lying ("a") or standing ("b"), so faint in the grain that some are mistaken. A
shift makes them fainter.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from PIL import Image

from raypipe.cli import verbs
from raypipe.cli.console import Console
from raypipe.config import replace, validate
from raypipe.errors import DataError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.models.zoo import ImageModel
from raypipe.registry import fetching, package, promote
from raypipe.registry.package import Package
from raypipe.registry.store import Store, open_store
from raypipe.tables.table import TableConfig
from raypipe.train import shifted, unseen
from raypipe.watch import history
from raypipe.watch.check import CheckResult, check

pytestmark = pytest.mark.slow  # a minute and a half

SIDE = 64
HOME = 15.0  # contrast of stripes, in grey levels


def stripes(seed: int, contrast: float) -> bytes:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:SIDE, 0:SIDE] / SIDE
    along = y if seed % 2 == 0 else x
    wave = np.sin(2 * np.pi * (rng.uniform(5, 8) * along + rng.random()))
    strength = contrast * rng.uniform(0.1, 1.3)
    pixels = 128 + strength * wave[..., None] + rng.normal(0, 30, (SIDE, SIDE, 3))
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def garbage(seed: int) -> bytes:
    """One colour, and a black box."""
    rng = np.random.default_rng(seed)
    pixels = np.full((SIDE, SIDE, 3), rng.integers(0, 256, 3), np.uint8)
    pixels[: SIDE // 2, : SIDE // 3] = 0
    Image.fromarray(pixels).save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def table(place: Path, images: list[bytes], **columns: Any) -> TableConfig:
    ids = [f"{place.name}-{i:04d}" for i in range(len(images))]
    rows = {"image_id": ids, "image": pa.array(images, pa.binary()), **columns}
    write_deltalake(str(place), pa.table(rows))
    return TableConfig(uri=str(place))


@pytest.fixture(scope="module")
def job(ray_session: str, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A champion, trained and registered by `raypipe train`."""
    root = tmp_path_factory.mktemp("severity")
    count = 700
    labels = ["ab"[seed % 2] for seed in range(count)]
    splits = ["train" if seed % 7 < 3 else "val" for seed in range(count)]
    images = [stripes(seed, HOME) for seed in range(count)]
    known = table(root / "known", images, label=labels, split=splits)
    made = validate(
        Job,
        {
            "run": {"name": "severity", "dir": str(root / "run")},
            "table": known.model_dump(),
            "model": {"side_px": SIDE},
            "train": {"epochs": 6, "batch_size": 32, "lr": 0.01},
        },
    )
    verbs.run("train", made, Console(as_json=True))
    return made


@pytest.fixture(scope="module")
def store(job: Job) -> Store:
    return open_store(job.run, job.registry)


@pytest.fixture(scope="module")
def champion(store: Store) -> Package:
    return fetching.fetch(store, promote.require_champion(store))


def checked(store: Store, job: Job, batch: TableConfig, name: str) -> CheckResult:
    return check(store, job.run, batch, name, job.predict, job.drift)


def accuracy(champion: Package, images: list[bytes], first: int) -> float:
    said = champion.predict(images).labels
    return float(np.mean([label == "ab"[(first + i) % 2] for i, label in enumerate(said)]))


def test_the_package_says_what_its_estimate_was_made_of(champion: Package) -> None:
    said = champion.info["severity"]
    assert said["why_not"] == "" and said["copied"] == 200 and 0 < said["seconds"] < 60
    assert package.SEVERITY in json.loads(champion.files[package.MANIFEST])
    found = champion.severity()
    assert not isinstance(found, str) and len(found.kinds) == 9
    assert found.accuracy == pytest.approx(champion.info["metrics"]["val_accuracy"], abs=1e-6)
    assert len(found.reference_NQ) == 400


@pytest.mark.parametrize("contrast", [HOME, 0.7 * HOME, 0.5 * HOME], ids=["home", "mild", "more"])
def test_an_estimate_is_near_the_truth(
    contrast: float, store: Store, job: Job, champion: Package, tmp_path: Path
) -> None:
    first = 10_000 + int(contrast) * 1_000
    images = [stripes(first + i, contrast) for i in range(300)]
    truth = accuracy(champion, images, first)
    done = checked(store, job, table(tmp_path / "night", images), f"night of {contrast:g}")
    found = done.report.severity
    assert found.why_not == "" and found.low is not None and found.high is not None
    assert found.low <= truth <= found.high and found.high - found.low < 0.3
    assert (found.loss[0] > 0.02) == (contrast < HOME)  # type: ignore[index]
    assert found.known == pytest.approx(champion.severity().accuracy)  # type: ignore[union-attr]
    page = Path(done.page).read_text(encoding="utf-8")
    assert "What it costs" in page and f"{100 * found.accuracy:.0f} %" in page  # type: ignore[operator]
    # The same again is the same row, read from the table.
    again = checked(store, job, TableConfig(uri=str(tmp_path / "night")), f"night of {contrast:g}")
    assert again.key == done.key and again.report.severity == found
    (run,) = store.client.search_runs([store.experiment_id], f"tags.`raypipe.key` = '{done.key}'")
    assert run.data.metrics["drift.accuracy"] == pytest.approx(found.accuracy)


def test_garbage_gets_no_estimate_and_is_no_calm(store: Store, job: Job, tmp_path: Path) -> None:
    batch = table(tmp_path / "garbage", [garbage(seed) for seed in range(200)])
    watched = {"watch.batch": batch.model_dump(), "watch.name": "garbage"}
    console = Console(as_json=True)
    said = verbs.run("drift", validate(Job, _nested(job, watched)), console)
    assert said["is_drift"] and said["severity"]["accuracy"] is None
    assert "too unlike those the model knows" in said["severity"]["why_not"]
    page = Path(said["report"]).read_text(encoding="utf-8")
    assert "The accuracy on these images is not known: the images are too unlike" in page
    # A policy of losses acts on it.
    past = history.checks(job.run, validate(Job, _nested(job, watched)).watch, said["model"], None)
    assert past[-1].is_drift and past[-1].severity.loss is None


def _nested(job: Job, changes: dict[str, Any]) -> dict[str, Any]:
    return replace(job, changes).model_dump()


def test_broken_images_are_left_out_of_the_estimate(
    store: Store, job: Job, champion: Package, tmp_path: Path
) -> None:
    images = [stripes(90_000 + i, HOME) for i in range(120)]
    half = table(tmp_path / "half", [*images, *[b"rot"] * 100])
    done = checked(store, job, half, "half")
    assert done.report.batch_images == 120
    found = done.report.severity
    assert found.low is not None and found.high is not None
    assert found.low <= accuracy(champion, images, 90_000) <= found.high
    broken = table(tmp_path / "broken", [b"rot"] * 40)
    with pytest.raises(DataError, match=r"No image of .* decodes"):
        checked(store, job, broken, "broken")
    few = table(tmp_path / "few", images[:1])
    with pytest.raises(DataError, match="too few images for a drift test"):
        checked(store, job, few, "few")
    # Enough for a test, and too few for an estimate.
    some = checked(store, job, table(tmp_path / "some", images[:25]), "some")
    assert "25 images are too few" in some.report.severity.why_not


def test_a_table_of_an_older_raypipe_gets_the_columns(
    store: Store, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = replace(job, {"run.dir": str(tmp_path / "run")})
    batch = table(tmp_path / "night", [stripes(80_000 + i, HOME) for i in range(60)])
    before = checked(store, mine, batch, "before")
    place = mine.watch.place(mine.run, "drift")
    rows = DeltaTable(place).to_pyarrow_table()
    new = [name for name in rows.column_names if name.startswith(("accuracy", "no_estimate"))]
    assert len(new) == 5
    write_deltalake(place, rows.drop_columns(new), mode="overwrite", schema_mode="overwrite")
    again = checked(store, mine, batch, "before")
    assert again.key == before.key and "older raypipe" in again.report.severity.why_not
    other = table(tmp_path / "other", [stripes(70_000 + i, HOME) for i in range(60)])
    after = checked(store, mine, other, "before")
    assert after.report.severity.accuracy is not None
    past = history.checks(
        mine.run, mine.watch.model_copy(update={"name": "before"}), after.model, None
    )
    assert [one.severity.loss is None for one in past] == [True, False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"registry.severity_images": 0}, "registry.severity_images is 0"),
        ({"registry.severity_images": 30}, "severity_images=30 .* 30 shifted images, and 40"),
        ({"registry.severity_s": 1e-9}, "severity_s=1e-09 allow 16 shifted images, and 40"),
        ({"feed.train": "train+val"}, "was trained on images of val"),
        ({"registry.group": "label"}, "too few labelled validation images"),
    ],
)
def test_why_there_is_none(job: Job, changes: dict[str, Any], says: str) -> None:
    # Not the whole job, which refuses 30 images: an earlier raypipe's champion may have them.
    other = replace(job.training, changes)
    pinned = pin(other.table, other.feed)
    model = ImageModel(other.model, 2)
    held_out = unseen.reference(other, model, pinned, other.run.path)
    found = shifted.measured(other, model, pinned, held_out)
    assert found.calibration is None and re.search(says, found.why_not), found.why_not
