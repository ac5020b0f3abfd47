"""Imports torch, what must fit it, and raypipe's own rooms. It runs in a process of its own."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypipe.errors import RaypipeError, one_line

# The driver makes these files, whatever torch was built for.
OF_DRIVER = "/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg"


def examine(
    config: str | None, overrides: Sequence[str], companions: Sequence[str]
) -> dict[str, Any]:
    """Facts about torch, its companions and the configuration.

    config_error: the four parts of what is wrong with the configuration, or None.
    """
    try:
        import torch
    except Exception as e:
        return {"torch_error": _reason(e)}
    # torch says in a warning why it finds no GPU.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": gpus,
        "why": one_line(told[0].message) if told else "no device",
        "has_gpu": any(Path(file).exists() for file in OF_DRIVER),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "nccl": _nccl(),
        "companions": {name: _problem(name) for name in companions},
    }
    # The doctor's own judgement would age apart from the training's.
    from raypipe.train.parallel.precision import bf16_is_fast

    facts["bf16"] = bf16_is_fast(torch.device("cuda" if gpus else "cpu"))
    facts["config_error"] = _config_error(config, overrides) if config or overrides else None
    return facts


def _nccl() -> str:
    import torch

    if not torch.distributed.is_available() or not torch.distributed.is_nccl_available():
        return ""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _problem(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as e:
        return _reason(e)
    return ""


def _config_error(config: str | None, overrides: Sequence[str]) -> list[Any] | None:
    from raypipe.config import load
    from raypipe.job import Job

    try:
        load(Job, config, overrides)
    except RaypipeError as e:
        return [e.what, e.got, e.rule, e.fix]
    return None


def _reason(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}")
