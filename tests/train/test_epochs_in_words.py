"""What a model card says of how long a model was trained."""

# Starts no Ray cluster.
from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raypipe.train.described import epochs


def told(count: int, best: int, solver: str = "steps", is_ensemble: bool = False) -> str:
    job: Any = SimpleNamespace(train=SimpleNamespace(solver=solver))
    result: Any = SimpleNamespace(history=({},) * count, best_epoch=best - 1)
    return epochs(job, result, is_ensemble)


def test_the_epoch_of_the_weights_is_named_where_it_is_not_the_last() -> None:
    """A card said 20 epochs of weights that had learned for seven, and one epoch of a head."""
    assert told(20, 20) == "20"
    assert told(20, 7) == "20; the weights are those of epoch 7"
    assert told(1, 1, "closed") == "none: fitted at once"
    assert told(9, 9, is_ensemble=True) == "9 (member 1)"
