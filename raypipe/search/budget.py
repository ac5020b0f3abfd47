"""A budget of seconds for a whole search: how long trials may run, and what a refit may have.

    |-- start --|-- reading --|-- trials --|-- refit --|-- ending --|
    0                                                          search.budget_s

Ending is what turns weights into an answer: predict validation and test, shifted copies, package,
MLflow, the page, the cluster's end. It comes last and cannot be left out, so its seconds are
reserved from the beginning, and estimated again whenever there is something new to estimate from:

- the start has been measured when trials begin. Ending is the same kind of work (imports, MLflow,
  Ray), so a host that starts slowly ends slowly: START of its seconds
- each trial is a run of its own in MLflow: OF_TRIAL of these seconds. A server is asked QUESTIONS
  for it, and how long it takes for one was measured
- images of validation and test are predicted at the speed of the leading trial's forward pass

What is left is divided: a refit gets `search.refit_share` of it, trials the rest. A refit gets what
there really is when trials have ended, if its epochs fit; it ends by its own clock (train/pace.py).

Everything here is arithmetic on given seconds. ledger.py holds the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raypipe.train.settings import TrainConfig

# Ending without images: at least FLOOR_S, and this part of the seconds that the start took. CLOSING
# is what remains to be done after a message: the cluster's end.
FLOOR_S = 7.0
START = 0.9
CLOSING = 0.5
# After trials, a host that is slow to start is slower still: what reads the last images starts new
# processes, beside those of trials that end. With starts of 7 to 10 s the end took less than was
# planned. With 16 to 18 s, on a host that was full, it took three seconds more in two of three
# searches, and then came the cluster's end: what was kept for shifted copies paid for that. Eight
# are a guess from these three; a disk far away makes a start slow, and nothing after it.
USUAL_START_S, MOST_SLOWER_S = 10.0, 8.0
# Shifted copies (train/shifted.py) get so much of the budget at most, and the images of validation
# and test so much. Where that is less than all of them, they are sampled.
SHIFTED, JUDGED = 0.08, 0.25
# In a shorter budget shifted copies and their fit, which may be left out, get only what an ensemble
# and a refit leave. They take ten seconds or more: in one such search the end was planned with 21 s
# and took 4, and there was no time to choose an ensemble.
SHORT_S = 60.0
FEWEST_JUDGED = 200
# Where not even these can be predicted in the time that is left, as many as can be, and so many in
# any case: of fewer no drift check could be made (watch/power.py).
LEAST_JUDGED = 40
# The choice of an ensemble: whose predictions take longer is chosen among fewer trials.
CHOOSING = 0.1
# Nor is it free where there are few images: nine candidates took 3 s for 30 of them. And
# trials end a second or two after their time.
LEAST_CHOOSING_S = 5.0
# A head is fitted again to a quarter more images, and reads and writes. In the end the ensemble is
# put together.
FIT_AGAIN, EACH_AGAIN_S, TOGETHER_S = 1.25, 1.0, 3.0
# Trials that train by the clock get this part of what is left for trials, less the start of
# their processes. What the end takes is known only when they have reported, and may be more then:
# with .95, a run of 180 s cut its trials before their rates had fallen.
CLOCKED, TRIAL_START_S = 0.8, 3.0
# The fit to shifted copies takes 3 to 6 s on a quiet host, and took 29 s at a load of 10.
FIT_S, OF_FIT = 6.0, 0.7
# One trial's run in MLflow takes 43 ms of CPU on a database of this machine, and its place on the
# leaderboard about as much; the start takes seven seconds of CPU.
TRIAL_S, OF_TRIAL = 0.06, 0.01
# A server is asked one question after the other. For a trial's run (registry/runs.py): is there one
# already, create it, its parameters, inputs, epochs and costs, end it. The model has a run too, and
# pages, files, a version, an alias and test metrics: about fifty, counted by reading the code.
QUESTIONS, QUESTIONS_OF_MODEL = 7, 50
# The trials' runs there get at most this part of the budget: with a second for an answer each trial
# would take eight from those that come. Where it is over, trials are left out (in_time.ending).
RECORDED = 0.15
# What comes after the trials' runs, beside these questions and the cluster's end: the package is
# copied, and the page is written.
REGISTERED_S = 2.0
# A package that goes to a store elsewhere, over a line of 20 Mbit/s: before anything was measured.
# A guess gets at most a part of the budget, because most lines are faster. A rate that was noted in
# an earlier upload gets what it takes (registry/uploads.py).
GUESSED_MB_PER_S, GUESSED_UPLOAD = 2.5, 0.1
# What a package has beside its weights: the reference of drift checks, raypipe's own code, pages.
BESIDE_WEIGHTS_MB = 4.0
# A forward pass of EfficientNet-Lite0 at 224 px on one core: before anything was measured.
GUESSED_IMAGES_PER_S = 40.0
# An image that judges is read and decoded, and half of them once more for what they look like
# (train/looked_at.py). Up to this part of a prediction that is in the margin, as it was in all runs
# that were measured: a small picture takes a millisecond, and its prediction 10 to 20. Nor do a few
# milliseconds count beside a faster prediction: they are measured while other processes start.
READ, COVERED, COVERED_S = 1.5, 0.25, 0.004
# Estimates may be wrong: this part of the ending is kept beside it, and of the whole budget.
ENDING_MARGIN, MARGIN = 0.15, 0.005

# A refit of fewer epochs learns less than its trial has learned already.
FEWEST_EPOCHS = 3
# At another resolution than the trial's, features have to settle first.
FEWEST_AT_OTHER_SIDE = 5
# Epochs that nobody has set are as many as there is time for: with the default of 20, a refit of an
# hour's budget would leave a third of it unused. So many at most. A refit may be faster than its
# trial was, so twice as many as fit are allowed, and no fewer than the default.
MOST_EPOCHS, FASTER = 60, 2
USUAL_EPOCHS: int = TrainConfig.model_fields["epochs"].default
# A backbone that learned at 64 px is another one at 224 px.
MOST_LARGER = 2.5
# Trials have one thread each, and a refit has all of them. EfficientNet-Lite0 with three frozen
# blocks, two cores: 23 images/s at 224 px beside another one, 40 alone; 64 and 99 at 128 px.
# Augmentation gains less.
ALONE = 1.4
# A metric of trials on a GPU alone (train/measure/meter.py).
OF_GPU = "gpu_memory_mb"
# The same of predictions when trials have ended; batch norms are folded, besides. In two runs 5,248
# of them at 224 px took 77 and 57 s, and 53 a second were expected by the trial's rate: 1.3 and 1.7
# times as fast.
PREDICTS_ALONE = 1.6


@dataclass(frozen=True)
class Speed:
    """What was measured of one trial: the evidence of the estimates."""

    trial: str
    epochs: int
    """That it was measured on."""

    side_px: int
    train_images_per_s: float
    """Of its epochs, validation included, beside the other trials."""

    forward_images_per_s: float | None = None
    """Of predictions when trials have ended, which are CPU work. None: not measured, because its
    inputs were features, so no image passed through the backbone; or because it had a GPU."""

    @property
    def alone(self) -> Speed:
        """That of a refit with several threads, of a trial that had one."""
        return replace(self, train_images_per_s=ALONE * self.train_images_per_s)

    def __str__(self) -> str:
        text = f"{self.trial}: {self.train_images_per_s:.0f} images/s trained"
        if self.forward_images_per_s is not None:
            text += f", {self.forward_images_per_s:.0f} forward"
        return f"{text} at {self.side_px} px in {self.epochs} epochs"


@dataclass(frozen=True)
class Ending:
    """What is to be done after the last training."""

    judged: int
    """Images of validation and test that the model predicts, times its views."""

    start_s: float
    """Seconds from the process's start to the running cluster."""

    trials: int = 0
    """That began."""

    images_per_s: float = GUESSED_IMAGES_PER_S

    shifted: int = 0
    """Predictions of shifted copies, of which there may be fewer."""

    least_shifted: int = 0
    """Fewer of them are of no use."""

    most_shifted_s: float = 0.0
    """What they may take at most."""

    others_s: float = 0.0
    """What a prediction takes of an ensemble's other networks, whose sides stay as they are."""

    reading_s: float = 0.0
    """What reading and decoding add to a prediction, beyond what its margin covers. Not to one of a
    shifted copy: nine of these come from one image."""

    between_s: float = 0.0
    """To choose an ensemble, and to fit its heads again; part of what has to be reserved."""

    answer_s: float = 0.0
    """What a question to MLflow's server takes; 0: its store is a file."""

    most_recorded_s: float = math.inf
    """What the trials' runs on this server may take at most."""

    upload_s: float = 0.0
    """What the package takes to stores elsewhere; 0: all of them are disks of this machine."""

    heads_alone: bool = False
    """Does no trial begin? Heads count as trials otherwise."""

    @property
    def seconds(self) -> float:
        shifted_s = min(self.most_shifted_s, self.shifted * self.prediction_s)
        is_enough = self.shifted > 0 and shifted_s >= self.least_shifted_s
        return self.least_s + (shifted_s + self.fit_s if is_enough else 0.0)

    @property
    def least_shifted_s(self) -> float:
        return self.least_shifted * self.prediction_s

    @property
    def prediction_s(self) -> float:
        """Of an image, by the model that is registered."""
        return 1 / self.images_per_s + self.others_s

    @property
    def judging_s(self) -> float:
        """Of a prediction that judges the model, with its part of reading the image."""
        return self.prediction_s + self.reading_s

    @property
    def fit_s(self) -> float:
        """What the estimate's fit to the shifted copies takes."""
        return max(FIT_S, OF_FIT * self.start_s)

    @property
    def least_s(self) -> float:
        """Without shifted copies."""
        return self.fixed_s + self.judged_s + self.between_s

    @property
    def judged_s(self) -> float:
        return self.judged * self.judging_s * (1 + ENDING_MARGIN)

    @property
    def fixed_s(self) -> float:
        """Without any image: package, MLflow, the page, the cluster's end."""
        fixed_s = max(FLOOR_S, START * self.start_s)
        if not self.heads_alone:
            fixed_s += min(MOST_SLOWER_S, max(0.0, self.start_s - USUAL_START_S))
        fixed_s += max(TRIAL_S, OF_TRIAL * self.start_s) * self.trials
        fixed_s += self.answer_s * QUESTIONS_OF_MODEL
        fixed_s += min(self.most_recorded_s, self.answer_s * QUESTIONS * self.trials)
        fixed_s += self.upload_s
        return fixed_s * (1 + ENDING_MARGIN)

    @property
    def after_runs_s(self) -> float:
        """What of it comes after the trials' runs in MLflow."""
        asking_s = self.answer_s * QUESTIONS_OF_MODEL
        return REGISTERED_S + asking_s + self.upload_s + closing_s(self.start_s)

    def at(self, larger: float) -> Ending:
        """The same, for pictures so many times as large on a side."""
        return replace(self, images_per_s=self.images_per_s / larger**2)

    def __str__(self) -> str:
        sent = f", upload {self.upload_s:.1f} s" if self.upload_s else ""
        return (
            f"{self.judged:,} images at {1 / self.judging_s:.0f}/s, {self.trials} trials, "
            f"start {self.start_s:.1f} s{sent}"
        )


