"""What a finished model says of a test split, image by image: methods of equal_time.py end here.

Each test image has a line, so that any part of the split can be told apart later: cells that no
test split had held before, say. The images are predicted as the model's package predicts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.config import replace
from raypipe.feed.dataset import Pinned
from raypipe.train import unseen
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.trainer import assemble

ID_LETTERS = 12  # of an image's id, as in solar_seeds.py
Right = tuple[str, bool]


class NoModel(Exception):
    """The method had no model when its time was over. That is a result, and no failure."""


@dataclass(frozen=True)
class Winner:
    """The model that validation chose, and the job that it was trained with."""

    job: TrainJob
    result: TrainResult


def scored(winner: Winner, rows: Pinned) -> list[Right]:
    """Of each image of feed.test: the beginning of its id, and is the model right?

    For one label an image (single_label).
    """
    # All images of the split, however few would judge a registered model.
    job = replace(winner.job, {"registry.judged_images": None})
    model = assemble(job, winner.result)
    said, labels_N = unseen.predict_split(job, model, rows, job.feed.test)
    right_N = said.scores_NC.argmax(1) == labels_N
    pairs = zip(said.ids, right_N, strict=True)
    return [(image_id[:ID_LETTERS], bool(right)) for image_id, right in pairs]


def share(cells: list[Right]) -> float:
    """Of the images, the part that the model is right about."""
    return round(sum(right for _, right in cells) / len(cells), 4)
