"""All checks, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.doctor import clusters, environments, machine, packages, stores
from raypipe.doctor.finding import Check
from raypipe.errors import ConfigError, nearest

CHECKS = (
    Check("python", machine.python),
    Check("packages", packages.versions),
    Check("libraries", packages.libraries, packages.IMPORT_S + 5, late="warn"),
    Check("fastdup", environments.fastdup, environments.IMPORT_S + 5, late="warn"),
    Check("alibi", environments.alibi, environments.IMPORT_S + 5, late="warn"),
    Check("locks", environments.locks),
    Check("java", environments.java, 15.0),
    Check("memory", machine.memory),
    Check("shm", machine.shared_memory),
    Check("disks", machine.disks),
    Check("files", machine.open_files),
    Check("sockets", machine.sockets),
    Check("text", machine.text),
    Check("ports", machine.ports),
    Check("telemetry", machine.telemetry),
    Check("variables", stores.variables),
    Check("token", clusters.token),
    Check("clusters", clusters.clusters, 35.0),
    Check("run", stores.run_folder, of_config=True),
    Check("table", stores.table, stores.STORE_S + 5, of_config=True),
    Check("mlflow", stores.mlflow, stores.MLFLOW_S + 5, of_config=True),
    Check("registry", stores.registry, stores.MLFLOW_S + 5, of_config=True),
    Check("clock", stores.clock, 20.0, of_config=True),
)


def chosen(only: str | None, has_config: bool) -> Sequence[Check]:
    """The checks with these names, separated by commas; None: all that have something to look at.

    Raises ConfigError for another name, and for a check that needs a configuration.
    """
    if only is None:
        return [check for check in CHECKS if has_config or not check.of_config]
    known = {check.name: check for check in CHECKS}
    found = []
    # Once each: a check is done when its name has an answer.
    for name in dict.fromkeys(each.strip() for each in only.split(",")):
        if name not in known:
            raise ConfigError(f"There is no check {name!r}", fix=nearest(name, list(known)))
        if known[name].of_config and not has_config:
            raise ConfigError(
                f"The check {name!r} looks at what a configuration names",
                fix=f"raypipe doctor CONFIG --only {name}",
            )
        found.append(known[name])
    return found
