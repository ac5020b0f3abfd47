"""What verbs return: the facts that people see, the summary that --json prints, and a repr.

In a notebook a result is shown as its tables and facts, with a link to its report.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from raypipe.config import RunConfig
from raypipe.costs.spent import Spent
from raypipe.registry.promote import ModelVersion
from raypipe.registry.tracking import KEY
from raypipe.search import page as search_page
from raypipe.search import refit
from raypipe.search.leaderboard import SearchResult
from raypipe.search.ledger import Ledger
from raypipe.serve.batch import PredictResult
from raypipe.serve.stream import StreamResult
from raypipe.tables.clean import CleanResult
from raypipe.tables.ingest import IngestResult
from raypipe.train.job import TrainJob, TrainResult
from raypipe.train.measure.utilisation import Utilisation
from raypipe.train.publish import CALIBRATION
from raypipe.train.unseen import Calibrated
from raypipe.watch import feedback
from raypipe.watch.check import CheckResult
from raypipe.watch.comparison import Comparison
from raypipe.watch.feedback import Feedback
from raypipe.watch.power import Power, as_facts
from raypipe.watch.retrain import RetrainResult
from raypipe.watch.severity import Severity
from raypipe.watch.windows import Waiting, Window
from raypipe.work.result import Facts, Result, prepared_from
from raypipe.work.tables import LEVEL, Table, comparison, evidence, leaderboard, limits

COUNTS = (
    "seen accepted present dropped other_split returned relabelled labels_removed duplicates "
    "quarantined reasons splits"
)
PHASES = "data", "augment", "forward", "backward", "optimizer", "other"


@dataclass(frozen=True, repr=False)
class Ingested(Result):
    """An ingest, or with `dry_run` how its source was understood."""

    table: str
    done: IngestResult | None
    understood: Mapping[str, Any]

    def facts(self) -> Facts:
        done = self.done
        # A dry run: nothing was counted, because nothing was read.
        if done is None:
            return {**self.understood, "table": f"{self.table}: nothing was written"}
        return {
            "table": done.version,
            "accepted": done.accepted,
            "already there": done.present,
            **_if_any("of these dropped by an earlier cleaning", done.dropped),
            **_if_any("of these in another split, where they stay", done.other_split),
            **_if_any("back after an earlier cleaning by other rules", done.returned),
            "relabelled": done.relabelled,
            **_if_any("of these without a label now", done.labels_removed),
            "duplicates": done.duplicates,
            "quarantined": done.reasons or 0,
            "unlabelled": done.unlabelled,
            "splits": done.splits,
        }

    def summary(self) -> Facts:
        if self.done is None:
            return {"understood": self.understood, "dry_run": True}
        # The names are those of IngestResult, and stay what scripts know.
        counts = {name: getattr(self.done, name) for name in COUNTS.split()}
        return {"table": str(self.done.version)} | counts


def _if_any(name: str, count: int) -> dict[str, int]:
    """A line that is of interest only where it counts something."""
    return {name: count} if count else {}


@dataclass(frozen=True, repr=False)
class Cleaned(Result):
    """A cleaning, and the tag of the version without the dropped rows."""

    done: CleanResult
    tag: str

    def facts(self) -> Facts:
        done = self.done
        return {
            "looked at": f"{done.images} images of {done.raw}",
            "found": done.counts or "nothing",
            "dropped": done.dropped,
            f"tag {self.tag}": done.clean,
        }

    def summary(self) -> Facts:
        done = self.done
        return {
            "table": str(done.clean),
            "images": done.images,
            "dropped": done.dropped,
            "verdicts": done.counts,
        }


def _of_folder(folder: Path, *names: str) -> dict[str, Path]:
    """Files of a run's folder, as far as they exist."""
    return {name: folder / name for name in names}


