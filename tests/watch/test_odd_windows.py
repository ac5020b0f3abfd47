"""Checks of windows that nobody hopes for: broken, hung, nameless. What was left out is said.

One package with domains and groups, checked against small tables.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from deltalake import write_deltalake
from PIL import Image

from raypipe.config import RunConfig
from raypipe.errors import DataError
from raypipe.images.decode import decode_batch
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing, promote, runs, versions
from raypipe.registry.package import Package, Reference
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve.batch import PredictConfig
from raypipe.tables.commits import rows_named
from raypipe.tables.table import TableConfig
from raypipe.watch.check import CheckResult, check_window
from raypipe.watch.detect import DriftConfig
from raypipe.watch.settings import WatchConfig
from raypipe.work.results.watching import Drifted
from tests.conftest import encode, striped

pytestmark = pytest.mark.usefixtures("ray_session")
CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
EVIL = "<script>alert(1)</script>\"\n'"


def images(first: int, last: int) -> list[bytes | None]:
    return [encode(striped(i, ("warm", "cold")[i % 2])) for i in range(first, last)]


@dataclass(frozen=True)
class Watched:
    """A champion that knows two domains, and groups by the column `module`."""

    store: Store
    run: RunConfig

    def check(self, table: Path, window: str = "all", **rows: Any) -> CheckResult:
        """Add the rows to the table, and check what came."""
        columns = {"image": pa.array(rows.pop("image"), pa.binary()), **rows}
        columns.setdefault("image_id", [f"i{k}" for k in range(len(columns["image"]))])
        write_deltalake(str(table), pa.table(columns), mode="append")
        watch = WatchConfig(name=table.parent.name, window=window)  # type: ignore[arg-type]
        batch, predict = TableConfig(uri=str(table)), PredictConfig()
        done = check_window(
            self.store, self.run, batch, watch, predict, DriftConfig(), lambda text: None
        )
        assert isinstance(done, CheckResult), done
        return done


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    torch.manual_seed(4)
    model = ImageModel(CFG, 2).eval()
    seen = images(0, 120)
    pixels_BHWC = torch.from_numpy(decode_batch(seen, CFG.pixels))
    with torch.no_grad():
        features_BD = model.embed(pixels_BHWC)
        model.head.standardise_by(features_BD.mean(0), features_BD.std(0))
        torch.nn.init.normal_(model.head.linear.weight, std=0.3)

    def built(name: str, reference: Reference, info: dict[str, Any]) -> Package:
        return Package(packing.build(folder / name, model, CFG, ("cold", "warm"), reference, info))

    nothing = Reference(np.zeros((4, 64)), np.full((4, 2), 0.5), tuple("wxyz"))
    said = built("draft", nothing, {}).predict(seen)
    names = tuple(f"r{i}" for i in range(120))
    groups = tuple(f"g{i // 4}" for i in range(120))
    domains = (EVIL,) * 60 + ("plain",) * 60
    reference = Reference(said.features_ND, said.scores_NC, names, domains=domains, groups=groups)
    gone = {"uri": str(folder / "gone"), "version": 0}
    config = {"registry": {"group": "module", "domain": "site"}, "table": {"uri": gone["uri"]}}
    made = built("package", reference, {"config": config, "table": gone})
    run = RunConfig(name="odd", dir=str(folder / "run"))
    store = open_store(run, RegistryConfig())
    with runs.run(store, "odd", "train", {}, None) as run_id:
        pass
    version = versions.register(store, run_id, Path(str(made.folder)), "odd", {})
    promote.promote(store, version, expected=None)
    return Watched(store, run)


@pytest.mark.parametrize("broken", [b"no image", None])
def test_images_that_do_not_decode_are_counted(
    watched: Watched, tmp_path: Path, broken: bytes | None
) -> None:
    said = "30 of 60 images have no prediction (broken): they are left out"
    for _ in range(2):
        done = watched.check(tmp_path / "t", image=[*images(200, 230), *[broken] * 30])
        assert said in done.report.notes and said in Path(done.page).read_text()
        said = said.replace("30 of 60", "60 of 120")


def test_a_night_without_any_image_is_in_the_next_one(watched: Watched, tmp_path: Path) -> None:
    table = tmp_path / "t"
    with pytest.raises(DataError, match=r"No image of .* decodes"):
        watched.check(table, "since_last", image=[b"no"] * 30)
    with pytest.raises(DataError, match="too few images"):
        watched.check(table, "since_last", image=[*images(200, 201), *[b"no"] * 30])
    done = watched.check(table, "since_last", image=images(201, 231))
    assert done.report.batch_images == 31 and done.window is not None
    assert done.window.images == 91 and any("60 of 91 images" in n for n in done.report.notes)


def test_the_list_of_images_to_label_names_their_files(watched: Watched, tmp_path: Path) -> None:
    """Ids that ingest gives are hashes: it had them twice, and no file. No verb named the list."""
    night = {"image": images(0, 1) * 40, "module": ["m"] * 40}
    paths = [f"night/{i}.png" for i in range(40)]
    for name, path, said in (("t", {"path": paths}, "night/0.png"), ("u", {}, "")):
        done = watched.check(tmp_path / name, **night, **path)
        # Of copies one is asked for.
        [row] = csv.DictReader(Path(done.to_label).read_text().splitlines())
        assert (row["image_id"], row["path"]) == ("i0", said)
        told = Drifted(done)
        assert told.facts()["to label"] == told.summary()["to_label"] == done.to_label


def test_labels_that_came_with_the_images_are_not_asked_for(
    watched: Watched, tmp_path: Path
) -> None:
    """They were, and were never compared. With one copy among them, neither were those of a night
    of which all images were asked for."""
    plain = [encode(Image.new("RGB", (48, 48), (6 * n, 20, 90))) for n in range(40)]
    # 15 have a label; of the two copies one is of such an image.
    night = {"image": [*plain, plain[0], plain[20]], "label": ["cold"] * 15 + [None] * 27}
    done = watched.check(tmp_path / "t", module=[f"m{n}" for n in range(42)], **night)
    assert done.report.is_drift
    rows = list(csv.DictReader(Path(done.to_label).read_text().splitlines()))
    assert {row["sha256"] for row in rows} == {sha256(one).hexdigest() for one in plain[15:]}
    assert len(rows) == 25
    place = WatchConfig().place(watched.run, "asked")
    assert not len(rows_named(place, {"name": tmp_path.name})), "all others are no choice"
    night["label"] = ["cold"] * 42
    done = watched.check(tmp_path / "u", module=[f"m{n}" for n in range(42)], **night)
    assert done.report.is_drift and done.to_label == ""


def test_a_camera_that_sends_one_picture_all_night_is_drift(
    watched: Watched, tmp_path: Path
) -> None:
    one = images(0, 1)
    found = watched.check(tmp_path / "t", image=one * 40, module=["m"] * 40).report
    assert found.is_drift and [e.on for e in found.evidence if e.is_drift] == ["copies"]


def test_a_column_of_groups_that_is_not_there_is_said(watched: Watched, tmp_path: Path) -> None:
    found = watched.check(tmp_path / "t", image=images(200, 240)).report
    assert any("no such column: its images are taken for independent" in n for n in found.notes)
    module = [f"m{i // 4}" for i in range(40)]
    found = watched.check(tmp_path / "u", image=images(200, 240), module=module).report
    assert not any("no such column" in note for note in found.notes)


def test_names_of_images_and_domains_are_text_on_the_page(watched: Watched, tmp_path: Path) -> None:
    ids = [f"<img src=x onerror=alert({i})>\n" for i in range(40)]
    page = Path(watched.check(tmp_path / "t", image=images(200, 240), image_id=ids).page)
    text = page.read_text()
    assert "<script>alert" not in text and "<img src=x" not in text and "&lt;script" in text


def animated(kind: str) -> bytes:
    frames = [striped(i, "warm") for i in range(3)]
    return encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=50)


def of_size(width: int, height: int) -> bytes:
    return encode(Image.new("RGB", (width, height), (200, 40, 90)))


def odd_pictures() -> dict[str, bytes]:
    """By name: pictures that decode, and that nobody thinks of."""
    one = striped(1, "warm")
    deep = np.asarray(one.convert("L")).astype(np.uint16) * 257
    return {
        "1x1": of_size(1, 1),
        "1x2": of_size(1, 2),
        "1x900": of_size(1, 900),
        "900x1": of_size(900, 1),
        "2x2": of_size(2, 2),
        "1x1 grey JPEG": encode(Image.new("L", (1, 1), 7), "JPEG"),
        "1x1 CMYK JPEG": encode(Image.new("CMYK", (1, 1), (1, 2, 3, 4)), "JPEG"),
        "black and white": encode(one.convert("1")),
        "grey": encode(one.convert("L")),
        "grey with alpha": encode(one.convert("LA")),
        "CMYK": encode(one.convert("CMYK"), "JPEG"),
        "16 bits": encode(Image.fromarray(deep)),
        "palette": encode(one.convert("P")),
        "animated WebP": animated("WEBP"),
        "animated PNG": animated("PNG"),
    }


@pytest.mark.parametrize("name", [*odd_pictures(), "all of them"])
def test_a_night_of_odd_pictures_is_checked(
    name: str, watched: Watched, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Alone and between others: a p-value, a page, no image lost and no warning of numpy's."""
    odd = odd_pictures()
    mine = list(odd.values()) * 2 if name == "all of them" else [odd[name]] * 2
    night = mine + (images(200, 230) if name != "all of them" else [])
    done = watched.check(tmp_path / "t", image=night)
    assert done.report.batch_images == len(night) and 0 <= done.report.p_value <= 1
    page = Path(done.page).read_text()
    assert "nan" not in page.lower().split("</style>")[-1].replace("finance", "")
    assert [str(w.message) for w in recwarn if "numpy" in str(w.filename)] == []


