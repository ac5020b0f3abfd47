"""The whole configuration: what one YAML may hold. Each section belongs to one room."""

from __future__ import annotations

from typing import Any

from pydantic import model_validator
from typing_extensions import Self

from raypipe.artifacts.settings import ArtifactsConfig
from raypipe.costs.settings import CostConfig
from raypipe.registry.tracking import LEAST_COPIED
from raypipe.search.settings import SearchConfig
from raypipe.serve.batch import PredictConfig
from raypipe.serve.evaluation import EvaluateConfig
from raypipe.serve.online.settings import ServeConfig
from raypipe.tables.clean import CleanConfig
from raypipe.tables.ingest import IngestConfig
from raypipe.train.job import TrainSections
from raypipe.watch.decide import GateConfig
from raypipe.watch.detect import DriftConfig
from raypipe.watch.settings import WatchConfig


class Job(TrainSections):
    """Every verb takes the same YAML and hands each room the sections that it needs.

    `training` holds those of a training. A Job is no TrainJob, so nothing that trains gets more.
    """

    search: SearchConfig = SearchConfig()
    """Which settings are searched, in how many trials, and which trials continue."""
    predict: PredictConfig = PredictConfig()
    """What is predicted, and where the predictions go."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Which model is evaluated on which table, and how its slices are made."""
    serve: ServeConfig = ServeConfig()
    """How `raypipe serve` answers requests over HTTP."""
    drift: DriftConfig = DriftConfig()
    """The tests of a drift check."""
    watch: WatchConfig = WatchConfig()
    """The batch that is checked, and the retrain after drift."""
    gate: GateConfig = GateConfig()
    """When a challenger is better than the champion."""
    ingest: IngestConfig = IngestConfig()
    """Which images are added to the table, and how."""
    clean: CleanConfig = CleanConfig()
    """What counts as a duplicate or a bad image, and which of these are dropped."""
    cost: CostConfig = CostConfig()
    """The node type that the job runs on, and prices, for estimates of money."""
    artifacts: ArtifactsConfig = ArtifactsConfig()
    """Where copies of reports, packages and logs go."""

    @model_validator(mode="after")
    def _retrain_can_be_balanced(self) -> Self:
        # Else a retrain would say it, after the check, of feed.sampling.
        task = self.model.task
        if self.watch.retrain_sampling == "balanced" and task != "single_label":
            raise ValueError(
                f"watch.retrain_sampling=balanced needs one class an image, and model.task={task}. "
                "Set it to auto"
            )
        return self

    @model_validator(mode="after")
    def _accuracy_can_be_estimated(self) -> Self:
        # Not a rule of the section: a champion of before may have been trained with so few.
        images = self.registry.severity_images
        if 0 < images < LEAST_COPIED:
            raise ValueError(
                f"registry.severity_images={images} is too few for an estimate of the accuracy: it "
                f"needs {LEAST_COPIED}. Set 0 for no estimate"
            )
        return self

    @model_validator(mode="after")
    def _an_image_for_each(self) -> Self:
        # Not a rule of the section, for the same reason.
        job = self.training
        for one in (job, *(job.stage(epoch)[0] for epoch in self.by_epoch)):
            if why := one.train.too_few_images:
                raise ValueError(why)
        return self

    @model_validator(mode="before")
    @classmethod
    def _reference_as_watched(cls, tree: Any) -> Any:
        """What a registered model keeps of its reference is what the drift check asks for."""
        watch = tree.get("watch") if isinstance(tree, dict) else None
        registry = tree.get("registry", {}) if isinstance(tree, dict) else None
        if not isinstance(watch, dict) or not isinstance(registry, dict):
            return tree
        wanted = {name: watch[name] for name in ("domain", "group") if watch.get(name)}
        own = {name: value for name, value in registry.items() if value is not None}
        return {**tree, "registry": {**registry, **wanted, **own}} if wanted else tree
