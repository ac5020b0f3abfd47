"""A champion that is an ensemble of heads: its challenger is one, too."""

from __future__ import annotations

from dataclasses import replace as replace_
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.feed.dataset import pin
from raypipe.job import Job
from raypipe.models.ensemble import EnsembleModel, Member
from raypipe.models.zoo import ModelConfig
from raypipe.registry.package import Package
from raypipe.search.limits import SearchLimits, Variant
from raypipe.tables.ingest import IngestConfig, ingest
from raypipe.tables.table import TableConfig
from raypipe.train import trainer
from raypipe.watch import heads
from raypipe.watch.settings import WatchConfig

STAGES = "efficientnet_lite0_stages"
FROZEN: dict[str, Any] = {"name": STAGES, "mode": "frozen", "side_px": 32}


def members() -> tuple[Member, ...]:
    """As a package of a search's ensemble has them."""
    kernel = Member(ModelConfig(**FROZEN, head="kernel"), 0.75, name="first-answer-1")
    small = ModelConfig(**FROZEN | {"name": "efficientnet_lite0", "side_px": 48}, head="kernel")
    made = (kernel, Member(small, 0.25, name="first-answer-3"))
    return tuple(Member.from_json(one.to_json()) for one in made)


def job(**changes: Any) -> Job:
    """The challenger's, with the settings of the first member."""
    model, train = FROZEN | {"head": "kernel"}, {"solver": "closed"}
    tree = {"table": {"uri": "unused"}, "model": model, "train": train}
    return replace(validate(Job, tree), changes)


def package(*made: Member) -> Package:
    return cast(Package, SimpleNamespace(members=made))


def test_only_heads_that_are_fitted_at_once_are_all_fitted_again() -> None:
    first, watch = job().training, WatchConfig()
    assert heads.of_champion(package(*members()), first, watch) == members()
    assert heads.of_champion(package(), first, watch) == ()
    tuned = Member(ModelConfig(mode="finetune"), 1.0, name="trial-1")
    assert heads.of_champion(package(tuned, *members()), first, watch) == ()
    stepped = job(**{"train.solver": "steps", "model.head": "linear"}).training
    assert heads.of_champion(package(*members()), stepped, watch) == ()
    space = {"train.weight_decay": "uniform(0.0, 1.0)"}
    drawn = WatchConfig(retrain_space=space, retrain_samples=4)
    assert heads.of_champion(package(*members()), first, drawn) == ()


def test_each_head_is_fitted_with_its_own_model_and_side() -> None:
    first = job(**{"train.workers": 2, "feed.sampling": "balanced"}).training
    one, two = heads.jobs(members(), first, None)
    assert (one.model.name, one.model.pixels) == (STAGES, 32)
    assert (two.model.name, two.model.pixels, two.model.head) == (
        "efficientnet_lite0",
        48,
        "kernel",
    )
    assert one.train.solver == two.train.solver == "closed" and two.train.workers == 1
    assert two.feed == first.feed
    one, two = heads.jobs(members(), first, {"model.side_px": 224})
    assert one.feed.train == two.feed.train == "train+val" and two.model.pixels == 48


