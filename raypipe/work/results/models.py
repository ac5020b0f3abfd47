"""What verbs return that make a model: a training, a search, and what they registered."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from raypipe.config import RunConfig
from raypipe.costs.spent import Spent
from raypipe.registry.runs import KEY
from raypipe.registry.versions import ModelVersion
from raypipe.report.formats import begun
from raypipe.search import finished, refit
from raypipe.search import page as search_page
from raypipe.search.ledger import Ledger
from raypipe.search.result import SearchResult
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.measure.utilisation import Utilisation
from raypipe.train.publish import CALIBRATION
from raypipe.train.unseen import Calibrated
from raypipe.work.result import Facts, Result, prepared_from
from raypipe.work.tables import Table, leaderboard

PHASES = "data", "augment", "forward", "backward", "optimizer", "other"


@dataclass(frozen=True)
class Registered:
    """A model version, the champion after it was registered, and the MLflow store of both.

    champion: None if there was one, and the alias was taken away since.
    """

    model: ModelVersion
    champion: ModelVersion | None
    mlflow_uri: str

    def facts(self, metrics: Mapping[str, float], config: Path) -> Facts:
        """config: a file that names the store, for the command that promotes this version."""
        # Metrics of cost are told apart; a refit has no validation metrics at all.
        judged = {k: v for k, v in metrics.items() if k.startswith("val_")}
        # Only the first model becomes champion by itself.
        way = f"raypipe promote {shlex.quote(str(config))} --version {self.model.version}"
        if self.champion is None:
            named = (
                f"{self.model}; there was a champion before, and now there is none: nothing has "
                f"compared this version; {way} makes it champion"
            )
        elif self.model.version == self.champion.version:
            named = f"{self.model} (champion)"
        else:
            named = f"{self.model}; champion stays {self.champion}; {way} changes that"
        facts: Facts = {"validation": judged} if judged else {}
        if CALIBRATION in self.model.tags:
            facts["calibrated"] = str(Calibrated(**json.loads(self.model.tags[CALIBRATION])))
        return {**facts, "model": named, "mlflow": self.mlflow_uri}

    def summary(self) -> Facts:
        return {
            "model": str(self.model),
            "champion": None if self.champion is None else str(self.champion),
        }

    def key(self, training: str) -> str:
        """Names the files of this version. Several packages of one `training`, as with and without
        calibration, are apart."""
        return self.model.tags.get(KEY) or training

    def files(self, run: RunConfig) -> dict[str, Path]:
        """The package, where this folder built it."""
        key = self.model.tags.get(KEY)
        return {"package": run.path / "packages" / key} if key else {}


@dataclass(frozen=True, repr=False)
class Trained(Result):
    """One training run and its registered model. `test`: metrics on the test split."""

    job: TrainJob
    result: TrainResult
    registered: Registered
    spent: Spent
    test: Mapping[str, float] = field(default_factory=dict)
    used: Utilisation | None = None

    def key(self) -> str:
        return self.registered.key(self.result.key)

    def files(self) -> dict[str, Path]:
        folder = self.job.folder(self.result.key)
        made = _of_folder(folder, "config.yaml", "result.json", "usage.json")
        return {**made, **self.registered.files(self.job.run)}

    def facts(self) -> Facts:
        result, train = self.result, self.job.train
        config = self.job.folder(result.key) / "config.yaml"
        facts = self.registered.facts(result.metrics, config)
        if self.job.model.views > 1:
            facts["validated"] = f"with one view of an image; predicts over {self.job.model.views}"
        if self.test:
            facts["test"] = self.test
        facts |= prepared_from(result.version, "prepared from")
        facts[f"{train.result} epoch"] = result.best_epoch + 1
        facts["stopped"] = result.stopped or f"after all {train.epochs} epochs"
        return facts | _cost(self.job, result) | _nodes(self.used) | self.spent.facts()

    def summary(self) -> Facts:
        result = self.result
        return {
            **self.registered.summary(),
            "table": str(result.version),
            **prepared_from(result.version),
            "metrics": result.metrics,
            "test": self.test,
            "epochs": len(result.history),
            "stopped": result.stopped,
            "spent": self.spent.summary(),
            "usage": self.used.summary() if self.used else None,
            "mlflow_uri": self.registered.mlflow_uri,
        }


def _nodes(used: Utilisation | None) -> dict[str, str]:
    """How busy the nodes were; nothing where a run was too short to say."""
    return {"nodes": used.text()} if used else {}


def _cost(job: TrainJob, result: TrainResult) -> Facts:
    """What the last epoch's steps took, and where to look further."""
    last = result.history[-1]
    folder = job.folder(result.key)
    facts: Facts = {}
    # A kept result of an older version may lack the times.
    if last.get("step_s"):
        step_s = last["step_s"]
        shares = [f"{p} {last[f'{p}_s'] / step_s:.0%}" for p in PHASES if f"{p}_s" in last]
        # Only DDP can tell it; it overlaps with the backward pass.
        waited = last.get("communication_s")
        if waited is not None:
            shares.append(f"communication {waited / step_s:.0%} (in backward)")
        facts["a step"] = f"{step_s * 1000:,.1f} ms: {', '.join(shares)}"
    units = {"mfu": ".1%", "gflops_per_s": ",.0f", "gpu_memory_mb": ",.0f", "cpu_memory_mb": ",.0f"}
    facts["a worker"] = {
        name: format(last[name], unit) for name, unit in units.items() if name in last
    }
    if job.train.tensorboard:
        facts["tensorboard"] = f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}"
    if job.train.profile:
        # A finished run is not traced again.
        traces = sorted((folder / "profile").glob("*.json"))
        none = f"none: the run had finished before, or it never came to {job.train.profile}"
        facts["profile"] = traces or none
    return facts


