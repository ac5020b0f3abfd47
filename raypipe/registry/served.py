"""The MLflow flavour of a model package: `mlflow.pyfunc.load_model`, `spark_udf`, `models serve`.

MLflow stores this file as code ("models from code"), so no pickle is written or read. It runs in
the user's environment, and may import only what `mlflow_model.requirements` lists.

The seal. MLflow loads files and knows no tag of the registered version. So the seal stands in the
MLmodel file, too, as `seal` of the model's config, and the package is checked against it before
anything of it is loaded. That proves that the package is the one that MLmodel was written for: a
flipped byte, a pickle in place of weights, weights and manifest swapped together are refused. It
does not prove who wrote MLmodel. Whoever can write the whole folder can write another seal, or
other code: MLflow runs the stored code first. To be sure of that, load by `raypipe.load`, which
asks the registry; or pass the tag's value, `load_model(uri, model_config={"seal": tag})`, for the
package at least.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from mlflow.exceptions import MlflowException
from mlflow.models import set_model
from mlflow.pyfunc.model import PythonModel

# Beside the stored copy of this file lies raypipe, one zip: see mlflow_model.py. An installed
# raypipe comes before it: in a notebook that trains, too, a zip that hides it could draw no report.
_RAYPIPE = Path(__file__).with_name("code") / "raypipe.zip"
if _RAYPIPE.is_file():
    sys.path.append(str(_RAYPIPE))

try:
    from raypipe.errors import DataError, RaypipeError
    from raypipe.registry.answers import Ask, table
    from raypipe.registry.inputs import Addresses, given
    from raypipe.registry.package import Package
except ImportError as e:
    if not (e.name or "").startswith("raypipe."):
        raise  # a library is missing
    raise MlflowException(
        f"The raypipe that is installed cannot read this model: {e}. Install the version that made "
        "it, or none: the model holds one"
    ) from e


class ServedImageModel(PythonModel):  # type: ignore[misc]
    """A column `image` in, one row an image out: see inputs.py and answers.py.

    An image that does not decode, or has no finite answer, is a row with `error`. A wrong call
    raises MlflowException, which the REST server answers with 400 and one line.
    """

    def load_context(self, context: Any) -> None:
        config = context.model_config or {}
        self.package = Package(Path(context.artifacts["package"]), config.get("seal"))
        self.addresses = Addresses(tuple(config.get("addresses") or ()))
        # A server's first call should not wait for the weights.
        self.package.model  # noqa: B018

    # MLflow makes schemas of type hints, except of this one; without any it warns whoever loads.
    def predict(
        self, context: Any, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        try:
            ask = Ask.of(params)
            ask.check(self.package.task)
            threads = min(8, os.cpu_count() or 1)
            received = given(_values(model_input), self.addresses, threads)
            attempt = self.package.attempt_finite(received.images, threads)
            return table(attempt, received.errors, self.package.task, ask)
        except RaypipeError as e:
            raise MlflowException.invalid_parameter_value(str(e)) from None


def _values(model_input: Any) -> Sequence[Any]:
    """The images of a call, one an entry."""
    if isinstance(model_input, pd.DataFrame):
        if "image" not in model_input:
            raise DataError(
                "There is no column of images",
                got=[str(name) for name in model_input.columns],
                rule="Its name is `image`",
            )
        return model_input["image"].tolist()
    if isinstance(model_input, dict):
        return _values(pd.DataFrame({"image": list(model_input.get("image", ()))}))
    # A batch of pixels BHWC; one image has three axes.
    if isinstance(model_input, np.ndarray) and model_input.ndim == 3:
        return [model_input]
    return list(model_input)


set_model(ServedImageModel())
