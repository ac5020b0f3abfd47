"""How fast this machine is: one measured forward pass, which calibrates space/cost.py.

Takes about half a second on a CPU for EfficientNet-Lite0, most of it to build the model.
"""

from __future__ import annotations

import time

import numpy as np

from raypipe.models.predictor import CPU_BATCH
from raypipe.models.zoo import ImageModel
from raypipe.search.space.cost import Speed
from raypipe.train.job import TrainJob

PASSES = 3


def measured(job: TrainJob) -> dict[str, Speed]:
    """The job's backbone, by name, at the job's resolution: the fastest of PASSES passes.

    On the CPU, with the threads that this process has.
    """
    model = job.model
    net = ImageModel(model, 2).for_inference()
    pixels_BHWC = np.zeros((CPU_BATCH, model.pixels, model.pixels, 3), np.uint8)
    net.predict(pixels_BHWC[:1])  # the first pass allocates
    seconds = []
    for _ in range(PASSES):
        began = time.perf_counter()
        net.predict(pixels_BHWC)
        seconds.append(time.perf_counter() - began)
    return {job.model.name: Speed(min(seconds) / CPU_BATCH, model.pixels)}
