"""One worker fine-tunes where no Ray is: in this process, with the same result as on a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.cluster.connect import ClusterConfig, connect
from raypipe.config import save
from raypipe.errors import ClusterError
from raypipe.train.launch import check_workers

from .. import forked
from .conftest import Jobs

RUN = """
import sys, ray
from pathlib import Path
from raypipe.config import load
from raypipe.train import trainer, unseen
from raypipe.train.job import TrainJob
job = load(TrainJob, Path(sys.argv[1]), [])
planned = trainer.plan(job)
result = trainer.run(planned)
assert not ray.is_initialized()
tested = unseen.test(planned, result)
print(len(result.history), tested["test_accuracy"], result.metrics["val_accuracy"])
"""


def test_a_single_worker_needs_no_cluster(jobs: Jobs, tmp_path: Path) -> None:
    save(
        jobs(**{"train.epochs": 2, "cluster.address": "none", "feed.test": "val"}),
        tmp_path / "job.yaml",
    )
    done = forked.run(RUN, tmp_path / "job.yaml")
    assert done.returncode == 0, done.stderr
    epochs, tested, validated = done.stdout.split()
    assert epochs == "2" and float(tested) == pytest.approx(float(validated))


def test_what_needs_a_cluster_says_so(jobs: Jobs) -> None:
    with pytest.raises(ClusterError, match=r"needs a cluster.*Set cluster\.address=auto"):
        connect(ClusterConfig(address="none"))
    assert (
        not jobs().needs_cluster
        and jobs(**{"train.workers": 2}).needs_cluster
        and jobs(**{"feed.carrier": "cache"}).needs_cluster
    )
    with pytest.raises(
        ClusterError, match=r"More workers than the cluster has.*Set train\.workers=1"
    ):
        check_workers(jobs(**{"train.workers": 2}).train, {"CPU": 1.0, "GPU": 0.0})