@dataclass(frozen=True)
class Refit:
    """A refit that fits: at most so many epochs in so many seconds."""

    epochs: int
    seconds: float
    side_px: int
    why: str


def judged_images(
    budget_s: float,
    images_per_s: float,
    views: int,
    wanted: int | None,
    fewest: int = FEWEST_JUDGED,
) -> int:
    """So many images of each of the two splits may judge the model; see registry.judged_images."""
    fitting = int(JUDGED * budget_s * images_per_s / views / 2)
    most = max(fewest, fitting)
    return most if wanted is None else min(most, wanted)


def uncovered_s(reading_s: float, prediction_s: float) -> float:
    """What has to be planned beside a prediction to read its image, beyond the margin."""
    return max(0.0, reading_s - max(COVERED * prediction_s, COVERED_S))


def upload_s(mb: float, mb_per_s: Sequence[float | None], budget_s: float) -> float:
    """What so many MB of weights take to stores elsewhere. mb_per_s: of each; None: not known."""
    mb += BESIDE_WEIGHTS_MB
    measured_s = sum(mb / rate for rate in mb_per_s if rate)
    guessed_s = mb / GUESSED_MB_PER_S * sum(1 for rate in mb_per_s if not rate)
    return measured_s + min(GUESSED_UPLOAD * budget_s, guessed_s)


