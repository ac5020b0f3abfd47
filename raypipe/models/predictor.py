"""What every model of a package is: uint8 pixels in, features and scores out, in batches.

`ImageModel` (zoo.py) is one backbone with its head. `EnsembleModel` (ensemble.py) is several. Who
predicts, serves, exports or watches needs only what stands here.

Shapes: pixels_BHWC uint8 0-255, features_BD and scores_BC float32.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import Self

from raypipe.models import tasks
from raypipe.models.finite import require_rows
from raypipe.models.tasks import Kind

# Images predicted together. Two CPU cores: 49 images/s at 16 a batch, 34 at 64 (caches).
CPU_BATCH, GPU_BATCH = 16, 256
# Of larger images fewer: 256 of 1,024 px may not fit a GPU, and on CPUs several tasks embed 16.
CPU_SIDE_PX, GPU_SIDE_PX = 512, 224


def together(device: str, side_px: int) -> int:
    """How many images of this side are predicted together."""
    most, side = (CPU_BATCH, CPU_SIDE_PX) if device == "cpu" else (GPU_BATCH, GPU_SIDE_PX)
    return max(1, min(most, most * side**2 // side_px**2))


def stored_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights by name, on the CPU, as safetensors takes them: no two share memory.

    A module of a user's own may have one weight under two names; then each has its own copy.
    """
    found: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in model.state_dict().items():
        on_cpu = tensor.detach().cpu()
        place = on_cpu.untyped_storage().data_ptr()
        found[name] = (on_cpu.clone() if place in places else on_cpu).contiguous()
        places.add(place)
    return found


class Predictor(nn.Module):
    """A model that predicts. A subclass sets these four, and says what `answers` are."""

    task: Kind
    side_px: int
    """Height and width of the pixels that it takes."""
    widths: tuple[int, int]
    """How many features, and how many scores, an image has."""
    temperature: float
    """Its logits are divided by it: set by whoever has fitted one (calibrate.py). It is no weight
    of a checkpoint."""

    def answers(self, pixels_BHWC: Tensor) -> tuple[Tensor, Tensor]:
        """(features_BD, scores_BC) of one batch, over all views and at the temperature."""
        raise NotImplementedError

    def for_inference(self) -> Self:
        """A copy that only predicts, and does so faster."""
        raise NotImplementedError

    def scores(self, logits_BC: Tensor) -> Tensor:
        """What the logits mean under the model's task: probabilities, or numbers."""
        return tasks.scores(self.task, logits_BC)

    @property
    def spread(self) -> float:
        """Of a regression: the standard deviation of its training labels."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return next(chain(self.parameters(), self.buffers())).device

    @torch.inference_mode()
    def predict(self, pixels_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(features_ND, scores_NC) of any number of uint8 images, on the model's own device.

        Scores are the mean over the views; features are those of the image as it is. Raises
        DataError if some are not finite.
        """
        device = self.device
        at_once = together(device.type, self.side_px)
        features: list[Tensor] = []
        scores: list[Tensor] = []
        for start in range(0, len(pixels_NHWC), at_once):
            batch = np.array(pixels_NHWC[start : start + at_once])
            features_BD, scores_BC = self.answers(torch.from_numpy(batch).to(device))
            features.append(features_BD.cpu())
            scores.append(scores_BC.cpu())

        # No images: empty arrays of the right width.
        if not features:
            no_features, no_scores = (np.empty((0, width), np.float32) for width in self.widths)
            return no_features, no_scores

        features_ND = torch.cat(features).numpy()
        scores_NC = torch.cat(scores).numpy()
        fix = "Take another version of the model, or train again with a lower train.lr"
        require_rows(features_ND, "features", fix)
        require_rows(scores_NC, "scores", fix)
        return features_ND, scores_NC
