"""A retrain that is asked for, of a champion that nothing new came for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.registry.versions import ModelVersion
from raypipe.watch import challenge, retrain
from raypipe.watch.retrain import Request, RetrainConfigs, Wanted


@pytest.mark.parametrize("way", ["train", "search", "of_heads"])
def test_a_champion_that_is_trained_again_is_no_challenger_of_itself(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key is one version. It was compared with itself, and its tag said refused."""
    champion = ModelVersion("m", 3, "/files", {})
    told: list[str] = []
    fake: Any = SimpleNamespace(
        model=SimpleNamespace(mode="frozen"), version=SimpleNamespace(version=1)
    )
    package: Any = SimpleNamespace(info={"config": {}}, members=())
    cfg: Any = SimpleNamespace(
        gate=None, watch=None, search=SimpleNamespace(refit_changes=None), clean=None
    )
    assert RetrainConfigs.__annotations__.keys() == vars(cfg).keys()
    monkeypatch.setattr(retrain, "validate", lambda kind, tree: fake)
    monkeypatch.setattr(retrain, "begin", lambda job, *rest: (job, None))
    monkeypatch.setattr(retrain.labels, "labelled_by_source", lambda *given: {})
    monkeypatch.setattr(retrain.limited, "rows_of", lambda *given: {})
    monkeypatch.setattr(retrain.around, "challenger", lambda *given: fake)
    monkeypatch.setattr(retrain.around, "is_search", lambda *given: way == "search")
    monkeypatch.setattr(retrain, "within_budget", lambda *given: None)
    monkeypatch.setattr(retrain, "_left_h", lambda *given: None)
    monkeypatch.setattr(retrain.heads, "of_champion", lambda *given: way == "of_heads")
    monkeypatch.setattr(challenge, way, lambda *given: (champion, "k", 5.0))
    nothing: Any = None
    request = Request(
        nothing, fake, cfg, None, nothing, told.append, told.append, nothing, monitors=()
    )
    states: list[str] = []
    held: Any = SimpleNamespace(reached=lambda state, **data: states.append(state))
    # There is no store: whatever is compared would fail here.
    done = retrain._retrain(request, Wanted(champion, package, "asked for", 0.0), fake, held)
    # It has cost what it has cost, and is no retrain that broke.
    assert states == ["trained", "ended"] and done.device_s == 5.0
    assert done.challenger is None and not done.decision.act and done.slices == ()
    assert "give m/3 again" in done.decision.reason and told[-1] == done.decision.reason
