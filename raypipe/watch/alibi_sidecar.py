"""Alibi Detect in its sidecar: arrays of both sides in, test statistics and p-values out.

Runs under numpy 1 (see `cluster/sidecar.py`), so it imports nothing of raypipe but its neighbours
`alibi_trained.py` and `projection.py`. 0.11.4 is Apache-2.0, 0.13.0 is not. The arrays are
projected already (`projection.py`), so that Alibi Detect and the exact tests compare the same
numbers.

Cost: 500+500 rows, 64 components, 500 permutations: about 2 s on one core, and 4 s more for the
first import.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from raypipe.watch.projection import LEAST_CVM

PERMUTED = {"mmd": "MMDDrift", "lsdd": "LSDDDrift"}
# Rows of both sides up to which MMD is computed in float64: of more its matrix takes too much
# memory. In float32 the statistic is off by up to 4e-7, and a permutation in 100 may change sides.
PRECISE = 4_000
BY_COLUMN = {"ks": "KSDrift", "looks": "KSDrift", "cvm": "CVMDrift", "chi2": "ChiSquareDrift"}


def check(
    arrays: dict[str, np.ndarray], options: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Compare `batch.ON` (m, k) with `ref.ON` (n, k), for each [detector, ON] of options["tests"].

    options: `tests`; `permutations`; `alpha`; `seed`; `width`, of MMD's kernel. Returns no arrays,
    and facts["evidence"]: [{statistic, p_value}], one a test. Equal input gives equal p-values.
    """
    import torch

    evidence = []
    for detector, on in options["tests"]:
        # Permutations, weights and kernel centres are drawn with torch's generator; the split of
        # what is trained on with numpy's.
        torch.manual_seed(options["seed"])
        np.random.seed(options["seed"] % 2**32)
        reference, batch = arrays[f"ref.{on}"], arrays[f"batch.{on}"]
        if detector in BY_COLUMN:
            evidence.append(_by_column(detector, reference, batch))
        elif detector in PERMUTED:
            evidence.append(_permuted(detector, reference, batch, options))
        else:
            from raypipe.watch import alibi_trained

            evidence.append(alibi_trained.test(alibi(), detector, reference, batch, options))
    return {}, {"evidence": evidence}


def alibi() -> Any:
    """`alibi_detect.cd`, which wants pydantic 1 while Ray refuses it: lend it the copy inside
    pydantic 2 for the import. Its test of classifiers, which nothing here calls, imports what scipy
    has no longer under Python 3.13.
    """
    lent = ("pydantic", "pydantic.fields")
    if "alibi_detect.cd" not in sys.modules:
        vars(importlib.import_module("scipy.stats")).setdefault("binom_test", None)
        own = {name: importlib.import_module(name) for name in lent}
        sys.modules.update(
            {
                name: importlib.import_module(name.replace("pydantic", "pydantic.v1"))
                for name in lent
            }
        )
        try:
            importlib.import_module("alibi_detect.cd")
        finally:
            sys.modules.update(own)
    return sys.modules["alibi_detect.cd"]


def _permuted(
    detector: str, reference: np.ndarray, batch: np.ndarray, options: dict[str, Any]
) -> dict[str, float]:
    count = int(options["permutations"])
    how: dict[str, Any] = {
        "backend": "pytorch",
        "p_val": options["alpha"],
        "n_permutations": count,
        "device": "cpu",
    }
    if detector == "mmd":  # alibi would take the width from the reference alone
        precise = len(reference) + len(batch) <= PRECISE
        number = np.float64 if precise else np.float32
        reference, batch = reference.astype(number), batch.astype(number)
        how |= {
            "sigma": np.array([options["width"]], dtype=number),
            "configure_kernel_from_x_ref": False,
        }
    data = getattr(alibi(), PERMUTED[detector])(reference, **how).predict(batch)["data"]
    # alibi's p is the share of permutations at least as extreme, which can be 0. The data as
    # observed is one permutation too.
    p_value = (round(float(data["p_val"]) * count) + 1) / (count + 1)
    return {"statistic": float(data["distance"]), "p_value": p_value}


def _by_column(detector: str, reference: np.ndarray, batch: np.ndarray) -> dict[str, float]:
    """The largest statistic over columns, and min(1, columns * smallest p): Bonferroni."""
    kind = getattr(alibi(), BY_COLUMN[detector])
    data = kind(reference, p_val=0.05).predict(batch, drift_type="feature")["data"]
    smallest = float(np.min(data["p_val"]))
    if detector == "cvm":
        smallest = max(smallest, LEAST_CVM)
    p_value = min(1.0, reference.shape[1] * smallest)
    return {"statistic": float(np.max(data["distance"])), "p_value": p_value}
