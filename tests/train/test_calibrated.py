"""A calibrated model is another version of the same training, and says its scores everywhere."""

from __future__ import annotations

import json

import mlflow
import numpy as np
import pytest
import torch

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.models.calibrate import calibration, tempered
from raypipe.registry import fetching, runs
from raypipe.registry.store import open_store
from raypipe.tables.table import TableConfig
from raypipe.train import trainer, unseen
from raypipe.train.publish import CALIBRATION, package_key, publish
from tests.pixels import decoded

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def test_a_calibrated_model_is_a_second_version_of_one_training(
    jobs: Jobs, three_splits: TableConfig
) -> None:
    plain = jobs(**{"train.epochs": 3, "table.uri": three_splits.uri})
    asked = replace(plain, {"model.calibrate": True})
    result = trainer.run(plain)
    again = trainer.run(asked)
    assert again.key == result.key and again.seconds == 0, "nothing is trained again"

    store = open_store(plain.run, plain.registry)
    first = publish(store, trainer.plan(plain), result, "train")
    second = publish(store, trainer.plan(asked), result, "train")
    assert (first.version, second.version) == (1, 2)
    published = [publish(store, trainer.plan(job), result, "train") for job in (plain, asked)]
    assert published == [first, second], "neither stands in for the other"
    # The way to another version of the same settings that the docs name.
    assert trainer.plan(replace(plain, {"run.seed": 1})).key != result.key

    package, calibrated = (fetching.fetch(store, version) for version in (first, second))
    temperature = calibrated.info["temperature"]
    assert "temperature" not in package.info and temperature != 1
    pixels_NHWC, labels_N, ids = decoded(asked)
    raw_NC = package.predict_pixels(pixels_NHWC).scores_NC
    found = calibrated.predict_pixels(pixels_NHWC)
    expected = tempered("single_label", torch.from_numpy(raw_NC), temperature).numpy()
    np.testing.assert_allclose(found.scores_NC, expected, atol=1e-5)
    assert found.labels == package.predict_pixels(pixels_NHWC).labels
    # Drift compares new scores with these: both are calibrated.
    reference = calibrated.reference()
    assert reference.ids == ids
    np.testing.assert_allclose(reference.scores_NC, found.scores_NC, atol=1e-4)

    told = json.loads(second.tags[CALIBRATION])
    assert told["temperature"] == temperature and told["images"] == len(labels_N)
    tested, test_labels_N, _ = decoded(asked, "test")
    targets_NC = np.eye(len(result.classes))[test_labels_N]
    before = calibration("single_label", package.predict_pixels(tested).scores_NC, targets_NC)
    after = calibration("single_label", calibrated.predict_pixels(tested).scores_NC, targets_NC)
    assert told["test_images"] == len(test_labels_N)
    assert told["error_before"] == pytest.approx(before.error, abs=1e-3)
    assert told["error_after"] == pytest.approx(after.error, abs=1e-3)
    low, high = told["change"]
    assert low <= after.error - before.error <= high
    said = str(unseen.Calibrated(**told))
    assert f"{temperature:.2f}" in said and "95 % interval of the change" in said
    folder = asked.run.path / "packages" / package_key(asked, result)
    card = (folder / "card.md").read_text(encoding="utf-8")
    assert said in card
    # Both are of one MLflow run: the second card took the place of the first.
    run_id = store.client.get_model_version(first.name, "1").run_id
    assert run_id == store.client.get_model_version(second.name, "2").run_id
    place = store.client.get_run(run_id).info.artifact_uri
    logged = [
        mlflow.artifacts.load_text(f"{place}/card-{version.tags[runs.KEY]}.md")
        for version in (first, second)
    ]
    assert logged[1] == card and said not in logged[0] and "# Model card" in logged[0]
    # The test metrics are of the same predictions.
    accuracy = unseen.test(trainer.plan(asked), result)["test_accuracy"]
    predicted_N = package.predict_pixels(tested).scores_NC.argmax(1)
    assert accuracy == pytest.approx(float((predicted_N == test_labels_N).mean()))


def test_without_test_images_the_error_is_not_made_up(jobs: Jobs) -> None:
    job = jobs(**{"train.epochs": 1, "model.calibrate": True})
    result = trainer.run(job)
    pinned = pin(job.table, job.feed)
    model = trainer.assemble(job, result)
    calibrated = unseen.reference(job, model, pinned, job.run.path).calibrated
    assert calibrated is not None and calibrated.test_images == 0
    assert calibrated.error_before is None and calibrated.error_after is None


def test_a_temperature_that_does_not_help_is_not_kept(
    jobs: Jobs, three_splits: TableConfig
) -> None:
    """A model that was hardly trained is as unsure as it should be."""
    hardly = {"train.epochs": 1, "train.lr": 1e-6, "table.uri": three_splits.uri}
    job = jobs(**hardly, **{"model.calibrate": True})
    result = trainer.run(job)
    store = open_store(job.run, job.registry)
    version = publish(store, trainer.plan(job), result, "train")
    told = unseen.Calibrated(**json.loads(version.tags[CALIBRATION]))
    assert told.temperature == 1 != told.fitted and told.gain < 0.001
    assert told.error_after == told.error_before and told.change == [0, 0]
    assert "not changed" in str(told) and "test images" in str(told)
    assert fetching.fetch(store, version).info["temperature"] == 1


def test_no_temperature_is_fitted_on_images_that_were_trained_on(
    jobs: Jobs, three_splits: TableConfig
) -> None:
    """Some of them, and also under another name."""
    named = {"feed.val": "val+train", "table.uri": three_splits.uri}
    job = jobs(**named, **{"train.epochs": 1, "model.calibrate": True})
    result = trainer.run(job)
    version = publish(open_store(job.run, job.registry), trainer.plan(job), result, "train")
    told = unseen.Calibrated(**json.loads(version.tags[CALIBRATION]))
    assert (told.temperature, told.images, told.test_images) == (1, 0, 0)
    card = job.run.path / "packages" / package_key(job, result) / "card.md"
    said = "not calibrated: the model was trained on images of feed.val=val+train, those of train"
    assert said == str(told) and said in card.read_text(encoding="utf-8")


def test_what_cannot_be_calibrated_is_refused_before_it_is_trained(jobs: Jobs) -> None:
    with pytest.raises(ConfigError, match=r"predicts a number\. Set model\.calibrate=false"):
        jobs(**{"model.calibrate": True, "model.task": "regression"})
    with pytest.raises(ConfigError, match=r"all of feed\.val=val are trained on"):
        jobs(**{"model.calibrate": True, "feed.train": "train+val"})
