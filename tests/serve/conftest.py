"""A registered model whose answers to the 200 mixed images vary, for every way of serving."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
import torch

from raypipe.config import RunConfig
from raypipe.images.decode import decode_batch
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing, promote, runs, versions
from raypipe.registry.package import Package, Predictions, Reference
from raypipe.registry.store import Store, open_store
from raypipe.registry.tracking import RegistryConfig
from raypipe.registry.versions import ModelVersion

CFG = ModelConfig(name="small_cnn", pretrained=False, mode="finetune")
CLASSES = ("a", "b", "c")


@dataclass(frozen=True)
class Registered:
    """A champion, its store, its MLflow model's files, and what the package itself answers."""

    store: Store
    version: ModelVersion
    package: Package
    files: Path
    images: list[bytes]
    answers: Predictions

    def another(self, key: str, folder: Path | None = None) -> ModelVersion:
        """One more version: of the same package, or of the one in `folder`."""
        with runs.run(self.store, key, "train", {}, None) as run_id:
            pass
        folder = folder or Path(str(self.package.folder))
        return versions.register(self.store, run_id, folder, key, {})

    def weights_of(self, version: ModelVersion) -> Path:
        """The version's weights where MLflow keeps them."""
        client = self.store.client
        uri = client.get_model_version_download_uri(version.name, str(version.version))
        return next(Path(unquote(urlparse(uri).path)).rglob("weights.safetensors"))


def flip_a_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="session")
def registered(two_hundred: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Registered:
    import mlflow

    folder = tmp_path_factory.mktemp("registered")
    torch.manual_seed(4)
    model = ImageModel(CFG, len(CLASSES)).eval()
    pixels_BHWC = torch.from_numpy(decode_batch(two_hundred, CFG.pixels))
    with torch.no_grad():
        seen_BD = model.embed(pixels_BHWC)
        model.head.standardise_by(seen_BD.mean(0), seen_BD.std(0))
        torch.nn.init.normal_(model.head.linear.weight, std=0.3)
    reference = Reference(np.zeros((4, 64)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    built = Package(packing.build(folder / "package", model, CFG, CLASSES, reference, {}))

    run = RunConfig(name="mixed", dir=str(folder / "run"))
    store = open_store(run, RegistryConfig())
    with runs.run(store, "mixed", "train", {}, None) as run_id:
        pass
    version = versions.register(store, run_id, Path(str(built.folder)), "mixed", {})
    promote.promote(store, version, expected=None)
    files = mlflow.artifacts.download_artifacts(
        artifact_uri=version.uri, tracking_uri=store.address, dst_path=str(folder / "model")
    )
    answers = built.predict(two_hundred)
    # A model that says one thing would agree with anything.
    assert min(np.bincount([CLASSES.index(label) for label in answers.labels], minlength=3)) > 20
    return Registered(store, version, built, Path(files), two_hundred, answers)
