"""What Databricks and its Unity Catalog ask for, beyond what other MLflow stores do.

Read from MLflow's own client (mlflow/store/_unity_catalog) and from Databricks' pages on names and
tags. raypipe never ran against Databricks: tests/registry/unity_catalog.py is a server of ours.

- A model has three names, catalog.schema.model. Unity Catalog keeps them in lower case.
- The key of a tag has none of `. , - = / :`, so `raypipe.key` is written as `raypipe__key`. A value
  has at most 1,000 characters.
- A search for versions returns them without tags, and a version is there before its files are.
- The older workspace registry (`databricks`) has no aliases.
- An experiment's name is a path in the workspace.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from raypipe.errors import ConfigError

CATALOG = "databricks-uc"
_OURS, _WRITTEN = "raypipe.", "raypipe__"
_VALUE = 1000  # characters of a tag's value


def is_databricks(address: str) -> bool:
    return address == "databricks" or address.startswith("databricks://")


def is_catalog(address: str) -> bool:
    return address == CATALOG or address.startswith(f"{CATALOG}://")


def default_registry(address: str) -> str:
    """Where the models of a store are: in the store itself; on Databricks in Unity Catalog, under
    the same profile."""
    return address.replace("databricks", CATALOG, 1) if is_databricks(address) else address


def check_addresses(uri: str, registry: str) -> None:
    """Raise ConfigError for addresses of the other kind."""
    if is_catalog(uri):
        raise ConfigError(
            "Unity Catalog keeps models, not runs",
            got=f"registry.uri={uri}",
            rule="Runs are in the workspace, databricks or databricks://PROFILE",
            fix=f"Set registry.uri=databricks and registry.registry_uri={uri}",
        )
    if is_databricks(registry):
        raise ConfigError(
            "The workspace's own model registry has no aliases",
            got=f"registry.registry_uri={registry}",
            rule="The champion is an alias",
            fix=f"Set registry.registry_uri={default_registry(registry)}",
        )


def check_experiment(uri: str, name: str) -> None:
    """Raise ConfigError for an experiment that a Databricks workspace would refuse."""
    if is_databricks(uri) and not re.fullmatch(r"(/[^/]+){2,}", name):
        last = name.strip("/").rpartition("/")[2] or "raypipe"
        raise ConfigError(
            "On Databricks an experiment is a path in the workspace",
            got=f"registry.experiment={name}",
            rule="It begins with /Users/NAME/ or /Shared/, and its folder exists",
            fix=f"Set registry.experiment=/Shared/{last}",
        )


def check_names(model: str, alias: str) -> None:
    """Raise ConfigError for a model and an alias that Unity Catalog refuses or spells otherwise."""
    levels = model.split(".")
    if len(levels) != 3 or not all(levels):
        raise ConfigError(
            "A model in Unity Catalog has three names",
            got=f"registry.model={model}",
            rule="They are catalog.schema.model, where the catalog and the schema exist",
            fix=f"Set registry.model=main.default.{re.sub(r'[^a-z0-9_]+', '_', model.lower())}",
        )
    # `main`.default.x is how SQL writes a name; MLflow would ask for a catalog of that spelling.
    plain = model.replace("`", "")
    if plain != model or not model.isprintable():
        raise ConfigError(
            "A model in Unity Catalog is named without backticks",
            got=f"registry.model={model!r}",
            rule="MLflow takes them for a part of the name, and what is not printable, too",
            fix=f"Set registry.model={''.join(c for c in plain if c.isprintable()).lower()}",
        )
    if re.search(r"[\s/\x00-\x1f\x7f]", model) or any(len(level) > 255 for level in levels):
        raise ConfigError(
            "Unity Catalog refuses this name",
            got=f"registry.model={model}",
            rule="None of the three has a blank, a slash or a control character, nor 256 of any",
            fix=f"Set registry.model={re.sub(r'[^a-z0-9_.]+', '_', model.lower())[:255]}",
        )
    # Two spellings of one model would have two histories in the table of moves.
    if model != model.lower():
        raise ConfigError(
            "Unity Catalog keeps names in lower case",
            got=f"registry.model={model}",
            rule="The name in the configuration is the one that is kept",
            fix=f"Set registry.model={model.lower()}",
        )
    if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", alias):
        raise ConfigError(
            "This alias cannot be kept in Unity Catalog",
            got=f"registry.alias={alias}",
            rule="It becomes a part of a tag's key: words of a-z and 0-9 with one _ between them",
            fix="Set registry.alias=champion",
        )


def written(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as Unity Catalog takes them.

    A value that is too long, or that begins or ends with a blank, is left out rather than cut: half
    of a JSON text is worse than none, and the package's own files say the same.
    """
    taken = {}
    for key, value in tags.items():
        if len(value) <= _VALUE and value == value.strip():
            taken[key.replace(_OURS, _WRITTEN, 1).replace(".", "__")] = value
    return taken


def read(tags: Mapping[str, str]) -> dict[str, str]:
    """The tags that `written` wrote, under their own names; others as they are."""
    found = {}
    for key, value in tags.items():
        name = key.replace("__", ".") if key.startswith(_WRITTEN) else key
        found[name] = value
    return found
