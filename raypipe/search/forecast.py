"""What is known of the end of a search, and what the end will take by that.

The end predicts validation images, test images and shifted copies. The model may be a trial, an
ensemble or a refit: nobody knows before. Who learns something about it writes it here. The ledger
asks when trials have to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raypipe.models.ensemble import Member
from raypipe.models.zoo import ModelConfig
from raypipe.search import budget, contenders, networks
from raypipe.search.budget import Ending, Speed
from raypipe.train.checkpoint import weights_mb


def _unknown(model: ModelConfig) -> float:
    """Nobody can time a network, or weigh it."""
    return 0.0


@dataclass
class Forecast:
    """What is known of the model that will be registered, and of the images that it predicts."""

    splits: tuple[int, ...] = ()
    """How many images validation and test have."""

    tests: int = 0
    """Test images. A refit has learned from validation, so they alone judge it."""

    views: int = 1
    """Predictions of an image."""

    judged_images: int | None = None
    """Images of a split that judge the model, at most; None: all."""

    validation: int = 0
    """Validation images; 0: not known."""

    combined: int = 0
    """Predictions by single trials that the choice of an ensemble still needs, at most."""

    chosen: int = 0
    """Predictions by the ensemble itself that its choice still needs."""

    others: int = 0
    """Further networks of the model whose speed is not known: as fast as the leading trial's."""

    others_s: float = 0.0
    """Seconds that an image takes in the further networks whose speed is known."""

    again_s: float = 0.0
    """Seconds to fit heads again, on validation images too; 0: there is nothing to fit."""

    shifted: int = 0
    """Shifted copies that are wanted, of images that a trial or a head has not learned."""

    shifted_again: int = 0
    """The same of a refit, which has learned from validation."""

    least_shifted: int = 0
    """Shifted copies of which fewer are of no use."""

    heads_alone: bool = False
    """Does no trial begin?"""

    trials_ended: bool = False
    """What follows is an ensemble, a refit or the end."""

    has_more_threads: bool = False
    """Does the end predict with more threads than a trial?"""

    timed: dict[str, float] = field(default_factory=dict)
    """By trial: predictions a second of its network at its own side, timed after the last trial."""

    works_per_s: float | None = None
    """Images a second through efficientnet_lite0 at 224 px (work 1 in contenders.py), in this
    process; None: not measured."""

    trial_per_s: float | None = None
    """Images a second through the slowest network that a trial may have, by `works_per_s`; None:
    not known."""

    time_network: Callable[[ModelConfig], float] = _unknown
    """Times a network on the CPUs of this process: images a second, of one view; 0: it cannot."""

    weigh_network: Callable[[ModelConfig], float] = _unknown
    """MB of a model's weights with its backbone and a linear head; 0: it cannot be said."""

    weighed: dict[str, float] = field(default_factory=dict)
    """What it has said, by the model's shape: to ask takes half a second."""

    pixels_per_s: dict[str, float] = field(default_factory=dict)
    """By backbone whose work is not known: pixels a second, as far as it was timed; 0: it cannot
    be."""

    image_s: float = 0.0
    """Seconds in which an image is read and decoded."""

    answer_s: float = 0.0
    """Seconds that MLflow's server takes for a question; 0: its store is a file."""

    uploads: tuple[float | None, ...] = ()
    """Of each store elsewhere that gets the package, MB a second; None: not known."""

    weights_mb: float = 0.0
    """MB of the weights of the model, or of a trial."""

    heads_mb: float = 0.0
    """MB of the heads that an ensemble may have, with their backbones."""

    embedded_per_s: float | None = None
    """Images a second through the trials' frozen backbone, as far as this process takes part in it;
    None: not measured."""

    def rate(self, speed: Speed | None) -> float:
        """Images a second that one prediction of the model takes, as far as it was measured."""
        measured = self._measured(speed)
        if measured is not None:
            return measured
        known = self.embedded_per_s or self.trial_per_s or self.works_per_s
        return known or budget.GUESSED_IMAGES_PER_S

    def _measured(self, speed: Speed | None) -> float | None:
        """Images a second of the trial's own network; None: nobody has measured it."""
        if speed is None:
            return None
        return self.timed.get(speed.trial, speed.forward_images_per_s)

    def _reading_s(self, speed: Speed | None, prediction_s: float) -> float:
        """Ending.reading_s, beside a prediction that takes so long."""
        if self._measured(speed) is None and self.embedded_per_s:
            return 0.0  # these images were read and decoded, too
        return budget.uncovered_s(budget.READ * self.image_s / self.views, prediction_s)

    def copies(self, refit: bool) -> int:
        """Shifted copies that are wanted. refit: the model is one."""
        return self.shifted_again if refit else self.shifted

    def _asked(self, trials: int) -> int:
        """Predictions by single trials that the choice of an ensemble still needs. What heads say
        is there, and a trial is asked by a soup and by an ensemble."""
        return min(self.combined, 2 * trials * (self.validation or self.combined))

    def slowest_of(self, models: Iterable[ModelConfig]) -> None:
        """Trials may have these networks: so none is slower."""
        found = list(models)
        # One of unknown work would have to be timed, at each of its sides.
        if self.works_per_s and found and all(contenders.is_known(one.name) for one in found):
            self.trial_per_s = min(map(self.network_per_s, found))

    def network_per_s(self, model: ModelConfig) -> float:
        """Images a second, of one view each, through the network of this model in this process.

        By its work; a backbone whose work is not known is timed once, which takes 1 to 3 s.
        """
        name, pixels = model.name, float(model.pixels**2)
        if not contenders.is_known(name):
            if name not in self.pixels_per_s:
                self.pixels_per_s[name] = pixels * self.time_network(model)
            if self.pixels_per_s[name] > 0:
                return self.pixels_per_s[name] / pixels
        return networks.of_works(self.works_per_s)(model)

    def network_mb(self, model: ModelConfig) -> float:
        """MB of a model's weights with its backbone, which no checkpoint of a frozen one has."""
        if model.shape not in self.weighed:
            self.weighed[model.shape] = self.weigh_network(model)
        return self.weighed[model.shape]

    def weigh_heads(self, kept: Mapping[str, ModelConfig], most: int) -> None:
        """An ensemble may have the `most` largest of these heads and of their backbones. kept:
        their models, by checkpoint."""
        own = [weights_mb(Path(checkpoint)) for checkpoint in kept]
        shared = {Member(model).shared: model for model in kept.values()}
        bodies = map(self.network_mb, shared.values())
        self.heads_mb = sum(sum(sorted(some, reverse=True)[:most]) for some in (own, bodies))

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

        start_s: what the cluster's start took. trials: how many began. speed: of the leading trial;
        None: none has reported yet. refit: the model is a refit. fewest: as few images judge the
        model as may.
        """
        rate = self.rate(speed)
        # An ensemble's other networks have views of their own. They are as many as trials have
        # reported, so far; before the first one, a guess of a guess would be too much.
        others = min(self.others, max(0, trials - 1)) if speed is not None else 0
        others_s = others / rate + self.others_s / self.views
        prediction_s = 1 / rate + others_s
        reading_s = self._reading_s(speed, prediction_s)
        judging_s = prediction_s + reading_s
        wanted = self.judged_images
        if fewest:
            wanted = min(budget.FEWEST_JUDGED, wanted or budget.FEWEST_JUDGED)
        most = budget.judged_images(budget_s, 1 / judging_s, self.views, wanted)
        splits = (self.tests,) if refit and self.tests else self.splits
        judged = self.views * sum(min(most, images) for images in splits)
        choosing_s = self._asked(trials) / rate + self.views * self.chosen * judging_s
        if self.combined:
            choosing_s = max(budget.LEAST_CHOOSING_S, choosing_s)
        between_s = min(budget.CHOOSING * budget_s, choosing_s)
        if speed is not None:
            between_s += self.again_s  # before, a refit is not yet planned with
        upload_s = 0.0
        if self.uploads:
            mb = (1 + others) * self.weights_mb + self.heads_mb
            upload_s = budget.upload_s(mb, self.uploads, budget_s)
        waits = self.trials_ended and budget_s < budget.SHORT_S
        return Ending(
            judged,
            start_s,
            trials,
            rate,
            shifted=0 if waits else self.views * self.copies(refit),
            least_shifted=self.views * self.least_shifted,
            most_shifted_s=budget.SHIFTED * budget_s,
            others_s=others_s,
            reading_s=reading_s,
            between_s=between_s,
            answer_s=self.answer_s,
            most_recorded_s=budget.RECORDED * budget_s,
            upload_s=upload_s,
            heads_alone=self.heads_alone,
        )
