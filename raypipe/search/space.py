"""The search space: any config field by dotted path -> how to draw it. Checked against the config before a trial starts.

search.space: {train.lr: "loguniform(1e-4, 1e-1)", model.dropout: "choice(0.0, 0.2, 0.5)", train.model.name: "grid(a, b)"}
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from raypipe.config import field_names, replace
from raypipe.errors import ConfigError, nearest
from raypipe.train.job import TrainJob

_CALL = re.compile(r"^\s*(\w+)\s*\((.*)\)\s*$", re.DOTALL)
SAMPLERS = ("grid", "choice", "uniform", "loguniform")
_FIXED = ("table", "run", "cluster", "registry", "feed.train", "feed.val", "feed.test", "train.workers")


def parse(space: Mapping[str, str], job: TrainJob) -> dict[str, Any]:
    """Ray Tune's parameter space. Raises ConfigError for an unknown field, an unknown sampler, or values the field refuses."""
    return {name: _sampler(name, text, job) for name, text in space.items()}


def values(space: Mapping[str, str], field: str) -> list[Any]:
    """The finite values a field can take in the space; empty when it is not searched or continuous."""
    if field not in space:
        return []
    kind, arguments = _split(field, space[field])
    return arguments if kind in ("grid", "choice") else []


def grid_size(space: Mapping[str, str]) -> int:
    """How many combinations the grid fields span; each is run once per sample."""
    size = 1
    for name, text in space.items():
        kind, arguments = _split(name, text)
        size *= len(arguments) if kind == "grid" else 1
    return size


def _sampler(name: str, text: str, job: TrainJob) -> Any:
    from ray import tune

    known = field_names(type(job))
    if name not in known:
        raise ConfigError(f"search.space names an unknown field {name}", fix=nearest(name, known))
    if any(name == f or name.startswith(f + ".") for f in _FIXED):
        raise ConfigError(f"search.space cannot vary {name}", rule="Trials of one search share table, run folder and splits")
    kind, arguments = _split(name, text)
    ranged = kind in ("uniform", "loguniform")
    inside = [arguments[0] + 0.618 * (arguments[1] - arguments[0])] if ranged else []  # a whole number's field refuses this one
    for value in arguments + inside:  # both ends of a range, every member of a choice
        try:
            replace(job, {name: value})
        except ConfigError as e:
            raise ConfigError(
                f"search.space.{name} draws a value the field refuses", got=value, rule=e.rule or str(e)
            ) from None
    if ranged:
        low, high = arguments
        return tune.uniform(low, high) if kind == "uniform" else tune.loguniform(low, high)
    return tune.grid_search(arguments) if kind == "grid" else tune.choice(arguments)


def _split(name: str, text: str) -> tuple[str, list[Any]]:
    call = _CALL.match(str(text))
    if not call or call[1] not in SAMPLERS:
        raise ConfigError(
            f"search.space.{name} is not a draw", got=text, rule=f"One of {', '.join(s + '(…)' for s in SAMPLERS)}"
        )
    kind = call[1]
    try:
        arguments = list(ast.literal_eval(f"({call[2]},)"))
    except (ValueError, SyntaxError):  # bare words, as in choice(cosine, constant)
        arguments = [_word(a) for a in call[2].split(",") if a.strip()]
    if kind in ("uniform", "loguniform"):
        numbers = [a for a in arguments if isinstance(a, (int, float)) and not isinstance(a, bool)]
        if (
            len(arguments) != 2
            or len(numbers) != 2
            or not numbers[0] < numbers[1]
            or (kind == "loguniform" and numbers[0] <= 0)
        ):
            raise ConfigError(
                f"search.space.{name} is not a range",
                got=text,
                rule=f"{kind}(low, high) with low < high" + (", low > 0" if kind == "loguniform" else ""),
            )
    elif not arguments:
        raise ConfigError(f"search.space.{name} has nothing to choose from", got=text)
    return kind, arguments


def _word(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()
