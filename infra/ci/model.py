"""Is there a registered model, and what does its alias name? Asked of Unity Catalog itself.

python infra/ci/model.py --name CATALOG.SCHEMA.MODEL --alias champion          what there is
python infra/ci/model.py --name CATALOG.SCHEMA.MODEL --alias champion --is 3   fails if it is not 3
python infra/ci/model.py --bundle FILE --alias champion --output "$GITHUB_OUTPUT"

A first deployment has no model yet: that is an answer, `exists=false`, and no error. Whatever else
goes wrong (no permission, no network, no login) is an error, and the deployment stops. FILE is what
`databricks bundle summary --output json` prints. It needs databricks-sdk, and logs in as that does:
DATABRICKS_HOST and an OIDC token in CI, a profile elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    named = made.add_mutually_exclusive_group(required=True)
    named.add_argument("--name", help="catalog.schema.model")
    named.add_argument("--bundle", type=Path, help="output of databricks bundle summary")
    made.add_argument("--alias", required=True)
    made.add_argument("--is", dest="wanted", type=int, help="the version that it must name")
    made.add_argument("--output", type=Path, help="a file for exists=…, name=… and version=…")
    made.add_argument("--azure", action="store_true", help="also tell Azure DevOps")
    return made


def main(words: list[str] | None = None) -> int:
    asked = parser().parse_args(words)
    try:
        name = asked.name or of_bundle(json.loads(asked.bundle.read_text("utf-8")))
        version = version_of(name, asked.alias)
    except Exception as e:
        # The first line: an SDK's error may go on with the settings that it found.
        print(
            f"model: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}",
            file=sys.stderr,
        )
        return 1
    found = {"exists": "false" if version is None else "true", "name": name}
    found["version"] = "" if version is None else str(version)
    print(json.dumps(found | {"alias": asked.alias}))
    if asked.output:
        with asked.output.open("a", encoding="utf-8") as file:
            file.writelines(f"{key}={value}\n" for key, value in found.items())
    if asked.azure:
        for key, value in found.items():
            print(f"##vso[task.setvariable variable={key};isOutput=true]{value}")
    if asked.wanted is not None and asked.wanted != version:
        print(
            f"model: {name}@{asked.alias} is {found['version'] or 'not there'}, not {asked.wanted}",
            file=sys.stderr,
        )
        return 1
    return 0


def of_bundle(summary: dict[str, Any]) -> str:
    """The full name of the bundle's one registered model. Raises ValueError without one."""
    models = summary.get("resources", {}).get("registered_models", {})
    if len(models) != 1:
        raise ValueError(f"the bundle has {len(models)} registered models, not one")
    [model] = models.values()
    name = model.get("id") or ".".join(model[k] for k in ("catalog_name", "schema_name", "name"))
    if name.count(".") != 2 or "${" in name:
        raise ValueError(f"the bundle does not say the model's full name, but {name!r}")
    return str(name)


def version_of(name: str, alias: str) -> int | None:
    """The version that the alias names; None without such a model or alias.

    Raises the SDK's errors for anything else, a refusal above all.
    """
    from databricks.sdk import WorkspaceClient
    from databricks.sdk.errors import NotFound

    client = WorkspaceClient()
    try:
        model = client.registered_models.get(name, include_aliases=True)
    except NotFound as e:
        # A catalog or schema that is not there is no first deployment: the name is wrong. Names
        # are in quotes, and may be any word.
        if "model" in re.sub(r"'[^']*'", "", str(e)).lower():
            return None
        raise
    for one in model.aliases or ():
        if one.alias_name == alias and one.version_num is not None:
            return int(one.version_num)
    return None


if __name__ == "__main__":
    raise SystemExit(main())
