"""The challenger of a champion that is an ensemble of heads: all of them, fitted to the new rows.

A preset often ends with such a champion. Its package has the settings of the first head alone, so a
search around them would compare one head with several. Heads that are fitted at once have no other
settings than their models, which the package knows: each is fitted again, with the weight that it
had. That takes seconds, so there is nothing to search.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace as with_
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from raypipe.config import replace
from raypipe.errors import ConfigError
from raypipe.feed.dataset import Pinned
from raypipe.models.ensemble import Member, bodies_of
from raypipe.models.providers import has_weights, same_options
from raypipe.models.zoo import ModelConfig
from raypipe.monitor.monitor import Monitor
from raypipe.registry.package import Package
from raypipe.search import refit, refit_together, variants
from raypipe.search.limits import SearchLimits
from raypipe.search.refit_together import Again
from raypipe.search.result import SearchResult
from raypipe.train import telling, trainer
from raypipe.train.job import TrainJob
from raypipe.watch.settings import WatchConfig


def of_champion(package: Package, first: TrainJob, watch: WatchConfig) -> tuple[Member, ...]:
    """The champion's members if all are heads that are fitted at once; else none.

    first: the challenger's job, with the settings of the first one. Its solver fits the others,
    too: a package does not say which of them learned by steps. Somebody who says what is drawn
    wants a search. Raises ConfigError for a head whose backbone nobody can find again.
    """
    searched = watch.retrain_samples > 1 and watch.retrain_space is not None
    heads = [one for one in package.members if one.model.mode == "frozen"]
    if searched or first.train.solver == "steps" or len(heads) < len(package.members):
        return ()
    _require_one_source(package, first.model)
    return package.members


def jobs(
    members: Sequence[Member], first: TrainJob, wanted: dict[str, Any] | None
) -> list[TrainJob]:
    """The job of each head. wanted: search.refit; with one, on validation images too.

    They keep their own resolutions, as in a refit of a search. Raises ConfigError for a head whose
    backbone nobody can find again.
    """
    # In this process: it takes no steps that workers could share.
    both = {} if wanted is None else refit.splits(first)
    changes = {"train.workers": 1, "train.strategy": "single"} | both
    return [replace(first, {"model": _asked(one, first.model)} | changes) for one in members]


def _asked(member: Member, first: ModelConfig) -> dict[str, Any]:
    """A member's model as a user asks for it: a package has the architecture of a provider's
    backbone in place of its name, which alone leads to pretrained weights."""
    model = member.model
    written = model.model_dump()
    if _is_as_first(member, first):
        written |= {"name": first.name, "options": first.options}
    elif not has_weights(model.name):
        raise _unknown(member, first)
    return written


def _is_as_first(member: Member, first: ModelConfig) -> bool:
    """Has its backbone the architecture of the first head's, which is a provider's?"""
    name, options = first.backbone.resolved or ("", {})
    return member.model.name == name and same_options(name, member.model.options, options)


def _require_one_source(package: Package, first: ModelConfig) -> None:
    """Raise ConfigError if a backbone has the architecture of the first one, and other weights.

    Two folders of Hugging Face may have one architecture. At two sides they are two backbones of an
    ensemble, and the name of the first one would bring its weights to both.
    """
    alike = {
        body: member
        for member, body in zip(package.members, bodies_of(package.members), strict=True)
        if _is_as_first(member, first)
    }
    if len(alike) < 2:
        return
    weights = load(package.files["weights.safetensors"])
    theirs = {body: _of_body(weights, body) for body in {0, *alike}}
    for body, member in alike.items():
        if not _are_equal(theirs[body], theirs[0]):
            raise _unknown(member, first)


def _of_body(weights: Mapping[str, Tensor], body: int) -> dict[str, Tensor]:
    prefix = f"bodies.{body}."
    return {n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}


def _are_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def _unknown(member: Member, first: ModelConfig) -> ConfigError:
    return ConfigError(
        "A head of the champion reads another backbone than its first head, and its package "
        "does not say where the weights of that one come from",
        got=f"{member.name or 'a head'}: {member.model.name}, beside {first.name}",
        rule="A package keeps a provider's backbone by its architecture; for the first head "
        "its configuration has the name, too",
        fix="Set watch.retrain_space, which searches around the settings of the first head",
    )


def check(
    members: Sequence[Member],
    of_each: Sequence[TrainJob],
    limits: SearchLimits,
    rows: Pinned,
) -> None:
    """Raise ConfigError if the heads, fitted by these jobs, break a limit: more rows give a kernel
    head more landmarks."""
    if not limits.of_models:
        return
    both = zip(members, of_each, strict=True)
    asked = [with_(member, model=job.model) for member, job in both]
    # Each time anew: what a busy host has measured would refuse all that follow.
    with tempfile.TemporaryDirectory() as folder:
        whole = variants.of_members(asked, rows, of_each[0], Path(folder))
    why = whole.breaks(limits)
    if why:
        raise ConfigError(
            "The champion's heads, fitted to these rows, would break search.limits",
            got=why,
            fix="Raise the limit, or set watch.retrain_space, which searches for another model",
        )


def fitted(
    members: Sequence[Member],
    of_each: Sequence[TrainJob],
    pinned: Callable[[TrainJob], Pinned],
    monitors: Sequence[Monitor],
) -> SearchResult:
    """The ensemble of these heads, each fitted by its job. pinned: the rows of a job."""
    shares, trained = {}, {}
    total = sum(member.weight for member in members)
    for place, (member, job) in enumerate(zip(members, of_each, strict=True), 1):
        planned = trainer.plan(job, pinned(job))
        told = telling.epochs(monitors, planned.job, planned.key, lambda metrics, state: None)
        done = trainer.run(planned, told)
        telling.finished(monitors, planned.job, done)
        name = member.name or f"head-{place}"
        shares[name] = member.weight / total
        trained[name] = SearchResult(
            key=done.key,
            job=planned.job,
            # What validation says of one head is nothing that the ensemble has reached.
            best=refit.without_validation(done),
            trials=(),
            metric=job.train.stopping.metric,
            seconds=done.seconds,
            refitted=True,
            pinned=planned.pinned,
        )
    first = next(iter(trained.values()))
    return refit_together.combined(first, Again(shares, None), trained)
