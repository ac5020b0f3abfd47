"""A batch and a server refuse a package that was altered in the registry, before loading it."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from raypipe.config import RunConfig, validate
from raypipe.errors import DataError
from raypipe.registry.tracking import RegistryConfig
from raypipe.serve import batch
from raypipe.serve.batch import PredictConfig
from raypipe.serve.online import server
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables.table import TableConfig, append
from tests.serve.conftest import Registered, flip_a_byte

pytestmark = pytest.mark.usefixtures("ray_session")


class Trap:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("sprung"),)


def pickle_for_weights(weights: Path) -> None:
    weights.write_bytes(pickle.dumps(Trap()))


def swap_both(weights: Path) -> None:
    """A pickle, and a manifest that attests it."""
    pickle_for_weights(weights)
    path = weights.with_name("manifest.json")
    manifest = json.loads(path.read_text())
    manifest[weights.name] = hashlib.sha256(weights.read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (flip_a_byte, "does not match its sha256.*weights"),
        (pickle_for_weights, "does not match its sha256.*weights"),
        (swap_both, "not the one that was registered"),
    ],
)
def test_it_is_refused_before_it_is_loaded(
    spoil: Callable[[Path], None],
    says: str,
    registered: Registered,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    version = registered.another(spoil.__name__)
    spoil(registered.weights_of(version))

    def no_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("it was read as weights")

    monkeypatch.setattr("raypipe.registry.package.load", no_weights)
    # A process that has the package of this seal already, whole, reads no file again.
    monkeypatch.setattr(batch, "_last_shared", [])
    append("t", pa.table({"image_id": ["a"], "image": [registered.images[0]]}), "one")
    run = RunConfig(name="mixed", dir=str(registered.store.folder.parent))
    cfg = PredictConfig(out=str(tmp_path / "out"))
    with pytest.raises(DataError, match=says):
        batch.predict(registered.store, run, TableConfig(uri="t"), cfg, version)
    with pytest.raises(DataError, match=says):
        pinned = validate(ServeConfig, {"version": version.version, "port": 0})
        server.check(run, RegistryConfig(), pinned)
    assert not Path("out").exists() and not Path("sprung").exists()
