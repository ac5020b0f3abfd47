"""Checks of the installed packages: their versions, torch and its companions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypipe.doctor.finding import Asked, Finding, State, of_error, ok
from raypipe.doctor.process import Died, ask
from raypipe.errors import RaypipeError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

IMPORT_S = 60.0
SHOWN = 4
Distributions = Mapping[str, importlib.metadata.Distribution]


def versions(asked: Asked) -> Sequence[Finding]:
    """Are the versions those that raypipe, and what it needs, were made for?"""
    installed = installed_packages()
    own, others = [], []
    for by, wanted in _wanted(installed):
        problem = _problem(wanted, installed)
        if problem and by == "raypipe":
            own.append((problem, wanted))
        elif problem:
            others.append((f"{problem}, says {by}", wanted))
    if not own and not others:
        return [ok("packages", f"{len(installed)} packages, those of raypipe within its bounds")]

    # What raypipe itself needs comes first; a conflict between two others may do no harm.
    problems = [*own, *others]
    seen = "; ".join(problem for problem, _ in problems[:SHOWN])
    if len(problems) > SHOWN:
        seen += f"; {len(problems) - SHOWN} more"
    rule = "Other versions have other names and other faults: raypipe is tested within its bounds"
    listed = " ".join(f"'{wanted.name}{wanted.specifier}'" for _, wanted in problems)
    way_out = f"python -m pip install {listed}; remove a folder that should not be on the path"
    return [Finding("packages", "fail" if own else "warn", seen, rule, way_out)]


def installed_packages() -> Distributions:
    """Packages by their normalised name. Of two on the path, Python imports the first."""
    from packaging.utils import canonicalize_name

    found: dict[str, importlib.metadata.Distribution] = {}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"]
        if name:
            found.setdefault(canonicalize_name(name), distribution)
    return found


def _wanted(installed: Distributions) -> Iterator[tuple[str, Requirement]]:
    """Who wants which package, from raypipe on.

    Packages of raypipe's own extras count where they are installed: an extra leaves no trace.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    todo: list[tuple[str, tuple[str, ...]]] = [("raypipe", ())]
    seen = set(todo)
    while todo:
        name, extras = todo.pop()
        distribution = installed.get(name)
        for text in (distribution.requires if distribution else None) or ():
            wanted = Requirement(text)
            inner = canonicalize_name(wanted.name)
            of_extra = name == "raypipe" and "extra ==" in text and inner in installed
            if not of_extra and not _applies(wanted, extras):
                continue
            yield name, wanted
            # A package may be wanted with other extras later.
            step = (inner, tuple(sorted(wanted.extras)))
            if step not in seen:
                seen.add(step)
                todo.append(step)


def _applies(wanted: Requirement, extras: tuple[str, ...]) -> bool:
    marker = wanted.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))


def _problem(wanted: Requirement, installed: Distributions) -> str:
    """What is wrong with the installed package, or ""."""
    from packaging.utils import canonicalize_name

    distribution = installed.get(canonicalize_name(wanted.name))
    if distribution is None:
        return f"{wanted.name} is missing"
    if wanted.specifier.contains(distribution.version, prereleases=True):
        return ""
    where = Path(str(distribution.locate_file("")))
    return f"{wanted.name} {distribution.version} in {where} is not {wanted.specifier}"


def libraries(asked: Asked) -> Sequence[Finding]:
    """Do torch and its companions fit each other and this machine; does the configuration load?"""
    question: dict[str, Any] = {
        "config": str(asked.config) if asked.config else None,
        "overrides": list(asked.overrides),
        "companions": [name for name in ("torchvision", "timm") if _is_there(name)],
    }
    try:
        facts = ask("raypipe.doctor.libraries:examine", IMPORT_S, **question)
    except Died as e:
        return [_not_imported("imports", str(e))]
    if "torch_error" in facts:
        return [_not_imported("torch", facts["torch_error"])]
    findings = [torch(facts), bf16(facts, asked.settings.train), *companions(facts, asked)]
    return [*findings, *_config(facts, asked)]