@dataclass(frozen=True)
class Registered:
    """A model version, the champion after it was registered, and the MLflow store of both."""

    model: ModelVersion
    champion: ModelVersion
    mlflow_uri: str

    def facts(self, metrics: Mapping[str, float], config: Path) -> Facts:
        """config: a file that names the store, for the command that promotes this version."""
        # Metrics of cost are told apart; a refit has no validation metrics at all.
        judged = {k: v for k, v in metrics.items() if k.startswith("val_")}
        # Only the first model becomes champion by itself.
        if self.model.version == self.champion.version:
            named = f"{self.model} (champion)"
        else:
            file = shlex.quote(str(config))
            way = f"raypipe promote {file} --version {self.model.version} changes that"
            stays = f"champion stays {self.champion}; {way}"
            named = f"{self.model}; {stays}"
        facts: Facts = {"validation": judged} if judged else {}
        if CALIBRATION in self.model.tags:
            facts["calibrated"] = str(Calibrated(**json.loads(self.model.tags[CALIBRATION])))
        return {**facts, "model": named, "mlflow": self.mlflow_uri}

    def summary(self) -> Facts:
        return {"model": str(self.model), "champion": str(self.champion)}

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
        return self.result.key

    def files(self) -> dict[str, Path]:
        folder = self.job.folder(self.result.key)
        made = _of_folder(folder, "config.yaml", "result.json", "usage.json")
        return {**made, **self.registered.files(self.job.run)}

    def facts(self) -> Facts:
        result, train = self.result, self.job.train
        config = self.job.folder(result.key) / "config.yaml"
        facts = self.registered.facts(result.metrics, config)
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
        facts["tensorboard"] = f"tensorboard --logdir {folder / 'tensorboard'}"
    if job.train.profile:
        # A finished run is not traced again.
        traces = sorted((folder / "profile").glob("*.json"))
        none = f"none: the run had finished before, or it never came to {job.train.profile}"
        facts["profile"] = traces or none
    return facts


def _if_budget(ledger: Ledger) -> Facts:
    summary = ledger.summary()
    return {} if summary is None else {"budget": summary}


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
        return self.result.best.key

    def files(self) -> dict[str, Path]:
        names = ("config.yaml", "best.yaml", "result.json", "schedule.yaml", "usage.json")
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
        trials = len(result.trials)
        facts["images decoded"] = f"{result.decoded}, for {trials} trials together"
        whole = f"of the {result.full_epochs} that all trials would take to their ends"
        facts["epochs"] = f"{result.epochs} {whole}"
        facts |= search_page.ranking(result)
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
            "epochs": {"run": result.epochs, "full": result.full_epochs},
            "report": str(self.report),
            "best_config": str(self.best_config),
            "trials": len(result.trials),
            "trial_costs": self._trial_costs(),
            "decoded": result.decoded,
            "best": result.trials[0].changes,
            "ahead": [asdict(one) for one in result.ahead],
            **_if_budget(self.ledger),
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


@dataclass(frozen=True, repr=False)
class Predicted(Result):
    """Predictions of a table; `done.out` is the table that holds them."""

    done: PredictResult
    spent: Spent

    def key(self) -> str:
        return self.done.key

    def facts(self) -> Facts:
        done = self.done
        return {
            "model": done.model,
            "images": f"{done.images} of {done.table}",
            **prepared_from(done.table, "prepared from"),
            "labels": done.labels,
            **({"do not decode": done.broken} if done.broken else {}),
            **({"new": f"{done.made} since v{done.since}"} if done.since is not None else {}),
            "predictions": done.out,
            **self.spent.facts(),
        }

    def summary(self) -> Facts:
        done = self.done
        return {
            "predictions": str(done.out),
            "model": done.model,
            "table": str(done.table),
            **prepared_from(done.table),
            "images": done.images,
            "broken": done.broken,
            "labels": done.labels,
            "made": done.made,
            "since": done.since,
            "spent": self.spent.summary(),
        }


@dataclass(frozen=True, repr=False)
class Followed(Result):
    """A stream that was stopped, or had nothing left to do."""

    done: StreamResult

    def facts(self) -> Facts:
        done = self.done
        return {
            "model": done.model or "–",
            "table": done.table if done.version is None else f"{done.table}@v{done.version}",
            "images": f"{done.rows} in {done.micro_batches} micro-batches",
            "predictions": done.out,
        }

    def summary(self) -> Facts:
        return asdict(self.done)


@dataclass(frozen=True, repr=False)
class Drifted(Result):
    """A drift check."""

    checked: CheckResult

    @property
    def is_drift(self) -> bool:
        return self.checked.report.is_drift

    @property
    def p_value(self) -> float:
        return self.checked.report.p_value

    def tables(self) -> list[Table]:
        return [evidence(self.checked)]

    def report_page(self) -> str:
        return self.checked.page

    def key(self) -> str:
        return Path(self.checked.page).stem.removeprefix("drift-")

    def facts(self) -> Facts:
        notes = self.checked.report.notes
        return {
            **prepared_from(self.checked.table, "prepared from"),
            "what it costs": str(self.checked.report.severity),
            **({"labels say": labels} if (labels := str(self.checked.report.feedback)) else {}),
            **({"tests": "; ".join(notes)} if notes else {}),
            "report": self.checked.page,
        }

    def summary(self) -> Facts:
        report = self.checked.report
        return {
            "is_drift": report.is_drift,
            "p_value": report.p_value,
            "model": self.checked.model,
            "table": str(self.checked.table),
            **prepared_from(self.checked.table),
            **window_facts(self.checked.window),
            "evidence": report.evidence,
            "severity": severity_facts(report.severity),
            "feedback": feedback_facts(report.feedback),
            "engine": report.engine,
            "notes": report.notes,
            "report": self.checked.page,
        }


