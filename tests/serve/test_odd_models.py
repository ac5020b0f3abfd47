"""A model that fails in a worker of Ray: a message says what failed, where, and on which image."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from raypipe.config import RunConfig
from raypipe.errors import DataError, RaypipeError
from raypipe.failures import explain
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry import packing
from raypipe.registry.package import Reference
from raypipe.registry.versions import ModelVersion
from raypipe.serve import batch
from raypipe.serve.batch import PredictConfig
from raypipe.tables.table import TableConfig, append
from tests.serve.conftest import CLASSES, Registered

pytestmark = pytest.mark.usefixtures("ray_session")


def odd(registered: Registered, how: str, folder: Path) -> ModelVersion:
    name = "file:tests.serve.odd_models:net"
    options = {"how": "nan" if how == "huge" else how}
    cfg = ModelConfig(name=name, options=options, pretrained=False, mode="finetune", side_px=32)
    model = ImageModel(cfg, len(CLASSES)).eval()
    if how == "huge":
        # Each weight is a number, and no answer is.
        with torch.no_grad():
            for weight in model.parameters():
                weight.fill_(3e38)
    reference = Reference(np.zeros((4, 3)), np.full((4, 3), 1 / 3), tuple("wxyz"))
    built = packing.build(folder / how, model, cfg, CLASSES, reference, {})
    return registered.another(f"odd-{how}", built)


def predicted(
    registered: Registered, how: str, folder: Path, others: int = 9
) -> batch.PredictResult:
    """Of nine images and a white one."""
    white = io.BytesIO()
    Image.new("RGB", (40, 40), "white").save(white, "PNG")
    images = [*registered.images[:others], white.getvalue()]
    ids = [f"i{n}" for n in range(others)] + ["the white one"]
    rows = pa.table({"image_id": ids, "image": pa.array(images, pa.binary())})
    append(str(folder / "t"), rows, "add")
    run, source = RunConfig(name="mixed", dir=str(folder)), TableConfig(uri=str(folder / "t"))
    model = odd(registered, how, folder)
    return batch.predict(registered.store, run, source, PredictConfig(), model)


@pytest.mark.parametrize("how", ["raise", "own"])
def test_code_of_the_user_that_raises_is_named(
    how: str, registered: Registered, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RaypipeError, match="it was made to") as found:
        predicted(registered, how, tmp_path)
    code, text = explain(found.value)
    assert code == 1 and "Traceback" not in capfd.readouterr().err
    kind = {"raise": "ValueError", "own": "MyOwnError"}[how]
    assert f"The model fails on 10 images: {kind}: it was made to" in text
    assert "image 'the white one' alone is enough" in text
    assert "in forward, line" in text and "of odd_models.py" in text


def test_an_image_that_gives_nan_is_a_row_with_its_error(
    registered: Registered, tmp_path: Path
) -> None:
    """One image must not stop a table of a million, or each night that has it."""
    done = predicted(registered, "nan", tmp_path)
    assert (done.images, done.broken) == (10, 1)
    columns = ["image_id", "label", "scores", "error"]
    rows = batch.read_rows(done.out.uri, done.key, columns).to_pylist()
    bad = [row for row in rows if row["error"]]
    assert [row["image_id"] for row in bad] == ["the white one"]
    assert bad[0]["error"] == "the model's answer is not finite" and bad[0]["label"] is None
    assert all(np.isfinite(row["scores"]).all() for row in rows if not row["error"])


def test_a_model_without_a_finite_answer_writes_no_row(
    registered: Registered, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=r"not finite; image 'the white one' alone"):
        predicted(registered, "huge", tmp_path, others=0)
    assert not (tmp_path / "predictions").exists()


def test_an_image_that_gives_nan_may_be_alone_in_its_batch(
    registered: Registered, tmp_path: Path
) -> None:
    """The 65th of 65 images, or the only new one of a stream, which it stopped for ever."""
    done = predicted(registered, "nan", tmp_path, others=0)
    assert (done.images, done.broken) == (1, 1)


@pytest.mark.slow
def test_a_worker_that_dies_on_an_image_ends_in_one_message(
    registered: Registered, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        predicted(registered, "exit", tmp_path)
        pytest.fail("it was made to die")
    except Exception as e:
        code, text = explain(e)
    assert code == 1 and "WorkerCrashedError" in text
    assert "Traceback" not in capfd.readouterr().err
