"""The MLflow model: what it takes, what it answers, and what it refuses before it loads."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pytest
import torch
from mlflow.exceptions import MlflowException
from PIL import Image

from raypipe.errors import DataError
from raypipe.images.decode import decode
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import inputs, packing, runs, served, versions
from raypipe.registry.package import Package, Reference
from raypipe.registry.store import Store
from tests.conftest import Draw
from tests.registry.conftest import small_package


def register(store: Store, folder: Path, model: str) -> Path:
    """The files of the MLflow model of a package."""
    store = dataclasses.replace(store, model=model)
    with runs.run(store, model, "train", {}, None) as run_id:
        pass
    made = versions.register(store, run_id, folder, model, {})
    files = mlflow.artifacts.download_artifacts(
        artifact_uri=made.uri, tracking_uri=store.address, dst_path=str(folder.parent / "model")
    )
    return Path(files)


@pytest.fixture(scope="module")
def built(model: ImageModel, tmp_path_factory: pytest.TempPathFactory) -> Package:
    """One for all tests here, which read it."""
    return small_package(model, tmp_path_factory.mktemp("served") / "package")


@pytest.fixture(scope="module")
def logged(shared_store: Store, built: Package) -> Path:
    """Read it, do not change it."""
    return register(shared_store, built.folder, "served")


@pytest.fixture(scope="module")
def loaded(logged: Path) -> mlflow.pyfunc.PyFuncModel:
    return mlflow.pyfunc.load_model(str(logged))


def test_bytes_base64_and_pixels_are_one_image(
    logged: Path, built: Package, textured: Draw
) -> None:
    model = mlflow.pyfunc.load_model(str(logged))
    images = [textured(seed, 32) for seed in range(3)]
    texts = [base64.b64encode(image).decode() for image in images]
    pixels_BHWC = np.stack([decode(image) for image in images])
    lines = [base64.encodebytes(image).decode() for image in images]
    forms: list[Any] = [
        pd.DataFrame({"image": images, "other": 1}),
        pd.DataFrame({"image": [bytearray(image) for image in images]}),
        pd.DataFrame({"image": texts}),
        pd.DataFrame({"image": pd.Series(lines, dtype="string")}),
        pd.DataFrame({"image": [f"data:image/png;base64,{text}" for text in texts]}),
        pd.DataFrame({"image": [text.encode() for text in texts]}),
        pd.DataFrame({"image": list(pixels_BHWC)}),
        pd.Series(images, name="image"),
        {"image": images},
        {"image": pixels_BHWC},
    ]
    expected = built.predict(images)
    for form in forms:
        found = model.predict(form)
        assert list(found.columns) == ["label", "score", "scores", "error"]
        assert found["label"].tolist() == expected.labels, form
        np.testing.assert_array_equal(np.stack(found["scores"]), expected.scores_NC)
        assert set(found["error"]) == {""}
    # Without MLflow's schema, a batch of pixels as it is.
    direct = model.unwrap_python_model()
    for batch in (pixels_BHWC, pixels_BHWC[:, ::-1, ::-1][:, ::-1, ::-1], list(pixels_BHWC)):
        assert direct.predict(None, batch)["label"].tolist() == expected.labels
    assert direct.predict(None, pixels_BHWC[0])["label"].tolist() == expected.labels[:1]


def test_params_add_columns_and_thresholds(
    loaded: mlflow.pyfunc.PyFuncModel, built: Package, textured: Draw
) -> None:
    images = pd.DataFrame({"image": [textured(seed, 32) for seed in range(8)]})
    expected = built.predict(images["image"].tolist())
    found = loaded.predict(images, params={"top_k": 9, "embedding": True})
    assert [top[0] for top in found["top_labels"]] == expected.labels
    assert [sorted(top, reverse=True) for top in found["top_scores"]] == found[
        "top_scores"
    ].tolist()
    assert {len(top) for top in found["top_labels"]} == {3}
    np.testing.assert_array_equal(np.stack(found["embedding"]), expected.features_ND)

    middle = float(np.median(expected.scores_NC.max(1)))
    found = loaded.predict(images, params={"threshold": middle})
    reached = (expected.scores_NC.max(1) >= middle).tolist()
    assert [label != "" for label in found["label"]] == reached and {True, False} == set(reached)
    for params in ({"threshold": 1.5}, {"top_k": -1}):
        with pytest.raises(MlflowException, match=r"(top_k|threshold) is a .*From|0 or more"):
            loaded.predict(images, params=params)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "missing"),
        (float("nan"), "missing"),
        (pd.NA, "missing"),
        (b"", "empty"),
        (b"no image at all", "not_an_image"),
        (b"\x89PNG\r\n\x1a\n", "not_an_image"),
        ("no base64!", "no base64"),
        ("\ud800", "no base64"),
        ("/etc/hostname", "no base64|not_an_image"),
        ("file:///etc/hostname", "This address is not read"),
        ("s3://bucket/image.png", "This address is not read"),
        (b"file:///etc/hostname", "not_an_image"),
        (np.zeros((4, 4, 3)), "not_pixels: float64"),
        (np.zeros((4, 4), np.uint8), "not_pixels"),
        (np.zeros((0, 4, 3), np.uint8), "not_pixels"),
        ([[[1, 2, 256]]], "not_pixels: int64"),
        ([[[1, 2, 3]], [[1]]], "These lists are no pixels"),
        (7, "This is no image"),
    ],
)
def test_what_is_no_image_costs_its_own_row(
    value: Any, reason: str, loaded: mlflow.pyfunc.PyFuncModel, built: Package, textured: Draw
) -> None:
    good = [textured(1, 32), textured(2, 32)]
    given = pd.DataFrame({"image": pd.Series([good[0], value, good[1]], dtype=object)})
    found = loaded.predict(given, params={"top_k": 1})
    assert [found["label"][0], found["label"][2]] == built.predict(good).labels
    row = found.loc[1, ["label", "score", "scores", "top_labels"]].tolist()
    assert row == ["", None, None, None]
    assert pd.Series([found["error"][1]]).str.contains(reason).all(), found["error"][1]
    assert "\n" not in found["error"][1]
    assert (found["error"] == "").tolist() == [True, False, True]
    assert "NaN" not in json.dumps(found.to_dict(orient="records"))


def test_an_address_is_read_only_below_what_the_loader_named(
    logged: Path, built: Package, textured: Draw, tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    allowed.mkdir()
    (allowed / "a b.png").write_bytes(textured(1, 32))
    (tmp_path / "secret.png").write_bytes(textured(2, 32))
    (allowed / "link.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "allowed not").mkdir()
    (tmp_path / "allowed not" / "a.png").write_bytes(textured(2, 32))
    root = allowed.as_uri()
    addresses = [
        f"{root}/a%20b.png",
        f"{root}/../secret.png",
        f"{root}/%2e%2e/secret.png",
        f"{root}/link.png",
        f"{tmp_path.as_uri()}/allowed%20not/a.png",
        f"{root}/missing.png",
        "http://127.0.0.1/a.png",
    ]
    model = mlflow.pyfunc.load_model(str(logged), model_config={"addresses": [root]})
    found = model.predict(pd.DataFrame({"image": addresses}))
    assert found["label"].tolist() == [*built.predict([textured(1, 32)]).labels, *[""] * 6]
    said = found["error"].tolist()[1:]
    assert ["not read" in text for text in said] == [True] * 4 + [False] + [True]
    assert "cannot be read" in said[4]
    # A caller's params cannot open it.
    closed = mlflow.pyfunc.load_model(str(logged))
    found = closed.predict(
        pd.DataFrame({"image": addresses[:1]}), params={"addresses": [root], "top_k": 1}
    )
    assert "not read" in found["error"][0]
    with pytest.raises(DataError, match="named by an address"):
        mlflow.pyfunc.load_model(str(logged), model_config={"addresses": [str(allowed)]})


@pytest.mark.parametrize(
    ("address", "folder", "inside"),
    [
        ("s3://b/cells/a.png", "s3://b/cells", True),
        ("s3://b/cells/a.png", "s3://b/cells/", True),
        ("s3://b/cells/a.png", "s3://b", True),
        ("s3://b/cells2/a.png", "s3://b/cells", False),
        ("s3://b/cells/../keys/a.png", "s3://b/cells", False),
        ("s3://b/cells/%2e%2e/keys/a.png", "s3://b/cells", False),
        ("s3://b/cells/%252e%252e/keys/a.png", "s3://b/cells", False),
        ("s3://c/cells/a.png", "s3://b/cells", False),
        ("s3://b/cells/a.png?endpoint_override=evil.example", "s3://b/cells", False),
        ("s3://b/cells/a.png#fragment", "s3://b/cells", False),
        ("s3://b/cells/a.png", "s3://b/cells?endpoint_override=store:9000", True),
        ("gs://b/cells/a.png", "s3://b/cells", False),
    ],
)
def test_an_address_is_inside_its_folder_or_not(address: str, folder: str, inside: bool) -> None:
    assert inputs._is_below(address, folder) is inside


def test_an_address_that_is_none_costs_its_own_place(tmp_path: Path) -> None:
    """It ended the whole call."""
    (tmp_path / "circle").symlink_to("circle")
    root = tmp_path.as_uri()
    odd = [f"{root}/%00.png", "s3://[half/a.png", f"{root}/circle/a.png", f"{root}/\ud800.png"]
    found = inputs.given([*odd, b"image"], inputs.Addresses((root,)), 1)
    assert found.images == [None] * 4 + [b"image"] and set(found.errors) == {0, 1, 2, 3}
    assert all("address" in said for said in found.errors.values())


def test_numbers_have_no_classes(shared_store: Store, tmp_path: Path, textured: Draw) -> None:
    cfg = ModelConfig(name="small_cnn", pretrained=False, mode="finetune", task="regression")
    reference = Reference(np.zeros((4, 64)), np.zeros((4, 1)), tuple("abcd"))
    folder = packing.build(tmp_path / "package", ImageModel(cfg, 1), cfg, ("value",), reference, {})
    model = mlflow.pyfunc.load_model(str(register(shared_store, folder, "a number")))
    images = pd.DataFrame({"image": [textured(1)]})
    assert model.predict(images)["label"].tolist() == ["0"]
    with pytest.raises(MlflowException, match="top_k and threshold are for classes"):
        model.predict(images, params={"top_k": 1})


def test_the_example_is_an_image_and_its_call_works(logged: Path, built: Package) -> None:
    model = mlflow.pyfunc.load_model(str(logged))
    example = model.input_example
    image = Image.open(io.BytesIO(example["image"][0]))
    assert image.size == (built.side_px, built.side_px)
    found = model.predict(example, params=model.metadata.load_input_example_params(str(logged)))
    assert found["error"].tolist() == [""] and len(found["top_labels"][0]) == 2
    assert model.metadata.metadata["classes"] == ["a", "b", "c"]


def flip_a_byte(package: Path) -> None:
    weights = package / "weights.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


def pickle_for_weights(package: Path) -> None:
    (package / "weights.safetensors").write_bytes(pickle.dumps(Trap()))


def swap_all(package: Path, weights: bytes | None = None) -> None:
    """Other weights, and a manifest that attests them."""
    path = package / "weights.safetensors"
    path.write_bytes(weights or path.read_bytes()[:-4] + b"\0\0\x80?")
    manifest = json.loads((package / "manifest.json").read_text())
    manifest[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (package / "manifest.json").write_text(json.dumps(manifest))


def swap_for_a_pickle(package: Path) -> None:
    swap_all(package, pickle.dumps(Trap()))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flip_a_byte, "does not match its sha256.*weights"),
        (pickle_for_weights, "does not match its sha256.*weights"),
        (swap_all, "not the one that was registered"),
        (swap_for_a_pickle, "not the one that was registered"),
    ],
)
def test_what_was_altered_is_refused_before_it_is_read_as_weights(
    spoil: Any, says: str, logged: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(logged, copy)
    spoil(next(copy.glob("artifacts/*")))

    def no_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read")

    monkeypatch.setattr("raypipe.registry.package.load", no_weights)
    for name in ("load", "loads"):
        monkeypatch.setattr(torch if name == "load" else pickle, name, no_weights)
    with pytest.raises(DataError, match=says):
        mlflow.pyfunc.load_model(str(copy))
    assert not (tmp_path / "sprung").exists()


def test_the_registrys_seal_may_be_demanded(logged: Path, built: Package) -> None:
    config = {"seal": built.seal}
    assert mlflow.pyfunc.load_model(str(logged), model_config=config)
    with pytest.raises(DataError, match="not the one that was registered"):
        mlflow.pyfunc.load_model(str(logged), model_config={"seal": "0" * 64})


WITHOUT = """
import pathlib, pickle, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "deltalake", "deepspeed"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Blocked())
# A server has no raypipe, and a developer's machine has.
sys.path = [path for path in sys.path if not pathlib.Path(path, "raypipe").is_dir()]
import mlflow, pandas as pd
def refuse(*_, **__):
    raise SystemExit("unpickled")
