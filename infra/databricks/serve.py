"""Make the serving endpoint answer with the champion's version: the task of the job `serve`.

    python serve.py CONFIG endpoint.yml --name=N --readers=GROUP --create=false section.key=value

Limits, size, tags and rights are those of endpoint.yml; tags of others stay. Run again, it changes
nothing. An endpoint that does not exist is made only with --create=true: it costs money. What was
set is read back; if the champion moves meanwhile, the endpoint follows it again.

It talks to the documented REST API through Databricks' SDK, which knows how to log in.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from databricks.sdk import WorkspaceClient
from databricks.sdk.errors import NotFound, PermissionDenied

from raypipe.config import load
from raypipe.errors import RaypipeError
from raypipe.job import Job
from raypipe.registry import promote
from raypipe.registry.store import Store, open_store

# Building an image and starting a node takes minutes; a GPU may take most of an hour.
UPDATE_S = 3600
POLL_S = float(os.environ.get("RAYPIPE_SERVE_POLL_S", "15"))
Call = Callable[..., Any]  # (method, path, body=…) -> what the API answers


def main(arguments: list[str]) -> int:
    asked = _asked(arguments)
    try:
        job = load(Job, Path(asked.config), asked.overrides)
        settings = yaml.safe_load(Path(asked.settings).read_text(encoding="utf-8"))
        store = open_store(job.run, job.registry, job.artifacts)
        call = WorkspaceClient().api_client.do
        print(follow(call, store, settings, asked.name, asked.readers, asked.create == "true"))
    except RaypipeError as e:
        print(f"serve: {e}", file=sys.stderr)
        return 1
    except PermissionDenied as e:
        print(f"serve: Whoever runs this may not do that: {e}", file=sys.stderr)
        return 1
    return 0


def _asked(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config")
    parser.add_argument("settings")
    parser.add_argument("--name", required=True)
    parser.add_argument("--readers", required=True)
    parser.add_argument("--create", choices=["true", "false"], default="false")
    asked, asked.overrides = parser.parse_known_args(arguments)
    # A misspelt option would be taken for an override, and refused there in other words.
    wrong = [given for given in asked.overrides if given.startswith("-")]
    if wrong:
        parser.error(f"unknown: {' '.join(wrong)}")
    return asked


def follow(
    call: Call, store: Store, settings: dict[str, Any], name: str, readers: str, make: bool
) -> str:
    """Bring the endpoint to the champion's version. Returns what was done, for people.

    Raises RaypipeError if there is no champion, or if the endpoint does not come up.
    """
    for _ in range(3):
        champion = promote.require_champion(store)
        wanted = body(settings, name, champion.name, champion.version)
        endpoint = _find(call, name)
        if endpoint is None and not make:
            return f"There is no endpoint {name}, and create=false: nothing to do"
        if endpoint is None:
            call("POST", "/api/2.0/serving-endpoints", body=wanted)
            said = f"Made endpoint {name} for {champion.name} version {champion.version}"
        elif _is_as_told(endpoint, wanted):
            said = f"Endpoint {name} serves {champion.name} version {champion.version} already"
        else:
            # An update under way cannot be interrupted. One that failed is why we are here.
            _wait(call, name, failed_is_fine=True)
            call("PUT", f"/api/2.0/serving-endpoints/{name}/config", body=wanted["config"])
            said = f"Endpoint {name} now serves {champion.name} version {champion.version}"
        if wanted.get("ai_gateway"):
            call("PUT", f"/api/2.0/serving-endpoints/{name}/ai-gateway", body=wanted["ai_gateway"])
        endpoint = _wait(call, name)
        _tag(call, endpoint, settings.get("tags") or [])
        _allow(call, endpoint["id"], settings.get("permissions", []), readers)
        if not _serves(endpoint, wanted):
            raise RaypipeError(
                f"The endpoint {name} does not serve what it was told to",
                got=str(_entities(endpoint)),
                rule=f"{champion.name} version {champion.version}",
                fix="Look at the endpoint's events in the workspace, then run the job again",
            )
        if promote.require_champion(store).version == champion.version:
            return said
    raise RaypipeError(
        f"The champion of {store.model} moved three times while the endpoint followed it",
        fix="Run the job again when promotions have ended",
    )


def body(settings: dict[str, Any], name: str, model: str, version: int) -> dict[str, Any]:
    """What the API is told: the settings, with the model's version in place."""
    [entity] = settings["config"]["served_entities"]
    served = entity | {"entity_name": model, "entity_version": str(version)}
    route = {"served_model_name": entity["name"], "traffic_percentage": 100}
    config = {"served_entities": [served], "traffic_config": {"routes": [route]}}
    kept = {key: settings[key] for key in ("ai_gateway", "tags") if key in settings}
    return {"name": name, "config": config, **kept}


