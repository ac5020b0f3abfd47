"""Outcomes of held-out images: of none that chose the model unseen, and of none that taught it."""

from __future__ import annotations

import pytest

from raypipe.feed.dataset import pin
from raypipe.models.outcomes import Outcomes
from raypipe.models.zoo import ImageModel
from raypipe.tables.table import TableConfig
from raypipe.train import learned, shifted, unseen

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


def outcomes_of(jobs: Jobs, inherited: int = 0, **changes: object) -> Outcomes | None:
    job = jobs(**changes)
    pinned = pin(job.table, job.feed)
    model = ImageModel(job.model, len(pinned.classes))
    rows_N2 = learned.rows_of(pinned, pinned.version, pinned.rows_of("val"))[1][:inherited]
    return unseen.reference(job, model, pinned, job.run.path, rows_N2).outcomes


@pytest.mark.parametrize("calibrate", [False, True])
def test_validation_images_chose_the_model(jobs: Jobs, calibrate: bool) -> None:
    found = outcomes_of(jobs, **{"model.calibrate": calibrate})
    assert found is not None and (found.split, found.chose) == ("val", True)
    # Also under another name.
    named = outcomes_of(jobs, **{"model.calibrate": calibrate, "feed.test": "val"})
    assert named is not None and named.chose


def test_test_images_chose_nothing(jobs: Jobs) -> None:
    found = outcomes_of(jobs, **{"feed.train": "val", "feed.test": "train"})
    assert found is not None and (found.split, found.chose) == ("train", False)


def test_a_model_is_not_measured_on_images_that_it_was_trained_on(jobs: Jobs) -> None:
    """After a refit on both splits, without test images: it is right there, and nowhere else."""
    assert outcomes_of(jobs, **{"feed.train": "train+val"}) is None
    # Nor on a test split that it was trained on: validation judges it.
    found = outcomes_of(jobs, **{"feed.test": "train"})
    assert found is not None and (found.split, found.chose) == ("val", True)


@pytest.mark.parametrize("calibrate", [False, True])
@pytest.mark.parametrize("inherited", [0, 1, 9])
def test_a_reference_is_not_of_images_that_an_ancestor_has_learned_from(
    jobs: Jobs, three_splits: TableConfig, inherited: int, calibrate: bool
) -> None:
    """A champion's refit has learned from validation, and a challenger may start from its weights.

    A temperature is never fitted on test images, whatever validation is worth. Images that are
    trained on are no test, either.
    """
    for test in ("test", "train", "nothing"):
        changes = {"table.uri": three_splits.uri, "feed.test": test, "model.calibrate": calibrate}
        job = jobs(**changes)
        pinned = pin(job.table, job.feed)
        model = ImageModel(job.model, len(pinned.classes))
        rows_N2 = learned.rows_of(pinned, pinned.version, pinned.rows_of("val"))[1][:inherited]
        found = unseen.reference(job, model, pinned, job.run.path, rows_N2)
        is_known = inherited > 1
        leaves = is_known and test == "test"
        assert found.split == ("test" if leaves else "val")
        assert found.is_inherited == (is_known and not leaves)
        why = shifted._why_not(job, pinned, found)
        assert ("started from may have learned from images of val" in why) == found.is_inherited
        if calibrate:
            told = found.calibrated
            assert told is not None and bool(told.why_not) == is_known
            assert (told.test_images > 0) == (test == "test" and not is_known)
            # A temperature of remembered images left the model too sure of all others.
            assert not is_known or (told.temperature == 1 and "learned from" in str(told))
        assert (job.run.path / unseen.TEST).exists() == (test == "test")
        (job.run.path / unseen.TEST).unlink(missing_ok=True)


def test_images_that_an_ancestor_has_learned_from_have_no_outcome(jobs: Jobs) -> None:
    every, some = outcomes_of(jobs), outcomes_of(jobs, inherited=7)
    assert every is not None and some is not None
    assert len(some) == len(every) - 7 and len(some.sure_N) == len(some)