pickle.load = pickle.loads = pickle.Unpickler = refuse
model = mlflow.pyfunc.load_model(sys.argv[1])
image = pathlib.Path(sys.argv[2]).read_bytes()
import raypipe
assert raypipe.__file__.startswith(sys.argv[1]), raypipe.__file__
print(model.predict(pd.DataFrame({"image": [image]}))["label"][0])
"""


WITHOUT_ONE = """
import importlib.util, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[2]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
spec = importlib.util.spec_from_file_location("served", sys.argv[1])
try:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
except Exception as e:
    print(f"{type(e).__name__}: {e}")
"""


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("torch", "ModuleNotFoundError: No module named 'torch'"),
        ("raypipe.registry.inputs", "The raypipe that is installed cannot read this model"),
    ],
)
def test_what_is_missing_is_said(missing: str, says: str) -> None:
    """A missing torch was told as an installed raypipe of the wrong version."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_ONE, str(Path(served.__file__)), missing],
        capture_output=True,
        text=True,
        check=False,
    )
    assert says in done.stdout, done.stderr[-2000:]
    assert ("installed" in done.stdout) == missing.startswith("raypipe.")


def test_it_loads_without_ray_delta_and_pickle(
    logged: Path, built: Package, textured: Draw, tmp_path: Path
) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(textured(3, 40))
    done = subprocess.run(
        # Isolated: the code is the model's own.
        [sys.executable, "-I", "-c", WITHOUT, str(logged), str(image)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == built.predict([textured(3, 40)]).labels
    kept = [path.name for path in logged.rglob("*") if path.is_file()]
    pickles = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".joblib")
    assert "served.py" in kept and not [name for name in kept if name.endswith(pickles)]