def _is_there(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _not_imported(name: str, why: str) -> Finding:
    rule = "Every verb imports torch and raypipe's own modules"
    way_out = "Install raypipe again (make install in its checkout), in an environment of its own"
    return Finding(name, "fail", f"An import failed: {why}", rule, way_out)


def torch(facts: Mapping[str, Any]) -> Finding:
    """Does torch use the GPU that is here?"""
    version, cuda, gpus = facts["version"], facts["cuda"], facts["gpus"]
    if not facts["has_gpu"]:
        built = f", built for CUDA {cuda}" if cuda else ""
        return ok("torch", f"{version}{built}; no GPU here")
    if not cuda:
        rule = "A CPU build cannot use a GPU"
        way_out = "Install a CUDA build, as pytorch.org/get-started says for your driver"
        return Finding("torch", "fail", f"{version}, and this machine has a GPU", rule, way_out)
    if facts["visible"] == "":
        seen = 'CUDA_VISIBLE_DEVICES="", and this machine has a GPU'
        return Finding("torch", "warn", seen, "It hides all GPUs", "unset CUDA_VISIBLE_DEVICES")
    # A CUDA build, a GPU, and torch cannot use it.
    if not gpus:
        rule = f"The driver must be new enough for CUDA {cuda}; a container needs --gpus all"
        way_out = "Update the driver, or install a torch built for the CUDA that nvidia-smi shows"
        return Finding("torch", "fail", f"{version} finds no GPU: {facts['why']}", rule, way_out)
    if gpus > 1 and not facts["nccl"]:
        rule = "Several GPUs exchange gradients with nccl"
        way_out = "Install a torch with nccl, as all builds of pytorch.org for Linux are"
        return Finding("torch", "fail", f"{version} has no nccl", rule, way_out)
    return ok("torch", f"{version}, CUDA {cuda}, {gpus} GPUs, nccl {facts['nccl'] or 'missing'}")


def bf16(facts: Mapping[str, Any], train: Mapping[str, Any]) -> Finding:
    """Is bf16 fast where it is asked for?"""
    fast = "fast here" if facts["bf16"] else "not fast here"
    if facts["bf16"] or train.get("precision") != "bf16":
        return ok("bf16", f"{fast}, train.precision={train.get('precision', 'auto')}")
    rule = "Without AVX512-BF16 or AMX, bf16 on a CPU was 4 times slower than fp32"
    way_out = "Set train.precision=auto: it takes bf16 where that is fast"
    return Finding("bf16", "warn", "train.precision=bf16, and this CPU has none", rule, way_out)


def companions(facts: Mapping[str, Any], asked: Asked) -> Sequence[Finding]:
    """Can torchvision and timm be imported beside this torch?"""
    name_of_model = str(asked.settings.model.get("name", ""))
    findings = []
    for name, problem in facts["companions"].items():
        if not problem:
            findings.append(ok(name, "fits torch"))
            continue
        used = name_of_model.startswith((f"{name}:", "timm:"))
        rule = "It is built for one torch: a CUDA build of it does not load beside a CPU torch"
        way_out = (
            f"python -m pip uninstall {name} (raypipe needs it for models named {name}:… only), "
            "or install the build for this torch from the same index"
        )
        state: State = "fail" if used else "warn"
        findings.append(Finding(name, state, problem, rule, way_out))
    return findings


def _config(facts: Mapping[str, Any], asked: Asked) -> Sequence[Finding]:
    if not asked.has_config:
        return []
    if facts["config_error"] is None:
        return [ok("configuration", str(asked.config or " ".join(asked.overrides)))]
    what, got, rule, fix = facts["config_error"]
    rule = rule or "Every verb refuses a configuration with a mistake"
    fix = fix or "raypipe config SECTION explains the settings"
    return [of_error("configuration", RaypipeError(what, got=got, rule=rule, fix=fix))]
