"""How many workers `train.workers=auto` takes, and which numbers are bad ones."""

from __future__ import annotations

import pytest

from raypipe.config import validate
from raypipe.errors import ConfigError
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
    for workers in (5, [2, 5]):
        with pytest.raises(ConfigError, match=r"batch_size=4 not each of 5 workers.*sync_bn=false"):
            validate(TrainConfig, {"workers": workers, "batch_size": 4, "sync_bn": True})
        validate(TrainConfig, {"workers": workers, "batch_size": 4})
        validate(TrainConfig, {"workers": workers, "batch_size": 5, "sync_bn": True})
        validate(TrainConfig, {"workers": workers, "batch_size": "auto", "sync_bn": True})


def test_workers_that_span_nodes_are_warned_of() -> None:
    assert "One node with 4 GPUs" in str(spans_nodes(4, [1, 1, 1, 1]))
    for workers, gpus in ((4, [4, 1]), (1, [1]), (2, []), (2, [0, 0])):
        assert spans_nodes(workers, gpus) is None


def test_auto_counts_as_one_until_the_cluster_is_known() -> None:
    cfg = validate(TrainConfig, {"workers": "auto"})
    assert (cfg.fewest_workers, cfg.most_workers, cfg.elastic) == (1, 1, False)
    with pytest.raises(ConfigError, match="or auto"):
        validate(TrainConfig, {"workers": "all"})
