"""An ensemble whose members are trained again: who, with which weight, and what if one cannot."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace as with_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.cli.console import Console as Shown
from raypipe.config import replace, validate
from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.models.ensemble import EnsembleModel
from raypipe.models.zoo import ModelConfig
from raypipe.monitor.monitor import Monitor
from raypipe.registry import fetching
from raypipe.search import networks, refit, refit_together, together, tuner, variants
from raypipe.search import page as search_page
from raypipe.search.budget import GUESSED_IMAGES_PER_S, Speed
from raypipe.search.greedy import Bar, Ensemble, by_metric
from raypipe.search.leaderboard import FIRST, Trial
from raypipe.search.ledger import Ledger
from raypipe.search.limits import Variant
from raypipe.search.refit_together import Again, chosen
from raypipe.search.result import SearchResult
from raypipe.search.settings import SearchConfig
from raypipe.tables.table import TableConfig, TableVersion
from raypipe.train import ensembles, trainer
from raypipe.train.checkpoint import name as epoch_name
from raypipe.train.job import TrainResult
from raypipe.train.loop import LoopState
from raypipe.work import in_time, kept_refits, training

from .test_budget_kept import BUDGET, only_lite0
from .test_refit import cells
from .test_tuner import Searches

__all__ = ["cells"]


@given(
    shares=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1), min_size=1),
    frozen=st.sets(st.sampled_from("abcdef")),
    grows=st.booleans(),
)
def test_one_fine_tuned_member_stays_and_has_half(
    shares: dict[str, float], frozen: set[str], grows: bool
) -> None:
    again = chosen(shares, frozen)
    tuned = [name for name in shares if name not in frozen]
    assert set(again.heads) == set(shares) & frozen
    assert (again.tuned is None) == (not tuned)
    if again.tuned is not None:
        assert shares[again.tuned] == max(shares[name] for name in tuned)
        assert next(iter(again.shares)) == again.tuned, "the package's embedding and job are its"
    lifted = again.lifted(grows)
    for one in (again, lifted):
        assert sum(one.shares.values()) == pytest.approx(1)
    if again.tuned is not None and grows:
        assert lifted.shares[again.tuned] == max(again.shares[again.tuned], 0.5)
    else:
        assert lifted == again
    # Heads keep their relations.
    for name in again.heads:
        first = again.heads[0]
        assert lifted.shares[name] / lifted.shares[first] == pytest.approx(
            shares[name] / shares[first]
        )


def test_of_equal_weights_the_better_trial_is_trained_again() -> None:
    again = chosen({"head": 0.2, "one": 0.4, "two": 0.4}, {"head"})
    assert again == Again({"one": pytest.approx(2 / 3), "head": pytest.approx(1 / 3)}, "one")  # type: ignore[dict-item]
    assert chosen({"one": 0.3, "two": 0.7}, set()) == Again({"two": 1.0}, "two")


def test_a_fine_tuned_trial_joins_heads_that_validation_cannot_tell_from_it() -> None:
    """400 validation images: three standard errors are 5.7 points at .88, and 2.2 at 1."""
    assert chosen({"a": 0.8, "b": 0.2}, {"a", "b"}, "rival") == Again(
        {"rival": 0.5, "a": pytest.approx(0.4), "b": pytest.approx(0.1)},  # type: ignore[dict-item]
        "rival",
    )
    assert chosen({"a": 0.8, "b": 0.2}, {"a"}, "rival").tuned == "b", "a member is no rival"

    def tuned_of(
        reached: float,
        said: dict[str, float] | None = None,
        known: dict[str, float] | None = None,
        metric: str = "val_accuracy",
        side_px: int | None = 224,
        epochs: int = 4,
        images: int = 400,
        earlier: float = math.nan,
    ) -> str | None:
        history = ({"val_accuracy": earlier}, said or {"val_accuracy": reached})
        tuned = Trial("t", {}, reached, 4, False, history, f"trials/t/{epoch_name(2)}")
        gone = Trial("gone", {}, 0.87, 4, False, ({"val_accuracy": 0.87},), None)
        head = Trial(f"{FIRST}1", {}, 0.88, 1, False, ({"val_accuracy": 0.88},), "somewhere")
        small = ModelConfig(mode="finetune", side_px=96)
        of = SimpleNamespace(
            trials=(head, gone, tuned),
            members=(),
            shares=(),
            models={head.name: ModelConfig(mode="frozen"), "gone": small, "t": small},
            best=SimpleNamespace(metrics=known or {"val_accuracy": 0.88}),
            pinned=SimpleNamespace(counts={"val": images}),
            searched=SimpleNamespace(train=SimpleNamespace(epochs=4)),
            job=SimpleNamespace(feed=SimpleNamespace(val="val")),
            metric=metric,
        )
        wanted = {"model.side_px": side_px, "train.epochs": epochs}
        assert refit_together.chosen_of(cast(SearchResult, of)).tuned is None
        return refit_together.chosen_of(cast(SearchResult, of), wanted).tuned

    assert tuned_of(0.825) == "t" and tuned_of(0.82) is None and tuned_of(float("nan")) is None
    # With train.result=last its model is that of the last epoch, whatever an earlier one was.
    assert tuned_of(0.5, earlier=0.88) is None
    # All images right are no proof that none is ever wrong, nor are all wrong.
    all_right = {"val_accuracy": 1.0}
    assert tuned_of(0.98, known=all_right) == "t" and tuned_of(0.97, known=all_right) is None
    assert tuned_of(0.0, known={"val_accuracy": 0.0}) == "t"
    # Of five images nothing can be told, and a model of half the accuracy does not join for that.
    assert tuned_of(0.92, known=all_right, images=5) == "t"
    assert tuned_of(0.89, known=all_right, images=5) is None
    assert tuned_of(0.85, known={"val_loss": 0.1}) is None, "nothing is known of the heads"
    assert tuned_of(0.85, side_px=96) is None, "it would be the same again"
    assert tuned_of(0.85, side_px=None, epochs=9) == "t"
    assert tuned_of(0.85, side_px=None) == "t", "224 px are the backbone's own"
    # With rare classes, accuracies are as equal as the classes are unequal.
    balanced = {"val_accuracy": 0.95, "val_balanced_accuracy": 0.25}
    heads = balanced | {"val_balanced_accuracy": 0.8}
    assert tuned_of(0.0, balanced, heads, "val_balanced_accuracy") is None
    assert tuned_of(0.0, heads, heads, "val_balanced_accuracy") == "t"
    assert tuned_of(0.0, balanced, heads, "val_loss") == "t"


def test_a_prediction_takes_as_long_as_the_networks_that_run() -> None:
    """60 images of 224 px a second; a trial of 96 px that predicts 300."""
    of_stages = {"name": "efficientnet_lite0_stages", "side_px": 224}
    models = {
        "tuned": ModelConfig(mode="finetune", side_px=96),
        "linear": ModelConfig(**of_stages),
        "kernel": ModelConfig(**of_stages, head="kernel"),
        "small": ModelConfig(name="efficientnet_lite0_stages", side_px=112),
    }
    speeds = {"tuned": Speed("tuned", 3, 96, 100.0, 300.0), "linear": Speed("linear", 1, 224, 1e3)}
    # The two heads of 224 px share a backbone, and 112 px are a quarter of its work.
    per_s = networks.of_works(60.0)
    assert networks.others_s(models, speeds, "tuned", per_s) == pytest.approx(1.25 / 60)
    assert networks.others_s(models, speeds, "linear", per_s) == pytest.approx(0.25 / 60 + 1 / 300)
    heads = [models[name] for name in ("linear", "kernel", "small")]
    assert networks.heads_s(heads, 1, per_s) == pytest.approx(1 / 60)
    guessed = networks.heads_s(heads, 4, networks.of_works(None))
    assert guessed == pytest.approx(1.25 / GUESSED_IMAGES_PER_S)
    of_head = networks.unmeasured(speeds["linear"], models["small"], per_s)
    assert of_head.forward_images_per_s == pytest.approx(240)


ASKED = {
    "search.budget_s": BUDGET,
    "search.first_answer": True,
    "search.ensemble": 3,
    "search.samples": 1,
    "search.scheduler": "none",
    "search.space": {"train.lr": "grid(1e-3, 1e-2)"},
    "search.refit": {"train.epochs": 3, "model.side_px": 48},
    "train.epochs": 2,
    "model.side_px": 32,
    "registry.severity_images": 0,
}


def choose(monkeypatch: pytest.MonkeyPatch, head: float, *tuned: float) -> None:
    """The ensemble is of a head and of trials with these weights, whatever they say."""
    real = together.said_of

    def said(candidates: Sequence[Any], *more: Any) -> Any:
        found = real(candidates, *more)
        is_head = [one.name.startswith(FIRST) for one in found.usable]
        left = [list(tuned), [head]]
        weights = [left[of].pop(0) if left[of] else 0.0 for of in is_head]
        no_bar = Bar(by_metric, (-math.inf, -math.inf), -math.inf)
        ensemble = Ensemble(tuple(weights), (0.0, 0.0), gain=1.0, bar=no_bar)
        monkeypatch.setattr(together.greedy, "choose", lambda *given: ensemble)
        return found

    monkeypatch.setattr(together, "said_of", said)


@pytest.mark.usefixtures("ray_session")
def test_all_members_are_trained_again_or_none(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of weight .6, and trials of .3 and .1: the larger one is trained again, and gets half.

    First three times in which one of them comes to nothing; the search is not repeated.
    """
    only_lite0(monkeypatch)
    choose(monkeypatch, 0.6, 0.3, 0.1)
    job = searches(tmp_path, **ASKED, **{"table.uri": cells.uri})
    now, fails = [0.0], ["head"]
    real = trainer.run

    def run(planned: Any, *more: Any) -> Any:
        is_head = planned.job.train.solver != "steps"
        if fails[0] == "head" and is_head:
            raise ValueError("no convergence")
        if fails[0] == "tuned" and not is_head:
            raise RaypipeError(trainer.DIVERGED)
        if fails[0] == "time":
            now[0] = 1990.0  # after the heads nothing is left
        return real(planned, *more)

    monkeypatch.setattr(trainer, "run", run)
    for fails[0], says in (("head", "no convergence"), ("tuned", "diverged"), ("time", " left (")):
        ledger = Ledger(BUDGET, 0.0, lambda: now[0])
        result, version, store = training.search_and_register(job, Shown(True), ledger=ledger)
        assert str(version).endswith("/1") and not result.refitted
        assert "No refit" in ledger.notes[0] and says in ledger.notes[0]
        assert sorted(result.shares) == pytest.approx([0.1, 0.3, 0.6])
        assert "val_loss" in result.best.metrics and result.job.feed.train == "train"
        monkeypatch.setattr(together, "make", lambda *given: pytest.fail("chosen again"))
        (result.folder / kept_refits.SETTLED).unlink()  # or it is not tried again
    sides_within_limits(result, monkeypatch)

    fails[0], now[0] = "none", 0.0
    ledger = Ledger(BUDGET, 0.0, lambda: now[0])
    others_s: list[float] = []
    alone = in_time._refitted_alone

    def spied(*given: Any) -> SearchResult:
        others_s.append(ledger.forecast.others_s)
        return alone(*given)

    monkeypatch.setattr(in_time, "_refitted_alone", spied)
    told: list[Mapping[str, Any]] = []
    monitors = [cast(Monitor, SimpleNamespace(note=lambda stream, values: told.append(values)))]
    result, version, store = training.search_and_register(
        job, Shown(True), monitors=monitors, ledger=ledger
    )
    # Each training has one end, under the key of its epochs, and the ensemble has one. The head's
    # training is of an earlier call.
    ended = [values["RunId"] for values in told if values["Kind"] == "finished"]
    (trained,) = {values["RunId"] for values in told if values["Kind"] == "epoch"}
    assert len(ended) == len(set(ended)) == 3 and {trained, result.best.key} < set(ended)
    assert str(version).endswith("/2") and ledger.notes == [] and result.refitted
    assert others_s == [ledger.forecast.others_s], (
        "the trial that leaves takes no time of the refit"
    )
    tuned, head = result.members
    assert head.startswith(FIRST) and tuned.startswith("trial-") and result.again == result.members
    assert result.shares == pytest.approx((0.5, 0.5))
    # Trained on validation images too, the fine-tuned one with more pixels.
    assert (result.job.feed.train, result.job.model.pixels) == ("train+val", 48)
    assert not any(name.startswith("val_") for name in result.best.metrics)
    assert "all 2 members" in refit.summary(result)["trained again"]
    assert result.spared.share == 0, "trials ran all of their epochs, the refit has others"
    shown = search_page.section(result)
    assert shown.epochs == shown.full_epochs == 4, "heads have none"
    package = fetching.fetch(store, version)
    assert isinstance(package.model, EnsembleModel) and package.model.side_px == 48
    assert [one.model.pixels for one in package.model.members] == [48, 32]
    assert package.info["config"]["feed"]["train"] == "train+val"
    # The page times the models, and has no point for what validation cannot judge.
    assert variants.of_result(result)[1] is None

    # After a kill nothing is trained once more.
    monkeypatch.setattr(trainer, "_run_into", lambda *given: pytest.fail("trained again"))
    monkeypatch.setattr(ensembles, "write", lambda *given: pytest.fail("another may read it"))
    again, same, _ = training.search_and_register(job, Shown(True), ledger=Ledger(BUDGET))
    assert same == version and again.best.key == result.best.key
    assert again.shares == result.shares


