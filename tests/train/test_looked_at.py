"""The reference says what its images look like, as a prediction of the same images says it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raypipe.feed.dataset import pin
from raypipe.images.measure import SEEN, statistics
from raypipe.models.zoo import ImageModel
from raypipe.train import looked_at, unseen
from tests.pixels import decoded

from .conftest import Jobs

pytestmark = pytest.mark.usefixtures("ray_session")


FROZEN = {
    "model.name": "efficientnet_lite0",
    "model.mode": "frozen",
    "model.pretrained": True,
    "model.side_px": 32,
}


@pytest.mark.parametrize("changes", [{}, FROZEN], ids=["finetune", "frozen"])
def test_a_reference_says_what_its_images_look_like(
    jobs: Jobs, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs(**changes)
    pinned = pin(job.table, job.feed)
    model = ImageModel(job.model, len(pinned.classes))
    pixels_NHWC, _, ids = decoded(job)
    found = unseen.reference(job, model, pinned, job.run.path).reference
    looks_NK = found.looks_NK
    assert found.ids == ids and looks_NK is not None and looks_NK.shape == (len(ids), len(SEEN))
    for column, values in enumerate(statistics(pixels_NHWC).values()):
        np.testing.assert_allclose(looks_NK[:, column], values, atol=1e-6)
    assert np.isfinite(looks_NK).all() and (looks_NK[:, 3:] >= 1).all()

    # Of a large split some are looked at, and the others say so.
    monkeypatch.setattr(looked_at, "IMAGES", 5)
    some_NK = unseen.reference(job, model, pinned, job.run.path).reference.looks_NK
    assert some_NK is not None
    seen_N = np.isfinite(some_NK).all(axis=1)
    assert seen_N.sum() == 5 and np.isnan(some_NK[~seen_N]).all()
    np.testing.assert_array_equal(some_NK[seen_N], looks_NK[seen_N])
