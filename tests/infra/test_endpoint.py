"""The job `serve` of the bundle: what it changes at an endpoint, and when."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.infra.test_bundle_runs import Serving

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = {
    "config": {"served_entities": [{"name": "champion", "workload_size": "Small"}]},
    "ai_gateway": {"usage_tracking_config": {"enabled": True}},
    "permissions": [{"level": "CAN_QUERY"}],
}


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    named = importlib.util.spec_from_file_location("serve", ROOT / "infra/databricks/serve.py")
    assert named is not None and named.loader is not None
    made = importlib.util.module_from_spec(named)
    named.loader.exec_module(made)
    champion = SimpleNamespace(name="c.s.cells", version=3)
    monkeypatch.setattr(made.promote, "require_champion", lambda store: champion)
    monkeypatch.setattr(made, "POLL_S", 0.0)
    return made


def calling(serve: ModuleType, service: Serving) -> Callable[..., Any]:
    def call(method: str, path: str, body: Any = None) -> Any:
        answer, status = service.answer(method, path, body)
        if status == 404:
            raise serve.NotFound("no such endpoint")
        return answer

    return call


def test_a_new_size_reaches_an_endpoint_that_has_the_version(serve: ModuleType) -> None:
    """A larger workload_size in endpoint.yml came with the next promotion, whenever that was."""
    service = Serving()
    call = calling(serve, service)

    def follow(size: str) -> str:
        entity = SETTINGS["config"]["served_entities"][0] | {"workload_size": size}
        settings = SETTINGS | {"config": {"served_entities": [entity]}}
        service.calls.clear()
        return str(serve.follow(call, None, settings, "cells", "readers", True))

    told = ("PUT", "/api/2.0/serving-endpoints/cells/config")
    assert follow("Small").startswith("Made endpoint cells")
    assert "already" in follow("Small") and told not in service.calls
    assert "now serves" in follow("Medium") and told in service.calls
    [entity] = service.endpoints["cells"]["config"]["served_entities"]
    assert (entity["workload_size"], entity["entity_version"]) == ("Medium", "3")
    assert "already" in follow("Medium") and told not in service.calls
    # What the API does not tell is no difference.
    del entity["workload_size"]
    assert "already" in follow("Large")


def test_a_new_tag_reaches_an_endpoint_that_has_the_version(serve: ModuleType) -> None:
    """Tags of endpoint.yml came with a new endpoint alone: `cost_centre` never reached the bill."""
    service = Serving()

    def follow(**tags: str) -> dict[str, str]:
        settings = SETTINGS | {"tags": [{"key": key, "value": tags[key]} for key in tags]}
        service.calls.clear()
        serve.follow(calling(serve, service), None, settings, "cells", "readers", True)
        return {tag["key"]: tag["value"] for tag in service.endpoints["cells"]["tags"]}

    told = ("PATCH", "/api/2.0/serving-endpoints/cells/tags")
    assert follow(project="raypipe") == {"project": "raypipe"} and told not in service.calls
    service.endpoints["cells"]["tags"].append({"key": "theirs", "value": "1"})
    both = {"project": "solar", "theirs": "1", "cost_centre": "7"}
    assert follow(project="solar", cost_centre="7") == both and told in service.calls
    assert follow(project="solar", cost_centre="7") == both and told not in service.calls
