"""What a model card says of how long a model was trained, and of what it was judged by."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from raypipe.models.ensemble import Member
from raypipe.models.zoo import ModelConfig
from raypipe.train.described import _architecture, _sample, epochs


def told(
    count: int, best: int, solver: str = "steps", averaged: int = 1, is_ensemble: bool = False
) -> str:
    job: Any = SimpleNamespace(train=SimpleNamespace(solver=solver))
    result: Any = SimpleNamespace(history=({},) * count, best_epoch=best - 1)
    return epochs(job, result, averaged, is_ensemble)


def test_the_epoch_of_the_weights_is_named_where_it_is_not_the_last() -> None:
    """A card said 20 epochs of weights that had learned for seven, and one epoch of a head."""
    assert told(20, 20) == "20"
    assert told(20, 7) == "20; the weights are those of epoch 7"
    assert told(1, 1, "closed") == "none: fitted at once"
    assert told(9, 9, is_ensemble=True) == "9 (member 1)"
    # A soup's weights were told as those of one epoch of its best trial.
    assert told(10, 7, averaged=3) == "10 (best trial); mean of the weights of 3 trials"


def test_images_that_cannot_be_read_are_counted_on_the_card() -> None:
    """Half of the test images were broken, and the card said "Images: 24"."""

    def said(images: int, broken: int = 0) -> str:
        pinned: Any = SimpleNamespace(counts={"test": 6})
        unseen: Any = SimpleNamespace(labels_N=np.zeros(images), split="test", broken=broken)
        return _sample(pinned, unseen)

    assert said(6) == ""
    assert said(3, 3).startswith("3 of them cannot be read")
    assert said(2, 1).startswith("Of 3 of its 6 images, drawn evenly. 1 of them cannot")


def test_a_member_that_a_refit_left_as_it_was_is_said_to_know_less() -> None:
    """A card said that all members had learned from the images of train+val."""
    model = ModelConfig(name="small_cnn", mode="finetune", pretrained=False, side_px=32)
    members = [Member(model, 3.0, name="head"), Member(model, 1.0, name="tuned")]
    job: Any = SimpleNamespace(model=model)
    facts = dict(_architecture(job, members, stay=["tuned"]))
    assert facts["Member 1"].endswith("weight 0.75 (head)")
    assert facts["Member 2"].endswith("weight 0.25 (tuned), trained without validation images")
