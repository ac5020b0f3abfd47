"""How many workers `train.workers=auto` takes, and which numbers are bad ones."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.config import replace, validate
from raypipe.errors import ConfigError
from raypipe.job import Job
from raypipe.search.space import parse
from raypipe.train.job import TrainJob
from raypipe.train.settings import TrainConfig
from raypipe.train.topology import choose, spans_nodes


@pytest.mark.parametrize(
    "gpus, workers, said",
    [
        ([], 1, "no GPU"),
        ([0, 0], 1, "no GPU"),
        ([1], 1, "one GPU"),
        ([8], 8, "8 GPUs"),
        ([4, 4], 4, "4 on other nodes stay free"),
        ([0, 4, 1], 4, "1 on other nodes"),
        ([1, 1, 1, 1], 1, "set train.workers=4"),
    ],
)
def test_one_node_with_several_gpus_comes_before_several_nodes(
    gpus: list[int], workers: int, said: str
) -> None:
    found, reason = choose(gpus)
    assert found == workers and said in reason


def test_each_worker_needs_an_image_of_the_step() -> None:
    assert choose([8], most=3) == (3, "a step has 3 images, and each worker needs one")


def test_norms_of_all_workers_need_an_image_of_each() -> None:
    """A worker without one computed another's, and the statistics counted that twice."""

    def job(**train: Any) -> Job:
        by_epoch = train.pop("by_epoch", {})
        return validate(Job, {"table": {"uri": "x"}, "train": train, "by_epoch": by_epoch})

    refused = r"batch_size=4 not each of 5 workers.*sync_bn=false"
    for workers in (5, [2, 5]):
        with pytest.raises(ConfigError, match=refused):
            job(workers=workers, batch_size=4, sync_bn=True)
        job(workers=workers, batch_size=4)
        job(workers=workers, batch_size="auto", sync_bn=True)
        fine = job(workers=workers, batch_size=5, sync_bn=True)
        # Nor do later epochs have too few, or a trial.
        with pytest.raises(ConfigError, match=refused):
            job(workers=workers, sync_bn=True, by_epoch={2: {"train.batch_size": 4}})
        texts = {"train.batch_size": "choice(4, 5)"}
        with pytest.raises(ConfigError, match=refused):
            parse.parse(texts, fine.training)


def test_a_champion_with_a_worker_too_many_can_be_read() -> None:
    """It was trained before that was refused, and no retrain could begin with its settings."""
    train = {"workers": [2, 16], "batch_size": 8, "sync_bn": True}
    theirs = validate(TrainJob, {"table": {"uri": "x"}, "train": train})
    again = replace(theirs, {"train.lr": 0.01})
    assert again.train.most_workers == 16
    parse.parse({"train.lr": "choice(0.01, 0.02)"}, theirs)


def test_workers_that_span_nodes_are_warned_of() -> None:
    assert "One node with 4 GPUs" in str(spans_nodes(4, [1, 1, 1, 1]))
    for workers, gpus in ((4, [4, 1]), (1, [1]), (2, []), (2, [0, 0])):
        assert spans_nodes(workers, gpus) is None


def test_auto_counts_as_one_until_the_cluster_is_known() -> None:
    cfg = validate(TrainConfig, {"workers": "auto"})
    assert (cfg.fewest_workers, cfg.most_workers, cfg.elastic) == (1, 1, False)
    with pytest.raises(ConfigError, match="or auto"):
        validate(TrainConfig, {"workers": "all"})
