"""Writes a model package: weights, reference and facts become the files that package.py reads.

The files of the folder are listed in package.py. The manifest is written last: a folder whose
writer was killed has none, and counts as incomplete.

Letters in names: N images, C classes, D features.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from raypipe.config import to_json
from raypipe.errors import DataError, one_line
from raypipe.images.measure import SEEN
from raypipe.models import own_code
from raypipe.models.ensemble import EnsembleModel
from raypipe.models.finite import require_rows, require_weights
from raypipe.models.predictor import Predictor, stored_weights
from raypipe.models.zoo import ImageModel, ModelConfig
from raypipe.registry.package import (
    AGAIN,
    FORMAT,
    MANIFEST,
    MEMBERS,
    OF_ENSEMBLE,
    Reference,
    sha256,
)


def build(
    folder: Path,
    model: Predictor,
    cfg: ModelConfig,
    classes: tuple[str, ...],
    reference: Reference,
    facts: dict[str, Any],
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a package into `folder`; `facts` (lineage, metrics) become part of package.json.

    cfg: the model's; of an ensemble its first member's. extra: further files by their name in the
    package, hashed as all are. Raises DataError for weights or reference arrays that are not
    finite, and for a `file:` model whose code cannot be packed.
    """
    # Check everything before the first file is written.
    weights = stored_weights(model)
    features_ND = reference.features_ND.astype(np.float32)
    scores_NC = reference.scores_NC.astype(np.float32)
    require_weights(weights, str(folder), AGAIN)
    require_rows(features_ND, "features", AGAIN)
    require_rows(scores_NC, "scores", AGAIN)

    ids = np.array(reference.ids, dtype=np.str_)
    arrays = io.BytesIO()
    kept: dict[str, Any] = {}
    if reference.looks_NK is not None:
        kept = {"looks": reference.looks_NK.astype(np.float32), "looks_columns": np.array(SEEN)}
    for name, texts in (("domains", reference.domains), ("groups", reference.groups)):
        if texts is not None:
            kept[name] = np.array(texts, np.str_)
    np.savez(arrays, features=features_ND, scores=scores_NC, ids=ids, **kept)
    info: dict[str, Any] = {
        "model": cfg.resolved().model_dump(mode="json"),
        "side_px": model.side_px,
        "classes": list(classes),
    }
    members = model.members if isinstance(model, EnsembleModel) else ()
    if members:
        info[MEMBERS] = [member.to_json() for member in members]
    files = {
        "package.json": to_json(info | facts, indent=2).encode(),
        "weights.safetensors": save(weights),
        "reference.npz": arrays.getvalue(),
    }
    for one in [member.model for member in members] or [cfg]:
        files |= _pack_code(one, len(classes))
    files |= dict(extra or {})
    manifest: dict[str, Any] = {"format": OF_ENSEMBLE if members else FORMAT}
    manifest |= {name: sha256(data) for name, data in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    # The manifest comes last: without it, the package counts as incomplete.
    (folder / MANIFEST).write_bytes(json.dumps(manifest).encode())
    return folder


def require_packable(cfg: ModelConfig, classes: int) -> None:
    """Raise DataError, before hours of training, for a `file:` model that no package could hold, or
    that a package would build in another way.
    """
    # Building it draws weights: nobody's random numbers may change by that.
    with torch.random.fork_rng(devices=[]):
        rebuilt = _packed(cfg, classes)[1]
        if rebuilt is None:
            return
        trained = ImageModel(cfg, classes)
    noise_BHWC = _noise(cfg.pixels)
    try:
        rebuilt.load_state_dict(trained.state_dict())
        with torch.inference_mode():
            one, other = (model.eval().embed(noise_BHWC) for model in (trained, rebuilt))
    except RuntimeError as e:
        why = one_line(str(e).splitlines()[-1], 200)
    else:
        if torch.allclose(one, other, rtol=1e-3, atol=1e-4 * float(one.abs().max())):
            return
        why = f"features of noise are {float((one - other).abs().max()):.2g} apart"
    raise DataError(
        f"The factory builds another model where pretrained is false: {why}",
        got=cfg.name,
        rule="A package builds it so, and loads all weights from its own file",
        fix="Let pretrained choose the weights and nothing else; draw nothing that is no weight",
    )


def _pack_code(cfg: ModelConfig, classes: int) -> dict[str, bytes]:
    """The code of a `file:` model, from which it was built once; nothing for other models."""
    return _packed(cfg, classes)[0]


def _packed(cfg: ModelConfig, classes: int) -> tuple[dict[str, bytes], ImageModel | None]:
    """The code of a `file:` model and the model that it builds; nothing for other models."""
    provider, _, factory = cfg.name.partition(":")
    if provider != "file":
        return {}, None
    code = own_code.collect(factory.partition(":")[0])
    packed = {own_code.FOLDER + path: source for path, source in code.items()}
    bare = cfg.model_copy(update={"pretrained": False, "frozen_blocks": 0})
    try:
        with own_code.importable(packed):
            model = ImageModel(bare, classes)
    except Exception as e:  # the user's code raises anything
        raise DataError(
            f"The model cannot be built from the code that was packed: {one_line(e)}",
            got=cfg.name,
            rule="A package holds the .py files that the factory's module imports by name",
            fix="Import them by name, and keep data files out of the factory",
        ) from e
    # Not cfg.pixels: without model.side_px it imports the factory.
    noise_BHWC = _noise(model.side_px)
    own_code.require_alone(packed, cfg.name, lambda: model.eval().embed(noise_BHWC))
    return packed, model


def _noise(side_px: int) -> torch.Tensor:
    """pixels_BHWC of two images, always the same."""
    shape = (2, side_px, side_px, 3)
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, shape, np.uint8))
