"""Alibi Detect's tests that train something first, in its sidecar: a classifier, or a kernel.

Half of both sides trains, the other half is tested, so the p-value holds: what is tested was not
seen. Three things of 0.11.4 are gone around:

- The classifier's binomial test needs what scipy removed. Kolmogorov-Smirnov on its probabilities
  is Alibi's default, and says more.
- SpotTheDiffDrift starts at the mean of the whole reference, its tested half included. Here it
  starts at 0, the mean of both sides (`projection.py`).
- LearnedKernelDrift with retrain_from_scratch trains one kernel and tests with a fresh copy of the
  untrained one. Without it, it tests with the one that it trained.
"""

from __future__ import annotations

from typing import Any

import numpy as np

EPOCHS = 20
HIDDEN = 32
TRAIN = 0.5


def test(
    cd: Any, detector: str, reference: np.ndarray, batch: np.ndarray, options: dict[str, Any]
) -> dict[str, float]:
    """{statistic, p_value} of float32 (n, k) and (m, k). cd: the module alibi_detect.cd.

    The generators of torch and numpy are seeded already. Raises ValueError for another detector.
    """
    if detector not in _TESTS:
        raise ValueError(f"unknown detector {detector!r}")
    return _TESTS[detector](cd, reference, batch, options)  # type: ignore[no-any-return]


def _how(options: dict[str, Any]) -> dict[str, Any]:
    return {
        "backend": "pytorch",
        "device": "cpu",
        "p_val": options["alpha"],
        "train_size": TRAIN,
        "epochs": EPOCHS,
        "verbose": 0,
    }


def _classifier(
    cd: Any, reference: np.ndarray, batch: np.ndarray, options: dict[str, Any]
) -> dict[str, float]:
    model = _network(reference.shape[1], 2)
    how = _how(options) | {"preds_type": "logits"}
    return _read(cd.ClassifierDrift(reference, model, **how).predict(batch))


def _spot_the_diff(
    cd: Any, reference: np.ndarray, batch: np.ndarray, options: dict[str, Any]
) -> dict[str, float]:
    spread_K = np.concatenate([reference, batch]).std(0)
    start_1K = np.random.normal(size=(1, len(spread_K))) * spread_K
    detector = cd.SpotTheDiffDrift(
        reference, initial_diffs=start_1K.astype(np.float32), **_how(options)
    )
    inner = detector._detector._detector
    for model in (inner.original_model, inner.model):
        model.mean.data.zero_()
    return _read(detector.predict(batch))


def _learned_kernel(
    cd: Any, reference: np.ndarray, batch: np.ndarray, options: dict[str, Any]
) -> dict[str, float]:
    from alibi_detect.utils.pytorch.kernels import DeepKernel

    count = int(options["permutations"])
    # A batch of training has rows of both sides, and a smaller one is dropped.
    smaller = int(TRAIN * min(len(reference), len(batch)))
    how = _how(options) | {"batch_size": min(32, smaller)}
    kernel = DeepKernel(_network(reference.shape[1], HIDDEN), eps=0.01)
    found = _read(
        cd.LearnedKernelDrift(
            reference, kernel, n_permutations=count, retrain_from_scratch=False, **how
        ).predict(batch)
    )
    # The data as observed is one permutation too.
    p_value = (round(found["p_value"] * count) + 1) / (count + 1)
    return found | {"p_value": p_value}


def _network(width: int, out: int) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, out))


def _read(predicted: dict[str, Any]) -> dict[str, float]:
    data = predicted["data"]
    return {"statistic": float(data["distance"]), "p_value": float(data["p_val"])}


_TESTS: dict[str, Any] = {
    "classifier": _classifier,
    "spot_the_diff": _spot_the_diff,
    "learned_kernel": _learned_kernel,
}
