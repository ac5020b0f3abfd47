"""search.preset: a search in one word. It sets only fields of `search` that the user left out.

A row is a field of `search` and its value in each preset; None leaves the default.
"""

from __future__ import annotations

from typing import Any, Literal

Preset = Literal["fast", "good", "best"]

# Trials begin until the time is over. More than can run in an hour on a large machine.
MANY = 2000

LARGER = {"model.side_px": 224}

PRESETS: dict[str, dict[Preset, Any]] = {
    "budget_s": {"fast": 180.0, "good": 1200.0, "best": 3600.0},
    "samples": {"fast": MANY, "good": MANY, "best": MANY},
    # Heads in the first minute, and what is better than the best of all of them. On solar cells
    # heads, a fine-tuned refit and their mean had 88.7 to 89.6, 90.3 and 90.3 to 91.0 % right.
    "first_answer": {"fast": True, "good": True, "best": True},
    "ensemble": {"fast": 5, "good": 5, "best": 5},
    # A trial of 96 or 128 px learns larger pictures in its refit, as far as there is time. Heads
    # alone take seconds, and a quarter more images are worth .7 points of accuracy
    # (benchmarks/results/2026-11-27-refit-of-heads.md).
    "refit": {"fast": "heads", "good": LARGER, "best": LARGER},
    # What trials leave for it. 180 s of trials and a refit of 13 epochs took 14 to 27 minutes on
    # the solar cells (benchmarks/results/2026-11-22-search.md).
    "refit_share": {"fast": None, "good": 0.6, "best": 0.5},
}


def filled(given: dict[str, Any]) -> dict[str, Any]:
    """The section `search` as given, with what its preset or its budget sets and nobody else did.

    An unknown preset stays: pydantic has the message.
    """
    preset = given.get("preset")
    values: dict[str, Any] = {}
    if preset in ("fast", "good", "best"):
        values = {name: row[preset] for name, row in PRESETS.items() if row[preset] is not None}
    elif preset is None and given.get("budget_s") is not None:
        values = {"samples": MANY}  # what was asked for is the time
    # A budget that somebody took away ends no trials: then there are as many as usual.
    if "budget_s" in given and given["budget_s"] is None:
        values.pop("samples", None)
    # A soup and a refit each make the model; and what a refit costs is not limited.
    if given.get("soup", 1) != 1 or _limits_money(given.get("limits")):
        values.pop("refit", None)
    # These draw all their trials at once, and a grid has its own number.
    grids = "grid(" in str(given.get("space", ""))
    if grids or given.get("scheduler") in ("pbt", "pb2", "hyperband", "freeze_thaw"):
        values.pop("samples", None)
    return {**values, **given}


def _limits_money(limits: Any) -> bool:
    """Is search.limits.money given? limits: a section, or what it will be made of."""
    money = limits.get("money") if isinstance(limits, dict) else getattr(limits, "money", None)
    return money is not None