def _find(call: Call, name: str) -> Any:
    try:
        return call("GET", f"/api/2.0/serving-endpoints/{name}")
    except NotFound:
        return None


def _entities(endpoint: Any) -> list[tuple[str, str]]:
    served = (endpoint.get("config") or {}).get("served_entities") or []
    return [(entity["entity_name"], str(entity["entity_version"])) for entity in served]


def _serves(endpoint: Any, wanted: dict[str, Any]) -> bool:
    return _entities(endpoint) == _entities(wanted)


def _is_as_told(endpoint: Any, wanted: dict[str, Any]) -> bool:
    """Has it the version, and also the size that endpoint.yml names, as far as the API tells it?"""
    if not _serves(endpoint, wanted):
        return False
    pairs = zip(
        endpoint["config"]["served_entities"], wanted["config"]["served_entities"], strict=True
    )
    return all(told.get(key, value) == value for told, own in pairs for key, value in own.items())


def _wait(call: Call, name: str, failed_is_fine: bool = False) -> Any:
    """The endpoint, once no update is under way. Raises RaypipeError if one failed."""
    until = time.monotonic() + UPDATE_S
    while True:
        endpoint = call("GET", f"/api/2.0/serving-endpoints/{name}")
        state = endpoint.get("state", {}).get("config_update", "NOT_UPDATING")
        if state == "NOT_UPDATING" or (failed_is_fine and state != "IN_PROGRESS"):
            return endpoint
        if state != "IN_PROGRESS" or time.monotonic() > until:
            raise RaypipeError(
                f"The update of the endpoint {name} did not end well",
                got=state,
                rule=f"It ends within {UPDATE_S} s; until then the version before answers",
                fix="Look at the endpoint's logs in the workspace, then run the job again",
            )
        time.sleep(POLL_S)


def _tag(call: Call, endpoint: Any, tags: list[dict[str, str]]) -> None:
    """Give an endpoint the tags that the settings have and it has not; those of others stay."""
    has = {tag["key"]: tag.get("value", "") for tag in endpoint.get("tags") or []}
    missing = [tag for tag in tags if has.get(tag["key"]) != tag.get("value", "")]
    if missing:
        path = f"/api/2.0/serving-endpoints/{endpoint['name']}/tags"
        call("PATCH", path, body={"add_tags": missing})


def _allow(call: Call, endpoint_id: str, permissions: list[dict[str, str]], readers: str) -> None:
    """Give the readers what the settings say, and see that they have it."""
    path = f"/api/2.0/permissions/serving-endpoints/{endpoint_id}"
    entries = [{"group_name": readers, "permission_level": p["level"]} for p in permissions]
    if not entries:
        return
    call("PATCH", path, body={"access_control_list": entries})
    told = call("GET", path).get("access_control_list", [])
    has = {
        (entry.get("group_name"), permission["permission_level"])
        for entry in told
        for permission in entry.get("all_permissions", [])
    }
    missing = [e for e in entries if (e["group_name"], e["permission_level"]) not in has]
    if missing:
        raise RaypipeError(
            f"The group {readers} did not get its rights at the endpoint",
            got=str(missing),
            fix="Check that the group exists, and that whoever runs this may manage the endpoint",
        )


if __name__ == "__main__":
    # On Databricks any SystemExit counts as a failure.
    if code := main(sys.argv[1:]):
        sys.exit(code)
