"""The same 200 images through every way of serving: equal labels, scores within 1e-4."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from raypipe.config import RunConfig
from raypipe.images.decode import decode_batch
from raypipe.serve import batch, stream
from raypipe.serve.batch import Calls, PredictConfig
from raypipe.tables import scan
from raypipe.tables.table import ImageTable, TableConfig, append
from tests.conftest import Cli
from tests.serve import servers
from tests.serve.conftest import Registered

CLOSE = 1e-4


def agree(expected: Registered, labels: list[Any], scores: Any) -> None:
    """Assert that an answer to the 200 images is the package's own."""
    assert len(labels) == 200 and list(labels) == expected.answers.labels
    found_NC = np.array([list(row) for row in scores], dtype=np.float64)
    assert np.abs(found_NC - expected.answers.scores_NC).max() < CLOSE


def test_plain_load_model(registered: Registered) -> None:
    mlflow.set_registry_uri(registered.store.address)
    mlflow.set_tracking_uri(registered.store.address)
    model = mlflow.pyfunc.load_model(f"models:/{registered.version.name}@champion")
    found = model.predict(pd.DataFrame({"image": registered.images}))
    agree(registered, found["label"].tolist(), found["scores"])


def test_base64(registered: Registered) -> None:
    model = mlflow.pyfunc.load_model(str(registered.files))
    texts = [base64.b64encode(image).decode() for image in registered.images]
    found = model.predict(pd.DataFrame({"image": texts}))
    agree(registered, found["label"].tolist(), found["scores"])


def test_onnx(registered: Registered, tmp_path: Path, cli: Cli) -> None:
    ort = pytest.importorskip("onnxruntime", reason="raypipe[onnx]")
    out = tmp_path / "model.onnx"
    name = f"models:/{registered.version.name}@champion"
    where = f"run.dir={registered.store.folder.parent}"
    code, said, error = cli("export", "onnx", name, out, where, "--json")
    assert code == 0, error
    assert json.loads(said.splitlines()[-1])["apart"] < CLOSE
    session = ort.InferenceSession(str(out), providers=["CPUExecutionProvider"])
    about = json.loads(session.get_modelmeta().custom_metadata_map["raypipe"])
    pixels_NHWC = decode_batch(registered.images, about["input"]["shape"][1])
    scores_NC, _ = session.run(None, {"pixels": pixels_NHWC})
    labels = [about["classes"][i] for i in scores_NC.argmax(1)]
    agree(registered, labels, scores_NC)


@pytest.mark.usefixtures("ray_session")
def test_batch_and_stream(registered: Registered, tmp_path: Path) -> None:
    ids = [f"{n:03d}" for n in range(200)]
    columns = {"image_id": ids, "image": pa.array(registered.images, pa.binary())}
    append(str(tmp_path / "t"), pa.table(columns), "the 200 images")
    run = RunConfig(name="mixed", dir=str(tmp_path))
    source = TableConfig(uri=str(tmp_path / "t"))

    cfg = PredictConfig(out=str(tmp_path / "batch"))
    key = batch.predict(registered.store, run, source, cfg).key
    found = batch.read_rows(str(tmp_path / "batch"), key, ["image_id", "label", "scores"])
    found = found.sort_by("image_id")
    agree(registered, found["label"].to_pylist(), found["scores"].to_pylist())

    # A stream's key depends on its micro-batches; all of its rows are wanted here.
    cfg = PredictConfig(out=str(tmp_path / "stream"), follow="once")
    stream.follow(registered.store, run, source, cfg, Calls())
    out = ImageTable(str(tmp_path / "stream"))
    found = scan.rows(out, out.pin(), ["image_id", "label", "scores"]).sort_by("image_id")
    agree(registered, found["label"].to_pylist(), found["scores"].to_pylist())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("tflite", "models:/mixed@champion", "x"), "There is no such format"),
        (("onnx", "models:/mixed", "x"), "names no registered model"),
        (("onnx", "models:/mixed@champion", "x", "run.dir=elsewhere"), "no model store here"),
        (("onnx", "models:/mixed/9", "x"), "has no version 9"),
        (("onnx", "models:/mixed@blue", "x"), "no blue of"),
        (("pt2", "models:/mixed/1", "x", "--int8"), "int8 is for ONNX"),
        (("pt2", "models:/mixed/1", "x", "--table", "nowhere"), "nowhere"),
    ],
)
def test_an_export_that_cannot_be_is_one_message(
    arguments: tuple[str, ...],
    says: str,
    registered: Registered,
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    where = (
        () if "run.dir=elsewhere" in arguments else (f"run.dir={registered.store.folder.parent}",)
    )
    code, _, error = cli("export", *arguments, *where)
    assert code == 2 and says in error and "Traceback" not in error
    assert not list(tmp_path.iterdir())


def served(files: Path, log: Path) -> AbstractContextManager[str]:
    """The address of `mlflow models serve` on this model, once it answers."""
    model = ("models", "serve", "-m", str(files), "--env-manager", "local")
    return servers.mlflow(*model, ready="/ping", log=log)


def ask(address: str, body: dict[str, Any] | str) -> tuple[int, Any]:
    """(status, JSON) of a call of a scoring server. body: JSON, or a text of CSV."""
    kind = "text/csv" if isinstance(body, str) else "application/json"
    data = body if isinstance(body, str) else json.dumps(body)
    request = urllib.request.Request(
        f"{address}/invocations", data.encode(), {"Content-Type": kind}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        return e.code, json.loads(e.read())


@pytest.mark.slow
def test_mlflow_models_serve(registered: Registered, tmp_path: Path) -> None:
    texts = [base64.b64encode(image).decode() for image in registered.images]
    secret = tmp_path / "secret.png"
    secret.write_bytes(registered.images[1])
    with served(registered.files, tmp_path / "log") as address:
        split = {"columns": ["image"], "data": [[text] for text in texts]}
        records = [{"image": text} for text in texts]
        for body in (
            {"dataframe_split": split},
            {"dataframe_records": records},
            {"inputs": texts},
            {"inputs": {"image": texts}},
            {"instances": texts},
            {"instances": records},
        ):
            status, answer = ask(address, body)
            assert status == 200, answer
            rows = answer["predictions"]
            agree(registered, [row["label"] for row in rows], [row["scores"] for row in rows])

        # Params, and an image that does not decode.
        bad = base64.b64encode(b"no image").decode()
        status, answer = ask(address, {"inputs": [texts[0], bad], "params": {"top_k": 2}})
        first, second = answer["predictions"]
        assert status == 200 and len(first["top_labels"]) == 2 and first["error"] == ""
        assert (
            second["label"] == "" and second["score"] is None and "not_an_image" in second["error"]
        )

        # A wrong call is 400 and one line; the server stays.
        status, answer = ask(address, {"inputs": texts[:1], "params": {"top_k": -1}})
        assert status == 400 and "top_k is a number of classes" in answer["message"]
        assert "Traceback" not in json.dumps(answer)

        # No form of a call makes the server read a file.
        for path in (str(secret), secret.as_uri()):
            for body in ({"inputs": [path]}, {"dataframe_split": split | {"data": [[path]]}}):
                # MLflow itself refuses some texts before the model sees them.
                status, answer = ask(address, body)
                rows = answer.get("predictions", [{"label": ""}])
                assert status in (200, 400) and rows[0]["label"] == "", answer
            status, answer = ask(address, f"image\n{path}\n")
            rows = answer.get("predictions", [{"label": ""}])
            assert status in (200, 400) and rows[0]["label"] == "", answer