@dataclass(frozen=True, repr=False)
class Searched(Result):
    """A search and its registered model.

    report: the HTML page. best_config: the best trial's job, for `raypipe train`.
    """

    result: SearchResult
    registered: Registered
    report: Path
    best_config: Path
    spent: Spent
    test: Mapping[str, float] = field(default_factory=dict)
    used: Utilisation | None = None
    ledger: Ledger = field(default_factory=Ledger)

    @property
    def leaderboard(self) -> Table:
        price = self.spent.price
        a_second = price.usd_per_device_s if price else None
        return leaderboard(self.result.metric, self.result.standings, usd_per_device_s=a_second)

    def tables(self) -> list[Table]:
        return [self.leaderboard]

    def report_page(self) -> str:
        return str(self.report)

    def key(self) -> str:
        return self.registered.key(self.result.best.key)

    def files(self) -> dict[str, Path]:
        names = ("config.yaml", finished.BEST, "result.json", "schedule.yaml", "usage.json")
        made = _of_folder(self.result.folder, *names)
        return {**super().files(), **made, **self.registered.files(self.result.job.run)}

    def facts(self) -> Facts:
        result = self.result
        facts = self.registered.facts(result.best.metrics, self.best_config)
        if self.test:
            facts["test"] = self.test
        if result.stopped:
            facts["stopped"] = result.stopped
        facts |= prepared_from(result.best.version, "prepared from")
        facts |= search_page.first_answer(result)
        # A mean belongs to no trial.
        facts |= search_page.combined(result)
        facts |= refit.summary(result)
        facts["images decoded"] = f"{result.decoded}, for {begun(result.drawn, result.heads)}"
        whole = f"of the {result.full_epochs} that all trials would take to their ends"
        facts["epochs"] = f"{result.epochs} {whole}"
        facts |= search_page.validated(result) | search_page.ranking(result)
        again = f"raypipe train {shlex.quote(str(self.best_config))}"
        if result.members:
            again += " (one trial alone: a mean of several is not trained)"
        facts |= _nodes(self.used) | self.spent.facts() | self.ledger.facts()
        return {**facts, "report": self.report, "again": again}

    def summary(self) -> Facts:
        result = self.result
        return {
            **self.registered.summary(),
            "table": str(result.best.version),
            **prepared_from(result.best.version),
            "metrics": result.best.metrics,
            "test": self.test,
            "soup": [] if result.shares else list(result.members),
            "ensemble": dict(zip(result.members, result.shares, strict=False)),
            "first_answer": search_page.first_answer(result).get("first answer"),
            "refitted": result.refitted,
            "again": list(result.again),
            "epochs": {"run": result.epochs, "full": result.full_epochs},
            "report": str(self.report),
            "best_config": str(self.best_config),
            "trials": result.drawn,
            "heads": result.heads,
            "trial_costs": self._trial_costs(),
            "decoded": result.decoded,
            "best": result.trials[0].changes,
            "ahead": [asdict(one) for one in result.ahead],
            **_if_budget(self.ledger),
            "notes": self.ledger.notes,
            "stopped": result.stopped,
            "spent": self.spent.summary(),
            "usage": self.used.summary() if self.used else None,
            "mlflow_uri": self.registered.mlflow_uri,
        }

    def _trial_costs(self) -> list[Facts]:
        price = self.spent.price
        a_second = price.usd_per_device_s if price else None
        return [
            {
                "trial": trial.name,
                "epochs": trial.epochs,
                "seconds": trial.seconds,
                "device_s": trial.device_s,
                "usd": None if a_second is None else trial.device_s * a_second,
            }
            for trial in self.result.trials
        ]


def _if_budget(ledger: Ledger) -> Facts:
    summary = ledger.summary()
    return {} if summary is None else {"budget": summary}


def _of_folder(folder: Path, *names: str) -> dict[str, Path]:
    """Files of a run's folder, as far as they exist."""
    return {name: folder / name for name in names}
