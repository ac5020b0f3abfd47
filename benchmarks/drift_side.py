"""One side of benchmarks/drift.py, in a process of its own.

python -m benchmarks.drift_side exact|alibi|alibi64 FOLDER     # alibi: the sidecar's interpreter

It reads samples.npz of FOLDER (reference, batch, width, permutations, seed) and prints one JSON
line. seconds: from arrays in memory to the p-value, without imports. peak_gb: the most that the
process held, all in. alibi64: Alibi in float64, to tell its rounding from a difference.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.scale.memory import peak_mb


def exact(reference: np.ndarray, batch: np.ndarray, width: float, count: int, seed: int) -> Any:
    from raypipe.watch.mmd import mmd, regroupings

    # Those that Alibi draws.
    chosen = regroupings(len(reference), len(batch), count, seed)
    found = mmd(reference, batch, width, chosen)
    # Alibi's own p-value: without the observed grouping.
    p_value = float((found.permuted_P >= found.statistic).mean())
    return found.statistic, p_value


def alibi(reference: np.ndarray, batch: np.ndarray, width: float, count: int, seed: int) -> Any:
    from raypipe.watch.alibi_sidecar import alibi

    detector = alibi().MMDDrift(
        reference,
        backend="pytorch",
        n_permutations=count,
        device="cpu",
        sigma=np.array([width], reference.dtype),
        configure_kernel_from_x_ref=False,
    )
    torch.manual_seed(seed)
    data = detector.predict(batch)["data"]
    return float(data["distance"]), float(data["p_val"])


def main() -> None:
    side, folder = sys.argv[1], Path(sys.argv[2])
    given = np.load(folder / "samples.npz")
    reference, batch = given["reference"], given["batch"]
    width, count, seed = float(given["width"]), int(given["permutations"]), int(given["seed"])
    compare: Callable[[], Any]
    if side.startswith("alibi"):
        from raypipe.watch.alibi_sidecar import alibi as detectors

        detectors()  # its import takes seconds
        if side == "alibi64":
            reference, batch = reference.astype(np.float64), batch.astype(np.float64)
        compare = partial(alibi, reference, batch, width, count, seed)
    else:
        from raypipe.watch import mmd as _  # noqa: F401

        compare = partial(exact, reference, batch, width, count, seed)
    began = time.perf_counter()
    statistic, p_value = compare()
    seconds = time.perf_counter() - began
    found = {"seconds": seconds, "statistic": statistic, "p_value": p_value}
    print(json.dumps(found | {"peak_gb": peak_mb() / 1024, "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main()
