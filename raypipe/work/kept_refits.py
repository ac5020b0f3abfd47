"""What the folder of a search keeps of its refits, so that the same command ends with one model.

The plan of a refit that was begun; the key of its training, once it is finished; and who was
trained again for the model that is registered.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from raypipe.config import to_json
from raypipe.files import write_atomic
from raypipe.job import Job
from raypipe.search import refit
from raypipe.search.budget import Refit
from raypipe.search.ledger import Ledger
from raypipe.search.result import SearchResult

PLAN = "refit.json"  # the refits that were begun, by the model and search.refit
# Of each of them whose model is registered: who was trained again for it.
SETTLED = "refits.json"
NONE = "No refit: "  # before the reason


def begun(found: SearchResult) -> dict[str, dict[str, Any]]:
    """Of each refit that was begun, by its `_name`: its `plan`; `trained`, once it is finished, is
    the key of its training.

    Commands may ask for two by turns: each goes on with its own.
    """
    file = found.folder / PLAN
    kept: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    # An older raypipe kept one of them, and a later one named no trial.
    if "asked" in kept:
        return {_of(found, kept.pop("asked")): {"plan": kept}}
    start = f"{found.best.key} "
    old = (start + "{", start + "[")
    return {
        _of(found, name.removeprefix(start)) if name.startswith(old) else name: one
        for name, one in kept.items()
    }


def plan_of(job: Job, found: SearchResult) -> Refit | None:
    """The plan of the refit, if it was begun."""
    kept = begun(found).get(_name(job, found))
    return None if kept is None else Refit(**kept["plan"])


def is_done(job: Job, found: SearchResult) -> bool:
    """Is the refit finished, and its training still there?"""
    key = begun(found).get(_name(job, found), {}).get("trained")
    return key is not None and (found.job.folder(key) / "result.json").exists()


def keep_plan(job: Job, found: SearchResult, planned: Refit, trained: str | None = None) -> None:
    """Keep the plan of this refit in the search's folder. trained: the key of its training, once it
    is finished."""
    kept = begun(found) | {_name(job, found): {"plan": asdict(planned), "trained": trained}}
    write_atomic(found.folder / PLAN, to_json(kept))


def forget_plan(job: Job, found: SearchResult) -> None:
    """This refit came to nothing. If nothing is registered in its place, another one is planned."""
    kept = begun(found)
    kept.pop(_name(job, found), None)
    write_atomic(found.folder / PLAN, to_json(kept))


def settle(job: Job, found: SearchResult, result: SearchResult, ledger: Ledger) -> None:
    """Note who was trained again for the model of `result`, which is registered now.

    So the same command ends with the same version. A refit that came to nothing, as one without
    time, is not tried once more: it could register another model. found: before the refit.
    """
    if job.search.refit is None:
        return
    assert found.pinned is not None
    # A reason of this configuration is none of another one's.
    if refit.never(job.training, job.search, found.pinned):
        return
    file = found.folder / SETTLED
    why = next((note for note in ledger.notes if note.startswith(NONE)), "").removeprefix(NONE)
    kept = json.loads(file.read_text()) if file.exists() else {}
    # What was noted first stays: a rerun has no reason of its own.
    kept.setdefault(_registered(job, found), {"again": list(result.again), "why": why})
    write_atomic(file, to_json(kept))


def settled(job: Job, found: SearchResult) -> dict[str, Any] | None:
    """What `settle` noted of this search.refit; None: no model of it is registered there."""
    file = found.folder / SETTLED
    noted = json.loads(file.read_text()) if file.exists() else {}
    # An older raypipe named neither the trial nor the registry.
    kept = noted.get(_registered(job, found), noted.get(f"{found.best.key} {_asked(job)}"))
    if kept is None:
        return None
    why = f"{kept['why']}. So it was when this model was registered (to try again, remove {file})"
    return {**kept, "why": why}


def _name(job: Job, found: SearchResult) -> str:
    """Of a refit. Where weights were lost, the same search may have chosen again."""
    return _of(found, _asked(job))


def _of(found: SearchResult, asked: str) -> str:
    # Members of an ensemble have the key of the search: the trial tells them apart.
    return f"{found.best.key} {found.trials[0].name} {asked}"


def _registered(job: Job, found: SearchResult) -> str:
    """Of a refit and the registry that its model is in."""
    registry = job.registry
    where = to_json([registry.uri, registry.registry_uri, registry.model])
    return f"{_name(job, found)} {where}"


def _asked(job: Job) -> str:
    """What of a configuration determines a refit; the search is the folder's."""
    own = job.train.epochs if "epochs" in job.train.model_fields_set else None
    return to_json(job.search.refit if own is None else [job.search.refit, own])