def closing_s(start_s: float) -> float:
    """Seconds from a message to the end of the process."""
    return max(2.0, CLOSING * start_s)


def clocked_s(left_s: float) -> float:
    """What a training by the clock that begins now has of the seconds before the ending."""
    return max(1.0, CLOCKED * left_s - TRIAL_START_S)


def again_s(fitted_s: Sequence[float]) -> float:
    """To fit heads again that took so many seconds each, and to put an ensemble together."""
    return TOGETHER_S + sum(EACH_AGAIN_S + FIT_AGAIN * seconds for seconds in fitted_s)


def usable(budget_s: float) -> float:
    """The part of the budget that is planned with."""
    return budget_s * (1 - MARGIN)


def trials_end(
    budget_s: float, spent_s: float, ending: Ending, refit_share: float, refits: bool
) -> float:
    """Seconds from the verb's start at which trials have to end.

    spent_s: when trials began. refits: will a refit follow?
    """
    room_s = max(0.0, usable(budget_s) - spent_s - ending.seconds)
    share = 1 - refit_share if refits else 1.0
    return spent_s + share * room_s


def plan_refit(
    budget_s: float,
    spent_s: float,
    ending: Ending,
    speed: Speed,
    images: int,
    most_epochs: int | None,
    sides: tuple[int, ...],
    without_s: float = 0.0,
) -> Refit | str:
    """The refit that fits, at the first of these sides for which its epochs fit; else why none.

    ending: that of a refit. images: that it trains on in an epoch. most_epochs: None where nobody
    has set them. sides: the wanted resolution first, the trial's last. without_s: what the ending
    takes if the refit comes to nothing.
    """
    needs, room_s = "", 0.0
    for side_px in sides:
        larger = side_px / speed.side_px
        if larger > MOST_LARGER:
            continue
        room_s = usable(budget_s) - spent_s - max(ending.at(larger).seconds, without_s)
        epoch_s = images / speed.train_images_per_s * larger**2
        fewest = FEWEST_EPOCHS if side_px == speed.side_px else FEWEST_AT_OTHER_SIDE
        fewest = min(fewest, most_epochs or fewest)
        if fewest * epoch_s <= room_s:
            fitting = int(room_s / epoch_s)
            why = f"{fitting} epochs of {epoch_s:.1f} s fit into {room_s:.0f} s ({speed})"
            most = most_epochs or min(MOST_EPOCHS, max(USUAL_EPOCHS, FASTER * fitting))
            return Refit(most, room_s, side_px, why)
        many = f"{fewest} epochs at {side_px} px need" if fewest > 1 else "an epoch needs"
        needs = f"{many} {fewest * epoch_s:.1f} s"
    left = f"{room_s:.1f} s are left" if room_s > 0 else "the end needs all that is left"
    return f"{needs or 'no resolution fits'}, and {left} ({speed})"


def speed_of(
    trial: str,
    side_px: int,
    is_frozen: bool,
    metrics: Mapping[str, float],
    epochs: int,
    has_more_threads: bool = False,
) -> Speed | None:
    """The speed in one epoch's metrics (train/measure/meter.py); None where they do not say it.

    has_more_threads: than the trial, has what predicts when trials have ended.
    """
    rate = metrics.get("images_per_s", 0.0)
    if not rate > 0:
        return None
    forward = None
    step_s, forward_s = metrics.get("step_s", 0.0), metrics.get("forward_s", 0.0)
    if not is_frozen and OF_GPU not in metrics and step_s > 0 and forward_s > 0:
        # images_per_s counts the validation, too: so this is the lower end.
        forward = rate * step_s / forward_s
        if has_more_threads:
            forward *= PREDICTS_ALONE
    return Speed(trial, epochs, side_px, rate, forward)
