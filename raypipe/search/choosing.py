"""The time to choose an ensemble: who is asked, and on how many images the chosen one is checked.

Heads are asked at once, because their features are there. A fine-tuned trial takes its forward pass
for each view of each validation image, and the ensemble takes all its networks. In a budget of
180 s, two trials of eight views once took all of this time, and the heads had no ensemble.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raypipe.models.zoo import ModelConfig
from raypipe.search import budget, networks
from raypipe.search.budget import Speed
from raypipe.search.leaderboard import Trial
from raypipe.search.ledger import IsLate, Ledger

CHECKED = 0.6
"""Of the seconds that are left, what the check may take by the measured speeds: it decodes images
and builds a model, too."""


@dataclass(frozen=True)
class Choosing:
    """What is known of the candidates' speeds, and the clock."""

    ledger: Ledger
    models: Mapping[str, ModelConfig]
    """Of the candidates, by name."""
    speeds: Mapping[str, Speed]
    """Of those that were measured."""

    @classmethod
    def of(
        cls, ledger: Ledger, models: Mapping[str, ModelConfig], trials: Sequence[Trial]
    ) -> Choosing:
        """models: of the candidates. One that is no trial is a soup: as fast as the best trial."""
        by_name = {trial.name: trial for trial in trials}
        speeds = {}
        for name, model in models.items():
            trial = by_name.get(name, trials[0])
            if not trial.history:
                continue
            speed = budget.speed_of(
                trial.name,
                model.pixels,
                model.mode == "frozen",
                # The fastest epoch: one that the clock has cut is mostly its validation.
                max(trial.history, key=lambda epoch: epoch.get("images_per_s", 0.0)),
                len(trial.history),
                ledger.forecast.has_more_threads,
            )
            if speed is not None:
                speeds[name] = networks.on_cpus(speed, model, ledger.forecast.network_per_s)
        return cls(ledger, models, speeds)

    def part(self) -> IsLate:
        """The clock of a part of the choice that begins now."""
        return self.ledger.choosing()

    def asking_s(self, name: str, images: int) -> float:
        """Seconds in which a candidate says something of so many images; 0: not known."""
        speed, model = self.speeds.get(name), self.models.get(name)
        if speed is None or model is None or speed.forward_images_per_s is None:
            return 0.0
        return images * model.views / speed.forward_images_per_s

    def checked(self, members: Collection[str], images: int) -> int | None:
        """Of so many images, those on which an ensemble of these is checked; None: all."""
        left_s, budget_s = self.ledger.left_now_s(), self.ledger.budget_s
        if left_s is None or budget_s is None:
            return None
        models = {name: self.models[name] for name in members}
        forecast = self.ledger.forecast
        image_s = networks.seconds(models, self.speeds, forecast.network_per_s)
        image_s += budget.uncovered_s(forecast.image_s, image_s)
        # What is left may be a refit's.
        left_s = min(left_s, budget.CHOOSING * budget_s)
        if images * image_s <= CHECKED * left_s:
            return None
        fitting = max(budget.FEWEST_JUDGED, int(CHECKED * left_s / image_s))
        return fitting if fitting < images else None
