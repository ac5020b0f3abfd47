"""What the end of a search will take: known when it begins, and known better with each measurement.

The end predicts validation and test, and shifted copies of images, with a model that nobody knows
yet: a trial, an ensemble, a refit. Whoever learns something of it says so here. Ledger asks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raypipe.search import budget
from raypipe.search.budget import Ending, Speed


@dataclass
class Forecast:
    """What is known of the model that will be registered, and of the images that it predicts."""

    splits: tuple[int, ...] = ()
    """How many images validation and test have."""

    tests: int = 0
    """How many test has: they alone judge a refit, which has learned from validation."""

    views: int = 1
    """Predictions of an image."""

    judged_images: int | None = None
    """Of a split, at most."""

    combined: int = 0
    """Predictions by single trials that the choice of an ensemble still needs."""

    chosen: int = 0
    """And predictions by the ensemble itself."""

    others: int = 0
    """Networks beside the leading trial's that the model may run, each as fast as that one."""

    others_s: float = 0.0
    """What an image takes of those of the model's networks that are as fast as they are."""

    again_s: float = 0.0
    """To fit heads again, on validation images too; 0: none, or they are fitted."""

    shifted: int = 0
    """Predictions of shifted copies that are wanted."""

    least_shifted: int = 0
    """Fewer of them are of no use."""

    has_more_threads: bool = False
    """Than a trial, has what predicts when trials have ended."""

    timed: dict[str, float] = field(default_factory=dict)
    """Predictions a second of a trial's network when trials have ended, at the trial's own side:
    timed, and no guess from its epochs."""

    works_per_s: float | None = None
    """Images of work 1 (contenders.py) a second, as far as it was measured."""

    embedded_per_s: float | None = None
    """Images a second that a frozen backbone embedded, for all trials together."""

    def rate(self, speed: Speed | None) -> float:
        """Images a second that one prediction of the model takes, as far as it was measured."""
        if speed is not None and speed.trial in self.timed:
            return self.timed[speed.trial]
        if speed is not None and speed.forward_images_per_s is not None:
            return speed.forward_images_per_s
        return self.embedded_per_s or self.works_per_s or budget.GUESSED_IMAGES_PER_S

    def ending(
        self,
        budget_s: float,
        start_s: float,
        trials: int,
        speed: Speed | None,
        refit: bool = False,
        fewest: bool = False,
    ) -> Ending:
        """What the end is expected to take, from what was measured so far.

        start_s: what the cluster's start took. trials: that began. speed: of the leading one; None:
        no trial has reported yet. refit: that of one. fewest: if as few images judge the model as
        may.
        """
        rate = self.rate(speed)
        # An ensemble's other networks have views of their own. They are as many as trials have
        # reported, so far; before the first one, a guess of a guess would be too much.
        others = min(self.others, max(0, trials - 1)) if speed is not None else 0
        others_s = others / rate + self.others_s / self.views
        together = 1 / (1 / rate + others_s)
        wanted = self.judged_images
        if fewest:
            wanted = min(budget.FEWEST_JUDGED, wanted or budget.FEWEST_JUDGED)
        most = budget.judged_images(budget_s, together, self.views, wanted)
        splits = (self.tests,) if refit and self.tests else self.splits
        judged = self.views * sum(min(most, images) for images in splits)
        choosing_s = self.combined / rate + self.views * self.chosen / together
        if self.combined:
            choosing_s = max(budget.LEAST_CHOOSING_S, choosing_s)
        between_s = min(budget.CHOOSING * budget_s, choosing_s)
        if speed is not None:
            between_s += self.again_s  # before, a refit is not yet planned with
        return Ending(
            judged,
            start_s,
            trials,
            rate,
            shifted=self.views * self.shifted,
            least_shifted=self.views * self.least_shifted,
            most_shifted_s=budget.SHIFTED * budget_s,
            others_s=others_s,
            between_s=between_s,
        )
