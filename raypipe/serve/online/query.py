"""What a client may ask of a prediction, and the body of its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raypipe.models.labels import BAR, NUMERIC
from raypipe.serve.online.batching import Outcome
from raypipe.serve.online.limits import Refused

_KNOWN = ("top_k", "threshold", "embedding")
_DIGITS = 6  # of a score


@dataclass(frozen=True)
class Wanted:
    """top_k: the best classes only. threshold: for tags, the least score of one that is set.
    embedding: the features, too."""

    top_k: int | None = None
    threshold: float = 0.5
    embedding: bool = False

    @classmethod
    def read(cls, query: Mapping[str, str]) -> Wanted:
        """From the query of a URL. Raises Refused (422) for what it does not know."""
        if not query:
            return cls()
        unknown = sorted(set(query) - set(_KNOWN))
        if unknown:
            known = ", ".join(_KNOWN)
            raise Refused(422, "Unknown parameter", got=unknown[0][:100], rule=f"Known: {known}")
        top_k = _number(query, "top_k", 1, 100_000)
        threshold = _number(query, "threshold", 0, 1)
        return cls(
            int(top_k) if top_k is not None else None,
            0.5 if threshold is None else threshold,
            _truth(query, "embedding"),
        )

    def body(self, outcome: Outcome, request_id: str) -> dict[str, Any]:
        """The JSON of an answer. A number is rounded to 6 digits."""
        assert outcome.scores_C is not None
        scores = outcome.scores_C.tolist()
        body: dict[str, Any] = {"request_id": request_id, "model": outcome.version}
        if outcome.task in NUMERIC:
            return body | {"label": outcome.label, "value": scores[0]} | self._features(outcome)
        # Classes by their score; with a threshold, the tags that are set are chosen again.
        label = outcome.label
        named = list(zip(outcome.classes, scores, strict=True))
        if outcome.task == "multi_label":
            label = BAR.join(name for name, score in named if score >= self.threshold)
        ranked = sorted(named, key=lambda pair: -pair[1])
        body |= {"label": label, "score": round(ranked[0][1], _DIGITS)}
        body["scores"] = {name: round(score, _DIGITS) for name, score in ranked[: self.top_k]}
        return body | self._features(outcome)

    def _features(self, outcome: Outcome) -> dict[str, Any]:
        if not self.embedding or outcome.features_D is None:
            return {}
        return {"embedding": np.round(outcome.features_D.astype(np.float64), _DIGITS).tolist()}


def _number(query: Mapping[str, str], name: str, least: float, most: float) -> float | None:
    text = query.get(name)
    if text is None:
        return None
    # NaN is not between any bounds.
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    whole = name != "top_k" or value == value // 1
    if not (least <= value <= most and whole):
        kind = "A whole number" if name == "top_k" else "A number"
        raise Refused(
            422, f"Wrong {name}", got=text[:100], rule=f"{kind} from {least:g} to {most:g}"
        )
    return value


def _truth(query: Mapping[str, str], name: str) -> bool:
    text = query.get(name, "false").lower()
    if text not in ("true", "false", "1", "0"):
        raise Refused(422, f"Wrong {name}", got=text[:100], rule="true or false")
    return text in ("true", "1")
