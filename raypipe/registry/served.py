"""The MLflow flavour of a model package.

MLflow stores this file as code ("models from code"), so no pickle is written or read. It runs in
the user's environment, and may import only what `promote.requirements` lists.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pandas as pd
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

from raypipe.registry.package import Package

# MLflow warns that `predict` has no type hint which it can turn into a schema. It knows none for
# encoded images; the model is logged with its own signature.
warnings.filterwarnings("ignore", message=".*type hint.*predict.*", category=UserWarning)


class ServedImageModel(PythonModel):  # type: ignore[misc]
    """A column `image` of encoded bytes in; columns label, score and scores out.

    `score` is the highest of `scores`, which are in class order.
    """

    def load_context(self, context: Any) -> None:
        self.package = Package(Path(context.artifacts["package"]))

    # Without type hints: MLflow would make a schema of them.
    def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
        is_table = isinstance(model_input, pd.DataFrame)
        images = list(model_input["image"] if is_table else model_input)
        predictions = self.package.predict(images)
        return pd.DataFrame(
            {
                "label": predictions.labels,
                "score": predictions.scores_NC.max(axis=1),
                "scores": [row.tolist() for row in predictions.scores_NC],
            }
        )


set_model(ServedImageModel())
