"""The MLflow flavour of a model package. MLflow stores this file as code ("models from code"): no pickle is written or read."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

from raypipe.registry.package import Package

# MLflow wants a type hint it can turn into a schema, and has none for encoded images; the package brings its own signature.
warnings.filterwarnings("ignore", message=".*type hint.*predict.*", category=UserWarning)


class ServedImageModel(PythonModel):  # type: ignore[misc]
    """A column `image` of encoded bytes in; label, score of that label, and scores in class order out."""

    def load_context(self, context: Any) -> None:
        self.package = Package(Path(context.artifacts["package"]))

    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]  # MLflow takes hints for a schema
        images = list(
            model_input["image"] if isinstance(model_input, pd.DataFrame) else model_input
        )
        found = self.package.predict(images)
        return pd.DataFrame(
            {
                "label": found.labels,
                "score": found.scores_NC.max(axis=1),
                "scores": [row.tolist() for row in found.scores_NC],
            }
        )


set_model(ServedImageModel())
