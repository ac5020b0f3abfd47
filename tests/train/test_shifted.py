"""Which images calibrate the estimate of accuracy, and how many copies of them."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raypipe.config import replace, validate
from raypipe.feed.dataset import pin
from raypipe.images import shifts
from raypipe.models.severity import require_enough
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.train import shifted, unseen
from raypipe.train.job import TrainJob
from raypipe.train.shifted import OTHERS, pooled

from .conftest import Jobs


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"a": 20, "b": 30}, {"a": 20, "b": 30}),
        ({"a": 50, "b": 19, "c": 3}, {"a": 50, OTHERS: 22}),
        ({"a": 50, "b": 19}, {"a": 50, "": 19}),
        ({"a": 5}, {"": 5}),
        ({}, {}),
        ({"": 7, "a": 20}, {"": 7, "a": 20}),
    ],
)
def test_small_domains_are_one_or_left_out(sizes: dict[str, int], expected: dict[str, int]) -> None:
    names = np.array([name for name, count in sizes.items() for _ in range(count)], dtype=object)
    assert Counter(pooled(names, np.arange(len(names))).tolist()) == expected


def test_a_domain_of_few_groups_counts_among_the_others() -> None:
    """30 images of 10 modules are 10: they cost the other domain its calibration."""
    names = np.array(["a"] * 30 + ["b"] * 200 + ["c"] * 15, dtype=object)
    images = np.array([*(n // 3 for n in range(30)), *range(100, 315)])
    found = pooled(names, images)
    assert Counter(found.tolist()) == {OTHERS: 45, "b": 200}
    require_enough(found, images)


def test_each_image_is_changed_in_every_way_once() -> None:
    cfg = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    model = ImageModel(cfg, 2).for_inference()
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    places, kinds, features, scores = shifted._predicted(model, pixels, np.arange(10, 15), 0)
    assert len(places) == len(features) == len(scores) == 5 * len(shifts.KINDS)
    pairs = Counter(zip(places.tolist(), kinds.tolist(), strict=True))
    assert set(pairs.values()) == {1} and len(pairs) == 45


def test_a_group_counts_once() -> None:
    samples = np.array([7, 8, 9, 10])
    assert shifted._images(samples, ("m", "", "m", "")).tolist() == [0, 1, 0, 2]
    assert shifted._images(samples, None) is samples


def test_few_images_cost_nothing_and_say_why(
    jobs: Jobs, ray_session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs()
    pinned = pin(job.table, job.feed)
    model = ImageModel(job.model, len(pinned.classes))
    held_out = unseen.reference(job, model, pinned, job.run.path)
    monkeypatch.delattr(shifted, "_copies")
    found = shifted.measured(job, model, pinned, held_out)
    assert found.calibration is None and found.copied == 0
    images = len(held_out.labels_N)
    assert found.why_not == (
        f"too few labelled validation images to calibrate on ({images} images)"
    )


def test_no_time_is_the_reason_only_where_time_would_have_helped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing: Any = None
    job = validate(TrainJob, {"table": {"uri": "unused"}})
    why_not = {"is": ""}
    monkeypatch.setattr(shifted, "_why_not", lambda *given: why_not["is"])
    monkeypatch.setattr(shifted, "measured", lambda *given: time.sleep(60))
    began = time.monotonic()
    for until in (0.0, began, began + 0.2):
        found = shifted.in_time(job, nothing, nothing, nothing, until)
        assert (found.calibration, found.why_not) == (None, shifted.NO_TIME)
    assert time.monotonic() - began < 10
    why_not["is"] = "there are no validation images"
    found = shifted.in_time(job, nothing, nothing, nothing, 0.0)
    assert found.why_not == "there are no validation images"


def test_of_few_images_no_time_is_not_the_reason_nor_are_many_called_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A late search of 27 validation images said that time was short, as if more had helped. And
    of 500, of which a budget let 40 judge the model, its package said that they were too few."""
    monkeypatch.setattr(shifted, "seen_by", lambda model, job: job)
    monkeypatch.delattr(shifted, "_copies")
    nothing: Any = None

    def why_not(images: int, judged: int, until: float | None) -> str:
        settings = {"registry": {"judged_images": judged}}
        job = validate(TrainJob, {"table": {"uri": "unused"}, **settings})
        pinned: Any = SimpleNamespace(
            task=SimpleNamespace(kind="single_label"),
            common=lambda one, other: set(),
            counts={"val": images},
        )
        of_table = SimpleNamespace(groups=None, domains=None)
        samples_N = np.arange(min(images, judged))
        held_out: Any = SimpleNamespace(
            split="val", is_inherited=False, reference=of_table, samples_N=samples_N
        )
        return shifted.in_time(job, nothing, pinned, held_out, until).why_not

    few = "too few labelled validation images to calibrate on (27 images)"
    assert why_not(27, 200, until=0.0) == why_not(27, 200, until=None) == few
    assert why_not(500, 40, until=0.0) == shifted.NO_TIME
    allows = "registry.judged_images=40 allows 40 validation images, and 100 are needed"
    assert why_not(500, 40, until=None) == allows


def test_copies_that_begin_late_end_in_time_to_be_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """They ran for as long as had been planned, were interrupted, and were lost."""
    nothing: Any = None
    job = validate(TrainJob, {"table": {"uri": "unused"}, "registry": {"severity_s": 40.0}})
    given = []

    def measured(job: TrainJob, *others: Any) -> shifted.Measured:
        given.append(job.registry.severity_s)
        few = job.registry.severity_s < 5
        return shifted.Measured(
            None, "registry.severity_s=… allow" if few else "", 7 if few else 99
        )

    monkeypatch.setattr(shifted, "measured", measured)
    now = time.monotonic()
    for left_s, expected_s, why_not in ((100, 40, ""), (20, 15, ""), (4, 3, shifted.NO_TIME)):
        found = shifted.in_time(job, nothing, nothing, nothing, now + left_s)
        assert given.pop() == pytest.approx(expected_s, abs=0.5) and found.why_not == why_not
    # Somebody wants so few: more time would give no more.
    few = replace(job, {"registry.severity_images": 7})
    found = shifted.in_time(few, nothing, nothing, nothing, now + 4)
    assert found.why_not == "registry.severity_s=… allow"