@pytest.mark.usefixtures("ray_session")
def test_heads_are_fitted_again_beside_trials_that_stay(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of weight .3, and trials of .6 and .1."""
    only_lite0(monkeypatch)
    choose(monkeypatch, 0.3, 0.6, 0.1)
    asked = ASKED | {"search.refit": "heads", "table.uri": cells.uri}
    monkeypatch.setattr(refit, "FEWEST_TESTS", 5)
    job = searches(tmp_path, **asked)
    before = training.search_and_refit(replace(job, {"search.refit": None}), Shown(True))
    told: list[Mapping[str, Any]] = []
    monitors = [cast(Monitor, SimpleNamespace(note=lambda stream, values: told.append(values)))]
    ledger = Ledger(BUDGET)
    result, version, store = training.search_and_register(
        job, Shown(True), monitors=monitors, ledger=ledger
    )
    assert result.key == before.key, "a refit does not change the search"
    (head,) = result.again
    stay = tuple(name for name in before.members if name != head)
    assert head.startswith(FIRST) and result.stay == stay and len(stay) == 2
    assert (result.members, result.shares) == (before.members, before.shares)
    assert not result.is_of_one_refit
    # Each training has one end, and the ensemble has one.
    ended = [values["RunId"] for values in told if values["Kind"] == "finished"]
    assert len(ended) == len(set(ended)) == 2 and result.best.key in ended
    # What the head has learned is the model's; the trials' weights are as they were.
    assert result.job.feed.train == "train+val" and result.job.model == result.models[head]
    assert result.pinned is not None and result.pinned.counts["train+val"] > 0
    assert not any(name.startswith("val_") for name in result.best.metrics)
    said = refit.summary(result)["trained again"]
    assert said == f"on train+val, 1 of 3 members: {head}"
    model = fetching.fetch(store, version).model
    old = trainer.assemble(before.job, before.best)
    assert isinstance(model, EnsembleModel) and isinstance(old, EnsembleModel)

    def weights_of(ensemble: EnsembleModel, name: str) -> list[Any]:
        place = [member.name for member in ensemble.members].index(name)
        return [weight.detach() for weight in ensemble.heads[place].parameters()]

    for name in result.members:
        both = zip(weights_of(model, name), weights_of(old, name), strict=True)
        is_same = all(a.shape == b.shape and bool((a == b).all()) for a, b in both)
        assert is_same == (name != head)
    trials_s = sum(trial.device_s for trial in result.trials)
    (fitted,) = (trial for trial in result.trials if trial.name == head)
    assert trials_s < result.device_s < trials_s + 10 * fitted.device_s + 5
    assert result.best.device_s < trials_s, "the trials' seconds count once"

    # Equal settings are not equal weights where a clock ends trials.
    def train(again: Any, member: SearchResult) -> SearchResult:
        planned = refit.planned(again, member)
        return refit.refit(planned, member, lambda *given: None, lambda *given: None)

    other = with_(before, best=with_(before.best, key="elsewhere"))
    found = [refit_together.refitted(job.training, of, job.search, train) for of in (before, other)]
    assert found[0].best.key == result.best.key != found[1].best.key

    # A trial that stays may lead: its settings are the model's, and it knows what its heads know.
    shares = {stay[0]: 0.6, head: 0.3, stay[1]: 0.1}
    of_head = refit.job_of(job.training, {"train.workers": 1}, refit_together.alone(before, head))
    trained = {head: train(of_head, refit_together.alone(before, head))}
    led = refit_together.combined(before, Again(shares, None, stay), trained)
    assert (led.members, led.again) == (tuple(shares), (head,)) and led.refitted
    assert led.job.model == before.models[stay[0]] and led.job.feed.train == "train+val"
    assert led.pinned == trained[head].pinned and led.plan.pinned.counts["train+val"] > 0
    assert not any(name.startswith("val_") for name in led.best.metrics)

    monkeypatch.setattr(trainer, "_run_into", lambda *given: pytest.fail("trained again"))
    again, same, _ = training.search_and_register(job, Shown(True), ledger=Ledger(BUDGET))
    assert same == version and again.shares == result.shares and again.stay == result.stay

    # Where a trial's own weights are damaged, what validation chose is whole.
    shutil.rmtree(result.job.folder(result.best.key))
    (result.folder / kept_refits.SETTLED).unlink()
    checkpoint = refit_together.alone(before, stay[0]).best.checkpoint
    next(Path(checkpoint).glob("weights-*")).write_bytes(b"damaged")
    ledger = Ledger(BUDGET)
    kept, first, _ = training.search_and_register(job, Shown(True), ledger=ledger)
    assert not kept.refitted and first != version and "cannot be read" in ledger.notes[-1]


@pytest.mark.usefixtures("ray_session")
def test_heads_stay_as_they_are_where_nothing_else_would_test_them(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_lite0(monkeypatch)
    choose(monkeypatch, 1.0)
    asked = ASKED | {"search.refit": "heads", "table.uri": cells.uri}
    whys = {"val": "would learn", "train": "would learn", "test": "needed", "nowhere": "needed"}
    for test, why in whys.items():
        job = searches(tmp_path, **asked, **{"feed.test": test})
        ledger = Ledger(BUDGET)
        result = training.search_and_refit(job, Shown(True), ledger=ledger)
        assert not result.refitted and result.job.feed.train == "train"
        assert why in ledger.notes[-1] and "val_loss" in result.best.metrics

    # A reason of one configuration is none of the next one.
    monkeypatch.setattr(refit, "FEWEST_TESTS", 5)
    job = searches(tmp_path, **asked, **{"feed.test": "test", "model.calibrate": True})
    ledger = Ledger(BUDGET)
    kept, _, _ = training.search_and_register(job, Shown(True), ledger=ledger)
    assert not kept.refitted and "temperature" in ledger.notes[-1]
    job = replace(job, {"model.calibrate": False})
    again, _, _ = training.search_and_register(job, Shown(True), ledger=Ledger(BUDGET))
    assert again.refitted and again.key == kept.key


def test_nobody_is_fitted_again_where_no_head_is_part_of_the_model() -> None:
    models = {"a": ModelConfig(mode="finetune"), "b": ModelConfig(mode="frozen")}

    def of(*names: str) -> Any:
        shares = tuple(1 / len(names) for _ in names) if len(names) > 1 else ()
        members = names if shares else ()
        return SimpleNamespace(
            members=members, shares=shares, models=models, trials=[SimpleNamespace(name=names[0])]
        )

    assert "no head" in str(refit_together.heads_of(of("a")))
    assert refit_together.heads_of(of("b")) == Again({"b": 1.0}, None)
    both = refit_together.heads_of(of("a", "b"))
    assert both == Again({"a": 0.5, "b": 0.5}, None, ("a",))
    assert isinstance(both, Again) and both.heads == ("b",)


def test_a_head_whose_refit_was_cut_replaces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """train.stopping.seconds ended it at a high rate, and it took the place of what validation
    chose; search.refit.train.stopping.seconds=null did not help."""
    train = {"epochs": 10, "stopping": {"seconds": 20}}
    job = validate(Job, {"table": {"uri": "unused"}, "train": train}).training
    monkeypatch.setattr(refit_together, "alone", lambda found, name: name)

    def job_of(job: Any, wanted: Any, member: Any) -> Any:
        return replace(job, refit.splits(job) | wanted)

    monkeypatch.setattr(refit, "job_of", job_of)

    def trained(again: Any, member: Any) -> Any:
        is_cut = member == "b" and again.train.stopping.seconds is not None
        epochs = 4 if is_cut else again.train.epochs
        best = SimpleNamespace(best_epoch=epochs - 1, history=({},) * epochs)
        return SimpleNamespace(job=again, best=best)

    def heads(**wanted: Any) -> Any:
        of: Any = None
        both = Again({"a": 0.5, "b": 0.5}, None)
        named = {f"train.{name.replace('__', '.')}": value for name, value in wanted.items()}
        return refit_together.heads_again(job, of, both, named, trained)

    assert heads() == "its heads were not fitted again: of b, it came to 40% of its schedule"
    done = heads(stopping__seconds=None, epochs=3)
    assert set(done) == {"a", "b"}
    # Other settings of the refit are not for heads.
    assert done["b"].job.train.epochs == 10 and done["b"].job.train.stopping.seconds is None


@pytest.mark.usefixtures("ray_session")
def test_a_trial_that_joins_a_head_costs_no_answer(
    cells: TableConfig, searches: Searches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are damaged, with and without a clock; then they are whole."""
    only_lite0(monkeypatch)
    monkeypatch.setattr(together, "make", lambda *given: None)
    # The head is always right on 18 images, so that any other trial is told from it.
    monkeypatch.setattr(refit_together, "_rival", lambda found, wanted: tuned_of(found).name)
    job = searches(tmp_path, **ASKED, **{"table.uri": cells.uri})
    refits = job.search.refit_changes or {}
    found = tuner.search(job.training, job.search)
    rival, head = tuned_of(found), found.trials[0].name
    assert head.startswith(FIRST) and not found.shares
    weights = next(Path(str(rival.checkpoint)).glob("weights-*"))
    sound = weights.read_bytes()
    weights.write_bytes(sound[:-9])

    told: list[Mapping[str, Any]] = []
    monitors = [cast(Monitor, SimpleNamespace(note=lambda stream, values: told.append(values)))]
    alone, _, _ = training.search_and_register(job, Shown(True), monitors=monitors)
    ended = [values["RunId"] for values in told if values["Kind"] == "finished"]
    assert ended == [alone.best.key], "one training has one end"
    assert alone.refitted and alone.again == (head,) and not alone.shares
    (alone.folder / kept_refits.SETTLED).unlink()

    def train(again: Any, member: SearchResult) -> SearchResult:
        planned = refit.planned(again, member)
        return refit.refit(planned, member, lambda *given: None, lambda *given: None)

    same = refit_together.refitted(job.training, found, job.search, train)
    assert same.refitted and same.again == (head,)
    weights.write_bytes(sound)
    both, _, _ = training.search_and_register(job, Shown(True))
    assert both.again == both.members == (rival.name, head) and both.shares == (0.5, 0.5)

    # One that came to nothing stays out on a rerun, whatever it would come to then.
    lost = replace(job, {"search.refit": refits | {"train.lr": 1e30}})
    result, version, _ = training.search_and_register(lost, Shown(True))
    assert result.again == (head,)
    monkeypatch.setattr(trainer, "_run_into", lambda *given: pytest.fail("trained again"))
    result, same, _ = training.search_and_register(lost, Shown(True))
    assert result.again == (head,) and same == version


def test_a_refit_tells_its_end_under_the_key_of_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    job = validate(Job, {"table": {"uri": "unused"}}).training
    version = TableVersion("unused", 1, "id")
    best = TrainResult("its-own", version, ("a", "b"), {}, ({},), 0, "somewhere", 1.0)
    planned = SimpleNamespace(job=job, key="its-own")

    def refitted(planned: Any, found: Any, epoch: Any, *more: Any) -> Any:
        epoch(
            dict.fromkeys(("images_per_s", "train_loss", "val_loss", "val_accuracy"), 1.0),
            LoopState(epoch=1),
        )
        return SimpleNamespace(best=best)

    monkeypatch.setattr(training.refit, "planned", lambda *given: planned)
    monkeypatch.setattr(training.refit, "refit", refitted)
    told: list[Mapping[str, Any]] = []
    monitors = [cast(Monitor, SimpleNamespace(note=lambda stream, values: told.append(values)))]
    found: Any = SimpleNamespace(trials=(SimpleNamespace(name="a trial"),))
    training._refitted(job, found, Shown(True), monitors, None)
    assert [(v["Kind"], v["RunId"]) for v in told] == [
        ("epoch", "its-own"),
        ("finished", "its-own"),
    ]


def tuned_of(found: SearchResult) -> Trial:
    return next(trial for trial in found.trials if trial.drawn)


def sides_within_limits(found: SearchResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """48 px where the whole keeps the limit, else the 32 px of the trial, else none."""

    def timed(models: list[Any], images: list[bytes], rounds: int = 1) -> list[Variant]:
        assert len(models[0].members) == 2, "the other trial has left"
        ms = models[0].side_px / 32
        return [Variant("", ms, ms, ms, 0.0)]

    with monkeypatch.context() as patched:
        patched.setattr(variants, "timed", timed)
        again = refit_together.chosen_of(found)
        wanted = {"train.epochs": 3, "model.side_px": 48}

        def side(latency_ms: float) -> int | str | None:
            limits: Any = {"latency_ms": latency_ms}
            return refit_together.side_px(wanted, found, again, SearchConfig(limits=limits))

        assert side(1.6) == 48 and side(1.2) == 32
        assert "An ensemble of 2 at 32 px needs 1 ms" in str(side(0.9))
        # Heads alone are asked, too: with validation images they have more landmarks.
        patched.setattr(variants, "timed", lambda models, images: [Variant("", 1, 1, 1, 0.0)])
        again = Again(dict.fromkeys(again.heads, 1.0), None)
        assert side(1.2) is None and "needs 1 ms" in str(side(0.9))
    assert refit_together.side_px(wanted, found, again, SearchConfig()) is None
