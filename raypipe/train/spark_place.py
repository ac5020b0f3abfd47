"""Whether a Spark application can run the workers of a training (`train.launcher`)."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

from raypipe.cluster import spark_session
from raypipe.cluster.connect import prepare_environment
from raypipe.cluster.spark_room import Wanted, ask, room_of
from raypipe.cluster.spark_session import Purpose
from raypipe.errors import ClusterError, ConfigError
from raypipe.train.job import TrainJob
from raypipe.train.settings import TrainConfig

SETTING = "train.launcher=torch_distributor"
PURPOSE = Purpose(
    who="the training",
    setting=SETTING,
    instead="train.launcher=ray",
    alone="train.launcher=ray",
    fewer="train.workers",
)
GPUS = "spark.task.resource.gpu.amount"
ENCRYPTED = "spark.ssl.enabled", "pytorch.spark.distributor.ignoreSsl"
SAME = "torch", "numpy"  # what the driver pickles, the executors must read


def check(job: TrainJob) -> None:
    """Raise ConfigError for settings that need Ray on the nodes that train."""
    refused = {
        "model.mode=frozen": job.model.mode == "frozen",
        f"feed.carrier={job.feed.carrier}": job.feed.carrier in ("cache", "offload"),
        f"cluster.address={job.cluster.address}": job.cluster.address
        not in ("auto", "local", "none"),
    }
    fix = {"model": "model.mode=finetune", "feed": "feed.carrier=threads"}
    for setting, is_wrong in refused.items():
        if is_wrong:
            other = fix.get(setting.partition(".")[0], "cluster.address=none")
            raise ConfigError(
                f"{SETTING} trains without Ray",
                got=setting,
                fix=f"Set {other}, or train.launcher=ray",
            )


def refuse(job: TrainJob, what: str, other: str = "") -> None:
    """Raise ConfigError if the job names this launcher, where `what` needs Ray.

    other: another way out.
    """
    if job.train.launcher != "ray":
        fix = " or ".join(filter(None, ["Set train.launcher=ray", other]))
        raise ConfigError(f"{what} needs Ray", got=SETTING, fix=fix)


def require_room(job: TrainJob) -> None:
    """Wait until the executors have room for the workers. Raises ClusterError if they have not."""
    prepare_environment()
    session = spark_session.get(PURPOSE)
    told = ask(session, _versions, PURPOSE)
    own = _versions(0)
    if told != own:
        differing = [f"{name} {told[name]} there, {own[name]} here" for name in own]
        raise ClusterError(
            "The Spark executors are not as this driver",
            got="; ".join(line for line in differing if line.split()[1] != line.split()[3]),
            rule="They read what the driver has pickled",
            fix="Install the same there, and set PYSPARK_PYTHON to that Python",
        )
    conf = session.sparkContext.getConf()
    _check_conf(job.train, conf)
    gpu = uses_gpu(job.train, conf)
    wanted = Wanted(job.train.most_workers, int(conf.get("spark.task.cpus", "1")), int(gpu))
    room_of(session, wanted, 0, PURPOSE, may_grow=False)


def _versions(_: int) -> dict[str, str]:
    """Of Python, raypipe and what pickles depend on; "none" where it is missing."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in ("raypipe", *SAME):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def _check_conf(cfg: TrainConfig, conf: Any) -> None:
    """Raise ClusterError for what TorchDistributor, or a stage of barrier tasks, refuses."""
    on = {name: conf.get(name, "false") == "true" for name in ENCRYPTED}
    gpus = conf.get(GPUS, "0")
    if conf.get("spark.dynamicAllocation.enabled", "false") == "true":
        got, fix = "spark.dynamicAllocation.enabled=true", "Start Spark without it"
    elif on[ENCRYPTED[0]] and not on[ENCRYPTED[1]]:
        got = f"{ENCRYPTED[0]}=true"
        fix = f"Set {ENCRYPTED[1]}=true in Spark if gradients may travel unencrypted"
    elif cfg.gpu is True and gpus != "1":
        got, fix = f"{GPUS}={gpus} and train.gpu=true", f"Start Spark with {GPUS}=1"
    else:
        return
    raise ClusterError(
        "Spark cannot run the workers of a training",
        got=got,
        rule="They are barrier tasks with at most one GPU each",
        fix=f"{fix}, or set train.launcher=ray",
    )


def uses_gpu(cfg: TrainConfig, conf: Any) -> bool:
    """Does each worker get a GPU? `train.gpu=auto`: yes if Spark gives one to each task."""
    return conf.get(GPUS, "0") == "1" if cfg.gpu == "auto" else cfg.gpu


def expected(job: TrainJob) -> tuple[dict[str, float], int, str]:
    """What a plan counts with, on how many nodes, and where; starts no Spark."""
    import torch

    gpu = torch.cuda.is_available() if job.train.gpu == "auto" else job.train.gpu
    workers = float(job.train.most_workers)
    place = "executors of Spark, which a plan does not start; measured as if they were this machine"
    return {"CPU": workers, "GPU": workers * gpu}, 1, place


def nodes() -> int:
    """How many machines the application runs on, the driver's included."""
    tracker = spark_session.get(PURPOSE).sparkContext._jsc.sc().statusTracker()
    return len({info.host() for info in tracker.getExecutorInfos()})