@pytest.mark.parametrize("kind", ["GIF", "TIFF", "BMP"])
def test_formats_that_are_not_accepted_are_counted(
    kind: str, watched: Watched, tmp_path: Path
) -> None:
    other = encode(striped(1, "warm"), kind)
    done = watched.check(tmp_path / "t", image=[*images(200, 230), other, other])
    assert done.report.batch_images == 30
    assert any("2 of 32 images have no prediction (broken)" in n for n in done.report.notes)


def test_a_list_that_somebody_has_filled_in_stays(watched: Watched, tmp_path: Path) -> None:
    """A window is checked again each night until another image comes, and the list was emptied."""
    table = tmp_path / "t"
    done = watched.check(table, image=images(0, 1) * 40, module=["m"] * 40)
    file = Path(done.to_label)
    (row,) = csv.DictReader(file.read_text().splitlines())
    file.write_text(file.read_text().replace(f"{row['sha256']},,", f"{row['sha256']},cold,"))
    watch, batch = WatchConfig(name=tmp_path.name, window="all"), TableConfig(uri=str(table))
    sections = watch, PredictConfig(), DriftConfig()
    again = check_window(watched.store, watched.run, batch, *sections, lambda text: None)
    assert isinstance(again, CheckResult) and again.to_label == done.to_label
    (row,) = csv.DictReader(file.read_text().splitlines())
    assert row["label"] == "cold"
