"""However many trials of however many workers: what is started fits."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.config import replace, validate
from raypipe.errors import ClusterError, ConfigError
from raypipe.job import Job
from raypipe.search import feasible
from raypipe.search.trials.trial_resources import (
    TrialResources,
    at_once,
    gpu_share,
    plan_resources,
)

JOB = validate(Job, {"table": {"uri": "unused"}})


def fitted(
    resources: dict[str, float], trials: int = 16, *, combinations: int = 1, **changes: Any
) -> TrialResources:
    job = replace(JOB, changes)
    return plan_resources(job, job.search, resources, trials, combinations)


def share(job: Job) -> float:
    return gpu_share(job, job.search)


@given(
    cpus=st.integers(1, 64),
    gpus=st.integers(0, 16),
    workers=st.integers(2, 9),
    concurrent=st.none() | st.integers(1, 8),
    scheduler=st.sampled_from(["asha", "pbt", "hyperband"]),
)
def test_all_groups_that_are_started_have_places(
    cpus: int, gpus: int, workers: int, concurrent: int | None, scheduler: str
) -> None:
    changes = {
        "train.workers": workers,
        "search.scheduler": scheduler,
        "search.concurrent": None if scheduler == "hyperband" else concurrent,
    }
    try:
        found = fitted({"CPU": cpus, "GPU": gpus}, 4, **changes)
    except ClusterError as e:
        assert "do not fit side by side" in str(e)
        return
    assert found.worker is not None and found.concurrent >= 1
    taken = found.concurrent * (found.trial["CPU"] + workers * found.worker["CPU"])
    assert taken <= cpus + 1e-6 and found.worker["CPU"] > 0
    assert found.concurrent * workers * found.worker.get("GPU", 0) <= gpus
    assert scheduler == "asha" or found.concurrent == 4


def test_the_number_follows_the_cluster() -> None:
    assert fitted({"CPU": 8}).concurrent == 8
    assert fitted({"CPU": 8}, **{"search.concurrent": 3}).concurrent == 3
    assert fitted({"CPU": 8, "GPU": 2}, **{"search.gpus_per_trial": 0.25}) == TrialResources(
        {"CPU": 1.0, "GPU": 0.25}, None, 8
    )
    assert fitted({"CPU": 32, "GPU": 8}, **{"train.workers": 2}) == TrialResources(
        {"CPU": 0.1}, {"CPU": 1.0, "GPU": 1.0}, 4
    )
    assert (
        fitted({"CPU": 32, "GPU": 8}, **{"train.workers": (2, 4)}).concurrent == 2
    )  # any of them may grow
    assert fitted({"CPU": 9}, **{"train.workers": 2}).concurrent == 4
    assert fitted({"CPU": 2}, **{"train.workers": 2}) == TrialResources(
        {"CPU": 0.1}, {"CPU": 0.95}, 1
    )


def test_what_cannot_fit_is_refused_with_a_number_that_does() -> None:
    changes: dict[str, Any] = {"train.workers": 2, "search.scheduler": "pbt"}
    with pytest.raises(
        ClusterError,
        match=r"16 trials of 2 workers do not fit.*got '8 GPUs'.*all at once.*search\.samples=4",
    ):
        fitted({"CPU": 64, "GPU": 8}, **changes)
    with pytest.raises(
        ClusterError, match=r"8 trials of 2 workers do not fit.*Set search\.concurrent=4"
    ):
        fitted({"CPU": 64, "GPU": 8}, **{"train.workers": 2, "search.concurrent": 8})
    with pytest.raises(
        ConfigError, match=r"cannot share a GPU.*gpus_per_trial=0\.5, train\.workers=2.*NCCL"
    ):
        fitted({"CPU": 64, "GPU": 8}, **{"train.workers": 2, "search.gpus_per_trial": 0.5})


def test_hyperband_has_room_for_all_of_its_groups() -> None:
    """Tune started all of them, and those that it had no room for waited for ever."""
    changes: dict[str, Any] = {"train.workers": 2, "search.scheduler": "hyperband"}
    with pytest.raises(
        ClusterError,
        match=r"16 trials of 2 workers do not.*hyperband starts.*all at once.*search\.samples=4",
    ):
        fitted({"CPU": 64, "GPU": 8}, **changes)
    found = fitted({"CPU": 2}, **changes)
    assert found.concurrent == 16 and found.worker is not None
    assert 16 * (found.trial["CPU"] + 2 * found.worker["CPU"]) <= 2


@pytest.mark.parametrize("scheduler", ["hyperband", "pbt"])
@pytest.mark.parametrize(
    ("samples", "workers", "way_out"),
    [
        (3, 2, r"Set search\.samples=2, or fewer"),
        (3, 8, r"Leave 2 of the 4 combinations in the grid of .* and set search\.samples=1, or"),
        (1, 8, r"Leave 2 of the 4 combinations in the grid of search\.space, or fewer"),
    ],
)
def test_the_trials_that_fit_are_those_of_a_whole_grid(
    scheduler: str, samples: int, workers: int, way_out: str
) -> None:
    """search.samples=8 was the way out for eight trials, and with a grid of four it made 32."""
    changes = {"train.workers": workers, "search.scheduler": scheduler, "search.samples": samples}
    with pytest.raises(ClusterError, match=rf"{4 * samples} trials of .* do not.*{way_out}"):
        fitted({"CPU": 64, "GPU": 16}, 4 * samples, combinations=4, **changes)


def test_a_grid_without_other_fields_needs_room_for_one_round() -> None:
    """32 trials did not fit, and two would have been run."""
    of_two = {"train.lr": "grid(1e-3, 1e-2)"}
    changes = {"train.workers": 2, "search.scheduler": "hyperband", "search.space": of_two}
    job = replace(JOB, changes)
    feasible.check(job.training, job.search, resources={"CPU": 64, "GPU": 4})
    way_out = r"2 trials of .* Leave 1 of the 2 combinations in the grid of search\.space, or"
    with pytest.raises(ClusterError, match=way_out):
        feasible.check(job.training, job.search, resources={"CPU": 64, "GPU": 2})


def test_no_more_run_side_by_side_than_there_is_room_for() -> None:
    two = {"CPU": 2.0}
    assert at_once(fitted(two, 16), two, 16) == 2
    assert at_once(fitted(two, 16, **{"search.concurrent": 64}), two, 16) == 2
    assert at_once(fitted(two, 16, **{"search.concurrent": 1}), two, 16) == 1
    assert at_once(fitted({"CPU": 8.0}, 3), {"CPU": 8.0}, 3) == 3


def test_trials_that_share_a_gpu_share_its_memory() -> None:
    assert share(replace(JOB, {"search.gpus_per_trial": 0.25})) == 0.25
    assert share(replace(JOB, {"search.gpus_per_trial": 2})) == share(JOB) == 1


@pytest.mark.parametrize(
    ("nodes", "each", "fits"),
    [
        ([(8, 1)], 0.5, True),
        ([(8, 1)], 2, False),
        ([(8, 1), (8, 1)], 2, False),
        ([(8, 4)], 2, True),
    ],
)
def test_a_trial_whose_gpus_no_node_has_is_refused(
    nodes: list[tuple[int, int]], each: float, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tune waited for two GPUs where each node has one, and said nothing."""
    listed = [{"CPU": float(cpus), "GPU": float(gpus)} for cpus, gpus in nodes]
    monkeypatch.setattr(feasible, "resources_by_node", lambda: listed)
    together = {"CPU": 8.0, "GPU": float(sum(gpus for _, gpus in nodes))}
    if fits:
        feasible._require_gpus(each, together)
        return
    with pytest.raises(ClusterError, match="No node of the cluster has the GPUs of a trial"):
        feasible._require_gpus(each, together)