def test_a_backbone_of_a_provider_is_asked_for_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package has the architecture alone, which has no pretrained weights."""
    first = job().training
    written = ("hf:vit", {"width": 8})
    backbone = replace_(first.model.backbone, resolved=written)
    monkeypatch.setattr(ModelConfig, "backbone", property(lambda self: backbone))
    one = replace_(members()[0], model=first.model.resolved())
    assert (one.model.name, one.model.options) == written
    # Another release of transformers writes other options, too: the retrain ended in an error.
    for release in ({}, {"transformers_version": "6.0.0", "of_a_later_release": 1}):
        later = replace_(backbone, resolved=("hf:vit", {"width": 8} | release))
        monkeypatch.setattr(ModelConfig, "backbone", property(lambda self, is_now=later: is_now))
        (again,) = heads.jobs((one,), first, None)
        assert (again.model.name, again.model.options) == (STAGES, first.model.options)


def test_a_second_backbone_whose_weights_nobody_can_find_is_refused() -> None:
    """It was told to fine-tune: "mode frozen needs pretrained weights, and hf:vit starts at
    random".
    """
    one, two = members()
    of_a_folder = two.model.model_copy(update={"name": "hf:vit", "options": {"hidden_size": 8}})
    both = (one, replace_(two, model=of_a_folder))
    with pytest.raises(
        ConfigError, match=r"does not say where.*first-answer-3: hf:vit.*watch\.retrain_space"
    ):
        heads.jobs(both, job().training, None)


def test_a_second_backbone_of_the_same_architecture_is_known_by_its_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At another side it is a backbone of its own. It was asked for by the name of the first one:
    the challenger's second head read the weights of the first one's backbone."""
    first, watch = job().training, WatchConfig()
    # As folders of Hugging Face are resolved.
    backbone = replace_(first.model.backbone, resolved=("hf:vit", {"width": 8}))
    monkeypatch.setattr(ModelConfig, "backbone", property(lambda self: backbone))
    sides = [first.model.model_copy(update={"side_px": px}).resolved() for px in (32, 48, 48)]
    heads_of = tuple(Member(model, name=f"head {place}") for place, model in enumerate(sides))
    ones, twos = torch.ones(2, 2), torch.full((2, 2), 2.0)

    def champion(**weights: torch.Tensor) -> Package:
        named = {name.replace("_", "."): weight for name, weight in weights.items()}
        found = SimpleNamespace(members=heads_of, files={"weights.safetensors": save(named)})
        return cast(Package, found)

    same = champion(bodies_0_net=ones, bodies_1_net=ones.clone(), heads_1_b=twos)
    found = heads.jobs(heads.of_champion(same, first, watch), first, None)
    assert [(one.model.name, one.model.pixels) for one in found] == [
        (STAGES, 32),
        (STAGES, 48),
        (STAGES, 48),
    ]
    other = champion(bodies_0_net=ones, bodies_1_net=twos)
    with pytest.raises(ConfigError, match=r"does not say where.*hf:vit.*watch\.retrain_space"):
        heads.of_champion(other, first, watch)


def test_heads_that_would_break_a_limit_with_more_rows_are_not_fitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(**{"run.dir": str(tmp_path)}).training
    whole = Variant("An ensemble", 1.0, 0.9, 1.1, size_mb=20.0)
    monkeypatch.setattr(heads.variants, "of_members", lambda *given: whole)
    rows: Any = None
    of_each = heads.jobs(members(), first, None)
    heads.check(members(), of_each, SearchLimits(size_mb=21.0), rows)
    with pytest.raises(ConfigError, match=r"break search\.limits.*20 MB of weights.*retrain_space"):
        heads.check(members(), of_each, SearchLimits(size_mb=19.0), rows)
    monkeypatch.setattr(heads.variants, "of_members", lambda *given: pytest.fail("measured"))
    heads.check(members(), of_each, SearchLimits(), rows)


@pytest.mark.usefixtures("ray_session")
def test_the_ensemble_is_fitted_as_a_whole_and_once(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = TableConfig(uri=str(tmp_path / "photos"))
    source = {"images": str(photos), "labels": str(photos / "labels.csv")}
    splits = {"train": 0.6, "val": 0.2, "test": 0.2}
    ingest(table, validate(IngestConfig, {"from": source, "splits": splits}))
    first = job(**{"table.uri": table.uri, "run.dir": str(tmp_path / "run")}).training
    told: list[Any] = []
    monitors: Any = [SimpleNamespace(note=lambda stream, values: told.append(values))]

    def fitted() -> Any:
        of_each = heads.jobs(members(), first, None)
        return heads.fitted(members(), of_each, lambda job: pin(job.table, job.feed), monitors)

    # On validation images too, their number of landmarks is of both splits.
    both = heads.jobs(members(), first, {})
    rows = pin(both[0].table, both[0].feed)
    heads.check(members(), both, SearchLimits(size_mb=1000), rows)
    found = fitted()
    assert found.members == ("first-answer-1", "first-answer-3") and found.shares == (0.75, 0.25)
    model = trainer.assemble(found.job, found.best)
    assert isinstance(model, EnsembleModel) and [m.model.pixels for m in model.members] == [32, 48]
    assert not any(name.startswith("val_") for name in found.best.metrics)
    assert len({one["RunId"] for one in told if one["Kind"] == "finished"}) == 2

    monkeypatch.setattr(trainer, "_run_into", lambda *given: pytest.fail("fitted again"))
    assert fitted().best.key == found.best.key