def severity_facts(found: Severity) -> Facts:
    """The estimated accuracy and its loss; without one, null and why."""
    loss = found.loss
    return {
        "accuracy": found.accuracy,
        "low": found.low,
        "high": found.high,
        "known": found.known,
        "loss": loss[0] if loss else None,
        "why_not": found.why_not or None,
    }


def feedback_facts(says: Feedback) -> Facts | None:
    """What the labels that came say; None where none did."""
    return None if says.measured is None else feedback.as_row(says)


def window_facts(window: Window | None) -> Facts:
    """Which images were looked at; nothing for a batch that was named by its version."""
    if window is None or not window.number:
        return {}
    known: Facts = {"window": window.number, "since": window.since, "again": window.again}
    return known | ({"missed": window.missed} if window.missed else {})


@dataclass(frozen=True, repr=False)
class Powered(Result):
    """What a drift check can see."""

    power: Power
    champion: ModelVersion

    def facts(self) -> Facts:
        return {"champion": str(self.champion), **as_facts(self.power)}

    def summary(self) -> Facts:
        return {"champion": str(self.champion), **asdict(self.power), "holds": self.power.holds}


@dataclass(frozen=True, repr=False)
class Waited(Result):
    """A drift check that had too few new images: they stay for the next one."""

    waiting: Waiting
    is_drift = False

    def facts(self) -> Facts:
        missed = {"missed": self.waiting.missed} if self.waiting.missed else {}
        return {"no check": str(self.waiting), **missed}

    def summary(self) -> Facts:
        w = self.waiting
        known = {"is_drift": False, "p_value": None, "table": str(w.table), "since": w.since}
        missed = {"missed": w.missed} if w.missed else {}
        return known | {"waiting": {"images": w.images, "needed": w.needed}} | missed


@dataclass(frozen=True, repr=False)
class Retrained(Result):
    """A decision about a challenger, the champion after it, and the drift check before it."""

    done: RetrainResult
    champion: ModelVersion | None
    checked: CheckResult | None = None
    spent: Spent | None = None
    run: RunConfig | None = None

    @property
    def promoted(self) -> bool:
        return self.done.decision.act and self.done.challenger is not None

    def tables(self) -> list[Table]:
        found = [] if self.checked is None else [evidence(self.checked)]
        # Without a challenger there is nothing to compare.
        more = [comparison(self.done), limits(self.done)]
        return [*found, *(table for table in more if table is not None)]

    def report_page(self) -> str | None:
        return None if self.checked is None else self.checked.page

    def key(self) -> str:
        # Without a challenger, the drift check is what there is.
        return self.done.key or (Path(self.checked.page).stem if self.checked else "")

    def files(self) -> dict[str, Path]:
        challenger, run = self.done.challenger, self.run
        if challenger is None or run is None:
            return super().files()
        champion = self.champion or challenger
        return {**super().files(), **Registered(challenger, champion, "").files(run)}

    def facts(self) -> Facts:
        report = {} if self.checked is None else {"report": self.checked.page}
        took = self.spent.facts() if self.spent else {}
        return {**report, **took, "decision": self.done.decision.reason}

    def summary(self) -> Facts:
        done = self.done
        named = {one.name: _slice(one.judged) if one.judged else None for one in done.named}
        return {
            "promoted": self.promoted,
            "reason": done.decision.reason,
            "champion": str(self.champion),
            "challenger": str(done.challenger) if done.challenger else None,
            "spent": self.spent.summary() if self.spent else None,
            "slices": {s.slice: _slice(s) for s in done.slices},
            **({"named_slices": named} if named else {}),
            **({"limits": done.measured.as_json()} if done.measured else {}),
        }


def _slice(s: Comparison) -> Facts:
    return {
        "champion": s.champion,
        "challenger": s.challenger,
        "measure": "accuracy" if s.unit is None else "mean absolute error",
        "images": s.images,
        "p_value": s.p_value,
        "won": s.won,
        "lost": s.lost,
        "at_worst": s.at_worst(LEVEL),
    }
